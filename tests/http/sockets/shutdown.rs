//! Graceful shutdown: requests in flight end, waiting and new ones are refused, and no lock is left.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::routing::post;
use support::http::{Client, listen, request};
use support::{Answer, assert_matches, until, wait_until};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tower_redlock::RedlockLayer;
use tower_redlock::test_util::ScriptedNodes;

use crate::sockets::server::{KEY, SOON, Server, TTL, lock_service};

// Rules: shutting-down
#[tokio::test]
async fn drain_serves_the_holder_and_refuses_waiters_and_new_requests() {
    // Behind a load balancer the door is closed first, otherwise the locks may be.
    for door_first in [true, false] {
        let (gate, nodes) = (Arc::new(Semaphore::new(0)), ScriptedNodes::new(3));
        let mut server = Server::start(&nodes, |layer| app(&gate, layer.wait(TTL))).await;
        let holder = spawn_request(server.addr);
        let held = || nodes.locks() == [1, 1, 1];
        server.wait_until("held", held).await;
        let waiter = spawn_request(server.addr);
        server
            .wait_until("waiting", || server.in_flight() == 2)
            .await;

        if door_first {
            server.shut_down();
        }
        let redlock = server.redlock.clone();
        let draining = tokio::spawn(async move { redlock.drain(TTL).await });
        let refused = timeout(SOON, waiter).await;
        let refused = refused.expect("the waiter is woken").unwrap();
        assert_shutting_down(&refused);
        if door_first {
            // Its server takes note of the shutdown in a task of its own.
            let closed = || async { TcpStream::connect(server.addr).await.is_err() };
            until("closed", SOON, closed).await;
        } else {
            let late = request(server.addr, "POST", "/", &[], b"").await;
            assert_shutting_down(&late);
            server.shut_down();
        }
        assert_eq!(nodes.locks(), [1, 1, 1], "not released under its holder");
        assert!(!draining.is_finished());

        gate.add_permits(1);
        let served = holder.await.unwrap();
        assert_eq!((served.status.as_u16(), &*served.text()), (200, "done"));
        // Free with the last byte of the response.
        assert_eq!(nodes.locks(), [0, 0, 0]);
        let drained = timeout(SOON, draining).await;
        let drained = drained.expect("nothing is waited for").unwrap();
        assert!(drained.is_clean() && drained.released == 1, "{drained:?}");
        server.wait_until_shut_down().await;
        server.ends_clean().await;
    }
}

#[tokio::test]
async fn serve_until_ends_the_requests_under_way_and_refuses_new_connections() {
    let (gate, nodes) = (Arc::new(Semaphore::new(0)), ScriptedNodes::new(3));
    let redlock = lock_service(&nodes);
    let app = app(&gate, RedlockLayer::new(redlock.clone(), KEY));
    let (listener, addr) = listen().await;
    let (signal, signalled) = oneshot::channel::<()>();
    let signal_came = async { drop(signalled.await) };
    let serving = tokio::spawn(async move {
        let serve = |stopping| axum::serve(listener, app).with_graceful_shutdown(stopping);
        redlock.serve_until(signal_came, TTL, serve).await
    });
    // An idle connection, whose client has its response, does not keep the server.
    let mut idle = Client::connect(addr).await;
    gate.add_permits(1);
    assert_eq!(idle.request("POST", "/", &[], b"").await.status, 200);
    let holder = spawn_request(addr);
    wait_until("held", SOON, || nodes.locks() == [1, 1, 1]).await;

    signal.send(()).unwrap();
    let refused = || async { TcpStream::connect(addr).await.is_err() };
    until("refused", SOON, refused).await;
    assert_eq!(nodes.locks(), [1, 1, 1], "not released under its holder");
    assert!(!serving.is_finished());

    gate.add_permits(1);
    let served = holder.await.unwrap();
    assert_eq!((served.status.as_u16(), &*served.text()), (200, "done"));
    assert_eq!(nodes.locks(), [0, 0, 0], "free with the last byte");
    let served = timeout(SOON, serving).await;
    let (output, drained) = served.expect("nothing is waited for").unwrap();
    assert!(drained.is_clean() && drained.released == 1, "{drained:?}");
    assert_matches!(output, Some(Ok(())));
}

/// A handler that answers when the gate lets it.
fn app(gate: &Arc<Semaphore>, layer: RedlockLayer) -> Router {
    let gate = Arc::clone(gate);
    let handler = async move || {
        gate.acquire().await.unwrap().forget();
        "done"
    };
    Router::new().route("/", post(handler)).layer(layer)
}

/// A request on a connection of its own, which the server may close afterwards.
fn spawn_request(addr: SocketAddr) -> JoinHandle<Answer> {
    tokio::spawn(async move { request(addr, "POST", "/", &[], b"").await })
}

#[track_caller]
fn assert_shutting_down(refused: &Answer) {
    assert_eq!(refused.status, 503);
    assert_eq!(refused.json()["code"], "shutting-down");
    assert!(refused.header("retry-after").is_some());
}
