//! Looking into a key and revoking it, with embedded nodes on a paused clock.

use std::future::IntoFuture;

use support::{Log, assert_matches, ms, secs};
use tokio::time::{Instant, sleep};
use tower_redlock::protocol::message::Op;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    FencingToken, KeyState, LockError, LockRequest, LostReason, NodeFailure, Redlock, ReleaseError,
    Released,
};

use crate::common::{Foreign, builder, processes, processes_of};

#[tokio::test(start_paused = true)]
async fn inspect_tells_free_held_and_shared_keys_apart_and_changes_nothing() {
    let (_nodes, [redlock, other]) = processes();
    let free = redlock.inspect("k").await;
    assert_eq!(free.state(), Some(KeyState::Free));
    assert_eq!(free.fencing_token(), None);
    assert!(!free.is_recorded());
    assert_eq!((free.nodes.len(), free.needed), (3, 2));

    let guard = other.try_lock("k").ttl(secs(10)).await.unwrap();
    sleep(secs(1)).await;
    let held = redlock.inspect("k").await;
    let left = Some(secs(9));
    assert_eq!(held.state(), Some(KeyState::Held { left }));
    assert_eq!(held.fencing_token(), guard.fencing_token());
    for node in &held.nodes {
        let key = node.outcome.as_ref().unwrap();
        assert_eq!(key.fencing_token, guard.fencing_token());
    }
    assert!(guard.is_valid());
    guard.release().await.unwrap();

    let reader = redlock.try_lock("k").shared().await.unwrap();
    let another = other.try_lock("k").shared().await.unwrap();
    let state = redlock.inspect("k").await.state();
    let Some(KeyState::Shared { readers: 2, left }) = state else {
        panic!("not two readers: {state:?}");
    };
    assert!(left.unwrap() <= secs(30));
    drop((reader, another));
    sleep(ms(10)).await;
    assert_eq!(other.inspect("k").await.state(), Some(KeyState::Free));
}

