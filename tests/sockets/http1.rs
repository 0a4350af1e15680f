//! HTTP/1.1 connections: what ends one, and what it survives.

use axum::Router;
use axum::routing::post;
use tower_redlock::test_util::ScriptedNodes;

use crate::server::{KEY, Server, lock_service};
use crate::support::http::Client;

#[tokio::test]
async fn a_panic_in_the_handler_breaks_the_connection_and_frees_the_lock() {
    let nodes = ScriptedNodes::new(3);
    let server = Server::start(&nodes, |layer| {
        let handler = |body: String| async move {
            assert!(body.is_empty(), "as the test wants it");
            "done"
        };
        Router::new().route("/", post(handler)).layer(layer)
    })
    .await;
    for _ in 0..3 {
        let mut client = Client::connect(server.addr).await;
        let broken = client.try_request("POST", "/", &[], b"panic").await;
        assert!(broken.is_err(), "{broken:?}");
        server.wait_until_free().await;
        let mut client = Client::connect(server.addr).await;
        let served = client.request("POST", "/", &[], b"").await;
        assert_eq!(served.status, 200);
    }
}

#[tokio::test]
async fn a_connection_goes_on_after_a_refusal() {
    let nodes = ScriptedNodes::new(3);
    let elsewhere = lock_service(&nodes);
    let server = Server::start(&nodes, |layer| {
        let app = Router::new().route("/", post(|| async { "done" }));
        app.layer(layer)
    })
    .await;
    // One connection: this client does not open another.
    let mut client = Client::connect(server.addr).await;
    for _ in 0..5 {
        let guard = elsewhere.lock(KEY).await.unwrap();
        for _ in 0..3 {
            let refused = client.request("POST", "/", &[], b"").await;
            assert_eq!(refused.status, 423);
            assert_eq!(refused.json()["code"], "lock-contended");
            assert_eq!(refused.header("connection"), None);
        }
        guard.release().await.unwrap();
        let served = client.request("POST", "/", &[], b"").await;
        assert_eq!((served.status, served.text().as_str()), (200, "done"));
    }
}
