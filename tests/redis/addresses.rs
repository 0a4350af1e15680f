//! Addresses that lead to one server, or change where they lead: a majority consists of servers.

use support::{
    Cluster, Log, Proxy, Random, RedisServer, assert_matches, free_port, ms, secs, until,
    until_all_up,
};
use tokio::time::{Instant, sleep};
use tower_redlock::{LockError, NodeHealth, NodeState};

use crate::patient::{LONGEST, builder, guarded, name_of};

/// What holds a lock is a majority of servers, and not of names.
#[tokio::test]
async fn changing_addresses_make_no_majority_of_one_server() {
    let cluster = Cluster::start(3);
    until_all_up(&guarded(cluster.urls()).build().unwrap(), LONGEST).await;
    let wires = cluster.proxies().await;
    let urls: Vec<_> = wires.iter().map(Proxy::url).collect();
    let redlock = guarded(urls).build().unwrap();
    let mut random = Random(20_261_122);
    let mut granted = 0;
    let began = Instant::now();
    while began.elapsed() < secs(5) {
        let wire = usize::try_from(random.below(3)).unwrap();
        let server = usize::try_from(random.below(3)).unwrap();
        // Nearly always right, so that there are locks at all.
        if random.below(8) == 0 {
            wires[wire].lead_to(cluster.servers[server].addr());
            wires[wire].cut();
            wires[wire].pass();
        } else {
            wires[wire].lead_to(cluster.servers[wire].addr());
        }
        for _ in 0..20 {
            if let Ok(guard) = redlock.try_lock("k").await {
                let name = name_of("k");
                let count = cluster.holders(&name);
                assert!(count >= 2 || !guard.is_valid(), "held by {count} server");
                granted += 1;
                guard.release().await.ok();
            }
            sleep(ms(10)).await;
        }
    }
    assert!(granted > 0, "nothing was tried");
    let connections: usize = wires.iter().map(Proxy::connections).sum();
    assert!(connections < 5 * 3 * 20, "{connections} connections");
}

/// Otherwise two of its three addresses would be a majority. New clients, which meet all addresses at once.
// Rules: guard.twin
#[tokio::test]
async fn restart_guard_off_server_under_several_addresses_gets_no_vote() {
    let server = RedisServer::start();
    let other = server.url().replace("127.0.0.1", "localhost");
    let dead = format!("redis://127.0.0.1:{}", free_port());
    for number in 0..10 {
        let (log, _subscribed) = Log::subscribed();
        let urls = [server.url(), other.clone(), dead.clone()];
        let redlock = builder(urls).build().unwrap();
        let key = number.to_string();
        let refused = redlock.try_lock(key.as_str()).await.unwrap_err();
        assert_matches!(refused, LockError::Unavailable { .. });
        let is_known = || async { redlock.health().await.up() == 0 };
        until("known", LONGEST, is_known).await;
        let refused = redlock.try_lock(key).await.unwrap_err().to_string();
        let addr = server.addr();
        let other = format!("localhost:{}", addr.port());
        let each = [
            format!("{addr} and {other} are one server; list it once"),
            format!("{other} and {addr} are one server; list it once"),
        ];
        // A majority without votes is enough to know.
        assert!(each.iter().any(|why| refused.contains(why)), "{refused}");
        let log = log.text();
        assert!(!log.contains("started or flushed"), "{log}");
        let mut lines = log.lines().filter(|line| line.contains("gives no votes"));
        let is_logged = lines.any(|line| each.iter().any(|why| line.contains(why)));
        assert!(is_logged, "{log}");
    }
}

#[tokio::test]
async fn restart_guard_off_address_that_is_corrected_votes_again() {
    let cluster = Cluster::start(2);
    let wrong = Proxy::start(cluster.servers[0].addr()).await;
    let urls = [cluster.servers[0].url(), wrong.url()];
    let redlock = builder(urls).build().unwrap();
    let up = async || redlock.health().await.up();
    until("known", LONGEST, || async { up().await == 0 }).await;
    wrong.lead_to(cluster.servers[1].addr());
    until("corrected", LONGEST, || async { up().await == 2 }).await;
    let guard = redlock.lock("k").await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn restart_guard_off_servers_that_refuse_info_vote_and_are_logged_once() {
    let cluster = Cluster::start(3);
    cluster.command(&["ACL", "SETUSER", "default", "-info"]);
    let (log, _subscribed) = Log::subscribed();
    let redlock = builder(cluster.urls()).build().unwrap();
    until_all_up(&redlock, LONGEST).await;
    let guard = redlock.lock("k").await.unwrap();
    guard.release().await.unwrap();
    let log = log.text();
    let warnings = log.matches("redlock node does not tell its run_id");
    assert_eq!(warnings.count(), 1, "{log}");
    assert!(log.contains("NOPERM"), "{log}");
}

// Rules: guard.twin
#[tokio::test]
async fn three_addresses_of_one_server_do_not_vote_or_reconnect_endlessly() {
    let server = RedisServer::start();
    until_all_up(&guarded([server.url()]).build().unwrap(), LONGEST).await;
    let mut wires = Vec::new();
    for _ in 0..3 {
        wires.push(Proxy::start(server.addr()).await);
    }
    let redlock = guarded(wires.iter().map(Proxy::url)).build().unwrap();
    until("known", LONGEST, || async {
        let is_down = |node: &NodeHealth| matches!(node.state, NodeState::Unreachable { .. });
        redlock.health().await.nodes.iter().all(is_down)
    })
    .await;
    let before: usize = wires.iter().map(Proxy::connections).sum();
    let began = Instant::now();
    while began.elapsed() < secs(6) {
        let refused = redlock.try_lock("k").await;
        assert_matches!(refused, Err(LockError::Unavailable { .. }));
        sleep(ms(20)).await;
    }
    let after: usize = wires.iter().map(Proxy::connections).sum();
    assert!(after - before <= 2 * 3, "{} connections", after - before);
    assert!(!server.exists(&name_of("k")));
}
