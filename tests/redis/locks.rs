//! Locks over real Redis nodes, without any HTTP.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use support::{
    Cluster, Proxy, RedisServer, assert_matches, lock_and_release, ms, secs, wait_until,
};
use tower_redlock::{LockError, LockKey, NodeFailure, Redlock, Released};

use crate::patient::{LONGEST, builder, failures, until_locked};

fn redlock(cluster: &Cluster) -> Redlock {
    builder(cluster.urls()).build().unwrap()
}

#[tokio::test]
async fn lock_excludes_other_callers_until_it_is_released() {
    let cluster = Cluster::start(3);
    for fencing in [true, false] {
        let ours = builder(cluster.urls()).fencing(fencing).build().unwrap();
        let theirs = builder(cluster.urls()).fencing(fencing).build().unwrap();
        for keys in [vec!["a"], vec!["a", "b"]] {
            let guard = ours.lock_all(keys.clone()).await.unwrap();
            assert_eq!(guard.fencing_token().is_some(), fencing);
            let refused = theirs.try_lock("a").await.unwrap_err();
            assert_matches!(refused, LockError::Contended { .. });
            guard.extend(secs(9)).await.unwrap();
            assert_eq!(guard.release().await, Ok(Released::Freed));
            lock_and_release(&theirs, "a").await;
        }
    }
    cluster.wait_until_free(secs(1)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contended_locks_over_five_nodes_exclude_and_raise_tokens() {
    let cluster = Cluster::start(5);
    let inside = Arc::new(AtomicUsize::new(0));
    let tokens = Arc::new(std::sync::Mutex::new(Vec::new()));
    let contenders = (0..3).map(|_| {
        let redlock = redlock(&cluster);
        let (inside, tokens) = (Arc::clone(&inside), Arc::clone(&tokens));
        tokio::spawn(async move {
            for _ in 0..30 {
                let guard = redlock.lock("k").wait(secs(20)).await.unwrap();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two are inside");
                tokens.lock().unwrap().push(guard.fencing_token().unwrap());
                tokio::time::sleep(ms(1)).await;
                inside.fetch_sub(1, Ordering::SeqCst);
                guard.release().await.unwrap();
            }
        })
    });
    for contender in contenders.collect::<Vec<_>>() {
        contender.await.unwrap();
    }
    let tokens = tokens.lock().unwrap();
    assert_eq!(tokens.len(), 90);
    assert!(
        tokens.is_sorted_by(|earlier, later| earlier < later),
        "{tokens:?}"
    );
}

#[tokio::test]
async fn node_with_a_key_of_another_type_does_not_vote() {
    let cluster = Cluster::start(3);
    let redlock = redlock(&cluster);
    for taken in ["redlock:{k}", "redlock:{k}:fence"] {
        let list = |server: usize| {
            cluster.servers[server].command(&["DEL", taken]);
            cluster.servers[server].command(&["RPUSH", taken, "mine"]);
        };
        list(0);
        lock_and_release(&redlock, "k").await;
        let both = redlock.lock_all(["k", "l"]).await.unwrap();
        both.release().await.unwrap();
        list(1);
        let refused = redlock.try_lock("k").await.unwrap_err();
        // The third may not have answered when the two decided.
        let is_refusal = |node: &&NodeFailure| matches!(node, NodeFailure::Refused { .. });
        assert_eq!(
            failures(&refused).iter().filter(is_refusal).count(),
            2,
            "{refused}"
        );
        for server in &cluster.servers[..2] {
            let left = server.command(&["LLEN", taken]).as_int();
            assert_eq!(left, Some(1), "overwritten");
            server.command(&["DEL", taken, "redlock:{k}", "redlock:{k}:fence"]);
        }
    }
}

#[tokio::test]
async fn keys_may_be_any_bytes_of_any_length() {
    let cluster = Cluster::start(3);
    let redlock = redlock(&cluster);
    let odd: Vec<LockKey> = vec![
        LockKey::from("with a \0 and a \r\n and a }"),
        LockKey::from(vec![0xff_u8, 0xfe]),
        LockKey::from("x".repeat(1 << 20)),
    ];
    for key in odd {
        let guard = redlock.lock(key.clone()).await.unwrap();
        let again = redlock.try_lock(key).await;
        assert_matches!(again, Err(LockError::Contended { .. }));
        guard.release().await.unwrap();
    }
    cluster.wait_until_free(secs(1)).await;
}

/// Two commands a node and lock; what scripts call inside, connecting and probing apart.
#[tokio::test]
async fn uncontended_lock_sends_two_commands_to_every_node() {
    const LOCKS: u64 = 50;
    for nodes in [1, 3, 5] {
        for fencing in [true, false] {
            let cluster = Cluster::start(nodes);
            let redlock = builder(cluster.urls()).fencing(fencing).build().unwrap();
            // Opens all connections, the slowest too.
            assert_eq!(redlock.health().await.up(), nodes);
            cluster.command(&["CONFIG", "RESETSTAT"]);
            for i in 0..LOCKS {
                let guard = redlock.lock(("key", i.to_string())).await.unwrap();
                // So that the slowest node has been asked too: a decided round asks no node.
                tokio::time::sleep(ms(2)).await;
                guard.release().await.unwrap();
            }
            cluster.wait_until_free(secs(1)).await;
            for server in &cluster.servers {
                let counts = server.call_counts();
                let count = |name: &str| counts.get(name).copied().unwrap_or(0);
                let (scripts, plain) = (count("evalsha") + count("eval"), count("set"));
                // With fencing, the SETs are those of the scripts: a lock and a fence each.
                let by_client = if fencing { scripts } else { scripts + plain };
                assert_eq!(
                    by_client,
                    2 * LOCKS,
                    "{nodes} nodes, fencing {fencing}: {counts:?}"
                );
            }
        }
    }
}

#[tokio::test]
async fn restarted_node_votes_again() {
    let mut cluster = Cluster::start(3);
    let redlock = redlock(&cluster);
    lock_and_release(&redlock, "k").await;
    cluster.servers[0].kill();
    cluster.servers[1].kill();
    let refused = redlock.try_lock("k").await.unwrap_err();
    assert_matches!(refused, LockError::Unavailable { .. });
    cluster.servers[0].restart();
    cluster.servers[1].restart();
    until_locked(&redlock, "k").await;
}

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
    for (fencing, several) in [(true, false), (true, true), (false, false), (false, true)] {
        let process = |label| {
            builder(cluster.urls())
                .fencing(fencing)
                .holder(label)
                .build()
        };
        let (ours, theirs) = (process("ours").unwrap(), process("theirs").unwrap());
        let keys = if several { vec!["a", "b"] } else { vec!["a"] };
        let guard = ours.lock_all(keys.clone()).note("a note").await.unwrap();
        // On all nodes: where callers compete, nodes name different holders.
        let all = 3 * keys.len();
        wait_until("on all", LONGEST, || cluster.lock_keys().len() == all).await;
        let value = cluster.servers[0].command(&["GET", "redlock:{a}"]);
        let value = value.as_str().unwrap();
        let (owner, shown) = value.split_at(32);
        assert!(
            owner.bytes().all(|digit| digit.is_ascii_hexdigit()),
            "{value}"
        );
        assert!(shown.ends_with(" ours\ta note"), "{value}");
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
    let process = |label| builder(cluster.urls()).holder(label).build().unwrap();
    let [one, other] = ["one", "other"].map(process);
    let _readers = [
        one.try_lock("r").shared().await.unwrap(),
        other.try_lock("r").shared().note("n").await.unwrap(),
    ];
    let inspection = process("third").inspect("r").await;
    let holders = inspection.holders();
    let mut holders: Vec<_> = holders.iter().map(ToString::to_string).collect();
    holders.sort_unstable();
    assert_eq!(holders, ["one", "other (n)"]);
}
