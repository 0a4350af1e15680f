//! Callers that are dropped at every poll, with every kind of node, and panics: no key is left.

use std::future::IntoFuture;
use std::pin::pin;
use std::time::Duration;

use support::{assert_matches, ms, poll_times, real_runtime, secs};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{ExtendError, LockError, LostReason, Redlock, ReleaseError, Released};

use crate::common::{builder, is_contended, process_with, processes, processes_of, spread_fences};

/// As that of all builders of these tests.
const TTL: Duration = secs(10);

/// That of a builder by default.
const NODE_TIMEOUT: Duration = ms(50);

/// Answers that come, but after the node timeout.
const TOO_SLOW: Duration = ms(120);

/// All that a node can do to a request.
const GATES: [Gate; 7] = [
    Gate::Ready,
    Gate::Slow(ms(20)),
    Gate::Slow(TOO_SLOW),
    Gate::Failing,
    Gate::Never,
    Gate::Mute,
    Gate::Down,
];

/// Every way in which three nodes can behave: whichever of them does what, or each of the three in its place.
fn all_gates(in_place: bool) -> Vec<[Gate; 3]> {
    let count = GATES.len();
    let mut all = Vec::new();
    for first in 0..count {
        for second in if in_place { 0 } else { first }..count {
            for third in if in_place { 0 } else { second }..count {
                all.push([first, second, third].map(|place| GATES[place]));
            }
        }
    }
    all
}

fn scene() -> (ScriptedNodes, Redlock) {
    process_with(|builder| builder)
}

fn set_all(nodes: &ScriptedNodes, gates: [Gate; 3]) {
    for (node, gate) in gates.into_iter().enumerate() {
        nodes.set(node, gate);
    }
}

fn set_all_for(nodes: &ScriptedNodes, kind: OpKind, gates: [Gate; 3]) {
    for (node, gate) in gates.into_iter().enumerate() {
        nodes.set_for(node, kind, gate);
    }
}

/// Ends the service and makes sure that this takes no longer than the nodes are waited for.
async fn drain(redlock: &Redlock, what: &str) {
    let began = Instant::now();
    let drained = redlock.drain(ms(60_000)).await;
    assert_eq!(drained.held, [], "{what}");
    // A second phase and a release, each at most one node timeout.
    assert!(began.elapsed() <= 3 * NODE_TIMEOUT, "{what}: {drained:?}");
}

/// Checks that no node has a lock after a drain, once what is on a slow wire has arrived.
async fn nothing_is_left(nodes: &ScriptedNodes, redlock: &Redlock, what: &str) {
    drain(redlock, what).await;
    sleep(TOO_SLOW).await;
    assert_eq!(nodes.locks(), [0, 0, 0], "{what}");
}

/// Drops the future of a lock at every poll until it completes, over all kinds of nodes.
async fn drop_the_acquisition_everywhere(keys: &[&str], fencing: bool, uneven: bool) {
    // With fences of their own, the nodes differ.
    for gates in all_gates(uneven) {
        for polls in 0.. {
            let what = format!("{keys:?}, {fencing}, {uneven}, {gates:?} after {polls} polls");
            let nodes = ScriptedNodes::new(3);
            if uneven {
                spread_fences(&nodes, keys[0]);
            }
            set_all(&nodes, gates);
            let build = || builder(&nodes).fencing(fencing).build().unwrap();
            let redlock = build();
            let request = redlock.lock_all(keys.iter().copied()).wait(Duration::ZERO);
            let mut asking = Box::pin(request.into_future());
            let outcome = poll_times(&mut asking, polls, 4).await;
            let finished = outcome.is_some();
            // A guard is dropped here too, at the moment it was handed out.
            drop((asking, outcome));

            nothing_is_left(&nodes, &redlock, &what).await;
            set_all(&nodes, [Gate::Ready; 3]);
            let other = build();
            let lock = other.lock_all(keys.iter().copied()).wait(Duration::ZERO);
            assert!(lock.await.is_ok(), "{what}");
            if finished {
                break;
            }
            assert!(polls < 100, "{what}: never finished");
        }
    }
}

