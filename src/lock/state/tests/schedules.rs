//! Threads that share a lock, give their shares up and send commands, while its task ends the lease.

use shuttle::future::block_on;
use shuttle::thread::{JoinHandle, spawn, yield_now};

use super::*;
use crate::node::sync::atomic::AtomicBool;
use crate::node::sync::tests::{in_many_orders, join};

fn extend() -> Input {
    let (ttl, token) = (None, None);
    Input::Extend { ttl, token }
}

/// What the task does: waits until the last share is gone, and carries out the commands before and then. Sets `ended`, and
/// closes the lease.
fn task(state: &Arc<LockState>, ended: &Arc<AtomicBool>) -> JoinHandle<()> {
    let (state, ended) = (Arc::clone(state), Arc::clone(ended));
    spawn(move || {
        loop {
            let is_shared = state.is_shared();
            while let Some(command) = state.try_recv() {
                command.done.send(Ok(None)).unwrap_or_default();
            }
            if !is_shared {
                break;
            }
            block_on(state.notified());
        }
        ended.store(true, Ordering::SeqCst);
        assert!(!state.share(), "a share after the last");
        state.lose(LostReason::Released);
        state.close(Some(Ok(())));
    })
}

/// Invariant: the last share that is dropped wakes the task, and no share can be taken from then on.
#[test]
fn zero_shares_is_final_and_wakes_the_task() {
    in_many_orders(|| {
        let (state, share) = granted("k");
        let ended = Arc::new(AtomicBool::new(false));
        let task = task(&state, &ended);
        let handles = [(); 2].map(|()| {
            let (state, ended) = (Arc::clone(&state), Arc::clone(&ended));
            spawn(move || {
                if state.share() {
                    yield_now();
                    assert!(!ended.load(Ordering::SeqCst), "released under a holder");
                    state.leave();
                }
            })
        });
        drop(share);
        join(handles);
        join([task]);
    });
}

/// Invariant: the task receives the last command of a holder that drops its share right after it. A command without a share
/// ends too, whether or not the task is still there.
#[test]
fn each_command_has_an_outcome() {
    in_many_orders(|| {
        let (state, share) = granted("k");
        let task = task(&state, &Arc::default());
        let holder = spawn(move || {
            let outcome = share.lease().command(extend());
            drop(share);
            block_on(outcome).expect("the share was there");
        });
        let late = spawn(move || drop(block_on(state.command(extend()))));
        join([holder, late, task]);
    });
}

/// Invariant: who waits for the release learns its outcome, and who waits for the loss its reason. The lease is not closed
/// before they are stored.
#[test]
fn the_outcome_of_the_release_is_there_when_the_lease_is_closed() {
    in_many_orders(|| {
        let (state, share) = granted("k");
        let task = task(&state, &Arc::default());
        let watching = {
            let state = Arc::clone(&state);
            spawn(move || assert_eq!(block_on(state.lost()), LostReason::Released))
        };
        drop(share);
        assert!(!state.is_shared());
        let outcome = block_on(state.released());
        assert!(outcome.is_ok(), "{outcome:?}");
        join([watching, task]);
    });
}

/// Invariant: a waiter that looks for a loss, and sleeps, hears of the next, also if another caller has the lock revoked.
#[test]
fn a_loss_is_heard_while_the_task_goes_on() {
    in_many_orders(|| {
        for reason in [LostReason::Gone, LostReason::Revoked] {
            let (state, _share) = granted("k");
            let losing = {
                let state = Arc::clone(&state);
                spawn(move || {
                    if reason == LostReason::Revoked {
                        state.revoke();
                    } else {
                        state.lose(reason);
                    }
                })
            };
            assert_eq!(block_on(state.lost()), reason);
            join([losing]);
        }
    });
}

/// Invariant: a task that dies without an outcome leaves none of those that wait behind.
#[test]
fn a_task_that_dies_ends_all_waits() {
    in_many_orders(|| {
        let (state, share) = granted("k");
        let dying = Arc::clone(&state);
        let task = spawn(move || dying.close(None));
        let commanding = spawn(move || block_on(share.lease().command(extend())));
        let watching = {
            let state = Arc::clone(&state);
            spawn(move || block_on(state.lost()))
        };
        let outcome = block_on(state.released());
        let died = LostReason::Abandoned;
        assert!(matches!(outcome, Err(ReleaseError::Lost(reason)) if reason == died));
        assert_eq!(watching.join().unwrap(), died);
        let outcome = commanding.join().unwrap();
        assert!(matches!(outcome, Err(ExtendError::Lost(reason)) if reason == died));
        join([task]);
    });
}
