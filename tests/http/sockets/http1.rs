//! Requests of HTTP/1.1 that are sent before the earlier ones are answered.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use axum::extract::RawQuery;
use bytes::Bytes;
use futures_util::stream;
use support::{ms, set_all};
use tokio::io::AsyncReadExt;
use tokio::sync::Semaphore;
use tokio::task::yield_now;
use tokio::time::timeout;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};

use crate::sockets::server::{Counted, PATIENCE, REQUEST, Server, send};

#[tokio::test]
async fn pipelined_requests_with_one_key_are_served_in_sequence() {
    const TURNS: usize = 5;
    let nodes = ScriptedNodes::new(3);
    // So slow that a request that did not wait for the release would meet its predecessor's lock.
    set_all(&nodes, OpKind::Release, Gate::Slow(ms(3)));
    let (inside, served) = (Arc::default(), Arc::<AtomicUsize>::default());
    let count = Arc::clone(&served);
    let handler = move |RawQuery(form): RawQuery| {
        let here = Counted::new(&inside);
        assert_eq!(inside.load(Ordering::Relaxed), 1, "two are inside");
        count.fetch_add(1, Ordering::Relaxed);
        async move {
            yield_now().await;
            drop(here);
            match form.as_deref() {
                Some("sized") => Body::from("done"),
                Some("chunked") => {
                    let chunks = ["do", "ne"].map(|chunk| Ok::<_, Infallible>(Bytes::from(chunk)));
                    Body::from_stream(stream::iter(chunks))
                }
                _ => Body::empty(),
            }
        }
    };
    let server = Server::with(&nodes, handler).await;
    let forms = ["sized", "chunked", "empty"];
    let requests = forms
        .map(|form| format!("POST /?{form} HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nbody"));
    let last = "POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    let mut client = send(server.addr, &(requests.concat().repeat(TURNS) + last)).await;
    let mut answers = String::new();
    let read = timeout(PATIENCE, client.read_to_string(&mut answers)).await;
    read.expect("they are answered").unwrap();
    let all = TURNS * forms.len() + 1;
    assert_eq!(answers.matches("HTTP/1.1 200 OK").count(), all, "{answers}");
    assert_eq!(answers.matches("HTTP/1.1 ").count(), all, "{answers}");
    assert_eq!(served.load(Ordering::Relaxed), all);
    server.ends_clean().await;
}

/// hyper does not see the end of a connection behind a request that it has not taken up yet: all but
/// the last of them go on, and only the handler's end, or `max_hold`, frees the lock.
#[tokio::test]
async fn disconnect_with_pipelined_requests_leaves_no_lock() {
    const REQUESTS: usize = 3;
    let (gate, nodes) = (Arc::new(Semaphore::new(0)), ScriptedNodes::new(3));
    let handler = {
        let gate = Arc::clone(&gate);
        async move || gate.acquire().await.unwrap().forget()
    };
    let server = Server::with(&nodes, handler).await;
    let client = send(server.addr, &REQUEST.repeat(REQUESTS)).await;
    let held = || nodes.locks() == [1, 1, 1];
    server.wait_until("held", held).await;
    drop(client);
    gate.add_permits(REQUESTS);
    server.wait_until("gone", || server.in_flight() == 0).await;
    server.ends_clean().await;
}
