//! Locks in time, on a paused clock: validity, renewal, loss, extension, waiting and collisions.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::{Instant, advance, sleep, timeout};
use tower_redlock::protocol::message::{Command, Op, Reply};
use tower_redlock::protocol::{KeyNames, LockKeys, Namespace, OwnerToken, Retry, validity};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    AlreadyReleased, ExtendError, LockError, LockGuard, LostReason, Redlock, RedlockBuilder,
    ReleaseError, Released,
};

use crate::support::{ms, secs};

fn builder(nodes: &ScriptedNodes) -> RedlockBuilder {
    Redlock::builder().scripted(nodes).ttl(secs(10))
}

fn end_of(guard: &LockGuard) -> Instant {
    Instant::now() + guard.valid_for()
}

/// A hash of nothing under a random key: random enough for delays.
fn random() -> u64 {
    RandomState::new().hash_one(())
}

/// The requests of some other process for one key, made by hand.
struct Foreign {
    names: Arc<[KeyNames]>,
    owner: OwnerToken,
}

impl Foreign {
    fn new(key: &str) -> Self {
        let keys = LockKeys::from_iter([key]);
        let names = Namespace::default().names(&keys, |_| [0; 32]);
        let names = names.expect("a short key");
        let mut owner = [0; 16];
        owner[..8].copy_from_slice(&random().to_be_bytes());
        Self {
            names: names.into(),
            owner: OwnerToken::from_random(owner),
        }
    }

    fn send(&self, nodes: &ScriptedNodes, node: usize, op: Op) -> Reply {
        let command = Command {
            names: Arc::clone(&self.names),
            owner: self.owner.clone(),
            op,
        };
        nodes.apply(node, &command)
    }

    fn acquire(&self, nodes: &ScriptedNodes, node: usize, ttl: Duration) -> Reply {
        let op = Op::Acquire {
            proposal: Some(1),
            ttl,
            retention: secs(3_600),
        };
        self.send(nodes, node, op)
    }
}

#[tokio::test(start_paused = true)]
async fn valid_for_is_the_ttl_minus_elapsed_time_minus_drift() {
    for delay in [0, 1, 10, 30, 49] {
        let nodes = ScriptedNodes::new(3);
        // One fast node: it is the majority's last answer that counts.
        for node in 1..3 {
            nodes.set(node, Gate::Slow(ms(delay)));
        }
        let redlock = builder(&nodes).build().unwrap();
        let began = Instant::now();
        let guard = redlock.try_lock("k").await.unwrap();
        assert_eq!(began.elapsed(), ms(delay));
        assert_eq!(guard.valid_for(), secs(10) - ms(delay) - ms(102));
        sleep(ms(1_000)).await;
        assert_eq!(guard.valid_for(), secs(9) - ms(delay) - ms(102));
        assert!(guard.is_valid());
    }
}

#[tokio::test(start_paused = true)]
async fn second_phase_reduces_the_validity() {
    let nodes = ScriptedNodes::new(3);
    for node in 0..3 {
        // Fences that differ, and are above every wall clock.
        let other = Foreign::new("k");
        let op = Op::Acquire {
            proposal: Some((1 << 52) + 7 * u64::try_from(node).unwrap()),
            ttl: secs(1),
            retention: secs(3_600),
        };
        other.send(&nodes, node, op);
        other.send(&nodes, node, Op::Release);
        nodes.set(node, Gate::Slow(ms(20)));
    }
    let guard = builder(&nodes)
        .build()
        .unwrap()
        .try_lock("k")
        .await
        .unwrap();
    assert_eq!(guard.valid_for(), secs(10) - ms(2 * 20) - ms(102));
}

#[tokio::test(start_paused = true)]
async fn acquisition_slower_than_the_ttl_is_expired_and_released() {
    let nodes = ScriptedNodes::new(3);
    let redlock = builder(&nodes).build().unwrap();
    for node in 1..3 {
        nodes.set_for(node, OpKind::Acquire, Gate::Slow(ms(45)));
    }
    let refused = redlock.try_lock("k").ttl(ms(40)).await;
    let Err(LockError::Expired { ttl, elapsed }) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!((ttl, elapsed), (ms(40), ms(45)));
    // Well before the ttl would have ended it: the slow nodes got the request just now.
    for _ in 0..5 {
        yield_now().await;
    }
    assert_eq!(nodes.locks(), [0, 0, 0]);
    let released: Vec<usize> = (0..3).map(|i| nodes.sent(i, OpKind::Release)).collect();
    assert_eq!(released, [1, 1, 1]);
}

