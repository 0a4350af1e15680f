//! Clients that disconnect during the handler, while they wait, and during the body.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::extract::RawQuery;
use axum::routing::post;
use h2::Reason;
use http_body_util::BodyExt;
use support::http::{self, Client};
use tokio::io::AsyncWriteExt;
use tokio::sync::Semaphore;
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{LockHandle, RunToCompletion};

use crate::sockets::http2_client::Http2Client;
use crate::sockets::server::{KEY, REQUEST, Server, lock_service, send, unending};

#[tokio::test]
async fn disconnect_during_the_handler_releases_the_lock() {
    let working = Arc::default();
    let server = Server::stuck(&working).await;
    let at_work = || working.load(Ordering::Relaxed) == 1;
    for half_close in [false, true] {
        let mut client = send(server.addr, REQUEST).await;
        server.wait_until("working", at_work).await;
        assert_eq!(server.nodes.locks(), [1, 1, 1]);
        if half_close {
            client.shutdown().await.unwrap();
        } else {
            drop(client);
        }
        server.wait_until("stopped", || !at_work()).await;
        server.wait_until_free().await;
    }
    server.ends_clean().await;
}

#[tokio::test]
async fn disconnect_of_a_waiter_leaves_the_queue() {
    // First in the queue it asks the nodes; behind a holder of its own server it does not.
    for holder_is_elsewhere in [true, false] {
        let (server, begun) = Server::counting().await;
        let guard = server.hold(holder_is_elsewhere).await;
        let waiting = send(server.addr, REQUEST).await;
        let waits = || server.in_flight() == 1;
        server.wait_until("waiting", waits).await;
        drop(waiting);
        server.wait_until("gone", || server.in_flight() == 0).await;
        server.has_no_waiter(guard, &begun, "gone").await;
    }
}

#[tokio::test]
async fn disconnect_during_the_body_releases_the_lock() {
    let handler = async |RawQuery(form): RawQuery| unending(form.is_some());
    let nodes = ScriptedNodes::new(3);
    let server = Server::with(&nodes, handler).await;
    for path in ["/", "/?endless"] {
        let mut client = Client::connect(server.addr).await;
        let response = client.send("POST", path, &[], b"").await.unwrap();
        let mut body = response.into_body();
        let frame = body.frame().await.unwrap().unwrap();
        assert!(!frame.into_data().unwrap().is_empty());
        assert_eq!(nodes.locks(), [1, 1, 1]);
        let other = http::request(server.addr, "POST", path, &[], b"").await;
        assert_eq!(other.status, 423);
        drop((client, body));
        server.wait_until_free().await;
    }
    server.ends_clean().await;
}

#[tokio::test]
async fn run_to_completion_keeps_the_lock_after_a_disconnect() {
    let (gate, done) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicUsize::new(0)));
    let nodes = ScriptedNodes::new(3);
    let server = Server::start(&nodes, |layer| {
        let (gate, done) = (Arc::clone(&gate), Arc::clone(&done));
        let handler = async move |lock: LockHandle| {
            gate.acquire().await.unwrap().forget();
            assert!(lock.is_valid());
            done.fetch_add(1, Ordering::Relaxed);
        };
        let layer = layer.on_disconnect(RunToCompletion);
        Router::new().route("/", post(handler)).layer(layer)
    })
    .await;
    let elsewhere = lock_service(&nodes);
    for (turn, http2) in [false, true].into_iter().enumerate() {
        let held = || nodes.locks() == [1, 1, 1];
        if http2 {
            let client = Http2Client::connect(server.addr).await;
            let (_response, mut stream) = client.open("POST", &[]).await;
            server.wait_until("working", held).await;
            stream.send_reset(Reason::CANCEL);
            server.wait_until("gone", || server.in_flight() == 0).await;
        } else {
            let client = send(server.addr, REQUEST).await;
            server.wait_until("working", held).await;
            drop(client);
            server.wait_until("gone", || server.in_flight() == 0).await;
        }
        assert!(elsewhere.try_lock(KEY).await.is_err(), "it is still held");
        assert_eq!(done.load(Ordering::Relaxed), turn);
        gate.add_permits(1);
        server.wait_until_free().await;
        assert_eq!(done.load(Ordering::Relaxed), turn + 1);
    }
    server.ends_clean().await;
}
