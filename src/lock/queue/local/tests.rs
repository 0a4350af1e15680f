//! Tests of the queues of this process.

use super::*;
use crate::lock::state::tests::granted;
use crate::node::NodeFailure;
use crate::protocol::Namespace;

#[cfg(shuttle)]
mod schedules;

fn keys(names: &[&str]) -> LockKeys {
    names.iter().map(|name| LockKey::from(*name)).collect()
}

/// Waits for the permits of all keys.
async fn acquire(queue: &Arc<LocalQueue>, keys: &LockKeys) -> Permit {
    let permit = queue.enter(keys, Access::Exclusive);
    permit.acquire_rest().await;
    permit
}

/// Returns a caller that waits for them.
fn waiting<'a>(
    queue: &'a Arc<LocalQueue>,
    keys: &'a LockKeys,
) -> tokio_test::task::Spawn<impl Future<Output = Permit> + 'a> {
    let mut waiting = tokio_test::task::spawn(acquire(queue, keys));
    tokio_test::assert_pending!(waiting.poll());
    waiting
}

#[tokio::test]
async fn acquire_admits_waiters_in_order() {
    let queue = Arc::new(LocalQueue::default());
    let first = acquire(&queue, &keys(&["k"])).await;
    let (one, other) = (keys(&["k"]), keys(&["k"]));
    let (mut second, mut third) = (waiting(&queue, &one), waiting(&queue, &other));
    drop(first);
    tokio_test::assert_pending!(third.poll());
    drop(tokio_test::assert_ready!(second.poll()));
    tokio_test::assert_ready!(third.poll());
}

#[tokio::test]
async fn a_dropped_waiter_leaves_the_queue_and_removes_the_slot() {
    let queue = Arc::new(LocalQueue::default());
    let first = acquire(&queue, &keys(&["k"])).await;
    let wanted = keys(&["k"]);
    let second = waiting(&queue, &wanted);
    drop(first);
    // The permit was assigned to the waiter, which was never polled again.
    drop(second);
    assert!(queue.is_empty());
    assert!(queue.try_acquire(&keys(&["k"]), Access::Exclusive).is_ok());
}

#[test]
fn waiters_dropped_at_the_same_time_remove_the_slot() {
    let queue = Arc::new(LocalQueue::default());
    for _ in 0..2_000 {
        let places = [(), ()].map(|()| queue.enter(&keys(&["k"]), Access::Exclusive));
        std::thread::scope(|scope| {
            for place in places {
                scope.spawn(move || drop(place));
            }
        });
        assert!(queue.is_empty());
    }
}

#[tokio::test]
async fn try_acquire_takes_all_keys_of_a_set_or_none() {
    let queue = Arc::new(LocalQueue::default());
    let y = queue.try_acquire(&keys(&["y"]), Access::Exclusive).unwrap();
    assert!(
        queue
            .try_acquire(&keys(&["x", "y"]), Access::Exclusive)
            .is_err()
    );
    assert!(queue.try_acquire(&keys(&["x"]), Access::Exclusive).is_ok());
    drop(y);
    assert!(queue.is_empty());
}

#[tokio::test]
async fn is_held_by_own_task_in_the_task_of_a_holder_that_is_not_about_to_release() {
    let queue = Arc::new(LocalQueue::default());
    let permit = queue.try_acquire(&keys(&["k"]), Access::Exclusive).unwrap();
    let is_own = |queue: &Arc<LocalQueue>| {
        let busy = queue.try_acquire(&keys(&["k"]), Access::Exclusive);
        busy.unwrap_err().is_held_by_own_task()
    };
    let task = tokio::spawn(async move {
        let mut found = Vec::new();
        for is_ending in [false, true] {
            let (holder, share) = granted("k");
            let _share = Some(share).filter(|_| !is_ending);
            permit.set_holder(&holder, task::try_id());
            found.push(is_own(&queue));
            let queue = Arc::clone(&queue);
            let other = tokio::spawn(async move { is_own(&queue) });
            found.push(other.await.unwrap());
        }
        found
    });
    assert_eq!(task.await.unwrap(), [true, false, false, false]);
}