// Rules: lock.release
#[tokio::test(start_paused = true)]
async fn acquisition_dropped_at_any_poll_of_either_phase_leaves_no_key() {
    for (keys, fencing, uneven) in [
        (&["k"][..], true, false),
        (&["k", "l"], true, true),
        (&["k"], false, false),
    ] {
        drop_the_acquisition_everywhere(keys, fencing, uneven).await;
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_lock_request_does_not_delay_the_next_caller_of_the_process() {
    for gates in all_gates(false) {
        for polls in 0..20 {
            let what = format!("{gates:?} after {polls} polls");
            let (nodes, redlock) = scene();
            set_all(&nodes, gates);
            let mut asking = Box::pin(redlock.try_lock("k").into_future());
            drop(poll_times(&mut asking, polls, 4).await);
            drop(asking);
            // The lease task sees it at its next turn, however the nodes are.
            yield_now().await;
            yield_now().await;

            let asked = nodes.sent(0, OpKind::Acquire);
            let mut asking = Box::pin(redlock.try_lock("k").into_future());
            drop(poll_times(&mut asking, 2, 4).await);
            assert_eq!(nodes.sent(0, OpKind::Acquire), asked + 1, "{what}");
            drop(asking);

            sleep(2 * TOO_SLOW).await;
            assert_eq!(nodes.locks(), [0, 0, 0], "{what}");
            set_all(&nodes, [Gate::Ready; 3]);
            assert!(redlock.try_lock("k").await.is_ok(), "{what}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn waiter_dropped_at_any_poll_leaves_the_queue_and_no_key() {
    for polls in 0..60 {
        let (nodes, redlock) = scene();
        let guard = redlock.lock("k").await.unwrap();
        let mut queued = Box::pin(redlock.lock("k").into_future());
        let mut behind = Box::pin(redlock.lock("k").into_future());
        assert!(poll_times(&mut queued, 1, 4).await.is_none());
        assert!(poll_times(&mut behind, 1, 4).await.is_none());
        if polls >= 10 {
            // The turn comes to the one that is about to go.
            drop(guard);
            drop(poll_times(&mut queued, polls - 10, 4).await);
            drop(queued);
        } else {
            drop(poll_times(&mut queued, polls, 4).await);
            drop((queued, guard));
        }
        let next = behind.await.unwrap();
        assert_eq!(nodes.locks(), [1, 1, 1], "after {polls} polls");
        drop(next);
        drain(&redlock, "waiter").await;
        assert_eq!(nodes.locks(), [0, 0, 0], "after {polls} polls");
    }
}

#[tokio::test(start_paused = true)]
async fn remote_waiter_dropped_at_any_poll_leaves_no_key() {
    for polls in 0..60 {
        let (nodes, [here, there]) = processes();
        let guard = there.lock("k").await.unwrap();
        // Released somewhere in the middle.
        tokio::spawn(async move {
            sleep(ms(70)).await;
            drop(guard);
        });
        let mut asking = Box::pin(here.lock("k").into_future());
        drop(poll_times(&mut asking, polls, 4).await);
        drop(asking);
        drain(&here, "polling waiter").await;
        sleep(ms(100)).await;
        assert_eq!(nodes.locks(), [0, 0, 0], "after {polls} polls");
        assert!(there.try_lock("k").await.is_ok(), "after {polls} polls");
    }
}

/// Whether a node with this gate carries releases out.
fn carries_out(gate: Gate) -> bool {
    matches!(gate, Gate::Ready | Gate::Slow(_) | Gate::Mute)
}

/// Whether a node with this gate answers in time.
fn answers(gate: Gate) -> bool {
    gate == Gate::Ready || matches!(gate, Gate::Slow(delay) if delay < NODE_TIMEOUT)
}

#[tokio::test(start_paused = true)]
async fn release_dropped_at_any_poll_releases_every_node_that_answers() {
    for gates in all_gates(false) {
        for polls in 0.. {
            let what = format!("{gates:?} after {polls} polls");
            let (nodes, redlock) = scene();
            let guard = redlock.try_lock("k").await.unwrap();
            assert_eq!(nodes.locks(), [1, 1, 1]);
            set_all_for(&nodes, OpKind::Release, gates);
            let mut releasing = Box::pin(guard.release());
            let outcome = poll_times(&mut releasing, polls, 4).await;
            drop(releasing);

            if let Some(outcome) = &outcome {
                let confirmed = gates.into_iter().filter(|gate| answers(*gate)).count();
                match outcome {
                    Ok(Released::Freed) => assert!(confirmed >= 2, "{what}"),
                    Err(ReleaseError::Unavailable { reached, .. }) => {
                        // Known as soon as two have failed; the third may still confirm.
                        assert!(*reached <= confirmed && confirmed < 2, "{what}");
                    }
                    _ => panic!("{what}: {outcome:?}"),
                }
            }
            drain(&redlock, &what).await;
            sleep(TOO_SLOW).await;
            let left = gates.map(|gate| usize::from(!carries_out(gate)));
            assert_eq!(nodes.locks(), left, "{what}");
            // Where no node receives the release, the ttl ends the lock.
            sleep(TTL).await;
            set_all(&nodes, [Gate::Ready; 3]);
            assert_eq!(nodes.locks(), [0, 0, 0], "{what}");
            let [other] = processes_of(&nodes);
            assert!(other.try_lock("k").await.is_ok(), "{what}");
            if outcome.is_some() {
                break;
            }
            assert!(polls < 100, "{what}: never finished");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn guard_dropped_during_a_renewal_leaves_no_key() {
    for gates in all_gates(false) {
        for after in [0, 10, 50, 60] {
            let what = format!("{gates:?} {after} ms into the renewal");
            let (nodes, redlock) = scene();
            let guard = redlock.try_lock("k").await.unwrap();
            set_all_for(&nodes, OpKind::Confirm, gates);
            sleep(TTL / 3 + ms(1 + after)).await;
            assert!(nodes.sent(0, OpKind::Confirm) > 0, "{what}");
            drop(guard);
            nothing_is_left(&nodes, &redlock, &what).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn extension_dropped_at_any_poll_leaves_a_valid_lock_that_can_be_released() {
    for gates in all_gates(false) {
        for polls in [0, 1, 2, 3, 4, 8, 12, 24] {
            let what = format!("{gates:?} after {polls} polls");
            let (nodes, redlock) = process_with(|builder| builder.renew(false));
            let guard = redlock.try_lock("k").await.unwrap();
            set_all_for(&nodes, OpKind::Confirm, gates);
            let end = Instant::now() + guard.valid_for();
            {
                let mut extending = pin!(guard.extend(TTL));
                drop(poll_times(&mut extending, polls, 4).await);
            }
            assert!(Instant::now() + guard.valid_for() >= end, "{what}");
            drop(guard);
            nothing_is_left(&nodes, &redlock, &what).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn panic_while_acquiring_is_a_lock_error_and_leaves_no_key() {
    for panicking in 0..3 {
        for uneven in [false, true] {
            let (nodes, redlock) = scene();
            let other = redlock.try_lock("other").await.unwrap();
            let kind = if uneven {
                // In the second phase.
                spread_fences(&nodes, "k");
                OpKind::Confirm
            } else {
                OpKind::Acquire
            };
            nodes.set_for(panicking, kind, Gate::Panic);
            let failed = redlock.try_lock("k").await;
            if uneven && failed.is_ok() {
                // Of the first two, the one with the higher fence need not confirm it.
                assert_eq!(panicking, 0);
                continue;
            }
            assert_matches!(failed, Err(LockError::Closed));
            assert_eq!(nodes.locks(), [1, 1, 1], "only the other key");
            // The key is free in the process as well, and other locks are unaffected.
            nodes.set(panicking, Gate::Ready);
            assert!(redlock.try_lock("k").await.is_ok());
            assert!(other.is_valid());
            assert_eq!(other.release().await, Ok(Released::Freed));
            drain(&redlock, "after a panic").await;
            assert_eq!(nodes.locks(), [0, 0, 0]);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn panic_while_renewing_resolves_lost_and_never_releases_under_the_guard() {
    let (nodes, redlock) = scene();
    let guard = redlock.try_lock("k").await.unwrap();
    let began = Instant::now();
    sleep(TTL / 6).await;
    let other = redlock.try_lock("other").await.unwrap();
    nodes.set_for(1, OpKind::Confirm, Gate::Panic);
    assert_eq!(guard.lost().await, LostReason::Abandoned);
    nodes.set(1, Gate::Ready);
    assert!(began.elapsed() <= TTL / 3 + ms(1), "at the renewal");
    assert!(!guard.is_valid() && guard.valid_for().is_zero());
    let refused = guard.extend(TTL).await;
    assert_eq!(refused, Err(ExtendError::Lost(LostReason::Abandoned)));

    // The holder may not have noticed yet, so the nodes still keep others out.
    assert_eq!(nodes.locks(), [2, 2, 2]);
    let [elsewhere] = processes_of(&nodes);
    assert!(is_contended(&elsewhere.try_lock("k").await));
    // The front of this process is free: the nodes are asked.
    let (asked, began) = (nodes.sent(0, OpKind::Acquire), Instant::now());
    assert!(redlock.try_lock("k").await.is_err());
    assert!(nodes.sent(0, OpKind::Acquire) > asked);
    assert!(began.elapsed() <= NODE_TIMEOUT);

    // By the ttl of the renewal that one node carried out, at the latest. Other locks are left alone.
    for _ in 0..30 {
        sleep(TTL / 10).await;
        assert!(other.is_valid());
    }
    assert_eq!(other.release().await, Ok(Released::Freed));
    assert_eq!(nodes.locks(), [0, 0, 0]);
    assert!(redlock.try_lock("k").await.is_ok());
    let released = guard.release().await;
    assert_eq!(released, Err(ReleaseError::Lost(LostReason::Abandoned)));
    drain(&redlock, "after a panic").await;
}

#[tokio::test(start_paused = true)]
async fn panic_while_releasing_leaves_the_key_to_its_ttl_and_the_local_queue_free() {
    for panicking in 0..3 {
        let (nodes, redlock) = scene();
        let guard = redlock.try_lock("k").await.unwrap();
        let (lost, handle) = (guard.lost(), guard.handle());
        nodes.set_for(panicking, OpKind::Release, Gate::Panic);
        let released = guard.release().await;
        let unknown = Err(ReleaseError::Lost(LostReason::Abandoned));
        assert_eq!(released, unknown);
        // It resolves, whatever it says.
        lost.await;
        assert!(!handle.is_valid());
        nodes.set(panicking, Gate::Ready);

        let asked = nodes.sent(0, OpKind::Acquire);
        drop(redlock.try_lock("k").await);
        assert!(nodes.sent(0, OpKind::Acquire) > asked, "asks the nodes");
        assert!(redlock.try_lock("other").await.is_ok());
        sleep(TTL).await;
        assert_eq!(nodes.locks(), [0, 0, 0]);
        assert!(redlock.try_lock("k").await.is_ok());
        drain(&redlock, "after a panic").await;
    }
}

/// A panic within a drop, while another one unwinds the task, would abort the process.
#[tokio::test(start_paused = true)]
async fn panic_of_every_request_aborts_nothing() {
    let (nodes, redlock) = scene();
    let guard = redlock.try_lock("held").await.unwrap();
    let reader = redlock.try_lock("read").shared().await.unwrap();
    let [elsewhere] = processes_of(&nodes);
    let waiting = elsewhere.lock("read").wait(TTL).into_future();
    let mut waiting = Box::pin(waiting);
    assert!(timeout(NODE_TIMEOUT, &mut waiting).await.is_err());
    assert!(nodes.sent(0, OpKind::Announce) > 0);
    set_all(&nodes, [Gate::Panic; 3]);
    // Takes back the announcement of a writer that waits, and its last attempt.
    drop(waiting);
    for request in [redlock.try_lock("k"), redlock.try_lock("k").shared()] {
        let failed = request.await;
        assert_matches!(failed, Err(LockError::Closed));
    }
    // Only one of the nodes panics, the one with the lower fence of the first two.
    set_all(&nodes, [Gate::Ready; 3]);
    nodes.set_for(1, OpKind::Confirm, Gate::Panic);
    nodes.set_for(1, OpKind::Release, Gate::Panic);
    spread_fences(&nodes, "uneven");
    drop(redlock.try_lock("uneven").await);
    assert_eq!(nodes.locks(), [2, 3, 2], "the others release it");
    set_all(&nodes, [Gate::Panic; 3]);
    let lost = Err(ReleaseError::Lost(LostReason::Abandoned));
    assert_eq!(guard.release().await, lost);
    assert_eq!(reader.release().await, lost);
}

#[test]
fn lock_future_dropped_outside_of_a_runtime_is_released_in_its_own() {
    let (nodes, redlock) = scene();
    set_all_for(&nodes, OpKind::Acquire, [Gate::Mute; 3]);
    set_all_for(&nodes, OpKind::Release, [Gate::Never; 3]);
    let mut request = redlock.lock("k").into_future();
    let runtime = real_runtime();
    runtime.block_on(async { timeout(NODE_TIMEOUT / 2, &mut request).await.ok() });
    drop(request);
    let drained = runtime.block_on(redlock.drain(TTL));
    assert_eq!(drained.unconfirmed.len(), 3, "{drained:?}");
    assert_eq!(nodes.sent(0, OpKind::Release), 1);
}

#[tokio::test(start_paused = true)]
async fn wait_ends_at_its_deadline_although_the_waiter_is_not_polled() {
    let (_nodes, [other, redlock]) = processes();
    let held = other.lock("k").await.unwrap();
    let mut unpolled = redlock.lock("k").wait(ms(300)).into_future();
    assert!(timeout(ms(100), &mut unpolled).await.is_err());
    sleep(ms(300)).await;
    drop(held);
    assert!(redlock.lock("k").wait(ms(100)).await.is_ok());
    // Nor does it keep a shutdown waiting.
    let _held = other.lock("l").await.unwrap();
    let mut unpolled = redlock.lock("l").wait(TTL).into_future();
    assert!(timeout(ms(100), &mut unpolled).await.is_err());
    let began = Instant::now();
    redlock.drain(TTL).await;
    assert!(began.elapsed() < ms(100));
}
