//! Locks at rest: until something is due, a lock that is held needs no task.

use support::{ms, real_runtime, secs};
use tokio::runtime::Handle;
use tokio::time::sleep;
use tower_redlock::test_util::OpKind;
use tower_redlock::{LockGuard, Redlock, ReleaseError};

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

/// Not until its next look, which may be the end of a long lock.
#[tokio::test(start_paused = true)]
async fn task_that_wakes_locks_ends_with_their_service() {
    let redlock = Redlock::in_memory(3);
    drop(lock(&redlock, 1).await);
    sleep(ms(10)).await;
    assert_eq!(tasks(), 1);
    drop(redlock);
    sleep(ms(10)).await;
    assert_eq!(Handle::current().metrics().num_alive_tasks(), 0);
}

/// The task is run in the home, which releases at once, and not by who drops or releases the guard.
#[test]
fn lock_at_rest_is_released_in_its_home_by_holders_elsewhere() {
    let (here, elsewhere) = (real_runtime(), real_runtime());
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