#[tokio::test]
async fn set_that_waits_keeps_no_permit_until_it_was_too_late_for_some_rounds() {
    let queue = Arc::new(LocalQueue::default());
    let both = keys(&["x", "y"]);
    let one = |name| queue.try_acquire(&keys(&[name]), Access::Exclusive);
    let mut held = one("y").unwrap();
    let mut waiting = tokio_test::task::spawn(acquire(&queue, &both));
    for round in 1..ROUNDS {
        let (busy, free) = [("x", "y"), ("y", "x")][usize::from(round % 2 == 1)];
        tokio_test::assert_pending!(waiting.poll(), "{round}");
        let next = one(free).unwrap();
        assert!(one(busy).is_err());
        drop(std::mem::replace(&mut held, next));
        // The set has the key it waited for, and finds the other one busy.
        tokio_test::assert_pending!(waiting.poll(), "{round}");
    }
    // It waits for `y`, and now keeps `x`, which is free.
    assert!(one("x").is_err());
    drop(held);
    drop(tokio_test::assert_ready!(waiting.poll()));
    assert!(queue.is_empty());
}

#[tokio::test]
async fn publishes_is_false_for_three_local_waiters_in_a_row() {
    let queue = Arc::new(LocalQueue::default());
    let permit = acquire(&queue, &keys(&["k"])).await;
    let wanted = keys(&["k"]);
    let waiting = waiting(&queue, &wanted);
    // No other process is known.
    assert!(permit.publishes());
    permit.places[0].set_subscribers(1);
    let kept = || (permit.publishes(), permit.places[0].notified());
    // This process and the other one know of a release that was published, and of no other.
    let [kept_here, published] = [(false, None), (true, Some(2))];
    let once = [kept_here, kept_here, kept_here, published];
    assert_eq!([(); 4].map(|()| kept()), once);
    assert_eq!([(); 4].map(|()| kept()), once);
    // A refused caller does not count as waiting.
    drop(waiting);
    assert!(queue.try_acquire(&wanted, Access::Exclusive).is_err());
    assert!(permit.publishes());
}

#[tokio::test]
async fn failure_is_that_of_callers_that_want_the_same_and_hear_of_it_in_time() {
    let queue = Arc::new(LocalQueue::default());
    // Closed stands for all errors that are not about the request.
    let [contended, closed] = [LockError::contended(None, None), LockError::Closed];
    let [mine, others] = [1, 2].map(OnceSpec::of_request);
    let (one, both) = (keys(&["k"]), keys(&["j", "k"]));
    let permit = acquire(&queue, &both).await;
    let place = &permit.places[1];
    let _waiting = place.waiter();
    for (error, once, theirs, is_told) in [
        (&contended, None, None, true),
        (&contended, None, Some(mine), false),
        (&contended, Some(mine), None, false),
        (&contended, Some(mine), Some(mine), true),
        (&contended, Some(mine), Some(others), false),
        (&closed, Some(mine), Some(others), true),
    ] {
        let before = place.failures();
        permit.set_failed(once, error);
        let told = |before, keys, access| place.failed_since(before, keys, access, theirs);
        let case = (error, once, theirs);
        let expected = is_told.then(|| (1, error.clone()));
        assert_eq!(told(before, &both, Access::Exclusive), expected, "{case:?}");
        assert_eq!(told(before, &one, Access::Exclusive), None, "{case:?}");
        assert_eq!(told(before, &both, Access::Shared), None, "{case:?}");
        let late = told(place.failures(), &both, Access::Exclusive);
        assert_eq!(late, None, "{case:?}");
    }
    // Nodes that do not answer are silent for all.
    let node: Arc<str> = "n".into();
    let refused = NodeFailure::refused(&node, "no");
    let silent = NodeFailure::Unanswered { node };
    for (nodes, is_told) in [(vec![silent.clone()], true), (vec![silent, refused], false)] {
        let error = LockError::without_quorum(2, Vec::new(), nodes);
        let before = place.failures();
        permit.set_failed(None, &error);
        let told = place.failed_since(before, &one, Access::Shared, Some(mine));
        assert_eq!(told, is_told.then_some((1, error)));
    }
}

