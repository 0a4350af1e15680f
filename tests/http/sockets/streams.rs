//! Long responses end when the lock is lost.

use axum::Router;
use axum::routing::post;
use support::ms;
use tokio::io::AsyncReadExt;
use tokio::time::timeout;
use tower_redlock::test_util::ScriptedNodes;

use crate::scripted_bodies::lose;
use crate::sockets::http2_client::Http2Client;
use crate::sockets::server::{REQUEST, SOON, Server, read_until, send, unending};

// Rules: http.abort
#[tokio::test]
async fn lock_lost_during_the_body_truncates_the_response_and_resets_the_http2_stream() {
    let nodes = ScriptedNodes::new(3);
    let server = Server::start(&nodes, |layer| {
        // A third of it later, the renewal finds out.
        let layer = layer.ttl(ms(300)).unwrap();
        let handler = async || unending(false);
        Router::new().route("/", post(handler)).layer(layer)
    })
    .await;
    let mut http1 = send(server.addr, REQUEST).await;
    read_until(&mut http1, "first").await;
    lose(&nodes);
    let mut rest = String::new();
    let ended = timeout(SOON, http1.read_to_string(&mut rest)).await;
    drop(ended.expect("the connection is closed when the lock is lost"));
    // The last chunk would say that all is there.
    assert!(!rest.contains("0\r\n"), "{rest}");
    server.wait_until_free().await;

    let http2 = Http2Client::connect(server.addr).await;
    // The second time shows that the connection goes on.
    for _ in 0..2 {
        let (response, _stream) = http2.send("POST", &[]).await;
        assert_eq!(response.status(), 200);
        let mut body = response.into_body();
        assert_eq!(body.data().await.unwrap().unwrap(), "first");
        lose(&nodes);
        let end = timeout(SOON, body.data()).await;
        let end = end.expect("the stream ends when the lock is lost");
        let error = end.expect("END_STREAM says that all is there").unwrap_err();
        assert!(error.is_reset() && error.is_remote(), "{error}");
        server.wait_until_free().await;
    }
    server.ends_clean().await;
}
