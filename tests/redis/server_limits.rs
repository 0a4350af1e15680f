//! Servers at a limit: out of memory, and fences at the largest number.

use std::time::Duration;

use support::{Cluster, RedisServer, ms, secs, wait_until};
use tower_redlock::{FencingToken, LockError, NodeFailure, Redlock, Released};

use crate::patient::{builder, failures};

/// With patience: a server that is late on a busy machine would give another reason than its limit.
fn redlock(cluster: &Cluster) -> Redlock {
    builder(cluster.urls()).build().unwrap()
}

/// Takes a server's memory away, so that it refuses all that would need more.
pub(crate) fn fill(server: &RedisServer) {
    let used = used_memory(server);
    set(server, "maxmemory-policy", "noeviction");
    // Well below: what a connection takes comes and goes.
    set(server, "maxmemory", &(used / 2).to_string());
    let refused = server.command(&["SET", "more", "memory"]);
    assert!(format!("{refused:?}").contains("OOM"), "{refused:?}");
}

pub(crate) fn used_memory(server: &RedisServer) -> u64 {
    let info = server.command(&["INFO", "memory"]);
    let mut lines = info.as_str().unwrap().lines();
    let used = lines.find_map(|line| line.strip_prefix("used_memory:"));
    used.unwrap().parse().unwrap()
}

pub(crate) fn give_back(server: &RedisServer) {
    set(server, "maxmemory", "0");
}

fn set(server: &RedisServer, setting: &str, value: &str) {
    let done = server.command(&["CONFIG", "SET", setting, value]);
    assert_eq!(done.as_str(), Some("OK"), "{setting}");
}

/// Returns how often each server set an expiry, the least of all.
fn expiries_set(cluster: &Cluster) -> u64 {
    let counts = cluster.servers.iter().map(RedisServer::call_counts);
    let expiries = counts.map(|calls| calls.get("pexpire").copied().unwrap_or_default());
    expiries.min().expect("there are servers")
}

/// Returns why nodes refused, in their own words.
pub(crate) fn refusals(refused: &LockError) -> Vec<String> {
    let words = failures(refused).iter().filter_map(|node| match node {
        NodeFailure::Refused { why, .. } => Some(why.to_string()),
        // Two refusals decide.
        NodeFailure::Unanswered { .. } => None,
        other => panic!("not refused: {other:?}"),
    });
    words.collect()
}

/// Checks that two nodes at least refused, and why.
#[track_caller]
fn assert_refused(refused: &LockError, why: &str) {
    let words = refusals(refused);
    let all = words.iter().all(|words| words.contains(why));
    assert!(words.len() >= 2 && all, "{refused}");
}

// Rules: node.full
#[tokio::test]
async fn full_servers_renew_extend_and_release_held_locks_and_refuse_new_ones() {
    let cluster = Cluster::start(3);
    for fencing in [true, false] {
        let [ours, theirs] = [(); 2].map(|()| {
            let builder = builder(cluster.urls()).fencing(fencing);
            builder.ttl(ms(1_500)).build().unwrap()
        });
        let one = ours.lock("one").await.unwrap();
        let set = ours.lock_all(["two", "three"]).await.unwrap();
        let tokens = [one.fencing_token(), set.fencing_token()];
        // The third may be later than the two that decide.
        let all = || cluster.lock_keys().len() == 9;
        wait_until("on all", secs(5), all).await;

        cluster.servers.iter().for_each(fill);
        for keys in [&["new"][..], &["new", "newer"]] {
            let refused = theirs.lock_all(keys.iter().copied()).await;
            assert_refused(&refused.unwrap_err(), "OOM");
        }
        // What is held is known without memory, but for the plain command of a single lock without
        // a token, which asks for memory first.
        for keys in [&["new", "one"][..], &["one"]] {
            let refused = theirs.lock_all(keys.iter().copied()).wait(Duration::ZERO);
            let refused = refused.await.unwrap_err();
            let is_known = fencing || keys.len() > 1;
            let is_contended = matches!(refused, LockError::Contended { .. });
            assert_eq!(is_contended, is_known, "{keys:?}: {refused}");
        }
        // Longer than any of them lives unless it is renewed: of three keys, and with fencing of as
        // many fences, each renewal sets the expiry.
        let renewal = if fencing { 6 } else { 3 };
        let before = expiries_set(&cluster);
        wait_until("renewed", secs(10), || {
            expiries_set(&cluster) >= before + 5 * renewal
        })
        .await;
        assert!(one.is_valid() && set.is_valid());
        one.extend(ms(1_400)).await.unwrap();
        set.extend(ms(1_400)).await.unwrap();
        assert_eq!([one.fencing_token(), set.fencing_token()], tokens);
        assert_eq!(one.release().await, Ok(Released::Freed));
        assert!(theirs.try_lock("one").await.is_err(), "there is no memory");

        cluster.servers.iter().for_each(give_back);
        let next = theirs.try_lock("one").await.unwrap();
        assert!(!fencing || next.fencing_token() > tokens[0]);
        assert_eq!(set.release().await, Ok(Released::Freed));
        let all = theirs.lock_all(["two", "three", "new"]).await.unwrap();
        assert!(!fencing || all.fencing_token() > tokens[1]);
        drop((next, all));
        cluster.wait_until_free(secs(2)).await;
    }
}

