//! `lock_all`: all keys or none, exclusion of each key, rising tokens, no deadlock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use support::{assert_matches, ms};
use tokio::time::{sleep, timeout};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    FencingToken, KeyError, LockError, LockGuard, LockKey, LockKeys, Redlock, RedlockBuilder,
    Released,
};

use crate::common::Foreign;

fn builder(nodes: &ScriptedNodes) -> RedlockBuilder {
    Redlock::builder().scripted(nodes).wait(ms(600_000))
}

/// What a storage would see: who is inside, and the tokens per key in the order of the grants.
#[derive(Debug, Default)]
struct Witness {
    inside: BTreeSet<LockKey>,
    tokens: BTreeMap<LockKey, Vec<FencingToken>>,
}

impl Witness {
    fn enter(&mut self, guard: &LockGuard) {
        let token = guard.fencing_token().expect("fencing is on");
        for key in guard.keys() {
            assert!(self.inside.insert(key.clone()), "two hold {key:?}");
            let before = self.tokens.entry(key.clone()).or_default();
            assert!(before.iter().all(|other| *other < token), "{key:?}");
            before.push(token);
        }
    }

    fn leave(&mut self, guard: &LockGuard) {
        for key in guard.keys() {
            assert!(self.inside.remove(key));
        }
    }
}

/// Lets every set be locked many times from several processes at once.
async fn contend(nodes: &ScriptedNodes, sets: [&[&str]; 3]) -> Witness {
    let witness = Arc::new(Mutex::new(Witness::default()));
    let mut jobs = Vec::new();
    for process in 0..3 {
        let redlock = builder(nodes).build().expect("valid settings");
        for (index, set) in sets.into_iter().enumerate() {
            let set: Vec<LockKey> = set.iter().map(|key| LockKey::from(*key)).collect();
            let (redlock, witness) = (redlock.clone(), Arc::clone(&witness));
            let pause = u64::try_from(index).expect("a few") + process;
            jobs.push(tokio::spawn(async move {
                for round in 0..20 {
                    let guard = redlock.lock_all(set.clone()).await.expect("a turn in time");
                    witness.lock().expect("no panic").enter(&guard);
                    sleep(ms(1 + (round + pause) % 5)).await;
                    witness.lock().expect("no panic").leave(&guard);
                    // Half of them wait for the release, half leave it to the background.
                    if round % 2 == 0 {
                        assert_eq!(guard.release().await, Ok(Released::Freed));
                    } else {
                        drop(guard);
                    }
                    sleep(ms(pause)).await;
                }
            }));
        }
    }
    for job in jobs {
        job.await.expect("no panic");
    }
    let witness = Arc::into_inner(witness).expect("all jobs are over");
    witness.into_inner().expect("no panic")
}