#[tokio::test(start_paused = true)]
async fn lock_granted_within_its_last_millisecond_is_valid_for_that_millisecond() {
    let nodes = ScriptedNodes::new(3);
    let redlock = builder(&nodes).build().unwrap();
    // The validity of 40 ms is 37.6 ms.
    for (delay, granted) in [(37, true), (38, false)] {
        for node in 0..3 {
            nodes.set_for(node, OpKind::Acquire, Gate::Slow(ms(delay)));
        }
        let asked = redlock.try_lock("k").ttl(ms(40)).await;
        assert_eq!(asked.is_ok(), granted, "{asked:?}");
        drop(asked);
        sleep(ms(100)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn renewal_keeps_the_lock_beyond_its_ttl() {
    let nodes = ScriptedNodes::new(3);
    let (here, there) = (
        builder(&nodes).ttl(secs(1)).build().unwrap(),
        builder(&nodes).build().unwrap(),
    );
    let guard = here.try_lock("k").await.unwrap();
    let began = Instant::now();
    while began.elapsed() < secs(10) {
        sleep(ms(50)).await;
        assert!(guard.valid_for() >= ms(600), "{:?}", began.elapsed());
        let refused = there.try_lock("k").await;
        assert!(
            matches!(refused, Err(LockError::Contended { .. })),
            "{refused:?}"
        );
    }
    // Every third of the ttl, not more.
    let renewals = nodes.sent(0, OpKind::Confirm);
    assert!((29..=31).contains(&renewals), "{renewals}");
    assert_eq!(guard.release().await, Ok(Released::Freed));
    assert!(there.try_lock("k").await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn renewal_goes_on_without_a_minority_of_nodes() {
    for gate in [Gate::Never, Gate::Down, Gate::Failing, Gate::Mute] {
        let nodes = ScriptedNodes::new(3);
        let redlock = builder(&nodes).ttl(secs(1)).build().unwrap();
        let guard = redlock.try_lock("k").await.unwrap();
        nodes.set(0, gate);
        for _ in 0..100 {
            sleep(ms(100)).await;
            assert!(guard.valid_for() >= ms(500), "{gate:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn renew_off_ends_the_lock_with_its_first_validity() {
    let nodes = ScriptedNodes::new(3);
    let redlock = builder(&nodes).renew(false).build().unwrap();
    let guard = redlock.try_lock("k").await.unwrap();
    let end = end_of(&guard);
    assert_eq!(guard.lost().await, LostReason::Expired);
    assert!(Instant::now() <= end && Instant::now() >= end - ms(2));
    assert!(!guard.is_valid());
    assert_eq!(nodes.sent(0, OpKind::Confirm), 0);
}

#[tokio::test(start_paused = true)]
async fn renewal_stops_at_max_hold() {
    for hold in [1_000, 1_001, 2_345, 3_000, 3_333, 5_000, 9_999] {
        let nodes = ScriptedNodes::new(3);
        let redlock = builder(&nodes).ttl(secs(1)).build().unwrap();
        let began = Instant::now();
        let guard = redlock.try_lock("k").max_hold(ms(hold)).await.unwrap();
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

#[tokio::test(start_paused = true)]
async fn max_hold_of_the_request_overrides_that_of_the_builder() {
    let nodes = ScriptedNodes::new(3);
    let redlock = builder(&nodes).ttl(secs(1)).max_hold(secs(2));
    let redlock = redlock.build().unwrap();
    let began = Instant::now();
    let (short, long) = (
        redlock.try_lock("short").await.unwrap(),
        redlock.try_lock("long").max_hold(secs(4)).await.unwrap(),
    );
    assert_eq!(short.lost().await, LostReason::MaxHold);
    assert_eq!(began.elapsed().as_secs(), 2);
    assert_eq!(long.lost().await, LostReason::MaxHold);
    assert_eq!(began.elapsed().as_secs(), 4);
}

#[tokio::test(start_paused = true)]
async fn wait_and_max_hold_of_duration_max_do_not_overflow() {
    let nodes = ScriptedNodes::new(3);
    let redlock = builder(&nodes).build().unwrap();
    let guard = redlock
        .lock("k")
        .wait(Duration::MAX)
        .max_hold(Duration::MAX);
    let guard = guard.await.unwrap();
    sleep(secs(60)).await;
    assert!(guard.is_valid());
    let waiting = tokio::spawn(redlock.lock("k").wait(Duration::MAX).into_future());
    sleep(secs(60)).await;
    drop(guard);
    assert!(waiting.await.unwrap().is_ok());
}

#[tokio::test(start_paused = true)]
async fn lost_resolves_by_the_end_of_validity_when_a_majority_fails() {
    for gate in [Gate::Never, Gate::Down, Gate::Failing, Gate::Mute] {
        // Before, amid and after renewals, which are due at 333, 666, 1000 ms.
        for dies_after in [0, 100, 332, 333, 334, 500, 666, 900, 2_000] {
            let what = format!("{gate:?} after {dies_after} ms");
            let nodes = ScriptedNodes::new(3);
            let redlock = builder(&nodes).ttl(secs(1)).build().unwrap();
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
                // Whoever asks may rely on it as long as nobody said otherwise.
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
async fn majority_that_answers_before_the_validity_ends_saves_the_lock() {
    for gate in [Gate::Never, Gate::Down, Gate::Failing, Gate::Mute] {
        let nodes = ScriptedNodes::new(3);
        let redlock = builder(&nodes).ttl(secs(1)).build().unwrap();
        let guard = redlock.try_lock("k").await.unwrap();
        sleep(ms(300)).await;
        nodes.set(0, gate);
        nodes.set(2, gate);
        sleep(ms(500)).await;
        nodes.set(0, Gate::Ready);
        nodes.set(2, Gate::Ready);
        for _ in 0..50 {
            sleep(ms(100)).await;
            assert!(guard.is_valid(), "{gate:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn is_valid_compares_the_clock_without_a_running_task() {
    let nodes = ScriptedNodes::new(3);
    let redlock = builder(&nodes).build().unwrap();
    let guard = redlock.try_lock("k").await.unwrap();
    assert!(guard.is_valid());
    // As after a pause of the whole process: the lease task has had no turn yet.
    let mut paused = Box::pin(advance(secs(10)));
    assert!(futures_util::poll!(&mut paused).is_pending());
    assert!(!guard.is_valid() && guard.valid_for().is_zero());
    paused.await;
    assert_eq!(guard.lost().await, LostReason::Expired);
}

#[tokio::test(start_paused = true)]
async fn majority_that_forgot_the_lock_resolves_lost_at_the_next_renewal() {
    let nodes = ScriptedNodes::new(3);
    let redlock = builder(&nodes).ttl(secs(3)).build().unwrap();
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
    let nodes = ScriptedNodes::new(3);
    let redlock = builder(&nodes).ttl(secs(1)).build().unwrap();
    let guard = redlock.try_lock("k").await.unwrap();
    nodes.wipe(1);
    sleep(secs(5)).await;
    assert!(guard.is_valid());
    assert_eq!(nodes.locks(), [1, 0, 1], "a missing key is never set again");
}

#[tokio::test(start_paused = true)]
async fn extend_that_fails_leaves_the_validity_as_it_was() {
    for gate in [
        Gate::Failing,
        Gate::Never,
        Gate::Mute,
        Gate::Down,
        Gate::Slow(ms(120)),
    ] {
        let what = format!("{gate:?}");
        let nodes = ScriptedNodes::new(3);
        let redlock = builder(&nodes).max_ttl(secs(60)).renew(false);
        let redlock = redlock.build().unwrap();
        let guard = redlock.try_lock("k").await.unwrap();
        let end = end_of(&guard);
        nodes.set_for(0, OpKind::Confirm, gate);
        nodes.set_for(1, OpKind::Confirm, gate);
        for ttl in [ms(500), secs(20)] {
            let began = Instant::now();
            let failed = guard.extend(ttl).await;
            let Err(ExtendError::Unavailable {
                reached,
                needed,
                nodes,
            }) = failed
            else {
                panic!("{what}: {failed:?}");
            };
            assert_eq!((needed, nodes.len()), (2, 2), "{what}");
            assert!(reached <= 1, "{what}");
            assert!(began.elapsed() <= ms(50), "{what}");
            assert_eq!(end_of(&guard), end, "{what}");
        }
        assert!(guard.is_valid());
        // Late answers to an extension that has failed are not counted for it.
        sleep(ms(200)).await;
        assert_eq!(end_of(&guard), end, "{what}");
        // Until the end it had, the nodes keep others out.
        sleep(end - Instant::now() - ms(3)).await;
        assert!(guard.is_valid());
        assert_eq!(nodes.locks(), [1, 1, 1], "{what}");
        sleep(ms(4)).await;
        assert!(!guard.is_valid(), "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn extend_counts_validity_from_before_the_first_request() {
    let nodes = ScriptedNodes::new(3);
    let redlock = builder(&nodes).max_ttl(secs(60)).renew(false);
    let redlock = redlock.build().unwrap();
    let guard = redlock.try_lock("k").await.unwrap();
    nodes.set(0, Gate::Never);
    nodes.set(1, Gate::Slow(ms(30)));
    nodes.set(2, Gate::Slow(ms(20)));
    sleep(secs(1)).await;
    guard.extend(secs(20)).await.unwrap();
    assert_eq!(guard.valid_for(), secs(20) - ms(30) - ms(202));
}

#[tokio::test(start_paused = true)]
async fn late_answers_to_one_extension_do_not_count_for_the_next() {
    let nodes = ScriptedNodes::new(3);
    let redlock = builder(&nodes).max_ttl(secs(60)).renew(false);
    let redlock = redlock.build().unwrap();
    let guard = redlock.try_lock("k").await.unwrap();
    let end = end_of(&guard);
    for node in 1..3 {
        nodes.set_for(node, OpKind::Confirm, Gate::Slow(ms(60)));
    }
    assert!(guard.extend(secs(20)).await.is_err());
    // The answers to the first come while the second is asked, which these nodes never hear of.
    for node in 1..3 {
        nodes.set_for(node, OpKind::Confirm, Gate::Never);
    }
    let began = Instant::now();
    let failed = guard.extend(secs(30)).await;
    assert!(
        matches!(failed, Err(ExtendError::Unavailable { .. })),
        "{failed:?}"
    );
    assert_eq!(began.elapsed(), ms(50));
    assert_eq!(end_of(&guard), end);
}

#[tokio::test(start_paused = true)]
async fn extend_by_less_does_not_shorten_the_validity() {
    let nodes = ScriptedNodes::new(3);
    let redlock = builder(&nodes).renew(false).build().unwrap();
    let guard = redlock.try_lock("k").await.unwrap();
    let (began, end) = (Instant::now(), end_of(&guard));
    sleep(secs(1)).await;
    guard.extend(ms(100)).await.unwrap();
    assert_eq!(end_of(&guard), end);
    sleep(began + secs(10) - ms(1) - Instant::now()).await;
    assert_eq!(nodes.locks(), [1, 1, 1]);
    sleep(ms(1)).await;
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn extend_sets_the_ttl_of_later_renewals() {
    let nodes = ScriptedNodes::new(3);
    let redlock = builder(&nodes).ttl(secs(1)).max_ttl(secs(9));
    let redlock = redlock.build().unwrap();
    let guard = redlock.try_lock("k").await.unwrap();
    guard.extend(secs(9)).await.unwrap();
    sleep(secs(30)).await;
    assert!(guard.valid_for() > secs(5));
    let longer = nodes.sent(0, OpKind::Confirm);
    assert!((10..=11).contains(&longer), "{longer} confirmations");
    // Back to a second: from the next renewal on.
    guard.extend(secs(1)).await.unwrap();
    sleep(secs(30)).await;
    assert!(guard.is_valid() && guard.valid_for() < secs(1));
}

#[tokio::test(start_paused = true)]
async fn extend_out_of_range_is_refused_and_leaves_the_validity_as_it_was() {
    let redlock = Redlock::in_memory(3);
    let guard = redlock.try_lock("k").await.unwrap();
    let end = end_of(&guard);
    let (asked, max) = (ms(10_001), secs(10));
    let refused = guard.extend(asked).await;
    assert_eq!(refused, Err(ExtendError::TtlTooLong { asked, max }));
    let refused = guard.extend(Duration::MAX).await;
    assert!(matches!(refused, Err(ExtendError::TtlTooLong { .. })));
    for asked in [ms(0), ms(2)] {
        let refused = guard.extend(asked).await;
        assert_eq!(refused, Err(ExtendError::TtlTooShort { asked }));
    }
    assert_eq!(end_of(&guard), end);
    assert_eq!(guard.release().await, Ok(Released::Freed));
}

#[tokio::test(start_paused = true)]
async fn upgraded_handle_keeps_the_lock_until_it_is_dropped() {
    let nodes = ScriptedNodes::new(3);
    let redlock = builder(&nodes).build().unwrap();
    let guard = redlock.try_lock("k").await.unwrap();
    let (handle, lost) = (guard.handle(), guard.lost());
    assert_eq!(handle.keys(), guard.keys());
    assert_eq!(handle.fencing_token(), guard.fencing_token());
    let detached = handle.upgrade().unwrap();
    assert_eq!(guard.release().await, Ok(Released::Shared));
    sleep(secs(30)).await;
    assert!(handle.is_valid() && detached.is_valid());
    assert_eq!(nodes.locks(), [1, 1, 1]);
    assert_eq!(detached.release().await, Ok(Released::Freed));

    assert_eq!(handle.upgrade().unwrap_err(), AlreadyReleased);
    assert!(!handle.is_valid() && handle.valid_for().is_zero());
    assert_eq!(lost.await, LostReason::Released);
    assert_eq!(handle.lost().await, LostReason::Released);
    let refused = handle.extend(secs(1)).await;
    assert_eq!(refused, Err(ExtendError::Lost(LostReason::Released)));
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn lock_handle_does_not_keep_the_lock() {
    let nodes = ScriptedNodes::new(3);
    let redlock = builder(&nodes).build().unwrap();
    let guard = redlock.try_lock("k").await.unwrap();
    let handle = guard.handle();
    handle.extend(secs(10)).await.unwrap();
    drop(guard);
    assert_eq!(handle.lost().await, LostReason::Released);
    assert_eq!(handle.upgrade().unwrap_err(), AlreadyReleased);
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[test]
fn dropped_runtime_resolves_lost() {
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
    };
    let owner = runtime().unwrap();
    let redlock = Redlock::in_memory(3);
    let guard = owner.block_on(redlock.try_lock("k").into_future()).unwrap();
    let lost = guard.lost();
    drop(owner);
    assert!(!guard.is_valid());
    runtime().unwrap().block_on(async {
        assert_eq!(lost.await, LostReason::Abandoned);
        assert_eq!(guard.lost().await, LostReason::Abandoned);
        let refused = guard.extend(secs(1)).await;
        assert_eq!(refused, Err(ExtendError::Lost(LostReason::Abandoned)));
        // Nobody released it: the holder was never asked.
        assert!(redlock.try_lock("k").await.is_err());
        let released = guard.release().await;
        assert_eq!(released, Err(ReleaseError::Lost(LostReason::Abandoned)));
        // The service itself goes on in the runtime that it is used in.
        assert!(redlock.try_lock("other").await.is_ok());
    });
}

#[tokio::test(start_paused = true)]
async fn local_waiters_are_granted_in_the_order_of_their_requests() {
    let nodes = ScriptedNodes::new(3);
    let redlock = builder(&nodes).build().unwrap();
    let guard = redlock.try_lock("k").await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut waiters = Vec::new();
    for waiter in 0..20 {
        let asking = redlock.lock("k").into_future();
        let order = Arc::clone(&order);
        waiters.push(tokio::spawn(async move {
            let guard = asking.await.unwrap();
            order.lock().unwrap().push(waiter);
            sleep(ms(10)).await;
            drop(guard);
        }));
        yield_now().await;
    }
    let asked = nodes.sent(0, OpKind::Acquire);
    sleep(secs(1)).await;
    assert_eq!(nodes.sent(0, OpKind::Acquire), asked, "waiters do not ask");
    let released = Instant::now();
    drop(guard);
    for waiter in waiters {
        waiter.await.unwrap();
    }
    assert_eq!(*order.lock().unwrap(), (0..20).collect::<Vec<_>>());
    // Handed over at once: no time passes but that of the holders.
    assert!(
        released.elapsed() <= ms(20 * 11),
        "{:?}",
        released.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn wait_that_ends_returns_contended_with_retry_after() {
    let nodes = ScriptedNodes::new(3);
    let (here, there) = (
        builder(&nodes).build().unwrap(),
        builder(&nodes).build().unwrap(),
    );
    let guard = here.try_lock("k").await.unwrap();
    for other in [&here, &there] {
        for wait in [ms(0), ms(1), ms(777), secs(7)] {
            let began = Instant::now();
            let refused = other.lock("k").wait(wait).await;
            let Err(LockError::Contended { retry_after }) = refused else {
                panic!("{refused:?}");
            };
            let left = retry_after.unwrap();
            assert!(left > secs(5) && left <= secs(10), "{left:?}");
            let waited = began.elapsed();
            assert!(waited >= wait && waited <= wait + ms(2), "{waited:?}");
        }
    }
    assert!(guard.is_valid());
}

#[tokio::test(start_paused = true)]
async fn remote_waiter_is_granted_within_the_longest_retry_delay_after_a_release() {
    for held in [0, 5, 50, 300, 1_000, 4_000] {
        let nodes = ScriptedNodes::new(3);
        let (here, there) = (
            builder(&nodes).build().unwrap(),
            builder(&nodes).build().unwrap(),
        );
        let guard = here.try_lock("k").await.unwrap();
        let waiting = tokio::spawn(there.lock("k").into_future());
        sleep(ms(held)).await;
        let released = Instant::now();
        drop(guard);
        assert!(waiting.await.unwrap().is_ok());
        // 250 ms is the default, and a timer rounds up.
        assert!(released.elapsed() <= ms(252), "{:?}", released.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn lock_of_a_dead_process_is_granted_as_soon_as_it_expires() {
    let nodes = ScriptedNodes::new(3);
    let dead = Foreign::new("k");
    for node in 0..3 {
        dead.acquire(&nodes, node, secs(2));
    }
    let began = Instant::now();
    let redlock = builder(&nodes).build().unwrap();
    drop(redlock.lock("k").await.unwrap());
    let waited = began.elapsed();
    // The nodes said when it expires, so the wait is not a blind one: at most one base delay more.
    assert!(
        waited >= secs(2) && waited <= secs(2) + ms(13),
        "{waited:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn retry_without_a_delay_does_not_spin_on_a_paused_clock() {
    let nodes = ScriptedNodes::new(3);
    let holder = Foreign::new("k");
    for node in 0..3 {
        holder.acquire(&nodes, node, secs(60));
    }
    let retry = Retry::new(Duration::ZERO, Duration::ZERO);
    let redlock = builder(&nodes).retry(retry).wait(ms(20)).build().unwrap();
    let refused = redlock.lock("k").await;
    assert!(matches!(refused, Err(LockError::Contended { .. })));
    assert!(nodes.sent(0, OpKind::Acquire) <= 22);
}

/// Another client of the same protocol that competes for a key without waiting, on links of its
/// own: requests of two services of this process would reach all nodes in the same order.
struct Competitor {
    nodes: ScriptedNodes,
    delays: [Duration; 2],
    retries_until: Instant,
}

impl Competitor {
    /// Returns whether it got the lock, after so many attempts.
    async fn compete(&self) -> (bool, u32) {
        for attempt in 0.. {
            let asked = Instant::now();
            let me = Foreign::new("k");
            let granted = |reply| matches!(reply, Reply::Granted(_));
            // Both at once; the answers are in when the slower is.
            let [first, second] = self.delays;
            let (near, far) = if first <= second { (0, 1) } else { (1, 0) };
            sleep(first.min(second)).await;
            let one = granted(me.acquire(&self.nodes, near, secs(10)));
            sleep(first.max(second) - first.min(second)).await;
            let two = granted(me.acquire(&self.nodes, far, secs(10)));
            if one && two {
                return (true, attempt + 1);
            }
            // On the same links, so it takes as long.
            let (nodes, delays) = (self.nodes.clone(), self.delays);
            tokio::spawn(async move {
                sleep(delays[near]).await;
                me.send(&nodes, near, Op::Release);
                sleep(delays[far] - delays[near]).await;
                me.send(&nodes, far, Op::Release);
            });
            let now = Instant::now();
            if !(one || two) || now >= self.retries_until {
                return (false, attempt + 1);
            }
            sleep(Retry::split_delay(attempt, now - asked, random())).await;
        }
        unreachable!()
    }
}

#[tokio::test(start_paused = true)]
async fn split_votes_grant_exactly_one_caller_without_a_wait() {
    let rounds = 400;
    let (mut our_wins, mut their_wins, mut splits) = (0, 0, 0);
    for round in 0..rounds {
        let nodes = ScriptedNodes::new(3);
        // Of the two nodes that are left each is nearer to one of the two, so each gets its own.
        let (near, far) = (ms(1), ms(2 + round % 2));
        nodes.set(0, Gate::Slow(near));
        nodes.set(1, Gate::Slow(far));
        nodes.set(2, Gate::Down);
        let redlock = builder(&nodes).build().unwrap();
        let competitor = Competitor {
            nodes: nodes.clone(),
            delays: [far, near],
            retries_until: Instant::now() + ms(50),
        };
        let (ours, (theirs, attempts)) =
            tokio::join!(redlock.try_lock("k").into_future(), competitor.compete());
        assert!(!(ours.is_ok() && theirs), "two winners in round {round}");
        our_wins += u64::from(ours.is_ok());
        their_wins += u64::from(theirs);
        splits += u64::from(attempts > 1 || nodes.sent(0, OpKind::Acquire) > 1);
    }
    assert!(
        splits > rounds / 2,
        "only {splits} splits in {rounds} rounds"
    );
    let winners = our_wins + their_wins;
    assert!(winners * 100 >= rounds * 99, "{winners} of {rounds}");
    // Neither by the other one giving up.
    assert!(
        our_wins > rounds / 10 && their_wins > rounds / 10,
        "{our_wins} and {their_wins}"
    );
}

/// One node is the holder's, one is down, and the third grants: that is what a split vote looks like.
#[tokio::test(start_paused = true)]
async fn possible_split_vote_delays_contended_by_at_most_one_node_timeout() {
    let mut longest = Duration::ZERO;
    for _ in 0..200 {
        let nodes = ScriptedNodes::new(3);
        Foreign::new("k").acquire(&nodes, 0, secs(10));
        nodes.set(1, Gate::Down);
        let redlock = builder(&nodes).build().unwrap();
        let asked = Instant::now();
        let refused = redlock.try_lock("k").await;
        assert!(
            matches!(refused, Err(LockError::Contended { .. })),
            "{refused:?}"
        );
        longest = longest.max(asked.elapsed());
    }
    // And one tick of the timer.
    assert!(longest <= ms(50) + ms(1), "{longest:?}");
}

#[tokio::test(start_paused = true)]
async fn try_lock_from_eight_processes_at_once_grants_at_most_one() {
    let rounds: usize = 100;
    let mut winners = 0;
    for round in 0..rounds {
        let nodes = ScriptedNodes::new(5);
        for node in 0..5 {
            let delay = 1 + u64::try_from((node + round) % 3).unwrap();
            nodes.set(node, Gate::Slow(ms(delay)));
        }
        let services: Vec<Redlock> = (0..8).map(|_| builder(&nodes).build().unwrap()).collect();
        let asking = services
            .iter()
            .map(|redlock| redlock.try_lock("k").into_future());
        let outcomes = futures_util::future::join_all(asking).await;
        let granted = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
        assert!(granted <= 1, "two winners in round {round}");
        winners += granted;
    }
    assert!(winners * 100 >= rounds * 99, "{winners} of {rounds}");
}

#[test]
fn drift_of_the_default_ttl_is_102_ms() {
    assert_eq!(validity::drift(secs(10)), ms(102));
    assert_eq!(validity::drift(secs(20)), ms(202));
}

/// An extension that is over before it is confirmed would be worth nothing and renew for ever.
#[tokio::test(start_paused = true)]
async fn extend_by_at_most_node_timeout_is_refused_with_ttl_too_short() {
    let nodes = ScriptedNodes::new(3);
    let redlock = Redlock::builder().scripted(&nodes).build().unwrap();
    let guard = redlock.try_lock("k").await.unwrap();
    for ttl in [Duration::from_micros(2_500), Duration::from_millis(50)] {
        let refused = guard.extend(ttl).await;
        assert_eq!(refused, Err(ExtendError::TtlTooShort { asked: ttl }));
    }
    sleep(Duration::from_secs(60)).await;
    assert!(guard.is_valid());
}

/// Also of a lock that was released before anybody thought of a shutdown.
#[tokio::test(start_paused = true)]
async fn drain_names_nodes_that_did_not_confirm_an_earlier_release() {
    let nodes = ScriptedNodes::new(3);
    let redlock = Redlock::builder().scripted(&nodes).build().unwrap();
    let guard = redlock.try_lock("k").await.unwrap();
    nodes.set_for(0, OpKind::Release, Gate::Never);
    guard.release().await.unwrap();
    sleep(Duration::from_millis(100)).await;
    let drained = redlock.drain(Duration::from_secs(1)).await;
    assert!(!drained.is_clean());
    assert_eq!(&*drained.unconfirmed[0].node, "embedded-0");
    // Until the key has ended by its ttl.
    sleep(Duration::from_secs(30)).await;
    assert!(redlock.drain(Duration::ZERO).await.is_clean());
}

/// A holder may still be at work: its lock ends by its ttl, not earlier.
#[tokio::test(start_paused = true)]
async fn drain_at_its_timeout_releases_no_lock_under_a_live_guard() {
    for renew in [true, false] {
        for timeout in [ms(0), ms(1), secs(4), secs(9)] {
            let what = format!("renewal {renew}, a drain of {timeout:?}");
            let nodes = ScriptedNodes::new(3);
            let redlock = builder(&nodes).renew(renew).build().unwrap();
            let guard = redlock.try_lock("guard").await.unwrap();
            let other = redlock.try_lock("share").await.unwrap();
            let share = other.handle().upgrade().unwrap();
            drop(other);

            let drained = redlock.drain(timeout).await;
            assert_eq!(drained.held.len(), 2, "{what}");
            let end = Instant::now() + guard.valid_for().min(share.valid_for());
            assert!(
                end >= Instant::now() + secs(10) - timeout - ms(200),
                "{what}"
            );
            // A second drain releases nothing either.
            redlock.drain(ms(0)).await;
            while Instant::now() + ms(50) < end {
                assert!(guard.is_valid() && share.is_valid(), "{what}");
                assert_eq!(nodes.locks(), [2, 2, 2], "{what}");
                sleep(ms(10)).await;
            }
            let released = (0..3).map(|node| nodes.sent(node, OpKind::Release));
            assert_eq!(released.sum::<usize>(), 0, "{what}");
            sleep(ms(100)).await;
            assert!(!guard.is_valid() && !share.is_valid(), "{what}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn lock_handle_reports_the_release_before_nodes_have_confirmed_it() {
    let nodes = ScriptedNodes::new(3);
    let node_timeout = Duration::from_secs(2);
    let builder = Redlock::builder().scripted(&nodes);
    let redlock = builder.node_timeout(node_timeout).build().unwrap();
    let guard = redlock.try_lock("k").await.unwrap();
    for node in 0..2 {
        nodes.set_for(node, OpKind::Release, Gate::Mute);
    }
    let lost = guard.handle().lost();
    let began = Instant::now();
    drop(guard);
    // Another one may have it from now on.
    assert_eq!(lost.await, LostReason::Released);
    assert!(began.elapsed() < node_timeout / 10);
}

/// Gives the first two of three nodes fences of their own, far ahead of every proposal: all three then
/// grant a lock with different numbers.
fn spread_fences(nodes: &ScriptedNodes, key: &str) {
    for (node, ahead) in [(0, 2_000_000_000_000_000), (1, 1_000_000_000_000_000)] {
        let foreign = Foreign::new(key);
        let proposal = Some(4_000_000_000_000_000 + ahead);
        let (ttl, retention) = (secs(1), secs(3_600));
        let acquire = Op::Acquire {
            proposal,
            ttl,
            retention,
        };
        assert!(matches!(
            foreign.send(nodes, node, acquire),
            Reply::Granted(_)
        ));
        assert_eq!(foreign.send(nodes, node, Op::Release), Reply::Released);
    }
}

#[tokio::test(start_paused = true)]
async fn acquisition_has_one_deadline_for_both_phases() {
    for (slow, is_granted) in [(ms(20), true), (ms(40), false)] {
        let nodes = ScriptedNodes::new(3);
        let redlock = builder(&nodes).build().unwrap();
        spread_fences(&nodes, "k");
        for node in 0..3 {
            nodes.set_for(node, OpKind::Acquire, Gate::Slow(slow));
            nodes.set_for(node, OpKind::Confirm, Gate::Slow(slow));
        }
        let began = Instant::now();
        let outcome = redlock.try_lock("k").await;
        assert_eq!(outcome.is_ok(), is_granted, "{outcome:?}");
        // The default node timeout is 50 ms.
        assert!(began.elapsed() <= ms(52), "{slow:?}: {:?}", began.elapsed());
        drop(outcome);
        sleep(secs(1)).await;
        assert_eq!(nodes.locks(), [0, 0, 0]);
    }
}
