//! The spans of requests to nodes, with the names of OpenTelemetry.

use support::{Deadline, Log, RedisServer, ms, secs};
use tower_redlock::Redlock;
use tracing::Level;

use crate::patient::builder;

fn redlock(server: &RedisServer) -> Redlock {
    builder([server.url()]).build().unwrap()
}

#[tokio::test]
async fn request_to_a_node_is_a_span_of_its_lock_with_names_of_opentelemetry() {
    let server = RedisServer::start();
    let (log, _guard) = Log::with_spans(Level::TRACE);
    let redlock = redlock(&server);
    let guard = redlock.lock("k").label("job").await.unwrap();
    guard.release().await.unwrap();
    server.command(&["CONFIG", "SET", "maxmemory", "1"]);
    redlock.try_lock("k").label("job").await.unwrap_err();
    let port = server.port();
    for (op, status) in [
        ("acquire", ""),
        ("release", ""),
        ("acquire", " otel.status_code=\"ERROR\""),
    ] {
        let span = format!(
            ":redlock.node{{otel.kind=\"client\" db.system.name=\"redis\" db.operation.name=\"{op}\" \
             server.address=\"127.0.0.1\" server.port={port}{status}}}: "
        );
        let parts = ["redlock.lock{resource=\"job\"", &span, ": close"];
        let is_told = |line: &str| parts.iter().all(|part| line.contains(part));
        let deadline = Deadline::after(secs(5));
        while !log.text().lines().any(is_told) {
            assert!(!deadline.is_over(), "{span}: {}", log.text());
            tokio::time::sleep(ms(10)).await;
        }
    }
}

#[tokio::test]
async fn request_to_a_node_has_no_span_below_trace() {
    let server = RedisServer::start();
    let (log, _guard) = Log::with_spans(Level::DEBUG);
    let guard = redlock(&server).lock("k").await.unwrap();
    guard.release().await.unwrap();
    let text = log.text();
    let is_quiet = text.contains("lock acquired") && !text.contains("redlock.node");
    assert!(is_quiet, "{text}");
}
