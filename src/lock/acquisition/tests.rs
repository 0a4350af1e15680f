//! Tests of locks whose keys belong to several groups.

use tokio::join;
use tokio::task::yield_now;

use super::*;
use crate::lock::NodeGroup;
use crate::lock::redlock::Redlock;
use crate::protocol::LockKey;

/// Returns a lock service with two groups, and a key of each, in the order in which they are locked.
fn two_groups() -> (Redlock, [LockKey; 2]) {
    let group = |name| NodeGroup::new().embedded(1).name(name);
    let builder = Redlock::builder().node_group(group("a"));
    let redlock = builder.node_group(group("b")).build().unwrap();
    let key_of = |group: &str| {
        let mut keys = (0_u64..).map(LockKey::from);
        let layout = &redlock.core().layout;
        keys.find(|key| *layout.group_of(key).name == *group)
    };
    let keys = ["a", "b"].map(|group| key_of(group).unwrap());
    (redlock, keys)
}

/// Acquires keys of both groups. Of several slots, takes one of these.
async fn acquire(
    request: &LockRequest,
    slots: u64,
    wait: Duration,
) -> Result<LockGuard, StageError> {
    let stages = request.core.layout.by_group(&request.keys);
    let span = LockSpan::new(None, &stages[0].group.cluster, &request.keys);
    let deadline = Instant::now() + wait;
    request.lock_stages(&stages, deadline, slots, &span).await
}

#[tokio::test(start_paused = true)]
async fn stage_that_is_refused_leaves_the_one_before_free() {
    let (redlock, [first, second]) = two_groups();
    let _other = redlock.lock(second.clone()).await.unwrap();
    let request = redlock.lock_all([first.clone(), second]);
    let acquired = acquire(&request, u64::MAX, Duration::ZERO).await;
    let Err(StageError::Failed(LockError::Contended { .. })) = acquired else {
        panic!("not refused");
    };
    drop(redlock.try_lock(first).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn lease_that_is_lost_while_another_is_waited_for_begins_all_again() {
    let (redlock, [first, second]) = two_groups();
    let _other = redlock.lock(second.clone()).await.unwrap();
    let request = redlock.lock_all([first.clone(), second]);
    let queue = &redlock.core().layout.group_of(&first).queue;
    let lose_the_first = async {
        loop {
            if let [lease] = &queue.leases_of(&first)[..] {
                return lease.revoke();
            }
            yield_now().await;
        }
    };
    let began = Instant::now();
    let acquiring = acquire(&request, u64::MAX, Duration::from_secs(60));
    let (acquired, ()) = join!(acquiring, lose_the_first);
    let Err(StageError::Again(LockError::Contended { .. })) = acquired else {
        panic!("not given up");
    };
    assert!(began.elapsed() < Duration::from_secs(1));
    drop(redlock.try_lock(first).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn slot_that_is_taken_in_a_later_group_is_named() {
    let (redlock, [first, second]) = two_groups();
    let other = redlock.lock(second.clone()).slots(2).await.unwrap();
    let taken = other.slot().unwrap();
    let request = redlock.lock_all([first, second]).slots(2);
    let acquired = acquire(&request, 1 << taken, Duration::ZERO).await;
    let Err(StageError::SlotTaken(slot, LockError::Contended { .. })) = acquired else {
        panic!("not refused");
    };
    assert_eq!(slot, taken);
    // The whole request goes on to the other slot.
    assert_eq!(request.await.unwrap().slot(), Some(1 - taken));
}
