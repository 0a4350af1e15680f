//! The spans of requests to nodes, with the names of OpenTelemetry.

use std::env;

use support::{ChildProcess, Deadline, Log, RedisServer, ms, secs};
use tower_redlock::Redlock;
use tracing::Level;

use crate::patient::{LONGEST, builder};

const URL: &str = "UNSUBSCRIBED_URL";

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

/// Without a subscriber, tracing passes to the crate `log` what is told, and the fields of spans, which are to be computed for
/// that. Only a process of its own has no subscriber of another test.
#[tokio::test]
async fn fields_of_spans_are_not_computed_without_a_subscriber() {
    let server = RedisServer::start();
    let (url, test) = (server.url(), "node_spans::process_without_a_subscriber");
    let test = ["--exact", test, "--nocapture"];
    let mut process = ChildProcess::start(env::current_exe().unwrap(), &test, &[(URL, &url)]);
    let status = process.wait(LONGEST);
    assert!(status.success(), "{}", process.stderr());
    // A filter that no test has, and a test that does nothing, are successes too.
    let logged = process.stdout();
    assert!(logged.contains("lock acquired"), "{logged}");
    assert!(logged.contains("span of this test; n=3"), "{logged}");
    assert!(!logged.contains("redlock.lock;"), "{logged}");
    assert!(!logged.contains("redlock.node;"), "{logged}");
}

/// Does nothing but in the process of the test above.
#[tokio::test]
async fn process_without_a_subscriber() {
    struct Printed;

    impl log::Log for Printed {
        fn enabled(&self, _: &log::Metadata<'_>) -> bool {
            true
        }

        fn log(&self, record: &log::Record<'_>) {
            println!("{}", record.args());
        }

        fn flush(&self) {}
    }

    let Ok(url) = env::var(URL) else { return };
    log::set_logger(&Printed).unwrap();
    log::set_max_level(log::LevelFilter::Trace);
    drop(tracing::info_span!("span of this test", n = 3));
    let redlock = builder([url]).build().unwrap();
    let guard = redlock.lock("k").await.unwrap();
    guard.release().await.unwrap();
}
