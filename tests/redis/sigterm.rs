//! SIGTERM under load: requests in flight end, and no node keeps a lock of the process.

use std::net::SocketAddr;
use std::time::Duration;

use nix::sys::signal::Signal;
use support::http::request;
use support::{ChildProcess, Cluster, example_path, free_port, ms, secs};

const PATIENCE: Duration = secs(20);

fn start(example: &str, cluster: &Cluster, grace_ms: &str) -> (ChildProcess, SocketAddr) {
    let listen = format!("127.0.0.1:{}", free_port());
    let urls = cluster.urls().join(",");
    let envs = [
        ("LISTEN", listen.as_str()),
        ("REDLOCK_URLS", urls.as_str()),
        ("REDLOCK_RESTART_GUARD", "off"),
        // On a busy machine the nodes may be late.
        ("REDLOCK_NODE_TIMEOUT", "300ms"),
        ("GRACE_MS", grace_ms),
    ];
    let server = ChildProcess::start(example_path(example), &[], &envs);
    server.wait_for_line("istening on http://", PATIENCE);
    (server, listen.parse().expect("it is an address"))
}

#[track_caller]
fn ends_and_says(server: &mut ChildProcess, what: &str) {
    let status = server.wait(PATIENCE);
    assert!(status.success(), "{status}: {}", server.stderr());
    let said = server.stdout();
    assert!(said.contains(what), "{said}");
}

#[tokio::test]
async fn sigterm_lets_requests_in_flight_finish_and_leaves_no_lock() {
    let cluster = Cluster::start(3);
    let (mut server, addr) = start("graceful_shutdown", &cluster, "10000");
    for probe in ["/livez", "/readyz"] {
        assert_eq!(request(addr, "GET", probe, &[], b"").await.status, 200);
    }
    let jobs: Vec<_> = (0..20)
        .map(|i| {
            let path = format!("/jobs/{i}?ms={}", 300 + i * 20);
            tokio::spawn(async move { request(addr, "POST", &path, &[], b"").await })
        })
        .collect();
    tokio::time::sleep(ms(200)).await;
    server.signal(Signal::SIGTERM);
    for job in jobs {
        let response = job.await.unwrap();
        assert_eq!(
            (response.status.as_u16(), &*response.text()),
            (200, "done\n")
        );
    }
    ends_and_says(&mut server, "drained: nothing left");
    assert_eq!(cluster.lock_keys(), [""; 0]);
}

#[tokio::test]
async fn sigterm_reports_a_handler_that_does_not_end_and_keeps_its_lock() {
    let cluster = Cluster::start(3);
    let (mut server, addr) = start("graceful_shutdown", &cluster, "300");
    let job = tokio::spawn(async move {
        // The process ends under it.
        let mut client = support::http::Client::connect(addr).await;
        let path = "/jobs/7?ms=60000";
        client.try_request("POST", path, &[], b"").await
    });
    tokio::time::sleep(ms(300)).await;
    assert_eq!(cluster.lock_keys().len(), 3);
    server.signal(Signal::SIGTERM);
    ends_and_says(&mut server, "drained: still held");
    let said = server.stdout();
    assert!(said.contains("3:job,1:7,"), "{said}");
    // Not released under its holder: it ends by its ttl.
    assert_eq!(cluster.lock_keys().len(), 3);
    assert!(job.await.unwrap().is_err());
}

#[tokio::test]
async fn sigterm_right_after_the_first_line_shuts_down() {
    let cluster = Cluster::start(3);
    for example in ["quickstart", "graceful_shutdown"] {
        let (mut server, _) = start(example, &cluster, "300");
        server.signal(Signal::SIGTERM);
        ends_and_says(&mut server, "drained: ");
    }
}
