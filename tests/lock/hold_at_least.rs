//! Locks whose key stays taken after an early release, with embedded nodes on a paused clock.

use std::future::IntoFuture;
use std::time::Duration;

use support::{ms, real_runtime, secs, set_all};
use tokio::time::{Instant, sleep, timeout};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{LostReason, Redlock};

use crate::common::{held_for, polling, processes, processes_of};

#[tokio::test(start_paused = true)]
async fn a_key_that_is_released_early_stays_taken_for_all_processes() {
    // Shorter and longer than the ttl, released and dropped.
    for (least, is_dropped) in [(2, false), (2, true), (45, false), (45, true)] {
        let (_nodes, [one, other]) = processes();
        let guard = one.try_lock("k").hold_at_least(secs(least)).await.unwrap();
        sleep(secs(1)).await;
        if is_dropped {
            drop(guard);
            sleep(ms(10)).await;
        } else {
            guard.release().await.unwrap();
        }
        for redlock in [&one, &other] {
            let left = held_for(redlock.try_lock("k")).await;
            assert!(left <= secs(least - 1), "{left:?}");
        }
        // Who waits gets the key when the time is over.
        let began = Instant::now();
        drop(other.lock("k").wait(secs(60)).await.unwrap());
        let (left, expected) = (began.elapsed(), secs(least - 1));
        let in_time = expected - ms(100)..expected + ms(50);
        assert!(in_time.contains(&left), "{left:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_that_was_held_for_longer_is_free_at_once() {
    let (nodes, [one, other]) = processes();
    let guard = one.try_lock("k").hold_at_least(secs(2)).await.unwrap();
    sleep(secs(40)).await;
    assert!(guard.is_valid());
    guard.release().await.unwrap();
    assert_eq!(nodes.locks(), [0; 3]);
    assert!(other.try_lock("k").await.is_ok());
}

/// The job failed, so another process is to do it.
#[tokio::test(start_paused = true)]
async fn a_lost_lock_does_not_stay_taken() {
    // In each case, at least one node still has the key when the lock is released.
    use LostReason::{Expired, Gone, MaxHold, Revoked};
    for reason in [MaxHold, Expired, Gone, Revoked] {
        let (nodes, [one, other]) = processes();
        let lock = one.try_lock("k").hold_at_least(secs(60));
        let guard = lock.max_hold(secs(30)).await.unwrap();
        match reason {
            Expired => set_all(&nodes, OpKind::Confirm, Gate::Failing),
            Gone => (0..2).for_each(|node| nodes.wipe(node)),
            Revoked => {
                nodes.set_for(0, OpKind::Revoke, Gate::Failing);
                one.revoke("k").await.unwrap();
            }
            _ => {}
        }
        assert_eq!(guard.lost().await, reason);
        let locks = nodes.locks();
        assert!(locks.contains(&1), "{reason:?}: {locks:?}");
        let released = guard.release().await;
        assert!(released.is_err(), "{reason:?}: {released:?}");
        assert_eq!(nodes.locks(), [0; 3], "{reason:?}");
        assert!(other.try_lock("k").await.is_ok(), "{reason:?}");
    }
}

/// It is not free yet, and a message would send all that wait to the nodes in vain.
#[tokio::test(start_paused = true)]
async fn a_release_that_keeps_the_key_or_slot_is_not_published() {
    for count in [None, Some(1)] {
        let nodes = ScriptedNodes::new(3);
        let [other] = polling(&nodes, secs(3_600));
        let [one] = processes_of(&nodes);
        let (mut lock, mut next) = (one.try_lock("k"), other.lock("k").wait(secs(60)));
        if let Some(count) = count {
            (lock, next) = (lock.slots(count), next.slots(count));
        }
        let guard = lock.hold_at_least(secs(5)).await.unwrap();
        let began = Instant::now();
        let waiting = tokio::spawn(next.into_future());
        sleep(secs(1)).await;
        let before = nodes.sent(0, OpKind::Acquire);
        guard.release().await.unwrap();
        sleep(secs(1)).await;
        assert_eq!(nodes.sent(0, OpKind::Acquire), before, "{count:?}");
        drop(waiting.await.unwrap().unwrap());
        let elapsed = began.elapsed();
        assert!(elapsed >= secs(5), "{count:?}: {elapsed:?}");
    }
}

/// The work of one that is refused, or dropped before it got its guard, has not begun.
#[tokio::test(start_paused = true)]
async fn a_caller_without_a_guard_keeps_nothing_taken() {
    let (nodes, [one, other]) = processes();
    let holder = other.try_lock("k").await.unwrap();
    assert!(one.try_lock("k").hold_at_least(secs(30)).await.is_err());
    let lock = one.lock("k").wait(secs(5)).hold_at_least(secs(30));
    let mut waiting = Box::pin(lock.into_future());
    assert!(timeout(ms(20), &mut waiting).await.is_err());
    holder.release().await.unwrap();
    // Granted, while the caller is not polled.
    sleep(ms(100)).await;
    drop(waiting);
    sleep(ms(100)).await;
    assert_eq!(nodes.locks(), [0; 3]);
}

#[tokio::test(start_paused = true)]
async fn a_key_may_stay_taken_for_ever() {
    let (_nodes, [one, other]) = processes();
    let lock = one.try_lock("k").hold_at_least(Duration::MAX);
    let guard = lock.await.unwrap();
    guard.release().await.unwrap();
    sleep(secs(1_000_000)).await;
    assert!(other.try_lock("k").await.is_err());
}

/// The task ends with its runtime, and has not run since the grant.
#[test]
fn a_key_stays_taken_although_the_runtime_of_its_task_ends() {
    let redlock = Redlock::in_memory(3);
    real_runtime().block_on(async {
        let lock = redlock.try_lock("k").hold_at_least(secs(60));
        drop(lock.await.unwrap());
    });
    real_runtime().block_on(held_for(redlock.try_lock("k")));
}
