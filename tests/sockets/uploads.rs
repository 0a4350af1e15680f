//! Request bodies that are big or slow.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::io::AsyncReadExt;
use tokio::time::{Instant, timeout};

use crate::server::{REQUEST, SOON, Server, send};

#[tokio::test]
async fn a_refused_request_is_answered_before_its_body_is_read() {
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
    server.wait_until_free().await;
}
