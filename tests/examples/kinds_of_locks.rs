//! The example of the chapter "Kinds of locks" on three real servers: what its commands show.

use std::net::SocketAddr;

use nix::sys::signal::Signal;
use support::http::request;
use support::{Answer, ChildProcess, Cluster, ms, quorum};
use tokio::time::sleep;

use crate::PATIENCE;

fn start(cluster: &Cluster) -> (ChildProcess, SocketAddr) {
    let urls = cluster.urls().join(",");
    let envs = [&quorum(&urls)[..], &[("REDLOCK_NODE_TIMEOUT", "500ms")]].concat();
    ChildProcess::serve("kinds_of_locks", &envs, "listening on http://")
}

/// Sends requests shortly after each other, while the earlier ones run.
async fn send_all(addr: SocketAddr, requests: &[(&'static str, &'static str)]) -> Vec<Answer> {
    let mut running = Vec::new();
    for (method, target) in requests.iter().copied() {
        let tenant = [("x-tenant", "a")];
        running.push(tokio::spawn(async move {
            request(addr, method, target, &tenant, b"").await
        }));
        sleep(ms(150)).await;
    }
    let mut responses = Vec::new();
    for request in running {
        responses.push(request.await.unwrap());
    }
    responses
}

fn said(responses: &[Answer]) -> Vec<(u16, String)> {
    let said = responses
        .iter()
        .map(|response| (response.status.as_u16(), response.text()));
    said.collect()
}

#[tokio::test]
async fn commands_of_the_chapter_show_each_kind_of_lock() {
    let cluster = Cluster::start(3);
    let (mut server, addr) = start(&cluster);
    server.wait_for_line("leading with token", PATIENCE);

    let pages = [
        ("GET", "/pages/7"),
        ("GET", "/pages/7"),
        ("PUT", "/pages/7"),
    ];
    let pages = said(&send_all(addr, &pages).await);
    assert_eq!(pages[0], (200, "read page 7\n".into()));
    assert_eq!(pages[1], (200, "read page 7\n".into()));
    assert_eq!(pages[2].0, 423);

    let conversions = said(&send_all(addr, &[("POST", "/convert"); 3]).await);
    let slots: Vec<_> = conversions[..2]
        .iter()
        .map(|(_, text)| text.clone())
        .collect();
    assert!(slots.contains(&"converted in slot 0\n".into()), "{slots:?}");
    assert!(slots.contains(&"converted in slot 1\n".into()), "{slots:?}");
    assert_eq!(conversions[2].0, 429);
    assert!(conversions[2].1.contains("too-many-concurrent"));

    let timers = said(&send_all(addr, &[("POST", "/jobs/report"); 2]).await);
    assert_eq!(timers[0], (200, "wrote the report\n".into()));
    assert_eq!(timers[1], (200, "another server has written it\n".into()));

    let job = "/admin/locks/job/report";
    let of_operators = [
        ("GET", job),
        ("DELETE", job),
        ("GET", job),
        ("GET", "/admin"),
    ];
    let seen = said(&send_all(addr, &of_operators).await);
    assert!(seen[0].1.contains(r#""state":"held""#), "{}", seen[0].1);
    assert!(seen[1].1.contains(r#""was_held":true"#), "{}", seen[1].1);
    assert!(seen[2].1.contains(r#""state":"free""#), "{}", seen[2].1);
    assert!(seen[3].1.contains(r#""status":"ready""#), "{}", seen[3].1);

    server.signal(Signal::SIGTERM);
    let status = server.wait(PATIENCE);
    assert!(status.success(), "{status}: {}", server.stderr());
    assert!(
        server.stdout().contains("drained: true"),
        "{}",
        server.stdout()
    );
    assert_eq!(cluster.lock_keys(), [""; 0]);
}