/// Otherwise sets would wait for each other in a circle, while no caller holds their keys.
#[tokio::test]
async fn set_that_lost_an_earlier_key_keeps_no_later_one_while_it_waits() {
    let queue = Arc::new(LocalQueue::default());
    let [x, y] = ["x", "y"].map(|name| keys(&[name]));
    let held = acquire(&queue, &y).await;
    let set = queue.enter(&keys(&["x", "y"]), Access::Exclusive);
    // It was too late so often that it keeps its keys.
    let mut rounds = ROUNDS;
    assert_eq!(set.next_busy(&mut rounds), Some(1));
    assert!(set.places[0].remove_idle(Duration::ZERO, true));
    let earlier = acquire(&queue, &x).await;
    drop(held);
    // What it waited for.
    let later = &set.places[1];
    set.admit(later, later.permits.try_acquire_many(PERMITS).ok());
    assert!(later.has(set.caller));
    assert_eq!(set.next_busy(&mut rounds), Some(0));
    assert!(queue.try_acquire(&y, Access::Exclusive).is_ok());
    drop(earlier);
    assert_eq!(set.next_busy(&mut rounds), None);
}

#[tokio::test]
async fn key_that_another_caller_holds_blocks_a_set_and_one_to_share_does_not() {
    let queue = Arc::new(LocalQueue::default());
    let both = keys(&["x", "y"]);
    let hold = |name, access| {
        let permit = queue.try_acquire(&keys(&[name]), access).unwrap();
        let (holder, share) = granted(name);
        permit.set_holder(&holder, None);
        (permit, share)
    };
    let blocked = |access| {
        let state = queue.enter(&both, access).blocked();
        state.map(|state| state.occupancy)
    };
    let asking = queue.try_acquire(&keys(&["x"]), Access::Exclusive).unwrap();
    let reader = hold("y", Access::Shared);
    assert_eq!(blocked(Access::Exclusive), Some(Occupancy::Held));
    // It waits for `x` alone, which may turn out to be free.
    assert_eq!(blocked(Access::Shared), None);
    drop((asking, reader));
    let writer = hold("y", Access::Exclusive);
    assert_eq!(blocked(Access::Shared), Some(Occupancy::Held));
    drop(writer);
    // Nor does a key block it of which a slot is free.
    let first = hold("y", Access::Slot(2));
    assert_eq!(blocked(Access::Slot(2)), None);
    let second = hold("y", Access::Slot(2));
    assert_eq!(blocked(Access::Slot(2)), Some(Occupancy::Held));
    drop((first, second));
}

#[tokio::test]
async fn subscription_ends_with_the_permit_unless_callers_wait() {
    let queue = Arc::new(LocalQueue::default());
    let wanted = keys(&["k"]);
    let (holder, _share) = granted("k");
    let names = Namespace::default().names(&wanted, |_| [0; 32]).unwrap();
    let permit = queue.try_acquire(&wanted, Access::Exclusive).unwrap();
    let place = &permit.places[0];
    // One process listens. As long as that is this one, there is no other.
    place.set_subscribers(1);
    drop(permit.subscribe(&holder.spec.cluster, &names));
    let waiting = place.waiter();
    permit.give_back();
    assert_eq!(place.notified(), None);
    drop(waiting);
    permit.give_back();
    assert_eq!(place.notified(), Some(2));
}

