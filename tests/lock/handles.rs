//! `LockHandle`: what a non-owning view of a lock reports, and `upgrade`.

use support::secs;
use tokio::time::sleep;
use tower_redlock::test_util::{Gate, OpKind};
use tower_redlock::{AlreadyReleased, ExtendError, LostReason, Released};

use crate::common::processes;

#[tokio::test(start_paused = true)]
async fn upgraded_handle_keeps_the_lock_until_it_is_dropped() {
    let (nodes, [redlock]) = processes();
    let guard = redlock.try_lock("k").await.unwrap();
    let (handle, lost) = (guard.handle(), guard.lost());
    assert_eq!(handle.keys(), guard.keys());
    assert_eq!(handle.fencing_token(), guard.fencing_token());
    let detached = handle.upgrade().unwrap();
    handle.extend(secs(10)).await.unwrap();
    assert_eq!(guard.release().await, Ok(Released::Shared));
    sleep(secs(30)).await;
    assert!(handle.is_valid() && detached.is_valid());
    assert_eq!(nodes.locks(), [1, 1, 1]);
    assert_eq!(detached.release().await, Ok(Released::Freed));

    // The handle itself keeps nothing.
    assert_eq!(handle.upgrade().unwrap_err(), AlreadyReleased);
    assert!(!handle.is_valid() && handle.valid_for().is_zero());
    assert_eq!(lost.await, LostReason::Released);
    assert_eq!(handle.lost().await, LostReason::Released);
    let refused = handle.extend(secs(1)).await;
    assert_eq!(refused, Err(ExtendError::Lost(LostReason::Released)));
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

/// The first node that frees it may grant it to another caller at once.
#[tokio::test(start_paused = true)]
async fn handle_is_invalid_before_the_first_node_is_asked_for_the_release() {
    let (nodes, [redlock]) = processes();
    let guard = redlock.try_lock("k").await.unwrap();
    let handle = guard.handle();
    // The task of the lock ends when it asks, and can publish nothing after that.
    nodes.set_for(0, OpKind::Release, Gate::Panic);
    drop(guard);
    assert_eq!(handle.lost().await, LostReason::Released);
    assert!(!handle.is_valid());
}
