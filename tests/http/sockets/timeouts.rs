//! A timeout layer outside of `RedlockLayer`, which drops the request in any state.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::error_handling::HandleErrorLayer;
use axum::http::StatusCode;
use axum::routing::post;
use support::http::Client;
use support::ms;
use tower::BoxError;
use tower::timeout::TimeoutLayer;
use tower_redlock::RedlockLayer;
use tower_redlock::test_util::ScriptedNodes;

use crate::sockets::server::{Counted, Server, TTL};

/// Of the timeout layer. Who is to be served, is served at once.
const LIMIT: Duration = ms(500);

/// A server whose handler counts itself in `begun` and, told so by the request, never ends.
async fn server(nodes: &ScriptedNodes, begun: &Arc<AtomicUsize>, wait: Duration) -> Server {
    let (begun, working) = (Arc::clone(begun), Arc::default());
    let handler = move |body: String| {
        begun.fetch_add(1, Ordering::Relaxed);
        let here = Counted::new(&working);
        let alone = working.load(Ordering::Relaxed) == 1;
        async move {
            let _here = here;
            assert!(alone, "a handler goes on");
            if body == "stuck" {
                pending::<()>().await;
            }
        }
    };
    Server::start(nodes, |layer: RedlockLayer| {
        let answer = HandleErrorLayer::new(async |_: BoxError| StatusCode::GATEWAY_TIMEOUT);
        let layers = (answer, TimeoutLayer::new(LIMIT), layer.wait(wait));
        Router::new().route("/", post(handler)).layer(layers)
    })
    .await
}

#[tokio::test]
async fn timeout_during_the_handler_releases_the_lock() {
    let (nodes, begun) = (ScriptedNodes::new(3), Arc::default());
    let server = server(&nodes, &begun, Duration::ZERO).await;
    let mut client = Client::connect(server.addr).await;
    for _ in 0..2 {
        let late = client.request("POST", "/", &[], b"stuck").await;
        assert_eq!(late.status, 504);
        // In the background: the request that could have waited for it is gone.
        server.wait_until_free().await;
        let served = client.request("POST", "/", &[], b"").await;
        assert_eq!(served.status, 200);
    }
    assert_eq!(begun.load(Ordering::Relaxed), 4);
    server.ends_clean().await;
}

#[tokio::test]
async fn timeout_of_a_waiter_leaves_the_queue() {
    // First in the queue it asks the nodes; behind a holder of its own server it does not.
    for holder_is_elsewhere in [true, false] {
        let (nodes, begun) = (ScriptedNodes::new(3), Arc::default());
        let server = server(&nodes, &begun, TTL).await;
        let guard = server.hold(holder_is_elsewhere).await;
        let mut client = Client::connect(server.addr).await;
        for _ in 0..2 {
            let late = client.request("POST", "/", &[], b"").await;
            assert_eq!(late.status, 504);
            assert_eq!(nodes.locks(), [1, 1, 1], "that of the guard");
        }
        server.has_no_waiter(guard, &begun, "late").await;
    }
}
