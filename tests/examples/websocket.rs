//! `websocket`: one editor per document, for as long as the socket is open and no longer.

use std::net::SocketAddr;

use futures_util::{SinkExt, StreamExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

use crate::PATIENCE;
use crate::documented::Example;

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// Opens a socket, or returns the status with which it was refused.
async fn open(addr: SocketAddr) -> Result<Socket, u16> {
    let url = format!("ws://{addr}/documents/7/edit");
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

#[tokio::test]
async fn websocket_document_has_one_editor_until_it_leaves_or_loses_its_lock() {
    let example = Example::start("websocket", &[("MAX_HOLD_MS", "2000")]);
    let mut first = open(example.addr).await.unwrap();
    assert_eq!(next(&mut first).await, Message::text(""));
    first.send(Message::text("hello")).await.unwrap();
    assert_eq!(next(&mut first).await, Message::text("saved"));
    // The response of the upgrade was sent long ago, and with it ended the layer's share.
    assert_eq!(open(example.addr).await.err(), Some(423));
    drop(first);
    let second = async {
        loop {
            match open(example.addr).await {
                Ok(socket) => break socket,
                Err(status) => assert_eq!(status, 423),
            }
        }
    };
    let mut second = timeout(PATIENCE, second).await.unwrap();
    assert_eq!(next(&mut second).await, Message::text("hello"));
    let goodbye = loop {
        if let Message::Close(goodbye) = next(&mut second).await {
            break goodbye.expect("the socket says why it ends");
        }
    };
    assert_eq!(goodbye.code, CloseCode::Again);
    assert!(goodbye.reason.contains("max_hold"), "{goodbye}");
    // Told last of all: the document is free by then.
    assert!(open(example.addr).await.is_ok());
}
