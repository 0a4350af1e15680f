//! `websocket`: one editor per document, for as long as the socket is open and no longer.

use std::net::SocketAddr;

use futures_util::{SinkExt, StreamExt};
use support::{assert_matches, ms};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

use crate::PATIENCE;
use crate::documented::Example;

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// Opens a socket, or returns the status with which it was refused.
async fn open(addr: SocketAddr, document: &str) -> Result<Socket, u16> {
    let url = format!("ws://{addr}/documents/{document}/edit");
    match timeout(PATIENCE, connect_async(url)).await.unwrap() {
        Ok((socket, _)) => Ok(socket),
        Err(Error::Http(refusal)) => Err(refusal.status().as_u16()),
        Err(error) => panic!("{error}"),
    }
}

async fn next(socket: &mut Socket) -> Message {
    let message = timeout(PATIENCE, socket.next()).await.unwrap();
    message.expect("the socket is open").unwrap()
}

async fn says(socket: &mut Socket, expected: &str) {
    assert_eq!(next(socket).await, Message::text(expected));
}

#[tokio::test]
async fn websocket_document_has_one_editor_while_the_socket_is_open() {
    let example = Example::start("websocket", &[]);
    let mut first = open(example.addr, "7").await.unwrap();
    says(&mut first, "").await;
    first.send(Message::text("hello")).await.unwrap();
    says(&mut first, "saved").await;
    // The response of the upgrade was sent long ago, and with it ended the layer's share.
    assert_eq!(open(example.addr, "7").await.err(), Some(423));
    assert!(open(example.addr, "8").await.is_ok());

    // Closed in order, it is free at once.
    first.close(None).await.unwrap();
    assert_matches!(next(&mut first).await, Message::Close(_));
    let mut second = open(example.addr, "7").await.unwrap();
    says(&mut second, "hello").await;
    assert_eq!(open(example.addr, "7").await.err(), Some(423));

    // Cut off, soon.
    drop(second);
    let third = async {
        while let Err(status) = open(example.addr, "7").await {
            assert_eq!(status, 423);
            sleep(ms(5)).await;
        }
    };
    timeout(PATIENCE, third).await.unwrap();
}

#[tokio::test]
async fn websocket_editor_is_notified_of_a_lost_lock() {
    let example = Example::start("websocket", &[("MAX_HOLD_MS", "300")]);
    let mut editor = open(example.addr, "7").await.unwrap();
    let goodbye = loop {
        if let Message::Close(goodbye) = next(&mut editor).await {
            break goodbye.expect("the socket says why it ends");
        }
    };
    assert_eq!(goodbye.code, CloseCode::Again);
    assert!(goodbye.reason.contains("max_hold"), "{goodbye}");
    // Told last of all: the document is free by then.
    assert!(open(example.addr, "7").await.is_ok());
}
