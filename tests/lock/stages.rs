//! Locks over several groups of nodes while they are acquired: what is held meanwhile, and when its terms begin.

use std::time::Duration;

use support::{assert_matches, ms, secs, set_all};
use tokio::time::{Instant, sleep, timeout};
use tower_redlock::test_util::{Gate, OpKind};
use tower_redlock::{
    LockError, LockGuard, LockRequest, LostReason, OnceError, ReleaseError, Released,
};

use crate::common::{Foreign, is_contended};
use crate::groups::{builder, groups, keys_of, with_keys};
use crate::moving::{Steps, both_ways, growing};

/// Locks the keys of two groups, of which the second is free only after a while.
async fn lock_late(held: LockGuard, after: Duration, request: LockRequest) -> LockGuard {
    let waiting = tokio::spawn(request.into_future());
    sleep(after).await;
    held.release().await.unwrap();
    waiting.await.unwrap().unwrap()
}

/// The terms of a lock begin when its caller has all of it, and not with its first group.
#[tokio::test(start_paused = true)]
async fn max_hold_and_hold_at_least_begin_when_the_last_group_is_locked() {
    let (_groups, redlock, keys) = with_keys::<2>().await;
    let held = redlock.lock(&keys[1]).await.unwrap();
    let both = redlock.lock_all(&keys).max_hold(secs(15));
    let guard = lock_late(held, secs(30), both).await;
    let began = Instant::now();
    assert_eq!(guard.lost().await, LostReason::MaxHold);
    let lasted = began.elapsed();
    assert!((secs(14)..secs(26)).contains(&lasted), "{lasted:?}");
    drop(guard);
    sleep(secs(1)).await;

    let held = redlock.lock(&keys[1]).await.unwrap();
    let both = redlock.lock_all(&keys).hold_at_least(secs(20));
    let guard = lock_late(held, secs(15), both).await;
    guard.release().await.unwrap();
    sleep(secs(19)).await;
    for key in &keys {
        assert!(is_contended(&redlock.try_lock(key).await));
    }
    sleep(secs(2)).await;
    assert!(redlock.lock_all(&keys).wait(ms(0)).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn lock_without_renewal_waits_for_the_last_group_for_longer_than_its_ttl() {
    let groups = groups::<2>();
    let redlock = builder(&groups).renew(false).build().unwrap();
    let other = builder(&groups).build().unwrap();
    let keys = keys_of(&redlock, 2).await;
    let held = other.lock(&keys[1]).await.unwrap();
    let waiting = tokio::spawn(redlock.lock_all(&keys).into_future());
    // It has the first group all the time, and not again and again.
    for _ in 0..300 {
        sleep(ms(100)).await;
        assert_eq!(groups[0].locks(), [1; 3]);
    }
    held.release().await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    assert_eq!(groups[0].sent(0, OpKind::Acquire), 1);
    assert!(guard.valid_for() > secs(6), "{:?}", guard.valid_for());
    let began = Instant::now();
    assert_eq!(guard.lost().await, LostReason::Expired);
    assert!(began.elapsed() < secs(10));
}

/// `wait` bounds an execution in both groups together.
#[tokio::test(start_paused = true)]
async fn execution_waits_once_for_both_groups() {
    let (_, steps, key) = growing().await;
    let _new = steps.new.lock(&key).await.unwrap();
    let mut waiting = Vec::new();
    for _ in 0..3 {
        let once = steps.both.once(&key).wait(secs(5));
        let asked = Instant::now();
        waiting.push(tokio::spawn(async move {
            let refused = once.run(|_| async { Ok::<u32, ()>(1) }).await;
            assert_matches!(refused, Err(OnceError::Lock(LockError::Contended { .. })));
            asked.elapsed()
        }));
        sleep(secs(1)).await;
    }
    for waiting in waiting {
        let waited = waiting.await.unwrap();
        assert!(waited < secs(6), "{waited:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn execution_gets_its_whole_max_hold_after_it_waited_for_the_new_group() {
    let (_, steps, key) = growing().await;
    let new = steps.new.lock(&key).await.unwrap();
    let once = steps.both.once(&key).wait(secs(60)).max_hold(secs(5));
    let waiting = tokio::spawn(once.run(|_| async {
        sleep(secs(4)).await;
        Ok::<u32, ()>(1)
    }));
    sleep(secs(20)).await;
    drop(new);
    assert_eq!(waiting.await.unwrap().unwrap().into_inner(), 1);
}

/// A slot has one number in all groups: callers choose other things by it.
#[tokio::test(start_paused = true)]
async fn slot_has_the_same_number_in_all_groups() {
    for round in 0..8 {
        let (_groups, redlock, keys) = with_keys::<2>().await;
        // With another number of the second key taken in each round.
        let beside = redlock.lock(&keys[1]).slots(3).await.unwrap();
        let one = redlock.lock_all(&keys).slots(3).wait(ms(0)).await.unwrap();
        let other = redlock.lock_all(&keys).slots(3).wait(ms(0)).await.unwrap();
        let mut numbers = [&beside, &one, &other].map(|guard| guard.slot().unwrap());
        numbers.sort_unstable();
        assert_eq!(numbers, [0, 1, 2], "round {round}");
        for guard in [&one, &other] {
            let slot = guard.slot().unwrap();
            for key in &keys {
                let slot = (key, "slot", slot).into();
                assert!(guard.keys().contains(&slot), "round {round}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_for_a_slot_of_both_groups_ends_with_any_of_them() {
    let (_, steps, key) = growing().await;
    for holder in [&steps.old, &steps.new, &steps.both] {
        let mut taken = Vec::new();
        for _ in 0..3 {
            taken.push(holder.try_lock(&key).slots(3).await.unwrap());
        }
        for freed in 0..3 {
            let waiting = tokio::spawn(steps.both.lock(&key).slots(3).into_future());
            sleep(secs(1)).await;
            assert!(!waiting.is_finished());
            taken.remove(0).release().await.unwrap();
            let began = Instant::now();
            taken.push(waiting.await.unwrap().unwrap());
            assert!(began.elapsed() < secs(2), "{freed}: {:?}", began.elapsed());
        }
        drop(taken);
        sleep(ms(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn drain_ends_a_caller_between_two_groups() {
    let all = groups::<2>();
    // With a key that is waited for in order, and one that is tried again and again.
    for (old, new, from, to) in both_ways(&all) {
        let steps = Steps::from(old, new);
        let key = steps.moving(from, to, 0).await;
        let _held = steps.new.lock(&key).await.unwrap();
        let waiting = tokio::spawn(steps.both.lock(&key).into_future());
        sleep(ms(1_234)).await;
        let began = Instant::now();
        let drained = steps.both.drain(secs(5)).await;
        assert!(drained.is_clean(), "{drained:?}");
        assert!(began.elapsed() < ms(10));
        let refused = waiting.await.unwrap();
        assert_matches!(refused, Err(LockError::Closed));
    }
}

/// Dropped at each of its polls, also while a token is raised and between two attempts.
#[tokio::test(start_paused = true)]
async fn request_that_is_dropped_at_any_time_leaves_nothing() {
    let all = groups::<2>();
    for (old, new, from, to) in both_ways(&all) {
        let steps = Steps::from(old, new);
        let key = steps.moving(from, to, 0).await;
        for nodes in &all {
            (0..3).for_each(|node| nodes.set(node, Gate::Slow(ms(7))));
        }
        for ahead in [false, true] {
            for after in 0..120 {
                if ahead {
                    let nodes = &all[usize::from(to == "1")];
                    Foreign::raise_fences(&key, nodes, 8_000_000_000_000_000 + after);
                }
                drop(timeout(ms(after), steps.both.lock(&key)).await);
                let once = steps.both.once((&key, after));
                let once = once.run(|_| async { Ok::<u32, ()>(1) });
                drop(timeout(ms(after), once).await);
                sleep(ms(300)).await;
                let left = all.iter().flat_map(|nodes| nodes.locks()).sum::<usize>();
                assert_eq!(left, 0, "after {after} ms");
            }
        }
        for nodes in &all {
            (0..3).for_each(|node| nodes.set(node, Gate::Ready));
        }
        assert!(steps.both.drain(secs(1)).await.is_clean());
    }
}

/// The renewals of one group fail, and those of the other do not.
#[tokio::test(start_paused = true)]
async fn validity_is_that_of_the_group_that_is_not_renewed() {
    for failing in 0..2 {
        let (groups, redlock, keys) = with_keys::<2>().await;
        let guard = redlock.lock_all(&keys).await.unwrap();
        set_all(&groups[failing], OpKind::Confirm, Gate::Failing);
        sleep(secs(8)).await;
        assert!(guard.valid_for() < secs(2), "{:?}", guard.valid_for());
        assert!(guard.handle().valid_for() < secs(2));
    }
}

#[tokio::test(start_paused = true)]
async fn release_waits_for_every_group_and_reports_each_failure() {
    for late in 0..2 {
        let (groups, redlock, keys) = with_keys::<2>().await;
        set_all(&groups[late], OpKind::Release, Gate::Slow(ms(30)));
        let guard = redlock.lock_all(&keys).await.unwrap();
        let began = Instant::now();
        assert_eq!(guard.release().await, Ok(Released::Freed));
        assert_eq!(began.elapsed(), ms(30));
        assert_eq!(groups[late].locks(), [0; 3]);
        (0..2).for_each(|node| groups[late].set_for(node, OpKind::Release, Gate::Failing));
        let guard = redlock.lock_all(&keys).await.unwrap();
        let released = guard.release().await;
        assert_matches!(released, Err(ReleaseError::Unavailable { .. }));
    }
}

#[tokio::test(start_paused = true)]
async fn new_group_is_not_asked_before_the_present_one_has_granted_the_key() {
    let all = groups::<2>();
    for (old, new, from, to) in both_ways(&all) {
        let steps = Steps::from(old, new);
        let key = steps.moving(from, to, 0).await;
        let next = &all[usize::from(to == "1")];
        let before = next.sent(0, OpKind::Acquire);
        let held = steps.old.lock(&key).await.unwrap();
        assert!(steps.both.try_lock(&key).await.is_err());
        let once = steps.both.once(&key).run(|_| async { Ok::<u32, ()>(1) });
        assert!(once.await.is_err());
        assert_eq!(next.sent(0, OpKind::Acquire), before);
        held.release().await.unwrap();
    }
}

/// Something may have been executed, so no other process executes before the ttl is over.
#[tokio::test(start_paused = true)]
async fn execution_that_panics_keeps_its_key_in_both_groups() {
    let (_, steps, key) = growing().await;
    let once = steps.both.once(&key);
    let panicked = tokio::spawn(once.run(|_| async {
        assert!(ms(0) > ms(1), "the work panics");
        Ok::<u32, ()>(1)
    }));
    assert!(panicked.await.is_err());
    sleep(secs(5)).await;
    for other in [&steps.old, &steps.new] {
        assert!(is_contended(&other.try_lock(&key).await));
    }
    sleep(secs(6)).await;
    for other in [&steps.old, &steps.new] {
        assert!(other.try_lock(&key).await.is_ok());
    }
}

/// Also a caller that waits for no release, but tries again and again.
#[tokio::test(start_paused = true)]
async fn max_waiters_counts_callers_of_keys_that_move_in_either_order() {
    let all = groups::<2>();
    for (old, new, from, to) in both_ways(&all) {
        let steps = Steps::with(old, new, |builder| builder.max_waiters(2));
        let key = steps.moving(from, to, 0).await;
        let held = steps.new.lock(&key).await.unwrap();
        let mut waiting = Vec::new();
        for _ in 0..5 {
            let locking = steps.both.lock(&key).into_future();
            waiting.push(tokio::spawn(async { locking.await.map(drop) }));
            sleep(secs(2)).await;
        }
        waiting.retain(|waiting| !waiting.is_finished());
        assert!((1..=2).contains(&waiting.len()), "{}", waiting.len());
        drop(held);
        for waiting in waiting {
            assert_eq!(waiting.await.unwrap(), Ok(()));
        }
    }
}

/// The handle of an execution shows what both groups have.
#[tokio::test(start_paused = true)]
async fn execution_is_valid_as_long_as_it_is_in_both_groups() {
    for lost in 0..2 {
        let (all, steps, key) = growing().await;
        let nodes = all[lost].clone();
        let once = steps.both.once(&key).run(move |execution| async move {
            (0..3).for_each(|node| nodes.wipe(node));
            let began = Instant::now();
            let reason = execution.lost().await;
            assert!(!execution.is_valid());
            assert!(began.elapsed() < secs(4), "{:?}", began.elapsed());
            assert_eq!(reason, LostReason::Gone);
            Err::<u32, _>(())
        });
        assert_eq!(once.await, Err(OnceError::Work(())));
    }
}

/// The first group is to be given the token of the second, which has a higher fence.
#[tokio::test(start_paused = true)]
async fn token_that_cannot_be_raised_names_the_nodes_that_voted_and_those_that_failed() {
    let (groups, redlock, keys) = with_keys::<2>().await;
    Foreign::raise_fences(&keys[1], &groups[1], 8_000_000_000_000_000);
    (1..3).for_each(|node| groups[0].set_for(node, OpKind::Confirm, Gate::Failing));
    let refused = redlock.lock_all(&keys).await;
    match refused.unwrap_err() {
        LockError::Unavailable {
            reached: 1,
            voted,
            nodes,
            ..
        } => {
            assert_eq!((voted.len(), nodes.len()), (1, 2));
            assert!(nodes.iter().all(|node| *node.node() != *voted[0]));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(groups[0].locks(), [0; 3]);
}

#[tokio::test(start_paused = true)]
async fn extend_extends_the_keys_of_every_group() {
    let groups = groups::<2>();
    let redlock = builder(&groups).max_ttl(secs(60)).build().unwrap();
    let keys = keys_of(&redlock, 2).await;
    let guard = redlock.lock_all(&keys).await.unwrap();
    guard.extend(secs(40)).await.unwrap();
    assert!(guard.valid_for() > secs(39), "{:?}", guard.valid_for());
    for nodes in &groups {
        set_all(nodes, OpKind::Confirm, Gate::Failing);
    }
    sleep(secs(35)).await;
    assert!(guard.is_valid());
    for nodes in &groups {
        assert_eq!(nodes.locks(), [1; 3]);
    }
}
