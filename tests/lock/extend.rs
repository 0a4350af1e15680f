//! `LockGuard::extend`: validity, later renewals and refusals.

use std::time::Duration;

use support::{assert_matches, ms, secs, set_all};
use tokio::time::{Instant, sleep};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{ExtendError, LostReason, Redlock, Released};

use crate::common::{builder, end_of, process_with};

#[tokio::test(start_paused = true)]
async fn extend_that_fails_leaves_the_validity_as_it_was() {
    use Gate::{Down, Failing, Mute, Never, Slow};
    for gate in [Failing, Never, Mute, Down, Slow(ms(120))] {
        let what = format!("{gate:?}");
        let (nodes, redlock) = process_with(|builder| builder.max_ttl(secs(60)).renew(false));
        let guard = redlock.try_lock("k").await.unwrap();
        let end = end_of(&guard);
        nodes.set_for(0, OpKind::Confirm, gate);
        nodes.set_for(1, OpKind::Confirm, gate);
        for ttl in [ms(500), secs(20)] {
            let began = Instant::now();
            let failed = guard.extend(ttl).await;
            match failed.unwrap_err() {
                ExtendError::Unavailable {
                    reached,
                    needed: 2,
                    nodes,
                } if reached <= 1 => {
                    assert_eq!(reached + nodes.len(), 3, "{what}");
                }
                other => panic!("{what}: {other:?}"),
            }
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
    let (nodes, redlock) = process_with(|builder| builder.max_ttl(secs(60)).renew(false));
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
    let (nodes, redlock) = process_with(|builder| builder.max_ttl(secs(60)).renew(false));
    let guard = redlock.try_lock("k").await.unwrap();
    let end = end_of(&guard);
    (1..3).for_each(|node| nodes.set_for(node, OpKind::Confirm, Gate::Slow(ms(60))));
    assert!(guard.extend(secs(20)).await.is_err());
    // The answers to the first come while the second is asked, which these nodes never hear of.
    (1..3).for_each(|node| nodes.set_for(node, OpKind::Confirm, Gate::Never));
    let began = Instant::now();
    let failed = guard.extend(secs(30)).await;
    assert_matches!(failed, Err(ExtendError::Unavailable { .. }));
    assert_eq!(began.elapsed(), ms(50));
    assert_eq!(end_of(&guard), end);
}

#[tokio::test(start_paused = true)]
async fn extend_by_less_does_not_shorten_the_validity() {
    let (nodes, redlock) = process_with(|builder| builder.renew(false));
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
    let (nodes, redlock) = process_with(|builder| builder.ttl(secs(1)).max_ttl(secs(9)));
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

/// An extension that is over before it is confirmed would be worth nothing and renew for ever.
#[tokio::test(start_paused = true)]
async fn extend_out_of_range_is_refused_and_leaves_the_validity_as_it_was() {
    let redlock = Redlock::in_memory(3);
    let guard = redlock.try_lock("k").await.unwrap();
    let end = end_of(&guard);
    let max = secs(10);
    for asked in [ms(10_001), Duration::MAX] {
        let refused = guard.extend(asked).await;
        assert_eq!(refused, Err(ExtendError::TtlTooLong { asked, max }));
    }
    // At most the node timeout, or not even the drift.
    for asked in [ms(0), ms(2), Duration::from_micros(2_500), ms(50)] {
        let refused = guard.extend(asked).await;
        assert_eq!(refused, Err(ExtendError::TtlTooShort { asked }));
    }
    assert_eq!(end_of(&guard), end);
    assert_eq!(guard.release().await, Ok(Released::Freed));
}

/// The answers arrive when the validity is over: the lock was lost meanwhile, and stays so.
// Rules: lock.extension
#[tokio::test(start_paused = true)]
async fn extend_that_is_confirmed_after_the_validity_does_not_revive_the_lock() {
    let nodes = ScriptedNodes::new(3);
    let redlock = builder(&nodes).ttl(secs(1)).max_ttl(secs(60)).renew(false);
    let guard = redlock.build().unwrap().try_lock("k").await.unwrap();
    sleep(guard.valid_for() - ms(20)).await;
    set_all(&nodes, OpKind::Confirm, Gate::Slow(ms(40)));
    let late = guard.extend(secs(20)).await;
    assert_eq!(late, Err(ExtendError::Lost(LostReason::Expired)));
    assert!(!guard.is_valid());
}
