//! Locks over real Redis nodes, without any HTTP.

use std::time::Duration;

use support::{
    Cluster, Proxy, RedisServer, assert_matches, lock_and_release, ms, secs, wait_until,
};
use tower_redlock::{LockError, Released};

use crate::patient::{LONGEST, builder, until_locked};

/// What one request set, a later one with a shorter ttl does not shorten; so the release must go out
/// as long as the longest of them lives.
#[tokio::test]
async fn lock_extended_by_less_is_released_on_every_node() {
    let cluster = Cluster::start(3);
    let redlock = builder(cluster.urls()).renew(false).node_timeout(ms(90));
    let redlock = redlock.build().unwrap();
    let guard = redlock.try_lock("k").await.unwrap();
    guard.extend(ms(100)).await.unwrap();
    guard.extend(ms(100)).await.unwrap();
    tokio::time::sleep(ms(400)).await;
    assert!(guard.is_valid());
    guard.release().await.unwrap();
    cluster.wait_until_free(secs(1)).await;
}

/// Over a slow link a connection takes several round trips, and so does every later one.
#[tokio::test]
async fn node_behind_a_slow_link_is_reached_again() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr()).await;
    proxy.delay(ms(250));
    let build = || {
        let redlock = builder([proxy.url()]).node_timeout(secs(1));
        redlock.connect_timeout(secs(5)).build().unwrap()
    };
    assert_eq!(build().health().await.up(), 1);
    let redlock = build();
    lock_and_release(&redlock, "k").await;
    proxy.cut();
    tokio::time::sleep(ms(300)).await;
    proxy.delay(ms(250));
    until_locked(&redlock, "k").await;
}

/// Also by the plain `SET`, and beside a client of another library.
#[tokio::test]
async fn labels_are_in_the_value_of_the_lock_and_refused_callers_read_them() {
    let cluster = Cluster::start(3);
    for fencing in [true, false] {
        let process = |label| {
            let builder = builder(cluster.urls()).fencing(fencing);
            builder.holder(label).build().unwrap()
        };
        let (ours, theirs) = (process("ours"), process("theirs"));
        let guard = ours.lock("a").note("a note").await.unwrap();
        // On all nodes: where callers compete, nodes name different holders.
        wait_until("on all", LONGEST, || cluster.lock_keys().len() == 3).await;
        let value = cluster.servers[0].command(&["GET", "redlock:{a}"]);
        let (owner, shown) = value.as_str().unwrap().split_at(32);
        let is_owner = owner.bytes().all(|digit| digit.is_ascii_hexdigit());
        assert!(is_owner && shown.ends_with(" ours\ta note"), "{value:?}");
        for refused in [
            theirs.try_lock("a").await,
            theirs.try_lock("a").shared().await,
            theirs.lock_all(["a", "c"]).wait(Duration::ZERO).await,
            theirs.lock("a").wait(ms(100)).await,
        ] {
            let Err(LockError::Contended { holder, .. }) = refused else {
                panic!("{refused:?}");
            };
            assert_eq!(holder.unwrap().to_string(), "ours (a note)");
        }
        guard.extend(secs(9)).await.unwrap();
        assert_eq!(guard.release().await, Ok(Released::Freed));
        let foreign = "0123456789abcdef0123456789abcdef01 7 x\ty";
        cluster.command(&["SET", "redlock:{a}", foreign, "PX", "9000"]);
        let refused = theirs.try_lock("a").await;
        assert_matches!(refused, Err(LockError::Contended { holder: None, .. }));
        cluster.command(&["DEL", "redlock:{a}"]);
    }
}
