//! Renewal, `max_hold` and `lost`, on a paused clock.

use std::pin::pin;
use std::sync::mpsc;
use std::thread;

use support::{ms, paused_runtime, real_runtime, secs};
use tokio::time::{Instant, sleep, timeout};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{ExtendError, LostReason, Redlock, ReleaseError, Released};

use crate::common::{builder, end_of, is_contended, process_with};

#[tokio::test(start_paused = true)]
async fn renewal_keeps_the_lock_beyond_its_ttl() {
    let nodes = ScriptedNodes::new(3);
    let here = builder(&nodes).ttl(secs(1)).build().unwrap();
    let there = builder(&nodes).build().unwrap();
    let guard = here.try_lock("k").await.unwrap();
    let began = Instant::now();
    while began.elapsed() < secs(10) {
        sleep(ms(50)).await;
        assert!(guard.valid_for() >= ms(600), "{:?}", began.elapsed());
        assert!(is_contended(&there.try_lock("k").await));
    }
    // Every third of the ttl, not more.
    let renewals = nodes.sent(0, OpKind::Confirm);
    assert!((29..=31).contains(&renewals), "{renewals}");
    assert_eq!(guard.release().await, Ok(Released::Freed));
    assert!(there.try_lock("k").await.is_ok());
}

/// And a majority that answers again before the validity ends saves the lock.
#[tokio::test(start_paused = true)]
async fn renewal_goes_on_without_a_minority_of_nodes() {
    for gate in [Gate::Never, Gate::Down, Gate::Failing, Gate::Mute] {
        let (nodes, redlock) = process_with(|builder| builder.ttl(secs(1)));
        let guard = redlock.try_lock("k").await.unwrap();
        nodes.set(0, gate);
        for _ in 0..100 {
            sleep(ms(100)).await;
            assert!(guard.valid_for() >= ms(500), "{gate:?}");
        }
        nodes.set(2, gate);
        sleep(ms(500)).await;
        nodes.set(2, Gate::Ready);
        for _ in 0..50 {
            sleep(ms(100)).await;
            assert!(guard.is_valid(), "{gate:?}");
        }
    }
}

/// At that of the request, or else at that of the builder.
#[tokio::test(start_paused = true)]
async fn renewal_stops_at_max_hold() {
    for hold in [1_000, 1_001, 2_345, 3_000, 3_333, 5_000, 9_999] {
        for of_builder in [ms(hold), secs(4)] {
            let (nodes, redlock) =
                process_with(|builder| builder.ttl(secs(1)).max_hold(of_builder));
            let began = Instant::now();
            let mut lock = redlock.try_lock("k");
            if of_builder != ms(hold) {
                lock = lock.max_hold(ms(hold));
            }
            let guard = lock.await.unwrap();
            while guard.is_valid() {
                assert!(began.elapsed() < secs(20), "{hold}: never ends");
                sleep(ms(1)).await;
            }
            let over = began.elapsed();
            assert_eq!(guard.lost().await, LostReason::MaxHold);
            assert!(over >= ms(hold), "{hold}: {over:?}");
            assert!(over <= ms(hold + 6), "{hold}: {over:?}");
            for _ in 0..20 {
                sleep(ms(100)).await;
                assert!(!guard.is_valid());
            }
            // The nodes forget it as well, though the guard is still here.
            assert_eq!(nodes.locks(), [0, 0, 0]);
            let released = guard.release().await;
            assert_eq!(released, Err(ReleaseError::Lost(LostReason::MaxHold)));
        }
    }
}