#[tokio::test]
async fn one_full_server_costs_only_its_vote() {
    let cluster = Cluster::start(3);
    let redlock = redlock(&cluster);
    fill(&cluster.servers[0]);
    for keys in [&["a"][..], &["a", "b"]] {
        let guard = redlock.lock_all(keys.iter().copied()).await.unwrap();
        guard.extend(secs(9)).await.unwrap();
        assert_eq!(guard.release().await, Ok(Released::Freed));
    }
    // It has taken nothing, and nothing was confirmed there.
    assert_eq!(cluster.servers[0].keys("*"), Vec::<String>::new());
    cluster.wait_until_free(secs(1)).await;
}

/// Puts the fence of a key where many locks, or a clock that was ahead, would have brought it.
fn plant(server: &RedisServer, key: &str, fence: u64) {
    let name = format!("redlock:{{{key}}}:fence");
    server.command(&["SET", &name, &format!("{fence} x")]);
}

/// Returns the number of the fence of a key, as the server has it.
fn fence(server: &RedisServer, key: &str) -> String {
    let record = server.command(&["GET", &format!("redlock:{{{key}}}:fence")]);
    let record = record.as_str().expect("there is a fence");
    record.split(' ').next().unwrap_or_default().to_owned()
}

// Rules: node.digits
#[tokio::test]
async fn fencing_tokens_rise_to_the_largest_number_and_end_there() {
    let cluster = Cluster::start(3);
    let redlock = redlock(&cluster);
    let max = FencingToken::MAX.as_u64();
    assert_eq!(max, 9_007_199_254_740_000);
    // Ahead of every clock for a while, beyond 2^53 / 10, odd and even.
    for start in [2_763_659_999_000_001, 4_503_599_627_370_498, max - 4] {
        for server in &cluster.servers {
            plant(server, "k", start);
            plant(server, "l", start - 9);
        }
        let sets = [&["k"][..], &["k", "l"]].into_iter().cycle();
        for (rise, keys) in (1..=4).zip(sets) {
            // What one key learned holds for the sets that it is in, and the other way round.
            let guard = redlock.lock_all(keys.iter().copied()).await.unwrap();
            let token = guard.fencing_token().unwrap();
            assert_eq!(token.as_u64(), start + rise);
            guard.extend(secs(9)).await.unwrap();
            assert_eq!(guard.fencing_token(), Some(token));
            assert_eq!(guard.release().await, Ok(Released::Freed));
        }
        let at_end = (start + 4).to_string();
        for key in ["k", "l"] {
            // A request that is late at one server on a busy machine may not be sent to it any more.
            let fences = cluster.servers.iter().map(|server| fence(server, key));
            let risen = fences.filter(|fence| *fence == at_end);
            assert!(risen.count() >= 2, "fences of {key}");
        }
    }
    for keys in [&["k"][..], &["l"], &["k", "l"], &["fresh", "k"]] {
        let refused = redlock.lock_all(keys.iter().copied()).await;
        assert_refused(&refused.unwrap_err(), "largest value");
    }
    // Nothing was left of those, and other keys are as before.
    cluster.wait_until_free(secs(1)).await;
    let fresh = redlock.lock_all(["fresh", "fresher"]).await.unwrap();
    assert!(fresh.fencing_token().unwrap().as_u64() < 2_763_659_999_000_001);
    // The error says what to do about it.
    cluster.command(&["DEL", "redlock:{k}:fence"]);
    assert!(redlock.try_lock("k").await.is_ok());
}
