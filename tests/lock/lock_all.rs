//! `lock_all`: all keys or none, exclusion of each key, rising tokens, no deadlock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use support::{ms, secs};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tower_redlock::test_util::{Gate, OpKind};
use tower_redlock::{
    FencingToken, KeyError, LockError, LockGuard, LockKey, LockKeys, Redlock, Released,
};

use crate::common::{Foreign, held_for, processes};

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

/// Lets every set be locked many times by all of these at once, and returns how often each key was locked.
///
/// In time, or there is a deadlock.
pub(crate) async fn contend(
    processes: &[&Redlock],
    sets: &[Vec<LockKey>],
) -> Vec<(LockKey, usize)> {
    let witness = Arc::new(Mutex::new(Witness::default()));
    let mut jobs = JoinSet::new();
    for (process, redlock) in (0..).zip(processes) {
        for (index, set) in (0..).zip(sets) {
            let (redlock, witness) = (Redlock::clone(redlock), Arc::clone(&witness));
            let (set, pause) = (set.clone(), index + process);
            jobs.spawn(async move {
                for round in 0..20 {
                    let locking = redlock.lock_all(&set).wait(secs(600));
                    let guard = locking.await.expect("a turn in time");
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
            });
        }
    }
    jobs.join_all().await;
    let tokens = std::mem::take(&mut witness.lock().expect("no panic").tokens);
    let counts = tokens.into_iter().map(|(key, tokens)| (key, tokens.len()));
    counts.collect()
}

#[tokio::test(start_paused = true)]
async fn lock_all_of_overlapping_sets_excludes_and_raises_tokens_per_key() {
    use Gate::{Down, Never, Ready, Slow};
    // In a ring, and with a single key.
    let [ring, sets] = [["xy", "yz", "zx"], ["xy", "yz", "x"]];
    for (sets, of_z, gates) in [
        (ring, 120, [Ready; 3]),
        (sets, 60, [Ready; 3]),
        (sets, 60, [Slow(ms(1)), Slow(ms(2)), Slow(ms(3))]),
        (sets, 60, [Ready, Slow(ms(2)), Down]),
        (sets, 60, [Ready, Never, Slow(ms(1))]),
    ] {
        let (nodes, processes) = processes::<3>();
        // Ahead of the wall clock, which hides mistakes otherwise.
        for key in ["x", "y", "z"] {
            Foreign::raise_fences(&key.into(), &nodes, 8_000_000_000_000_000);
        }
        for (node, gate) in gates.into_iter().enumerate() {
            nodes.set(node, gate);
        }
        let keys = |set: &str| {
            set.chars()
                .map(|key| LockKey::from(key.to_string()))
                .collect()
        };
        let granted = contend(&processes.each_ref(), &sets.map(keys)).await;
        let expected = [("x", 120), ("y", 120), ("z", of_z)];
        let expected = expected.map(|(key, count)| (LockKey::from(key), count));
        assert_eq!(granted, expected, "{gates:?}");
        sleep(ms(100)).await;
        assert_eq!(nodes.locks(), [0, 0, 0], "{gates:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn lock_all_with_one_held_key_locks_none() {
    let (nodes, [here, there]) = processes();
    let y = here.try_lock("y").await.unwrap();
    for other in [&here, &there] {
        for set in [["x", "y"], ["y", "z"]] {
            held_for(other.lock_all(set).wait(Duration::ZERO)).await;
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
async fn lock_all_takes_1_to_32_distinct_keys_in_any_order() {
    let (nodes, [redlock]) = processes();
    let guard = redlock.lock_all(["y", "x", "y", "x"]).await.unwrap();
    let sorted = [LockKey::from("x"), LockKey::from("y")];
    assert_eq!((guard.keys(), guard.key()), (&sorted[..], &sorted[0]));
    assert_eq!(nodes.locks(), [2, 2, 2]);
    guard.release().await.unwrap();
    // A set of one is the key itself.
    let guard = redlock.lock_all(["x", "x"]).await.unwrap();
    assert!(redlock.try_lock("x").await.is_err());
    guard.release().await.unwrap();

    let asked = nodes.sent(0, OpKind::Acquire);
    let keys = |count: usize| (0..count).map(|i| i.to_string());
    let too_many = KeyError::TooMany { count: 33, max: 32 };
    for (request, error) in [
        (redlock.lock_all(keys(33)), too_many),
        (redlock.lock_all(keys(0)), KeyError::None),
        (redlock.lock_all(["a", ""]), KeyError::Empty),
    ] {
        assert_eq!(request.await.unwrap_err(), LockError::Key(error));
    }
    assert_eq!(nodes.sent(0, OpKind::Acquire), asked, "no node was asked");
    // Duplicates do not count.
    let doubled = keys(LockKeys::MAX).chain(keys(32));
    let guard = redlock.lock_all(doubled).await.unwrap();
    assert_eq!((guard.keys().len(), nodes.locks()), (32, vec![32; 3]));
    assert_eq!(guard.release().await, Ok(Released::Freed));
    assert_eq!(nodes.locks(), [0, 0, 0]);
}
