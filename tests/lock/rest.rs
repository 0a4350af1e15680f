//! Locks at rest: until something is due, a lock that is held needs no task.

use std::pin::pin;

use support::{ms, secs, set_all};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::time::{sleep, timeout};
use tower_redlock::test_util::{Gate, OpKind};
use tower_redlock::{LockGuard, LostReason, Redlock, ReleaseError, Released};

use crate::common::process_with;

/// The tasks of the current runtime, without that of the home.
fn tasks() -> usize {
    Handle::current().metrics().num_alive_tasks() - 1
}

async fn lock(redlock: &Redlock, key: u64) -> LockGuard {
    redlock.try_lock(key).await.expect("the lock is free")
}

#[tokio::test(start_paused = true)]
async fn locks_have_tasks_from_their_first_renewal_on() {
    let (nodes, redlock) = process_with(|builder| builder.ttl(secs(9)));
    let mut guards = Vec::new();
    for key in 0..10 {
        guards.push(lock(&redlock, key).await);
        sleep(ms(100)).await;
    }
    // Of the last one, so that the others are not woken for it.
    let soon = redlock.try_lock(99).ttl(secs(3)).await.unwrap();
    assert_eq!(tasks(), 1, "one wakes them all");
    sleep(ms(1_100)).await;
    assert_eq!(tasks(), 1 + 1, "its renewal is due after a second");
    sleep(ms(950)).await;
    assert_eq!(tasks(), 1 + 2);
    sleep(ms(950)).await;
    assert_eq!(tasks(), 11, "none is left to wake");
    assert_eq!(nodes.sent(0, OpKind::Confirm), 10 + 2);
    assert!(
        guards
            .iter()
            .all(|guard| guard.valid_for() > secs(8) - ms(100))
    );
    drop((guards, soon));
    sleep(ms(10)).await;
    assert_eq!(nodes.locks(), [0, 0, 0]);
    assert_eq!(tasks(), 0);
}

/// The caller polls the release itself, for as long as it waits.
#[tokio::test(start_paused = true)]
async fn release_goes_on_when_its_caller_has_its_outcome_or_goes_away() {
    for waits in [ms(0), ms(5), ms(20)] {
        let (nodes, redlock) = process_with(|builder| builder);
        let guard = lock(&redlock, 1).await;
        set_all(&nodes, OpKind::Release, Gate::Slow(ms(10)));
        nodes.set_for(0, OpKind::Release, Gate::Slow(ms(30)));
        let released = timeout(waits, guard.release()).await;
        assert_eq!(
            released.ok(),
            (waits > ms(10)).then_some(Ok(Released::Freed))
        );
        sleep(ms(40)).await;
        assert_eq!(nodes.locks(), [0, 0, 0], "{waits:?}");
        let drained = redlock.drain(secs(1)).await;
        assert!(drained.is_clean() && drained.lagging_nodes.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn release_of_one_share_of_a_lock_at_rest_leaves_it_to_the_other() {
    let (nodes, redlock) = process_with(|builder| builder.ttl(secs(9)));
    let guard = lock(&redlock, 1).await;
    let other = guard.handle().upgrade().unwrap();
    let released = timeout(secs(1), guard.release()).await;
    assert_eq!(released, Ok(Ok(Released::Shared)));
    sleep(secs(20)).await;
    assert!(other.is_valid() && nodes.locks() == [1, 1, 1]);
    assert_eq!(other.release().await, Ok(Released::Freed));
}

#[tokio::test(start_paused = true)]
async fn panic_in_a_release_is_the_loss_of_the_lock() {
    let (nodes, redlock) = process_with(|builder| builder);
    let guard = lock(&redlock, 1).await;
    nodes.set_for(0, OpKind::Release, Gate::Panic);
    let lost = ReleaseError::Lost(LostReason::Abandoned);
    assert_eq!(guard.release().await, Err(lost));
    nodes.set(0, Gate::Ready);
    assert!(redlock.try_lock(1).wait(secs(20)).await.is_ok());
}

fn runtime() -> Runtime {
    let runtime = Builder::new_current_thread().enable_time().build();
    runtime.expect("a runtime can be started")
}

/// With its home, as a lock whose task is running.
#[test]
fn lock_at_rest_is_lost_with_the_runtime_of_its_home() {
    let (here, elsewhere) = (runtime(), runtime());
    let redlock = here.block_on(async { Redlock::in_memory(3) });
    let guard = here.block_on(lock(&redlock, 1));
    let mut lost = pin!(guard.lost());
    elsewhere.block_on(async {
        assert!(timeout(ms(20), lost.as_mut()).await.is_err());
        here.shutdown_background();
        let reason = timeout(secs(1), lost).await;
        assert_eq!(reason, Ok(LostReason::Abandoned));
    });
}

/// The task is run in the home, which releases at once, and not by who drops or releases the guard.
#[test]
fn lock_at_rest_is_released_in_its_home_by_holders_elsewhere() {
    let (here, elsewhere) = (runtime(), runtime());
    let redlock = here.block_on(async { Redlock::in_memory(3) });
    for is_awaited in [false, true] {
        let guard = here.block_on(lock(&redlock, 1));
        if is_awaited {
            // The home rests.
            let released = elsewhere.block_on(guard.release());
            assert!(matches!(released, Err(ReleaseError::Unavailable { .. })));
        } else {
            drop(guard);
        }
        drop(here.block_on(lock(&redlock, 1)));
    }
}
