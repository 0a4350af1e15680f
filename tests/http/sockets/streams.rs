//! Long responses: they hold the lock until they end, and end when the lock is lost.

use std::convert::Infallible;
use std::time::Duration;

use axum::Router;
use axum::http::Method;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::routing::get;
use futures_util::{StreamExt, stream};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use support::http::Client;
use support::ms;
use tokio::io::AsyncReadExt;
use tokio::time::timeout;
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{OnLost, RedlockLayer};

use crate::sockets::server::{SOON, Server, send};

#[tokio::test]
async fn event_stream_holds_the_lock_until_the_client_disconnects() {
    let nodes = ScriptedNodes::new(3);
    let server = Server::start(&nodes, events).await;
    for _ in 0..2 {
        let mut client = Client::connect(server.addr).await;
        let response = client.send("GET", "/", &[], b"").await.unwrap();
        assert_eq!(response.status(), 200);
        let mut body = response.into_body();
        assert_eq!(next(&mut body).await, "data: first\n\n");
        for _ in 0..3 {
            assert_eq!(next(&mut body).await, ":\n\n");
            assert_eq!(nodes.locks(), [1, 1, 1]);
        }
        let mut other = Client::connect(server.addr).await;
        assert_eq!(other.request("GET", "/", &[], b"").await.status, 423);
        drop((client, body));
        server.wait_until_free().await;
    }
    server.ends_clean().await;
}

/// When a lock ends in these tests, although it could be renewed for longer.
const MAX_HOLD: Duration = ms(400);

fn limited(layer: RedlockLayer, on_lost: OnLost) -> Router {
    let layer = layer.ttl(MAX_HOLD / 2).unwrap().max_hold(MAX_HOLD);
    events(layer.on_lost(on_lost))
}

// Rules: http.abort
#[tokio::test]
async fn max_hold_truncates_an_event_stream() {
    let nodes = ScriptedNodes::new(3);
    let server = Server::start(&nodes, |layer| limited(layer, OnLost::Abort)).await;

    let mut client = send(server.addr, "GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let mut bytes = Vec::new();
    let ended = timeout(MAX_HOLD + SOON, client.read_to_end(&mut bytes)).await;
    drop(ended.expect("the connection is closed when the lock is over"));
    assert_no_clean_end(&bytes, "data: first");
    server.ends_clean().await;
}

#[tokio::test]
async fn on_lost_notify_lets_an_event_stream_outlive_its_lock() {
    let nodes = ScriptedNodes::new(3);
    let server = Server::start(&nodes, |layer| limited(layer, OnLost::Notify)).await;
    let mut client = Client::connect(server.addr).await;
    let response = client.send("GET", "/", &[], b"").await.unwrap();
    assert_eq!(nodes.locks(), [1, 1, 1]);
    let mut body = response.into_body();
    assert_eq!(next(&mut body).await, "data: first\n\n");
    let free = async {
        // Read meanwhile, so that what comes later was sent later.
        while nodes.locks() != [0, 0, 0] {
            assert_eq!(next(&mut body).await, ":\n\n");
        }
    };
    timeout(MAX_HOLD + SOON, free).await.unwrap();
    for _ in 0..10 {
        assert_eq!(next(&mut body).await, ":\n\n");
    }
    drop((client, body));
    server.ends_clean().await;
}

/// One event, and then comments for as long as the client stays.
fn events(layer: RedlockLayer) -> Router {
    let handler = async || {
        let first = Event::default().data("first");
        let events = stream::iter([Ok::<_, Infallible>(first)]).chain(stream::pending());
        let often = KeepAlive::new().interval(ms(10));
        Sse::new(events).keep_alive(often)
    };
    let layer = layer.methods([Method::GET]);
    Router::new().route("/", get(handler)).layer(layer)
}

async fn next(body: &mut Incoming) -> String {
    let frame = timeout(SOON, body.frame()).await;
    let frame = frame.expect("the stream goes on").unwrap().unwrap();
    String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap()
}

#[track_caller]
fn assert_no_clean_end(bytes: &[u8], part: &str) {
    let text = String::from_utf8_lossy(bytes);
    assert!(text.contains(part), "{text}");
    assert!(
        !text.contains("\r\n0\r\n"),
        "the last chunk says that all is there: {text}"
    );
}
