//! Request bodies that are big or slow.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::middleware::map_request;
use axum::routing::post;
use bytes::Bytes;
use http_body_util::BodyExt;
use support::http;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout};
use tower_redlock::test_util::{OpKind, ScriptedNodes};
use tower_redlock::{BufferBodyLayer, RedlockLayer};

use crate::sockets::server::{PATIENCE, REQUEST, SOON, Server, send};

#[tokio::test]
async fn rejection_is_sent_before_the_request_body_is_read() {
    let working = Arc::default();
    let server = Server::stuck(&working).await;
    let holder = send(server.addr, REQUEST).await;
    let at_work = || working.load(Ordering::Relaxed) == 1;
    server.wait_until("working", at_work).await;

    for (expect, part) in [("expect: 100-continue\r\n", ""), ("", "only the beginning")] {
        let head =
            format!("POST / HTTP/1.1\r\nhost: a\r\n{expect}content-length: 50000000\r\n\r\n");
        let began = Instant::now();
        let mut client = send(server.addr, &(head + part)).await;
        let mut answer = vec![0; 2_000];
        let read = timeout(SOON, client.read(&mut answer)).await;
        let read = read.expect("it is answered at once").unwrap();
        let answer = String::from_utf8_lossy(&answer[..read]);
        // First of all: with 100 Continue the client would begin to send its 50 MB.
        assert!(answer.starts_with("HTTP/1.1 423 "), "{answer}");
        assert!(answer.contains("retry-after: "), "{answer}");
        assert!(began.elapsed() < SOON);
    }
    drop(holder);
    server.ends_clean().await;
}

/// A body of four bytes in two framings: the head, and each byte on the wire.
const SLOW_UPLOADS: [(&str, [&str; 4]); 2] = [
    ("content-length: 4", ["a", "b", "c", "d"]),
    (
        "transfer-encoding: chunked",
        [
            "1\r\na\r\n",
            "1\r\nb\r\n",
            "1\r\nc\r\n",
            "1\r\nd\r\n0\r\n\r\n",
        ],
    ),
];

// Rules: http.upload
#[tokio::test]
async fn slow_upload_holds_the_lock_unless_buffer_body_layer_is_outside() {
    for (buffered, leaves) in [(false, false), (false, true), (true, false), (true, true)] {
        for (framing, pieces) in SLOW_UPLOADS {
            let what = format!("{framing}, buffered: {buffered}, leaves: {leaves}");
            let (arrived, nodes) = (Arc::default(), ScriptedNodes::new(3));
            let server = Server::start(&nodes, |layer| upload(layer, buffered, &arrived)).await;
            let head =
                format!("POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{framing}\r\n\r\n");
            let mut client = send(server.addr, &head).await;
            let in_time = if leaves { &pieces[..2] } else { &pieces[..3] };
            for (number, piece) in in_time.iter().enumerate() {
                client.write_all(piece.as_bytes()).await.unwrap();
                let has_arrived = || arrived.load(Ordering::Relaxed) == number + 1;
                server.wait_until("arrived", has_arrived).await;
                let expected = usize::from(!buffered);
                assert_eq!(nodes.locks(), [expected; 3], "{what}");
                assert_eq!(nodes.sent(0, OpKind::Acquire), expected, "{what}");
            }
            if leaves {
                drop(client);
                server.wait_until("gone", || server.in_flight() == 0).await;
                server.wait_until_free().await;
                let asked = nodes.sent(0, OpKind::Acquire);
                assert_eq!(asked, usize::from(!buffered), "{what}");
            } else {
                let other = http::request(server.addr, "POST", "/", &[], b"").await;
                assert_eq!(other.status, if buffered { 200 } else { 423 }, "{what}");
                client.write_all(pieces[3].as_bytes()).await.unwrap();
                let mut answer = String::new();
                let read = timeout(PATIENCE, client.read_to_string(&mut answer)).await;
                read.expect("it is answered").unwrap();
                assert!(answer.starts_with("HTTP/1.1 200 "), "{what}: {answer}");
                assert!(answer.ends_with("abcd"), "{what}: {answer}");
                // Free with the last byte of the response.
                assert_eq!(nodes.locks(), [0, 0, 0], "{what}");
            }
            server.ends_clean().await;
        }
    }
}

/// An echo that counts the bytes of its requests as they arrive, outside of all layers.
fn upload(layer: RedlockLayer, buffered: bool, arrived: &Arc<AtomicUsize>) -> Router {
    let app = Router::new().route("/", post(async |body: Bytes| body));
    let app = app.layer(layer);
    let app = if buffered {
        app.layer(BufferBodyLayer::new(1_000))
    } else {
        app
    };
    let arrived = Arc::clone(arrived);
    app.layer(map_request(move |request: Request| {
        let arrived = Arc::clone(&arrived);
        let counted = request.map(|body| {
            Body::new(body.map_frame(move |frame| {
                let bytes = frame.data_ref().map_or(0, Bytes::len);
                arrived.fetch_add(bytes, Ordering::Relaxed);
                frame
            }))
        });
        async { counted }
    }))
}
