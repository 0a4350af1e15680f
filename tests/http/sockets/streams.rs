//! Long responses end when the lock is lost.

use std::convert::Infallible;
use std::time::Duration;

use axum::Router;
use axum::http::Method;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::routing::get;
use futures_util::{StreamExt, stream};
use support::ms;
use tokio::io::AsyncReadExt;
use tokio::time::timeout;
use tower_redlock::RedlockLayer;
use tower_redlock::test_util::ScriptedNodes;

use crate::sockets::server::{SOON, Server, send};

/// When the lock ends, although it could be renewed for longer.
const MAX_HOLD: Duration = ms(400);

// Rules: http.abort
#[tokio::test]
async fn max_hold_truncates_an_event_stream() {
    let nodes = ScriptedNodes::new(3);
    let limited = |layer: RedlockLayer| layer.ttl(MAX_HOLD / 2).unwrap().max_hold(MAX_HOLD);
    let server = Server::start(&nodes, |layer| events(limited(layer))).await;
    let mut client = send(server.addr, "GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let mut bytes = Vec::new();
    let ended = timeout(MAX_HOLD + SOON, client.read_to_end(&mut bytes)).await;
    drop(ended.expect("the connection is closed when the lock is over"));
    let text = String::from_utf8_lossy(&bytes);
    assert!(text.contains("data: first"), "{text}");
    // The last chunk says that all is there.
    assert!(!text.contains("\r\n0\r\n"), "{text}");
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