#[tokio::test(start_paused = true)]
async fn lock_all_of_overlapping_sets_excludes_and_raises_tokens_per_key() {
    // In a ring, and with a single key.
    let ring: [&[&str]; 3] = [&["x", "y"], &["y", "z"], &["z", "x"]];
    let sets: [&[&str]; 3] = [&["x", "y"], &["y", "z"], &["x"]];
    for (sets, grants, gates) in [
        (ring, [120; 3], [Gate::Ready; 3]),
        (sets, [120, 120, 60], [Gate::Ready; 3]),
        (
            sets,
            [120, 120, 60],
            [1, 2, 3].map(|delay| Gate::Slow(ms(delay))),
        ),
        (
            sets,
            [120, 120, 60],
            [Gate::Ready, Gate::Slow(ms(2)), Gate::Down],
        ),
        (
            sets,
            [120, 120, 60],
            [Gate::Ready, Gate::Never, Gate::Slow(ms(1))],
        ),
    ] {
        let nodes = ScriptedNodes::new(3);
        for (node, gate) in gates.into_iter().enumerate() {
            nodes.set(node, gate);
        }
        // In time, or there is a deadlock.
        let contending = contend(&nodes, sets);
        let witness = timeout(ms(3_600_000), contending).await.unwrap();
        let granted = ["x", "y", "z"].map(|key| witness.tokens[&LockKey::from(key)].len());
        assert_eq!(granted, grants, "{gates:?}");
        sleep(ms(100)).await;
        assert_eq!(nodes.locks(), [0, 0, 0], "{gates:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn lock_all_with_one_held_key_locks_none() {
    let nodes = ScriptedNodes::new(3);
    let [here, there] = [(); 2].map(|()| builder(&nodes).build().unwrap());
    let y = here.try_lock("y").await.unwrap();
    for other in [&here, &there] {
        for set in [["x", "y"], ["y", "z"]] {
            let refused = other.lock_all(set).wait(Duration::ZERO).await;
            let Err(LockError::Contended { retry_after, .. }) = refused else {
                panic!("{refused:?}");
            };
            assert!(retry_after.is_some());
            assert_eq!(nodes.locks(), [1, 1, 1], "only y");
        }
        assert!(other.try_lock("x").await.is_ok());
        assert!(other.try_lock("z").await.is_ok());
        // They are given back in the background.
        sleep(ms(1)).await;
    }
    drop(y);
    assert!(there.lock_all(["x", "y", "z"]).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn lock_all_draws_one_token_above_the_fences_of_all_its_keys() {
    let nodes = ScriptedNodes::new(3);
    // The fence of one key is far ahead of the wall clock, which hides no mistake then.
    let ahead = (1_u64 << 52) + 5;
    Foreign::raise_fences(&"y".into(), &nodes, ahead);
    let redlock = builder(&nodes).build().unwrap();
    let mut last = ahead;
    for set in ["xyz", "x", "xz", "z", "yz", "y"] {
        let keys = set.chars().map(String::from);
        let guard = redlock.lock_all(keys).await.unwrap();
        let token = guard.fencing_token().unwrap().as_u64();
        assert!(token > last, "{set:?}");
        last = token;
        guard.release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn lock_all_sorts_keys_and_drops_duplicates() {
    let nodes = ScriptedNodes::new(3);
    let redlock = builder(&nodes).build().unwrap();
    let guard = redlock.lock_all(["y", "x", "y", "x"]).await.unwrap();
    let sorted = [LockKey::from("x"), LockKey::from("y")];
    assert_eq!(guard.keys(), sorted);
    assert_eq!(guard.key(), &sorted[0]);
    assert_eq!(nodes.locks(), [2, 2, 2]);
    let refused = redlock.lock_all(["x", "y"]).wait(Duration::ZERO).await;
    assert_matches!(refused, Err(LockError::Contended { .. }));
    drop(guard);
    // A set of one is the key itself.
    let guard = redlock.lock_all(["x", "x"]).await.unwrap();
    assert!(redlock.try_lock("x").await.is_err());
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn lock_all_takes_1_to_32_distinct_keys() {
    let nodes = ScriptedNodes::new(3);
    let redlock = builder(&nodes).build().unwrap();
    let keys = |count: usize| (0..count).map(|i| i.to_string());
    let guard = redlock.lock_all(keys(LockKeys::MAX)).await.unwrap();
    assert_eq!(guard.keys().len(), 32);
    assert_eq!(nodes.locks(), [32, 32, 32]);
    assert_eq!(guard.release().await, Ok(Released::Freed));
    assert_eq!(nodes.locks(), [0, 0, 0]);

    let asked = nodes.sent(0, OpKind::Acquire);
    let refused = redlock.lock_all(keys(33)).await.unwrap_err();
    let too_many = KeyError::TooMany { count: 33, max: 32 };
    assert_eq!(refused, LockError::Key(too_many));
    let refused = redlock.lock_all(keys(0)).await.unwrap_err();
    assert_eq!(refused, LockError::Key(KeyError::None));
    let refused = redlock.lock_all(["a", ""]).await.unwrap_err();
    assert_eq!(refused, LockError::Key(KeyError::Empty));
    assert_eq!(nodes.sent(0, OpKind::Acquire), asked, "no node was asked");
    // Duplicates do not count.
    let doubled = keys(32).chain(keys(32));
    assert!(redlock.lock_all(doubled).await.is_ok());
}
