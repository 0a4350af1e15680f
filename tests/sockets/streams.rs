//! Responses that go on for long, and locks that end before them.

use std::convert::Infallible;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::post;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use tokio::io::AsyncReadExt;
use tokio::time::timeout;
use tower_redlock::test_util::ScriptedNodes;

use crate::server::{REQUEST, Server, send};

#[tokio::test]
async fn a_lock_lost_amid_the_body_is_no_clean_end_on_the_wire() {
    let nodes = ScriptedNodes::new(3);
    let server = Server::start(&nodes, |layer| {
        let first = || stream::iter([Ok::<_, Infallible>(Bytes::from_static(b"first"))]);
        let handler = move || async move { Body::from_stream(first().chain(stream::pending())) };
        // A third of it later, the renewal finds out.
        let layer = layer.ttl(Duration::from_millis(300)).unwrap();
        Router::new().route("/", post(handler)).layer(layer)
    })
    .await;
    let mut client = send(server.addr, REQUEST).await;
    let held = || nodes.locks() == [1, 1, 1];
    server.wait_until("locked", held).await;
    nodes.wipe(0);
    nodes.wipe(1);
    let mut text = String::new();
    let ended = timeout(Duration::from_secs(10), client.read_to_string(&mut text)).await;
    // A reset connection is as good as one that ends amid a chunked body.
    drop(ended.expect("the connection is closed when the lock is lost"));
    assert!(text.contains("first"), "{text}");
    assert!(
        !text.contains("\r\n0\r\n"),
        "the last chunk says that all is there: {text}"
    );
}