#[tokio::test(start_paused = true)]
async fn caller_that_does_not_react_loses_its_permits_to_the_next_and_gives_none_back() {
    let queue = Arc::new(LocalQueue::default());
    let wanted = keys(&["k"]);
    let allowance = Duration::from_millis(100);
    for asks in [true, false] {
        let idle = queue.try_acquire(&wanted, Access::Exclusive).unwrap();
        let place = Arc::clone(&idle.places[0]);
        if !asks {
            idle.set_refused(Instant::now(), None, &None);
            assert!(!place.remove_idle(allowance, true));
            tokio::time::advance(allowance).await;
        }
        assert!(!(asks && place.remove_idle(allowance, false)));
        let changes = place.state(Access::Exclusive).changes;
        assert!(place.remove_idle(allowance, asks));
        assert_ne!(place.state(Access::Exclusive).changes, changes);
        let next = queue.try_acquire(&wanted, Access::Exclusive).unwrap();
        drop(idle);
        assert!(queue.try_acquire(&wanted, Access::Exclusive).is_err());
        drop(next);
        assert!(queue.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn slot_is_free_when_the_first_of_its_holders_ends_and_a_key_when_the_last_does() {
    let queue = Arc::new(LocalQueue::default());
    let [soon, late] = [1, 9].map(Duration::from_secs);
    for (access, expected) in [(Access::Slot(2), soon), (Access::Shared, late)] {
        let held = [late, soon].map(|left| {
            let permit = queue.try_acquire(&keys(&["k"]), access).unwrap();
            permit.set_refused(Instant::now(), Some(left), &None);
            permit
        });
        let state = held[0].places[0].state(access);
        assert_eq!(state.occupancy, Occupancy::Held);
        assert_eq!(state.retry_after, Some(expected), "{access:?}");
    }
}

#[tokio::test]
async fn so_many_callers_as_there_are_slots_are_admitted_each_with_a_number_of_its_own() {
    let queue = Arc::new(LocalQueue::default());
    for count in 1..=64 {
        let access = Access::Slot(count);
        let key = keys(&["k"]);
        let permits: Vec<Permit> = (0..count)
            .map(|_| queue.try_acquire(&key, access).unwrap())
            .collect();
        assert!(queue.try_acquire(&key, access).is_err(), "{count}");
        let all = u64::MAX >> (64 - count);
        let number = |permit: &Permit| permit.take_number(all, u64::try_from(7 * count).unwrap());
        let mut numbers: Vec<usize> = permits.iter().filter_map(number).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..count).collect::<Vec<_>>());
        // Each has one, and none is left.
        assert_eq!(permits[0].take_number(all, 0), None);
        drop(permits);
        assert!(queue.is_empty());
    }
}

#[test]
fn a_number_is_given_back_with_the_permit_and_for_another_one() {
    let queue = Arc::new(LocalQueue::default());
    let key = keys(&["k"]);
    let first = queue.try_acquire(&key, Access::Slot(2)).unwrap();
    let second = queue.try_acquire(&key, Access::Slot(2)).unwrap();
    assert_eq!(first.take_number(0b01, 0), Some(0));
    assert_eq!(second.take_number(0b01, 0), None);
    assert_eq!(first.take_number(0b10, 0), Some(1));
    assert_eq!(second.take_number(0b11, 5), Some(0));
    drop(first);
    assert_eq!(second.take_number(0b10, 0), Some(1));
}

/// Enters and leaves places of new keys, from 2,000 on, until the map is full.
fn places_until_full(queue: &Arc<LocalQueue>) -> Vec<Arc<Place>> {
    *queue.places.lock() = HashMap::with_capacity(3);
    let enter = |key: u32| {
        let permit = queue.enter(&LockKey::from(key).into(), Access::Exclusive);
        Arc::clone(&permit.places[0])
    };
    let capacity = queue.places.lock().capacity();
    (2_000..).map(enter).take(capacity).collect()
}

/// They are kept for the next callers, and not for good.
#[test]
fn places_without_callers_are_few_and_tell_the_next_caller_nothing() {
    let queue = Arc::new(LocalQueue::default());
    let enter = |key: u32| queue.enter(&LockKey::from(key).into(), Access::Exclusive);
    let held: Vec<Permit> = (0..10).map(enter).collect();
    for key in 10..1_000 {
        drop(enter(key));
    }
    assert!(queue.places.lock().len() < 100);
    // Where the map is full, the place is another one.
    for key in (0..1).chain(1_000..1_010) {
        let place = Arc::clone(&enter(key).places[0]);
        place.set_subscribers(2);
        // With this process.
        let remembered = (key == 0).then_some(3);
        assert_eq!(enter(key).notified(), remembered);
    }
    assert!(Arc::ptr_eq(&held[0].places[0], &enter(0).places[0]));
    drop(held);
    // Keys that fill the map, in turn, keep their places.
    let full = places_until_full(&queue);
    for (key, place) in (2_000..).zip(&full) {
        assert!(Arc::ptr_eq(place, &enter(key).places[0]));
    }
}
