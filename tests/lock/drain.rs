//! `Redlock::drain`: holders, unconfirmed releases and the timeout.

use std::time::Duration;

use support::{ms, secs, three_nodes, three_nodes_with};
use tokio::time::{Instant, sleep, timeout};
use tower_redlock::protocol::LockKeys;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{Drained, LockError, LostReason, Redlock};

use crate::common::{process_with, processes, processes_of};

/// Also those of locks that were released before it was called.
#[tokio::test(start_paused = true)]
async fn drain_forgets_an_unconfirmed_release_when_it_is_confirmed_late() {
    let (nodes, redlock) = three_nodes();
    let guard = redlock.lock_all(["a", "b"]).await.unwrap();
    for (node, late) in [(0, 1), (1, 2), (2, 3)] {
        nodes.set_for(node, OpKind::Release, Gate::Slow(secs(late)));
    }
    assert!(guard.release().await.is_err());
    // From a majority that is free on, the keys are.
    for (unconfirmed, lagging) in [(3, &[][..]), (2, &[]), (0, &["embedded-2"]), (0, &[])] {
        sleep(ms(100)).await;
        let drained = redlock.drain(ms(0)).await;
        assert_eq!(drained.unconfirmed.len(), unconfirmed, "{drained:?}");
        let names = drained.lagging_nodes.iter().map(|node| &**node);
        assert_eq!(names.collect::<Vec<_>>(), lagging, "{drained:?}");
        assert_eq!(drained.is_clean(), unconfirmed == 0);
        sleep(ms(900)).await;
    }
}

/// Three of four nodes must grant a key, so two that may still have it keep it from all others.
#[tokio::test(start_paused = true)]
async fn drain_is_not_clean_while_half_of_the_nodes_have_not_confirmed_a_release() {
    for (unreleased, is_clean) in [(1, true), (2, false)] {
        let nodes = ScriptedNodes::new(4);
        let [redlock, other] = processes_of(&nodes);
        let guard = redlock.try_lock("k").await.unwrap();
        (0..unreleased).for_each(|node| nodes.set_for(node, OpKind::Release, Gate::Failing));
        drop(guard);
        let drained = redlock.drain(secs(60)).await;
        assert_eq!(drained.is_clean(), is_clean, "{drained:?}");
        assert_eq!(other.try_lock("k").await.is_ok(), is_clean);
    }
}

/// A majority has confirmed the release, and one node may still answer in time.
#[tokio::test(start_paused = true)]
async fn a_drain_that_waits_for_an_answer_hides_it_from_no_other_drain() {
    let (nodes, redlock) = three_nodes();
    let guard = redlock.try_lock("k").await.unwrap();
    nodes.set_for(2, OpKind::Release, Gate::Slow(ms(30)));
    guard.release().await.unwrap();
    let draining = redlock.clone();
    let draining = tokio::spawn(async move { draining.drain(secs(10)).await });
    sleep(ms(1)).await;
    let drained = redlock.drain(ms(0)).await;
    let lagging = |drained: Drained| {
        drained
            .lagging_nodes
            .iter()
            .map(ToString::to_string)
            .collect()
    };
    let (seen, waited): (Vec<_>, Vec<_>) = (lagging(drained), lagging(draining.await.unwrap()));
    assert_eq!((seen, waited), (vec!["embedded-2".to_owned()], vec![]));
}

#[tokio::test(start_paused = true)]
async fn drain_waits_for_the_holders_and_leaves_no_key() {
    let (nodes, redlock) = three_nodes_with(|builder| builder.ttl(secs(1)));
    for (key, held) in [("a", 10), ("b", 3_000)] {
        let guard = redlock.try_lock(key).await.unwrap();
        tokio::spawn(async move {
            sleep(ms(held)).await;
            // Renewed while draining.
            assert!(guard.is_valid());
            drop(guard);
        });
    }
    let queued = tokio::spawn(redlock.lock("a").into_future());
    let there = Redlock::builder().scripted(&nodes).build().unwrap();
    let _foreign = there.try_lock("foreign").await.unwrap();
    let polling = tokio::spawn(redlock.lock("foreign").into_future());
    sleep(ms(5)).await;

    let began = Instant::now();
    let draining = redlock.clone();
    let draining = tokio::spawn(async move { draining.drain(Duration::MAX).await });
    // Those who wait hear of it at once, those who come now too.
    for waiter in [queued, polling] {
        let error = waiter.await.unwrap().unwrap_err();
        assert_eq!(error, LockError::Closed);
    }
    assert_eq!(redlock.lock("new").await.unwrap_err(), LockError::Closed);
    assert_eq!(redlock.try_lock("a").await.unwrap_err(), LockError::Closed);
    assert_eq!(began.elapsed(), ms(0));

    let drained = draining.await.unwrap();
    assert!(drained.is_clean(), "{drained:?}");
    assert_eq!(drained.released, 2);
    assert_eq!(began.elapsed(), ms(2_995));
    assert_eq!(nodes.locks(), [1, 1, 1], "the other process keeps its lock");
    // Again, with nothing left to do.
    assert_eq!(redlock.drain(secs(1)).await.released, 0);
}