/// At each node that has it, and in all only if a majority has.
#[tokio::test(start_paused = true)]
async fn inspect_sees_the_record_of_an_execution() {
    let (nodes, [redlock]) = processes();
    let once = redlock.once("invoice");
    once.run(|_| async { Ok::<_, ()>(1) }).await.unwrap();
    sleep(ms(10)).await;
    for (wiped, is_recorded) in [(0, true), (1, true), (2, false)] {
        if wiped > 0 {
            nodes.wipe(wiped - 1);
        }
        let seen = redlock.inspect("invoice").await;
        assert_eq!(seen.is_recorded(), is_recorded, "{seen:?}");
        assert_eq!(seen.state(), Some(KeyState::Free));
        for (node, seen) in seen.nodes.iter().enumerate() {
            let known = seen.outcome.as_ref().unwrap();
            assert_eq!(known.is_recorded, node >= wiped, "{node}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn inspect_of_nodes_that_disagree_has_the_highest_token_and_the_most_readers() {
    for most in 0..3 {
        let (nodes, [redlock]) = processes();
        let mut numbers = [5, 6, 7];
        numbers[most] += 10;
        for (node, number) in (0..).zip(numbers) {
            let foreign = Foreign::new("k");
            foreign.acquire_with(&nodes, node, number, secs(1));
            foreign.send(&nodes, node, Op::Release);
        }
        let seen = redlock.inspect("k").await;
        let token = |number| FencingToken::try_from(number).unwrap();
        assert_eq!(seen.fencing_token(), Some(token(numbers[most])));
        let known = seen.nodes.iter().map(|node| node.outcome.as_ref().unwrap());
        let tokens = known.map(|known| known.fencing_token.unwrap());
        assert_eq!(tokens.collect::<Vec<_>>(), numbers.map(token));

        // Each of the other nodes misses one of three readers.
        let mut readers = Vec::new();
        for down in 0..3 {
            if down != most {
                nodes.set(down, Gate::Failing);
            }
            readers.push(redlock.try_lock("k").shared().await.unwrap());
            nodes.set(down, Gate::Ready);
        }
        let seen = redlock.inspect("k").await;
        for (node, seen) in (0..).zip(&seen.nodes) {
            let count = if node == most { 3 } else { 2 };
            let state = seen.outcome.as_ref().unwrap().state;
            let is_so = matches!(state, KeyState::Shared { readers, .. } if readers == count);
            assert!(is_so, "{node}: {state:?}");
        }
        let state = seen.state();
        let is_so = matches!(state, Some(KeyState::Shared { readers: 3, .. }));
        assert!(is_so, "most at {most}: {state:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn inspect_reports_each_node_that_is_down_silent_or_quarantined_within_the_node_timeout() {
    let nodes = ScriptedNodes::new(5);
    let [redlock, _] = processes_of(&nodes);
    let _guard = redlock.try_lock("k").await.unwrap();
    nodes.set(0, Gate::Failing);
    nodes.set(1, Gate::Never);
    let began = Instant::now();
    let seen = redlock.inspect("k").await;
    assert!(began.elapsed() <= ms(200), "{:?}", began.elapsed());
    assert!(seen.nodes[0].outcome.is_err());
    let silent = seen.nodes[1].outcome.as_ref().unwrap_err();
    assert_matches!(silent, NodeFailure::TimedOut { .. });
    assert_matches!(seen.state(), Some(KeyState::Held { .. }));
    nodes.set(2, Gate::Failing);
    let seen = redlock.inspect("k").await;
    assert_eq!(seen.state(), None);
}

#[tokio::test(start_paused = true)]
async fn inspect_of_an_invalid_key_says_so_for_every_node() {
    let (nodes, [redlock]) = processes();
    let seen = redlock.inspect("").await;
    for node in &seen.nodes {
        let error = node.outcome.as_ref().unwrap_err().to_string();
        assert!(error.contains("empty"), "{error}");
    }
    assert_eq!(nodes.sent(0, OpKind::Inspect), 0);
    let refused = redlock.revoke("").await.unwrap_err();
    assert_matches!(refused, LockError::Key(_));
}

#[tokio::test(start_paused = true)]
async fn revoke_frees_a_key_and_the_holder_of_this_process_is_told_at_once() {
    let (_nodes, [redlock, other]) = processes();
    let guard = redlock.try_lock("k").await.unwrap();
    let waiting = tokio::spawn(redlock.lock("k").wait(secs(5)).into_future());
    // Its task rests until the next renewal.
    sleep(secs(1)).await;
    let began = Instant::now();
    let revoked = redlock.revoke("k").await.unwrap();
    assert_eq!((revoked.held, revoked.failures.len()), (3, 0));
    assert!(revoked.was_held());
    assert_eq!(guard.lost().await, LostReason::Revoked);
    assert!(!guard.is_valid());
    // Callers of this process do not wait for the guard.
    let next = waiting.await.unwrap().unwrap();
    assert!(began.elapsed() < ms(100), "{:?}", began.elapsed());
    assert!(next.fencing_token() > guard.fencing_token());
    // The old holder's release does not free the key of the next one.
    assert!(guard.release().await.is_err());
    assert!(other.try_lock("k").await.is_err());
    assert!(next.is_valid());
}

#[tokio::test(start_paused = true)]
async fn the_holder_of_another_process_is_told_at_its_next_renewal() {
    let (_nodes, [redlock, other]) = processes();
    let guard = other.try_lock("k").ttl(secs(9)).await.unwrap();
    let began = Instant::now();
    redlock.revoke("k").await.unwrap();
    let taken = redlock.try_lock("k").await.unwrap();
    assert_eq!(guard.lost().await, LostReason::Gone);
    assert!(began.elapsed() <= ms(3_100), "{:?}", began.elapsed());
    drop(guard);
    sleep(ms(10)).await;
    assert!(taken.is_valid());
}

#[tokio::test(start_paused = true)]
async fn revoke_frees_a_key_from_all_its_readers_and_a_single_slot() {
    let (_nodes, [redlock, other]) = processes();
    let readers = [
        redlock.try_lock("k").shared().await.unwrap(),
        other.try_lock("k").shared().await.unwrap(),
    ];
    assert_eq!(other.revoke("k").await.unwrap().held, 3);
    for reader in &readers {
        reader.lost().await;
    }
    let alone = redlock.try_lock("k").await.unwrap();
    drop(readers);
    sleep(ms(10)).await;
    assert!(alone.is_valid());

    let slot = || redlock.try_lock("s").slots(2);
    let slots = [slot().await.unwrap(), slot().await.unwrap()];
    redlock.revoke(("s", "slot", 1)).await.unwrap();
    for guard in slots {
        assert_eq!(guard.is_valid(), guard.slot() == Some(0));
    }
}

/// How a lock is asked for.
type Kind = fn(LockRequest) -> LockRequest;

/// The successor may have begun before the release.
#[tokio::test(start_paused = true)]
async fn release_of_a_lock_that_another_process_took_over_is_an_error() {
    let kinds: [(&str, Kind); 4] = [
        ("alone", |lock| lock),
        ("shared", LockRequest::shared),
        ("slots", |lock| lock.slots(2)),
        ("stays taken", |lock| lock.hold_at_least(secs(5))),
    ];
    for (keys, fencing) in [(&["k"][..], true), (&["k", "l"], true), (&["k"], false)] {
        for (kind, of) in kinds {
            let what = format!("{kind}, {keys:?}, fencing: {fencing}");
            let nodes = ScriptedNodes::new(3);
            let process = || builder(&nodes).fencing(fencing).build().unwrap();
            let (one, other) = (process(), process());
            let lock = |redlock: &Redlock| of(redlock.lock_all(keys.iter().copied()));
            let guard = lock(&one).await.unwrap();
            // What a majority has forgotten is free for others.
            nodes.wipe(0);
            nodes.wipe(1);
            let (log, logging) = Log::subscribed();
            let lost = Err(ReleaseError::Lost(LostReason::Gone));
            assert_eq!(guard.release().await, lost, "{what}");
            assert!(log.text().contains("lock lost"), "{what}: {}", log.text());
            drop(logging);
            nodes.wipe(2);
            let guard = lock(&other).await.unwrap();
            // One node that has forgotten the lock does not matter.
            nodes.wipe(0);
            assert_eq!(guard.release().await, Ok(Released::Freed), "{what}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn revoke_of_a_free_key_is_no_error() {
    let (nodes, [redlock]) = processes();
    let before = redlock.try_lock("k").await.unwrap().fencing_token();
    sleep(ms(10)).await;
    for failing in 0..2 {
        let revoked = redlock.revoke("k").await.unwrap();
        assert!(!revoked.was_held());
        assert_eq!((revoked.held, revoked.failures.len()), (0, failing));
        assert_eq!(nodes.sent(1, OpKind::Inspect), failing + 1);
        nodes.set(0, Gate::Failing);
    }
    // That no majority knows of a lock is another thing.
    nodes.set(1, Gate::Failing);
    let refused = redlock.revoke("k").await.unwrap_err();
    match &refused {
        LockError::Unavailable {
            reached: 1, nodes, ..
        } => assert_eq!(nodes.len(), 2),
        _ => panic!("{refused}"),
    }
    // It changes nothing.
    (0..3).for_each(|node| nodes.set(node, Gate::Ready));
    assert_eq!(nodes.sent(2, OpKind::Revoke), 0);
    assert_eq!(redlock.inspect("k").await.fencing_token(), before);
    assert!(redlock.try_lock("k").await.unwrap().fencing_token() > before);
}

#[tokio::test(start_paused = true)]
async fn a_revocation_that_frees_nothing_does_not_touch_the_holder() {
    let (nodes, [redlock]) = processes();
    let guard = redlock.try_lock("k").await.unwrap();
    (0..3).for_each(|node| nodes.wipe(node));
    assert!(!redlock.revoke("k").await.unwrap().was_held());
    assert!(guard.is_valid());
    assert_ne!(guard.lost().await, LostReason::Revoked);
}

/// The key may belong to another holder when a node that was stopped goes on.
#[tokio::test(start_paused = true)]
async fn a_revocation_that_a_node_gets_late_frees_nothing() {
    let (nodes, [redlock, other]) = processes();
    let stuck = other.try_lock("k").await.unwrap();
    nodes.set_for(2, OpKind::Revoke, Gate::Slow(secs(1)));
    let revoked = redlock.revoke("k").await.unwrap();
    assert_eq!((revoked.held, revoked.failures.len()), (2, 1));
    drop(stuck);
    sleep(ms(10)).await;
    Foreign::holding("k", &nodes, secs(10));
    sleep(secs(2)).await;
    assert_eq!(nodes.locks(), [1; 3]);
}

/// A caller that is granted the key during the call has nothing to do with it.
#[tokio::test(start_paused = true)]
async fn a_caller_that_is_granted_the_key_during_a_revocation_keeps_it() {
    let (nodes, [redlock, other]) = processes();
    let stuck = other.try_lock("k").await.unwrap();
    let waiting = tokio::spawn(redlock.lock("k").wait(secs(5)).into_future());
    sleep(ms(20)).await;
    nodes.set_for(2, OpKind::Revoke, Gate::Never);
    redlock.revoke("k").await.unwrap();
    let next = waiting.await.unwrap().unwrap();
    assert!(next.is_valid());
    sleep(secs(1)).await;
    assert!(next.is_valid());
    drop(stuck);
}

#[tokio::test(start_paused = true)]
async fn a_late_revocation_takes_no_vote_of_a_later_holder() {
    let (nodes, [redlock]) = processes();
    let stuck = Foreign::holding("k", &nodes, secs(10));
    nodes.set_for(2, OpKind::Revoke, Gate::Slow(ms(40)));
    let operator = redlock.clone();
    let revoking = tokio::spawn(async move { operator.revoke("k").await });
    sleep(ms(10)).await;
    // The stuck holder goes on, and releases there; the next one is granted the key.
    stuck.send(&nodes, 2, Op::Release);
    Foreign::holding("k", &nodes, secs(10));
    assert_eq!(revoking.await.unwrap().unwrap().held, 2);
    assert_eq!(nodes.locks(), [1; 3]);
}

#[tokio::test(start_paused = true)]
async fn a_key_is_held_for_as_long_as_a_majority_keeps_it() {
    let nodes = ScriptedNodes::new(5);
    let [redlock, _] = processes_of(&nodes);
    let holder = Foreign::new("k");
    for (node, seconds) in [(0, 4), (1, 9), (2, 7), (3, 2), (4, 8)] {
        holder.acquire(&nodes, node, secs(seconds));
    }
    for left in [secs(7), secs(4)].map(Some) {
        let state = redlock.inspect("k").await.state();
        assert_eq!(state, Some(KeyState::Held { left }));
        nodes.set(2, Gate::Failing);
    }
}

/// A candidate has left its value on a node, and another node does not answer.
#[tokio::test(start_paused = true)]
async fn revoke_frees_a_majority_of_a_stuck_holder_beside_a_leftover_of_another_caller() {
    for _ in 0..4 {
        let (nodes, [redlock, other]) = processes();
        let stuck = other.try_lock("k").ttl(secs(9)).await.unwrap();
        nodes.wipe(2);
        Foreign::new("k").acquire(&nodes, 2, secs(10));
        nodes.set(0, Gate::Never);
        assert_eq!(redlock.revoke("k").await.unwrap().held, 2);
        assert_eq!(nodes.locks()[1..], [0, 0]);
        assert!(redlock.try_lock("k").await.is_ok());
        drop(stuck);
    }
}

/// Its holder may go on for long, and must not keep the key where the revocation has failed.
#[tokio::test(start_paused = true)]
async fn revoked_lock_is_not_renewed_where_the_revocation_has_failed() {
    let (nodes, [redlock]) = processes();
    let guard = redlock.try_lock("k").await.unwrap();
    nodes.set_for(0, OpKind::Revoke, Gate::Failing);
    assert_eq!(redlock.revoke("k").await.unwrap().held, 2);
    assert_eq!(nodes.locks(), [1, 0, 0]);
    sleep(secs(11)).await;
    assert_eq!(nodes.locks(), [0; 3]);
    assert_eq!(nodes.sent(0, OpKind::Confirm), 0);
    drop(guard);
}
