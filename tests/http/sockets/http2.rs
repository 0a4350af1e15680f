//! HTTP/2 streams: how one ends, and that the others on its connection go on.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Router;
use axum::http::HeaderMap;
use axum::routing::post;
use futures_util::{FutureExt, future};
use h2::Reason;
use support::http::Client;
use support::ms;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tower_redlock::test_util::ScriptedNodes;

use crate::sockets::http2_client::Http2Client;
use crate::sockets::server::{Counted, PATIENCE, SOON, Server, unending};

/// How a client leaves a stream.
#[derive(Debug, Clone, Copy)]
enum Leave {
    /// RST_STREAM.
    Reset,
    /// RST_STREAM of the h2 crate for dropped streams.
    Forget,
    Disconnect,
}

const WAYS_TO_LEAVE: [Leave; 3] = [Leave::Reset, Leave::Forget, Leave::Disconnect];

#[tokio::test]
async fn http2_stream_reset_during_the_handler_releases_the_lock() {
    let working = Arc::default();
    let server = Server::stuck(&working).await;
    let at_work = || working.load(Ordering::Relaxed) == 1;
    for leave in WAYS_TO_LEAVE {
        let client = Http2Client::connect(server.addr).await;
        // The second time shows that the connection goes on.
        for _ in 0..2 {
            let (response, mut stream) = client.open("POST", &[]).await;
            server.wait_until("working", at_work).await;
            assert_eq!(server.nodes.locks(), [1, 1, 1]);
            match leave {
                Leave::Reset => stream.send_reset(Reason::CANCEL),
                Leave::Forget => drop((response, stream)),
                Leave::Disconnect => break,
            }
            server.wait_until("stopped", || !at_work()).await;
            server.wait_until_free().await;
        }
        drop(client);
        server.wait_until("stopped", || !at_work()).await;
        server.wait_until_free().await;
    }
    server.ends_clean().await;
}

#[tokio::test]
async fn http2_stream_reset_of_a_waiter_leaves_the_queue() {
    let cases = WAYS_TO_LEAVE.map(|leave| [(leave, true), (leave, false)]);
    for (leave, holder_is_elsewhere) in cases.into_iter().flatten() {
        let (server, begun) = Server::counting().await;
        let guard = server.hold(holder_is_elsewhere).await;
        let client = Http2Client::connect(server.addr).await;
        let (response, mut stream) = client.open("POST", &[]).await;
        let waits = || server.in_flight() == 1;
        server.wait_until("waiting", waits).await;
        match leave {
            Leave::Reset => stream.send_reset(Reason::CANCEL),
            Leave::Forget => drop((response, stream)),
            Leave::Disconnect => drop(client),
        }
        server.wait_until("gone", || server.in_flight() == 0).await;
        let what = format!("{leave:?}");
        server.has_no_waiter(guard, &begun, &what).await;
    }
}

#[tokio::test]
async fn http2_stream_reset_during_the_body_releases_the_lock() {
    let handler = async |headers: HeaderMap| unending(headers.contains_key("x-endless"));
    let nodes = ScriptedNodes::new(3);
    let server = Server::with(&nodes, handler).await;
    for leave in WAYS_TO_LEAVE {
        for headers in [&[][..], &[("x-endless", "")]] {
            let client = Http2Client::connect(server.addr).await;
            let (response, mut stream) = client.send("POST", headers, b"").await.unwrap();
            let mut body = response.into_body();
            assert!(!body.data().await.unwrap().unwrap().is_empty());
            assert_eq!(nodes.locks(), [1, 1, 1]);
            match leave {
                Leave::Reset => stream.send_reset(Reason::CANCEL),
                Leave::Forget => drop((stream, body)),
                Leave::Disconnect => drop(client),
            }
            server.wait_until_free().await;
        }
    }
    server.ends_clean().await;
}

#[tokio::test]
async fn http2_streams_with_one_key_serve_one_and_keep_the_connection() {
    const STREAMS: usize = 16;
    let (gate, inside) = (Arc::new(Semaphore::new(0)), Arc::default());
    let handler = {
        let gate = Arc::clone(&gate);
        move || {
            let (gate, here) = (Arc::clone(&gate), Counted::new(&inside));
            let alone = inside.load(Ordering::Relaxed) == 1;
            async move {
                let _here = here;
                gate.acquire().await.unwrap().forget();
                assert!(alone, "two are inside");
                "done"
            }
        }
    };
    let nodes = ScriptedNodes::new(3);
    let server = Server::with(&nodes, handler).await;
    let client = Http2Client::connect(server.addr).await;
    for _ in 0..3 {
        let mut requests: Vec<_> = (0..STREAMS)
            .map(|_| client.request("POST", &[], b"").boxed_local())
            .collect();
        for _ in 1..STREAMS {
            let answered = timeout(PATIENCE, future::select_all(requests)).await;
            let (refused, _, others) = answered.expect("all but one are answered at once");
            assert_eq!(refused.status, 423);
            requests = others;
        }
        assert_eq!(nodes.locks(), [1, 1, 1]);
        gate.add_permits(1);
        let served = requests.remove(0).await;
        assert_eq!((served.status, &*served.body), (200, &b"done"[..]));
        // Free with the end of the stream, so that the next round finds a free lock.
        assert_eq!(nodes.locks(), [0, 0, 0]);
    }
    server.ends_clean().await;
}

// Rules: http.abort
#[tokio::test]
async fn lock_lost_during_the_body_resets_the_http2_stream() {
    let nodes = ScriptedNodes::new(3);
    let server = Server::start(&nodes, |layer| {
        // A third of it later, the renewal finds out.
        let layer = layer.ttl(ms(300)).unwrap();
        let handler = async || unending(false);
        Router::new().route("/", post(handler)).layer(layer)
    })
    .await;
    let client = Http2Client::connect(server.addr).await;
    // The second time shows that the connection goes on.
    for _ in 0..2 {
        let (response, _stream) = client.send("POST", &[], b"").await.unwrap();
        assert_eq!(response.status(), 200);
        let mut body = response.into_body();
        assert_eq!(body.data().await.unwrap().unwrap(), "first");
        nodes.wipe(0);
        nodes.wipe(1);
        let end = timeout(SOON, body.data()).await;
        let end = end.expect("the stream ends when the lock is lost");
        let error = end.expect("END_STREAM says that all is there").unwrap_err();
        assert!(error.is_reset() && error.is_remote(), "{error}");
        server.wait_until_free().await;
    }
    server.ends_clean().await;
}

#[tokio::test]
async fn panic_in_the_handler_resets_the_http2_stream_or_ends_the_connection() {
    let nodes = ScriptedNodes::new(3);
    let handler = |body: String| async move {
        assert!(body.is_empty(), "as the test wants it");
    };
    let server = Server::with(&nodes, handler).await;
    let client = Http2Client::connect(server.addr).await;
    for _ in 0..3 {
        let error = client.send("POST", &[], b"panic").await.unwrap_err();
        assert!(error.is_reset() && error.is_remote(), "{error}");
        server.wait_until_free().await;
        assert_eq!(client.request("POST", &[], b"").await.status, 200);
        let mut http1 = Client::connect(server.addr).await;
        let broken = http1.try_request("POST", "/", &[], b"panic").await;
        assert!(broken.is_err(), "{broken:?}");
        server.wait_until_free().await;
        server.serves_the_next().await;
    }
    server.ends_clean().await;
}
