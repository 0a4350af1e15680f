//! WebSockets: the lock ends with the 101, unless the handler upgrades its handle for the socket's task.

use std::net::SocketAddr;

use axum::Router;
use axum::extract::ws::{WebSocket, WebSocketUpgrade};
use axum::handler::Handler;
use axum::http::Method;
use axum::routing::get;
use futures_util::{SinkExt, StreamExt};
use support::{ms, set_all};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{WebSocketStream, client_async};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{LockHandle, RedlockLayer};

use crate::sockets::server::{PATIENCE, Server, send};

#[tokio::test]
async fn lock_of_a_protocol_upgrade_is_released_with_the_101() {
    let nodes = ScriptedNodes::new(3);
    set_all(&nodes, OpKind::Release, Gate::Slow(ms(10)));
    let handler = async |upgrade: WebSocketUpgrade| upgrade.on_upgrade(echo);
    let server = Server::start(&nodes, |layer| of_get(layer, handler)).await;
    let mut sockets = Vec::new();
    for _ in 0..3 {
        // The next one is not refused, although the earlier ones are still there.
        sockets.push(connect(server.addr).await.unwrap());
        let held = nodes.locks().iter().sum::<usize>();
        assert!(held <= 1, "a majority has not confirmed the release");
    }
    for socket in &mut sockets {
        assert_echo(socket).await;
    }
    server.ends_clean().await;
}

// Rules: http.upgrade
#[tokio::test]
async fn upgraded_handle_keeps_the_lock_for_the_websocket_task() {
    let nodes = ScriptedNodes::new(3);
    let handler = async |lock: LockHandle, upgrade: WebSocketUpgrade| {
        let guard = lock.upgrade().unwrap();
        upgrade.on_upgrade(async move |socket| {
            echo(socket).await;
            drop(guard);
        })
    };
    let server = Server::start(&nodes, |layer| of_get(layer, handler)).await;
    for closes in [true, false] {
        let mut socket = connect(server.addr).await.unwrap();
        assert_echo(&mut socket).await;
        assert_eq!(nodes.locks(), [1, 1, 1]);
        match connect(server.addr).await {
            Err(Error::Http(refused)) => assert_eq!(refused.status(), 423),
            other => panic!("{other:?}"),
        }
        if closes {
            socket.close(None).await.unwrap();
        }
        drop(socket);
        server.wait_until_free().await;
    }
    // A client that leaves when it has sent its request, and not read the 101.
    let client = send(server.addr, UPGRADE).await;
    let held = || nodes.locks() == [1, 1, 1];
    server.wait_until("upgraded", held).await;
    drop(client);
    server.wait_until_free().await;
    server.ends_clean().await;
}

fn of_get<H: Handler<T, ()>, T: 'static>(layer: RedlockLayer, handler: H) -> Router {
    let layer = layer.methods([Method::GET]);
    Router::new().route("/", get(handler)).layer(layer)
}

async fn echo(mut socket: WebSocket) {
    while let Some(Ok(message)) = socket.recv().await {
        if socket.send(message).await.is_err() {
            break;
        }
    }
}

async fn connect(addr: SocketAddr) -> Result<WebSocketStream<TcpStream>, Error> {
    let stream = TcpStream::connect(addr).await.unwrap();
    let shaken = timeout(PATIENCE, client_async("ws://a/", stream)).await;
    let (socket, response) = shaken.expect("it is answered")?;
    assert_eq!(response.status(), 101);
    Ok(socket)
}

async fn assert_echo(socket: &mut WebSocketStream<TcpStream>) {
    socket.send(Message::text("hello")).await.unwrap();
    let echo = timeout(PATIENCE, socket.next()).await;
    let echo = echo.expect("the task is there").unwrap().unwrap();
    assert_eq!(echo, Message::text("hello"));
}

const UPGRADE: &str = "GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
    sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
