//! Clients that leave during the handler, while they wait, and during the body.

use std::any::Any;
use std::future::pending;
use std::net::SocketAddr;

use axum::Router;
use axum::extract::RawQuery;
use axum::routing::post;
use bytes::Bytes;
use futures_util::future::Either;
use h2::client::ResponseFuture;
use h2::{Reason, RecvStream, SendStream};
use support::{Executed, http};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tower_redlock::RedlockLayer;
use tower_redlock::test_util::ScriptedNodes;

use crate::sockets::http2_client::Http2Client;
use crate::sockets::server::{KEY, Server, TTL, lock_service, read_until, send, unending};

/// How a client leaves its request.
#[derive(Debug, Clone, Copy)]
enum Leave {
    /// It closes its connection of HTTP/1.1.
    Close,
    /// It closes its half of that connection.
    HalfClose,
    /// RST_STREAM of HTTP/2.
    Reset,
    /// RST_STREAM of the h2 crate for dropped streams.
    Forget,
    /// It closes its connection of HTTP/2.
    Disconnect,
}

const WAYS_TO_LEAVE: [Leave; 4] = [Leave::Close, Leave::Reset, Leave::Forget, Leave::Disconnect];

/// What a client has of a request that it has sent.
enum Sent {
    Http1(TcpStream),
    Http2(
        Http2Client,
        SendStream<Bytes>,
        Either<ResponseFuture, RecvStream>,
    ),
}

impl Sent {
    async fn send(leave: Leave, addr: SocketAddr, path: &str) -> Self {
        if let Leave::Close | Leave::HalfClose = leave {
            let request = format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n");
            return Self::Http1(send(addr, &request).await);
        }
        let client = Http2Client::connect(addr).await;
        let (response, stream) = client.open("POST", path, &[]).await;
        Self::Http2(client, stream, Either::Left(response))
    }

    /// Reads the beginning of the body.
    async fn read_first(self) -> Self {
        match self {
            Self::Http1(mut stream) => {
                read_until(&mut stream, "first").await;
                Self::Http1(stream)
            }
            Self::Http2(client, stream, Either::Left(response)) => {
                let mut body = response.await.unwrap().into_body();
                assert_eq!(body.data().await.unwrap().unwrap(), "first");
                Self::Http2(client, stream, Either::Right(body))
            }
            begun @ Self::Http2(..) => begun,
        }
    }

    /// Leaves the request, and returns what the client keeps.
    async fn leave(self, leave: Leave) -> Box<dyn Any> {
        match (leave, self) {
            (Leave::HalfClose, Self::Http1(mut stream)) => {
                stream.shutdown().await.unwrap();
                Box::new(stream)
            }
            (Leave::Reset, Self::Http2(client, mut stream, answer)) => {
                stream.send_reset(Reason::CANCEL);
                Box::new((client, stream, answer))
            }
            (Leave::Forget, Self::Http2(client, ..)) => Box::new(client),
            _ => Box::new(()),
        }
    }
}

#[tokio::test]
async fn client_that_leaves_during_the_handler_releases_the_lock() {
    let nodes = ScriptedNodes::new(3);
    let server = Server::with(&nodes, async || pending::<()>().await).await;
    for leave in [Leave::HalfClose].into_iter().chain(WAYS_TO_LEAVE) {
        let sent = Sent::send(leave, server.addr, "/").await;
        let held = || nodes.locks() == [1, 1, 1];
        server.wait_until("held", held).await;
        let _rest = sent.leave(leave).await;
        let gone = format!("gone, {leave:?}");
        server.wait_until(&gone, || server.in_flight() == 0).await;
        server.wait_until_free().await;
    }
    server.ends_clean().await;
}

#[tokio::test]
async fn waiter_that_leaves_is_no_longer_in_the_queue() {
    // First in the queue it asks the nodes; behind a holder of its own server it does not.
    let cases = WAYS_TO_LEAVE.map(|leave| [(leave, true), (leave, false)]);
    for (leave, holder_is_elsewhere) in cases.into_iter().flatten() {
        let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
        let counted = executed.clone();
        let handler = post(async move || counted.one_more().to_string());
        let app = |layer: RedlockLayer| Router::new().route("/", handler).layer(layer.wait(TTL));
        let server = Server::start(&nodes, app).await;
        let theirs = lock_service(&nodes);
        let holder = [&server.redlock, &theirs][usize::from(holder_is_elsewhere)];
        let guard = holder.lock(KEY).await.unwrap();
        let sent = Sent::send(leave, server.addr, "/").await;
        let waits = || server.in_flight() == 1;
        server.wait_until("waiting", waits).await;
        let _rest = sent.leave(leave).await;
        let gone = format!("gone, {leave:?}");
        server.wait_until(&gone, || server.in_flight() == 0).await;
        guard.release().await.unwrap();
        let next = http::request(server.addr, "POST", "/", &[], b"").await;
        assert_eq!(next.status, 200);
        server.ends_clean().await;
        assert_eq!(executed.count(), 1, "{leave:?}: one waits");
    }
}

#[tokio::test]
async fn client_that_leaves_during_the_body_releases_the_lock() {
    let handler = async |RawQuery(form): RawQuery| unending(form.is_some());
    let nodes = ScriptedNodes::new(3);
    let server = Server::with(&nodes, handler).await;
    for leave in WAYS_TO_LEAVE {
        for path in ["/", "/?endless"] {
            let sent = Sent::send(leave, server.addr, path).await;
            let sent = sent.read_first().await;
            assert_eq!(nodes.locks(), [1, 1, 1]);
            let other = http::request(server.addr, "POST", path, &[], b"").await;
            assert_eq!(other.status, 423);
            let _rest = sent.leave(leave).await;
            server.wait_until_free().await;
        }
    }
    server.ends_clean().await;
}
