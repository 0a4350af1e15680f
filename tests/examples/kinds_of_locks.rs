//! The example of the chapter "Kinds of locks" on three real servers: what its commands show.

use std::net::SocketAddr;

use futures_util::future::join_all;
use nix::sys::signal::Signal;
use support::http::request;
use support::{ChildProcess, Cluster, ms, quorum};
use tokio::time::sleep;

use crate::PATIENCE;

fn start(cluster: &Cluster) -> (ChildProcess, SocketAddr) {
    let urls = cluster.urls().join(",");
    let envs = [&quorum(&urls)[..], &[("REDLOCK_NODE_TIMEOUT", "500ms")]].concat();
    ChildProcess::serve("kinds_of_locks", &envs, "listening on http://")
}

/// Sends requests shortly after each other, while the earlier ones run.
async fn send_all(addr: SocketAddr, requests: &[(&str, &str)]) -> Vec<(u16, String)> {
    let requests = (0..).zip(requests).map(async |(at, (method, target))| {
        sleep(at * ms(150)).await;
        let answer = request(addr, method, target, &[("x-tenant", "a")], b"").await;
        (answer.status.as_u16(), answer.text())
    });
    join_all(requests).await
}

#[tokio::test]
async fn commands_of_the_chapter_show_each_kind_of_lock() {
    let cluster = Cluster::start(3);
    let (mut server, addr) = start(&cluster);
    server.wait_for_line("leading with token", PATIENCE);

    let (get, put) = (("GET", "/pages/7"), ("PUT", "/pages/7"));
    let pages = send_all(addr, &[get, get, put]).await;
    assert_eq!(pages[..2], [(); 2].map(|()| (200, "read page 7\n".into())));
    assert_eq!(pages[2].0, 423);

    let mut conversions = send_all(addr, &[("POST", "/convert"); 3]).await;
    conversions.sort();
    for (slot, (status, text)) in conversions[..2].iter().enumerate() {
        let expected = format!("converted in slot {slot}\n");
        assert_eq!((*status, text), (200, &expected));
    }
    assert_eq!(conversions[2].0, 429);
    assert!(conversions[2].1.contains("too-many-concurrent"));

    let timers = send_all(addr, &[("POST", "/jobs/report"); 2]).await;
    let by_other = "another server has written it\n".to_owned();
    let expected = [(200, "wrote the report\n".to_owned()), (200, by_other)];
    assert_eq!(timers, expected);

    let job = "/admin/locks/job/report";
    for (method, target, shown) in [
        ("GET", job, r#""state":"held""#),
        ("DELETE", job, r#""was_held":true"#),
        ("GET", job, r#""state":"free""#),
        ("GET", "/admin", r#""status":"ready""#),
    ] {
        let seen = &send_all(addr, &[(method, target)]).await[0];
        assert!(seen.1.contains(shown), "{method} {target}: {seen:?}");
    }

    server.signal(Signal::SIGTERM);
    let status = server.wait(PATIENCE);
    assert!(status.success(), "{status}: {}", server.stderr());
    server.wait_for_line("drained: true", PATIENCE);
    assert_eq!(cluster.lock_keys(), [""; 0]);
}
