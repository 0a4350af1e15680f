//! Servers with `cluster-enabled yes`: one that has all hash slots is a node like any other.

use std::time::Duration;

use support::{
    Deadline, RedisServer, assert_matches, lock_and_release, ms, secs, until_all_up,
    use_every_connection, wait_until, why_unreachable,
};
use tower_redlock::{LockError, NodeState, Redlock, RedlockBuilder, Released, RestartGuard};

use crate::patient::builder;

const ALL_SLOTS: std::ops::Range<u16> = 0..16_384;
const LONGEST: Duration = secs(20);
const REMEDY: &str = "a node in cluster mode must have all of them: add them, or list a server that is not in \
    cluster mode";

fn unguarded() -> RedlockBuilder {
    builder([])
}

fn guarded(server: &RedisServer) -> RedlockBuilder {
    // More than the ttl of what uses every connection.
    let builder = unguarded().url(server.url()).ttl(ms(1500));
    let guard = RestartGuard::For(secs(2));
    builder.namespace("guarded").restart_guard(guard)
}

#[tokio::test]
async fn everything_works_on_a_server_that_has_all_slots() {
    let mut server = RedisServer::start_in_cluster_mode(ALL_SLOTS);
    let url = server.url();
    use_every_connection(&url, || unguarded().url(&url)).await;
    let redlock = guarded(&server).build().unwrap();
    until_all_up(&redlock, LONGEST).await;
    use_every_connection(&url, || guarded(&server)).await;
    let errors = server.command(&["INFO", "errorstats"]);
    let errors = errors.as_str().unwrap();
    let is_refused = errors.contains("CROSSSLOT") || errors.contains("MOVED");
    assert!(!is_refused, "{errors}");

    // The scripts are loaded again.
    server.command(&["SCRIPT", "FLUSH"]);
    let guard = redlock.lock_all(["a", "b", "c"]).await.unwrap();
    assert_eq!(guard.release().await, Ok(Released::Freed));

    // It has lost its locks, and keeps its slots.
    server.restart();
    until_quarantined(&redlock).await;
    let refused = redlock.try_lock("a").await.unwrap_err();
    assert_matches!(refused, LockError::Unavailable { .. });
    until_all_up(&redlock, LONGEST).await;
    drop(redlock.lock_all(["a", "b", "c"]).await.unwrap());

    // As after a slot has come back from another server, without its keys.
    let bumped = server.command(&["CLUSTER", "BUMPEPOCH"]);
    assert!(bumped.as_str().unwrap().starts_with("BUMPED"), "{bumped:?}");
    server.command(&["CLIENT", "KILL", "TYPE", "normal"]);
    until_quarantined(&redlock).await;
}

async fn until_quarantined(redlock: &Redlock) {
    let deadline = Deadline::after(LONGEST);
    let is_quarantined = |state: &NodeState| matches!(state, NodeState::Quarantined { .. });
    while !is_quarantined(&redlock.health().await.nodes[0].state) {
        assert!(!deadline.is_over(), "not quarantined");
    }
}

#[tokio::test]
async fn a_server_that_has_some_slots_is_refused_with_the_remedy() {
    let server = RedisServer::start_in_cluster_mode(0..8_192);
    for builder in [guarded(&server), unguarded().url(server.url())] {
        let (why, slots) = (
            why_unreachable(builder).await,
            "it has not all hash slots of its Redis Cluster",
        );
        assert!(why.contains(slots) && why.contains(REMEDY), "{why}");
    }
    let why = why_unreachable(unguarded().url(server.url() + "/1")).await;
    // Valkey 9 may have several.
    let remedies = ["leave the database out of the URL", "out of range"];
    let has_remedy = remedies.iter().any(|remedy| why.contains(remedy));
    assert!(has_remedy, "{why}");
    server.command(&["ACL", "SETUSER", "default", "-cluster"]);
    let why = why_unreachable(guarded(&server)).await;
    assert!(why.contains("+cluster|nodes in cluster mode"), "{why}");
}

/// Keys are never looked for at another server, which is another node or none.
#[tokio::test]
async fn a_slot_that_moves_away_is_a_failure_of_the_node() {
    let server = RedisServer::start_in_cluster_mode(ALL_SLOTS);
    let other = RedisServer::start_in_cluster_mode(0..0);
    let [scripts, plain] = [true, false].map(|fencing| {
        let builder = unguarded().url(server.url()).fencing(fencing);
        builder.build().unwrap()
    });
    for redlock in [&scripts, &plain] {
        lock_and_release(redlock, "k").await;
    }

    server.command(&["CLUSTER", "MEET", "127.0.0.1", &other.port().to_string()]);
    let id = other.command(&["CLUSTER", "MYID"]);
    let id = id.as_str().unwrap();
    wait_until("met", LONGEST, || {
        let nodes = server.command(&["CLUSTER", "NODES"]);
        let mut lines = nodes.as_str().unwrap().lines();
        lines.any(|line| line.starts_with(id) && line.contains(" master "))
    })
    .await;
    server.command(&["DEL", "redlock:{k}:fence"]);
    let slot = server.command(&["CLUSTER", "KEYSLOT", "redlock:{k}"]);
    let slot = slot.as_int().unwrap().to_string();
    let moved = server.command(&["CLUSTER", "SETSLOT", &slot, "NODE", id]);
    assert_eq!(moved.as_str(), Some("OK"), "{moved:?}");

    for (redlock, told) in [(&scripts, "access a non local key"), (&plain, "MOVED ")] {
        let refused = redlock.try_lock("k").await.unwrap_err().to_string();
        let is_told = refused.contains(told) && refused.contains(REMEDY);
        assert!(is_told, "{refused}");
        // The connection that was admitted with all slots ends, and no other one is.
        let deadline = Deadline::after(LONGEST);
        let why = "has not all hash slots";
        while !format!("{:?}", redlock.health().await.nodes).contains(why) {
            assert!(!deadline.is_over(), "{:?}", redlock.health().await);
        }
    }
    let why = why_unreachable(unguarded().url(server.url())).await;
    assert!(why.contains(REMEDY), "{why}");
    let asked = other.call_counts();
    let was_asked = asked.contains_key("set") || asked.contains_key("evalsha");
    assert!(!was_asked, "{asked:?}");
}