/// A holder may still be at work: its lock ends by its ttl, not earlier.
#[tokio::test(start_paused = true)]
async fn drain_ends_at_its_timeout_and_releases_nothing_under_a_guard() {
    for renew in [true, false] {
        for patience in [ms(0), ms(1), secs(4), secs(9)] {
            let what = format!("renewal {renew}, a drain of {patience:?}");
            let (nodes, redlock) = process_with(|builder| builder.renew(renew));
            let guard = redlock.lock_all(["a", "b"]).await.unwrap();
            let other = redlock.try_lock("share").await.unwrap();
            let share = other.handle().upgrade().unwrap();
            drop(other);

            let drained = redlock.drain(patience).await;
            let held = [&["a", "b"][..], &["share"]];
            let held = held.map(|keys| LockKeys::from_iter(keys.iter().copied()));
            assert_eq!(drained.held, held, "{what}");
            assert_eq!((drained.released, drained.unconfirmed), (0, vec![]));
            let left = guard.valid_for().min(share.valid_for());
            assert!(left >= secs(10) - patience - ms(200), "{what}");
            let end = Instant::now() + left;
            // A second drain releases nothing either.
            redlock.drain(ms(0)).await;
            let renewals = nodes.sent(0, OpKind::Confirm);
            while Instant::now() + ms(50) < end {
                assert!(guard.is_valid() && share.is_valid(), "{what}");
                assert_eq!(nodes.locks(), [3, 3, 3], "{what}");
                sleep(ms(10)).await;
            }
            let lost = timeout(secs(1), guard.lost()).await;
            assert_eq!(lost, Ok(LostReason::Expired), "{what}");
            assert!(Instant::now() <= end && Instant::now() + ms(2) >= end);
            assert!(!guard.is_valid() && !share.is_valid(), "{what}");
            assert_eq!(nodes.sent(0, OpKind::Confirm), renewals, "{what}");
            let released = (0..3).map(|node| nodes.sent(node, OpKind::Release));
            assert_eq!(released.sum::<usize>(), 0, "{what}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn drain_names_the_nodes_that_did_not_confirm_a_release() {
    for gate in [Gate::Never, Gate::Failing, Gate::Down, Gate::Mute] {
        let (nodes, redlock) = three_nodes();
        let guard = redlock.try_lock("k").await.unwrap();
        nodes.set(1, gate);
        nodes.set(2, gate);
        tokio::spawn(async move {
            sleep(ms(10)).await;
            drop(guard);
        });
        let began = Instant::now();
        let drained = redlock.drain(secs(60)).await;
        assert!(began.elapsed() <= ms(10 + 51), "{gate:?}");
        assert!(!drained.is_clean(), "{gate:?}");
        let [one, other] = drained.unconfirmed.as_slice() else {
            panic!("{gate:?}: {drained:?}");
        };
        assert_eq!([&*one.node, &*other.node], ["embedded-1", "embedded-2"]);
        assert_eq!(one.keys, LockKeys::from_iter(["k"]));
        assert!(drained.lagging_nodes.is_empty());
        assert_eq!((drained.released, drained.held.len()), (1, 0));
    }
}

/// Such a node cannot have the key, however it answers later. One that failed in another way may have it.
#[tokio::test(start_paused = true)]
async fn node_that_never_got_the_request_does_not_lag_in_a_drain() {
    for (gate, lags) in [(Gate::Down, false), (Gate::Failing, true)] {
        let (nodes, redlock) = three_nodes();
        nodes.set(0, gate);
        let guard = redlock.try_lock("k").await.unwrap();
        nodes.set(0, Gate::Never);
        drop(guard);
        let drained = redlock.drain(secs(60)).await;
        let lagging = drained.lagging_nodes.len();
        assert_eq!(lagging, usize::from(lags), "{gate:?}: {drained:?}");
    }
}

/// The last request that locks a key may reach a node as late as its ttl, and the key lives for another.
#[tokio::test(start_paused = true)]
async fn drain_reports_an_unconfirmed_release_for_two_ttl() {
    let (nodes, redlock) = process_with(|builder| builder.ttl(secs(10)));
    let guard = redlock.try_lock("k").await.unwrap();
    (0..2).for_each(|node| nodes.set_for(node, OpKind::Release, Gate::Never));
    drop(guard);
    sleep(secs(19)).await;
    let drained = redlock.drain(secs(1)).await;
    assert_eq!(drained.unconfirmed.len(), 2, "{drained:?}");
    sleep(secs(2)).await;
    let again = redlock.drain(secs(1)).await;
    assert!(again.is_clean() && again.lagging_nodes.is_empty());
}

/// Although a node has not answered.
#[tokio::test(start_paused = true)]
async fn a_lock_that_a_majority_has_released_is_not_held() {
    let (nodes, [redlock]) = processes();
    let guard = redlock.lock("k").await.unwrap();
    nodes.set_for(0, OpKind::Release, Gate::Slow(ms(20)));
    guard.release().await.unwrap();
    let drained = redlock.drain(ms(0)).await;
    assert_eq!(drained.held, [], "{drained:?}");
    assert!(drained.is_clean(), "{drained:?}");
}