// Rules: lock.loss
#[tokio::test(start_paused = true)]
async fn lost_resolves_by_the_end_of_validity_when_a_majority_fails() {
    for gate in [Gate::Never, Gate::Down, Gate::Failing, Gate::Mute] {
        // Before, amid and after renewals, which are due at 333, 666, 1000 ms.
        for dies_after in [0, 100, 332, 333, 334, 500, 666, 900, 2_000] {
            let what = format!("{gate:?} after {dies_after} ms");
            let (nodes, redlock) = process_with(|builder| builder.ttl(secs(1)));
            let guard = redlock.try_lock("k").await.unwrap();
            sleep(ms(dies_after)).await;
            nodes.set(0, gate);
            nodes.set(2, gate);
            let end = end_of(&guard);
            let mut lost = Box::pin(guard.lost());
            let fired = loop {
                if let Ok(reason) = timeout(ms(1), &mut lost).await {
                    assert_eq!(reason, LostReason::Expired, "{what}");
                    break Instant::now();
                }
                // The lock is valid until its loss is reported.
                assert!(Instant::now() < end, "{what}");
                assert_eq!(end_of(&guard), end, "{what}");
            };
            assert!(fired <= end, "{what}: {:?} late", fired - end);
            assert!(fired >= end - ms(2), "{what}: {:?} early", end - fired);
            for _ in 0..50 {
                assert!(!guard.is_valid() && guard.valid_for().is_zero(), "{what}");
                sleep(ms(50)).await;
            }
            // What is lost stays lost, also when the nodes are back.
            nodes.set(0, Gate::Ready);
            nodes.set(2, Gate::Ready);
            let refused = guard.extend(secs(1)).await;
            assert_eq!(refused, Err(ExtendError::Lost(LostReason::Expired)));
            sleep(secs(1)).await;
            assert!(!guard.is_valid(), "{what}");
            let released = guard.release().await;
            assert_eq!(released, Err(ReleaseError::Lost(LostReason::Expired)));
            assert!(redlock.try_lock("k").await.is_ok(), "{what}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn majority_that_forgot_the_lock_resolves_lost_at_the_next_renewal() {
    let (nodes, redlock) = process_with(|builder| builder.ttl(secs(3)));
    let guard = redlock.try_lock("k").await.unwrap();
    let began = Instant::now();
    nodes.wipe(0);
    nodes.wipe(2);
    assert_eq!(guard.lost().await, LostReason::Gone);
    assert_eq!(began.elapsed(), secs(1));
    assert!(!guard.is_valid());
    // The node that still has it is released at once all the same, when the guard goes.
    let released = guard.release().await;
    assert_eq!(released, Err(ReleaseError::Lost(LostReason::Gone)));
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn minority_that_forgot_the_lock_does_not_resolve_lost() {
    let (nodes, redlock) = process_with(|builder| builder.ttl(secs(1)));
    let guard = redlock.try_lock("k").await.unwrap();
    nodes.wipe(1);
    sleep(secs(5)).await;
    assert!(guard.is_valid());
    assert_eq!(nodes.locks(), [1, 0, 1], "a missing key is never set again");
}

/// With its home, although its task rests.
#[test]
fn dropped_runtime_resolves_lost() {
    let (home, elsewhere) = (real_runtime(), real_runtime());
    let redlock = Redlock::in_memory(3);
    let lock = |key: &'static str| home.block_on(redlock.try_lock(key).into_future()).unwrap();
    let (guard, _held) = (lock("k"), lock("held"));
    elsewhere.block_on(async {
        let mut lost = pin!(guard.lost());
        assert!(timeout(ms(20), lost.as_mut()).await.is_err());
        home.shutdown_background();
        assert!(!guard.is_valid());
        let reason = timeout(secs(1), lost).await;
        assert_eq!(reason, Ok(LostReason::Abandoned));
        let refused = guard.extend(secs(1)).await;
        assert_eq!(refused, Err(ExtendError::Lost(LostReason::Abandoned)));
        // The lock was not released: its holder still exists.
        assert!(redlock.try_lock("k").await.is_err());
        let released = guard.release().await;
        assert_eq!(released, Err(ReleaseError::Lost(LostReason::Abandoned)));
        // The service itself goes on in the runtime that it is used in.
        assert!(redlock.try_lock("other").await.is_ok());
        // No task releases the lock whose holder still exists, so a drain waits for no answer.
        let drained = timeout(secs(1), redlock.drain(secs(60))).await;
        assert_eq!(drained.unwrap().held, []);
    });
}

/// The holder keeps its guard, but other callers of the process need not wait for it.
#[tokio::test(start_paused = true)]
async fn lock_that_is_not_renewed_ends_with_its_first_validity_and_keeps_no_other_caller_out() {
    let (nodes, redlock) = process_with(|builder| builder.renew(false));
    let guard = redlock.try_lock("k").await.unwrap();
    let end = end_of(&guard);
    assert_eq!(guard.lost().await, LostReason::Expired);
    assert!(Instant::now() <= end && Instant::now() >= end - ms(2));
    assert_eq!(nodes.sent(0, OpKind::Confirm), 0);
    sleep(secs(1)).await;
    let next = redlock.try_lock("k").await.unwrap();
    assert!(next.is_valid() && !guard.is_valid());
    // Its late release takes nothing away from the next holder.
    let released = guard.release().await;
    assert_eq!(released, Err(ReleaseError::Lost(LostReason::Expired)));
    assert_eq!(nodes.locks(), [1, 1, 1]);
}

/// A task that is busy for nothing keeps the paused clock where it is, so that the test never ends.
#[test]
fn a_lock_that_is_lost_after_hours_leaves_its_task_at_rest() {
    let (ended, test) = mpsc::channel();
    thread::spawn(move || {
        paused_runtime().block_on(async {
            let (nodes, redlock) = process_with(|builder| builder);
            let guard = redlock.lock("k").await.unwrap();
            sleep(secs(7_200)).await;
            (0..2).for_each(|node| nodes.wipe(node));
            assert_eq!(guard.lost().await, LostReason::Gone);
            sleep(secs(1)).await;
        });
        ended.send(()).unwrap();
    });
    test.recv_timeout(secs(60)).unwrap();
}
