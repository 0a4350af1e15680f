//! Releases that a server refuses, and servers that are stopped or full: nothing is lost, drain reports it.

use std::future::IntoFuture;

use support::{
    Cluster, Executed, Proxy, RedisServer, SlowReadiness, alone, lock_and_release, ms, once, secs,
    until, until_all_up, wait_until,
};
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, ServiceExt};
use tower_redlock::Redlock;

use crate::patient::{LONGEST, app_of, builder, many_threads, name_of, request};

/// Servers that refuse every write, as with too few replicas.
fn refuse_writes(server: &RedisServer, refuse: bool) {
    let replicas = if refuse { "1" } else { "0" };
    server.command(&["CONFIG", "SET", "min-replicas-to-write", replicas]);
}

/// A server behind a proxy that has refused to release a lock, which is not over for a minute.
async fn refused() -> (RedisServer, Proxy, Redlock) {
    let server = RedisServer::start();
    let wire = Proxy::start(server.addr()).await;
    let redlock = builder([wire.url()]).ttl(secs(60)).build().unwrap();
    let guard = redlock.lock("k").await.unwrap();
    refuse_writes(&server, true);
    assert!(guard.release().await.is_err());
    (server, wire, redlock)
}

/// On a new connection.
// Rules: lock.release_kept
#[tokio::test]
async fn refused_release_outlives_its_redlock_and_drain_names_the_node() {
    let (server, wire, redlock) = refused().await;
    let drained = redlock.drain(secs(2)).await;
    assert_eq!(drained.unconfirmed.len(), 1, "{drained:?}");
    drop(redlock);
    wire.cut();
    sleep(ms(300)).await;
    wire.pass();
    refuse_writes(&server, false);
    until("free", LONGEST, || async { !server.exists(&name_of("k")) }).await;
}

/// The next runtime has it from the lane of the one that ended.
#[test]
fn refused_release_outlives_its_runtime() {
    let server = RedisServer::start();
    let redlock = builder([server.url()]).ttl(secs(60)).build().unwrap();
    let (first, second) = (many_threads(), many_threads());
    let guard = first.block_on(redlock.lock("k").into_future()).unwrap();
    refuse_writes(&server, true);
    assert!(first.block_on(guard.release()).is_err());
    drop(first);
    refuse_writes(&server, false);
    second.block_on(until("free", LONGEST, || async {
        redlock.health().await;
        !server.exists(&name_of("k"))
    }));
}

/// As while the rights of its user are changed: the keys would stay locked at all servers until their ttl.
// Rules: lock.release_kept
#[tokio::test]
async fn releases_that_servers_deny_are_sent_again_when_the_rights_are_back() {
    for denied in ["-evalsha", "-del"] {
        let cluster = Cluster::start(3);
        let redlock = builder(cluster.urls()).ttl(secs(60)).build().unwrap();
        let guard = redlock.lock("k").await.unwrap();
        cluster.command(&["ACL", "SETUSER", "default", denied]);
        assert!(guard.release().await.is_err(), "{denied}");
        cluster.command(&["ACL", "SETUSER", "default", "+@all"]);
        cluster.wait_until_free(LONGEST).await;
    }
}

/// A release that is refused is of its own owner: when it is accepted at last, the key may be another's.
// Rules: node.release
#[tokio::test]
async fn refused_release_does_not_release_the_next_holder() {
    let (server, wire, _ours) = refused().await;
    let theirs = builder([server.url()]).build().unwrap();
    wire.cut();
    refuse_writes(&server, false);
    server.command(&["DEL", &name_of("k")]);
    let next = theirs.lock("k").await.unwrap();
    wire.pass();
    sleep(ms(800)).await;
    assert!(next.is_valid() && server.exists(&name_of("k")));
    next.release().await.unwrap();
}

/// One server is away while very many requests leave before they begin.
#[tokio::test]
async fn dropped_requests_beside_a_stopped_server_delay_neither_drain_nor_lane() {
    let _alone = alone().await;
    let cluster = Cluster::start(3);
    let (wire, urls) = cluster.behind_proxy(2).await;
    // Far above the 300 ms after which requests leave: a busy machine is late to drop them.
    let redlock = builder(urls).ttl(secs(1)).node_timeout(ms(900));
    let redlock = redlock.build().unwrap();
    lock_and_release(&redlock, "warm").await;
    let executed = Executed::default();
    let layer = once(&redlock).at_most_once(true);
    wire.black_hole();
    let mut tasks = tokio::task::JoinSet::new();
    for key in 0..1_500 {
        let slow = layer.layer(SlowReadiness::of_clones(app_of(&executed), secs(60)));
        let asked = slow.oneshot(request(&key.to_string()));
        tasks.spawn(async move { timeout(ms(300), asked).await.is_ok() });
        if key % 100 == 0 {
            sleep(ms(10)).await;
        }
    }
    while let Some(answered) = tasks.join_next().await {
        assert!(!answered.unwrap());
    }
    let began = Instant::now();
    let drained = redlock.drain(secs(30)).await;
    assert!(began.elapsed() < secs(10) && drained.held.is_empty());
    for server in &cluster.servers[..2] {
        assert_eq!(server.keys("*:intent").len(), 0);
    }
    assert_eq!(executed.count(), 0);
    drop((redlock, layer));
    // Two ttls, and it does not try to connect any more.
    sleep(ms(2_500)).await;
    let connections = wire.connections();
    sleep(secs(1)).await;
    assert_eq!(wire.connections(), connections);
}

/// The time is counted from the grant, whenever a server gets the release.
#[tokio::test]
async fn hold_at_least_ends_in_time_at_servers_that_were_stopped() {
    let cluster = Cluster::start(3);
    let redlock = builder(cluster.urls()).ttl(secs(20)).build().unwrap();
    until_all_up(&redlock, LONGEST).await;
    let held = |count| cluster.holders(&name_of("k")) == count;
    let guard = redlock.lock("k").hold_at_least(secs(2)).await.unwrap();
    wait_until("held", LONGEST, || held(3)).await;
    cluster.servers.iter().for_each(RedisServer::stop);
    drop(guard);
    sleep(ms(2_500)).await;
    cluster.servers.iter().for_each(RedisServer::cont);
    wait_until("free", secs(1), || held(0)).await;
}
