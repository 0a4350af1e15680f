//! Threads that wait for keys, have them, give up, and are taken for idle.

use std::future::poll_fn;
use std::task::Poll;

use shuttle::future::block_on;
use shuttle::thread::{JoinHandle, spawn};

use super::*;
use crate::node::sync::atomic::AtomicUsize;
use crate::node::sync::tests::{in_many_orders, join};

/// Waits in a new thread for the permits of some keys, and does something while it has them.
fn acquiring(
    queue: &Arc<LocalQueue>,
    names: &[&str],
    access: Access,
    act: impl FnOnce(&Permit) + Send + 'static,
) -> JoinHandle<()> {
    let (queue, keys) = (Arc::clone(queue), keys(names));
    spawn(move || {
        let permit = queue.enter(&keys, access);
        block_on(permit.acquire_rest());
        act(&permit);
    })
}

/// Invariant: one caller at a time has a key for itself, and finds the former one off the list. Each gets its turn.
#[test]
fn callers_of_a_key_have_it_one_after_the_other() {
    in_many_orders(|| {
        let (queue, inside) = (Arc::default(), Arc::new(AtomicUsize::new(0)));
        let callers = [(); 3].map(|()| {
            let (of_queue, inside) = (Arc::clone(&queue), Arc::clone(&inside));
            acquiring(&queue, &["k"], Access::Exclusive, move |permit| {
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "with another");
                let (holder, _share) = granted("k");
                permit.set_holder(&holder, None);
                let listed = of_queue.leases_of(&LockKey::from("k")).len();
                assert_eq!(listed, 1, "the former holder is listed");
                inside.fetch_sub(1, Ordering::SeqCst);
            })
        });
        join(callers);
        assert!(queue.is_empty());
    });
}

/// Invariant: a writer has the key without readers, which have it together.
#[test]
fn a_writer_has_the_key_without_readers() {
    const WRITER: usize = 100;
    in_many_orders(|| {
        let (queue, inside) = (Arc::default(), Arc::new(AtomicUsize::new(0)));
        let caller = |access, weight: usize, allowed: usize| {
            let inside = Arc::clone(&inside);
            acquiring(&queue, &["k"], access, move |_| {
                let others = inside.fetch_add(weight, Ordering::SeqCst);
                assert!(others <= allowed, "{others} beside {weight}");
                inside.fetch_sub(weight, Ordering::SeqCst);
            })
        };
        join([
            caller(Access::Shared, 1, 1),
            caller(Access::Exclusive, WRITER, 0),
            caller(Access::Shared, 1, 1),
        ]);
        assert!(queue.is_empty());
    });
}

/// Invariant: as many callers as there are slots have permits, each with a number that no other one has, and a caller
/// with a permit finds a number.
#[test]
fn callers_with_permits_of_slots_have_different_numbers() {
    in_many_orders(|| {
        let (queue, taken) = (Arc::default(), Arc::new(AtomicU64::new(0)));
        let callers = [(); 3].map(|()| {
            let taken = Arc::clone(&taken);
            acquiring(&queue, &["k"], Access::Slot(2), move |permit| {
                let number = permit.take_number(0b11, 0).expect("one is free");
                let others = taken.fetch_or(1 << number, Ordering::SeqCst);
                assert_eq!(others & 1 << number, 0, "number {number} twice");
                taken.fetch_and(!(1 << number), Ordering::SeqCst);
            })
        });
        join(callers);
        assert!(queue.is_empty());
    });
}

/// Invariant: sets of keys that overlap do not wait for each other for ever, whether they keep keys while they wait or
/// have just begun to.
#[test]
fn sets_of_keys_that_overlap_all_get_their_turn() {
    in_many_orders(|| {
        let queue = Arc::<LocalQueue>::default();
        let sets = [["a", "b"], ["b", "c"], ["a", "b"]];
        let callers = sets.map(|set| {
            let queue = Arc::clone(&queue);
            spawn(move || {
                let permit = queue.enter(&keys(&set), Access::Exclusive);
                block_on(acquire_in_the_last_round(&permit));
            })
        });
        join(callers);
        join(sets.map(|set| acquiring(&queue, &set, Access::Exclusive, |_| {})));
        assert!(queue.is_empty());
    });
}

async fn acquire_in_the_last_round(permit: &Permit) {
    let mut rounds = ROUNDS - 1;
    while let Some(busy) = permit.next_busy(&mut rounds) {
        let place = &permit.places[busy];
        let acquired = place.permits.acquire_many(PERMITS).await;
        permit.admit(place, Some(acquired.expect("is never closed")));
    }
}

/// Invariant: a caller that stops waiting, also at the moment at which it gets the permits, leaves them to the next.
#[test]
fn a_caller_that_stops_waiting_leaves_its_permits_to_the_next() {
    in_many_orders(|| {
        let queue = Arc::<LocalQueue>::default();
        let permit = queue.try_acquire(&keys(&["k"]), Access::Exclusive).unwrap();
        let impatient = {
            let queue = Arc::clone(&queue);
            spawn(move || {
                let permit = queue.enter(&keys(&["k"]), Access::Exclusive);
                let mut acquiring = Box::pin(permit.acquire_rest());
                block_on(poll_fn(|context| {
                    Poll::Ready(acquiring.as_mut().poll(context).is_ready())
                }));
            })
        };
        let patient = acquiring(&queue, &["k"], Access::Exclusive, |_| {});
        drop(permit);
        join([impatient, patient]);
        assert!(queue.is_empty());
    });
}

/// Invariant: a caller that is taken off the list because it seems idle, while it leaves by itself, gives its permits back
/// once.
#[test]
fn permits_of_a_caller_that_seems_idle_are_given_back_once() {
    in_many_orders(|| {
        let queue = Arc::<LocalQueue>::default();
        let permit = queue.try_acquire(&keys(&["k"]), Access::Exclusive).unwrap();
        let place = Arc::clone(&permit.places[0]);
        let leaving = spawn(move || drop(permit));
        let impatient = {
            let place = Arc::clone(&place);
            spawn(move || {
                place.remove_idle(Duration::ZERO, true);
            })
        };
        let next = acquiring(&queue, &["k"], Access::Exclusive, |_| {});
        join([leaving, impatient, next]);
        assert_eq!(place.permits.available_permits(), PERMITS as usize);
        assert!(queue.is_empty());
    });
}

/// Invariant: a caller that looks at the list after it has asked to be told of changes, and sleeps, is told of the next.
#[test]
fn a_waiter_hears_that_the_key_is_held() {
    in_many_orders(|| {
        let queue = Arc::<LocalQueue>::default();
        let permit = queue.try_acquire(&keys(&["k"]), Access::Exclusive).unwrap();
        let waiting = queue.enter(&keys(&["k"]), Access::Exclusive);
        let holding = spawn(move || {
            let (holder, share) = granted("k");
            permit.set_holder(&holder, None);
            (permit, share)
        });
        let place = &waiting.places[0];
        block_on(async {
            loop {
                let changed = place.changed.notified();
                if place.state(Access::Exclusive).occupancy == Occupancy::Held {
                    break;
                }
                changed.await;
            }
        });
        drop(holding.join().unwrap());
    });
}

/// Invariant: while other processes wait, at most three releases in a row are kept from them.
#[test]
fn at_most_three_releases_in_a_row_are_kept_in_the_process() {
    in_many_orders(|| {
        let (queue, kept) = (Arc::<LocalQueue>::default(), Arc::new(AtomicUsize::new(0)));
        let callers = [(); 5].map(|()| {
            let kept = Arc::clone(&kept);
            acquiring(&queue, &["k"], Access::Exclusive, move |permit| {
                permit.places[0].set_subscribers(1);
                if permit.publishes() {
                    kept.store(0, Ordering::SeqCst);
                } else {
                    assert!(kept.fetch_add(1, Ordering::SeqCst) < 3);
                }
            })
        });
        join(callers);
    });
}

/// Invariant: never more calls wait than a cap allows, of several at least one does, and each frees what it occupied, once.
#[test]
fn no_more_calls_wait_than_the_caps_allow() {
    in_many_orders(|| {
        let caps = [2, 1].map(|max| Some(WaiterCap::new(max)));
        let [inside, admitted] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
        let calls = [(); 3].map(|()| {
            let (caps, inside) = (caps.clone(), Arc::clone(&inside));
            let admitted = Arc::clone(&admitted);
            spawn(move || {
                let mut slots = Wait::new(Instant::now(), caps, None);
                if slots.occupy().is_ok() {
                    admitted.fetch_add(1, Ordering::SeqCst);
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "one too many");
                    inside.fetch_sub(1, Ordering::SeqCst);
                }
            })
        });
        join(calls);
        assert!(admitted.load(Ordering::SeqCst) > 0, "all were refused");
        let occupied = caps.map(|cap| cap.unwrap().waiting.load(Ordering::SeqCst));
        assert_eq!(occupied, [0, 0]);
    });
}
