//! Callers of one process that want the same free key at once: only a key that some caller holds is contended.

use std::collections::BTreeSet;
use std::future::IntoFuture;
use std::pin::pin;
use std::time::Duration;

use support::{ms, real_runtime, redlock, secs, set_all};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{LockError, LockRequest, OnceError, Redlock};

use crate::common::held_for;

/// Requests of all kinds that want the same.
const KINDS: [(&str, fn(&Redlock) -> LockRequest); 8] = [
    ("try_lock", |redlock| redlock.try_lock("k")),
    ("a short wait", |redlock| redlock.lock("k").wait(ms(5))),
    ("a long wait", |redlock| redlock.lock("k").wait(secs(60))),
    ("a reader", |redlock| redlock.try_lock("k").shared()),
    ("one of two slots", |redlock| redlock.try_lock("k").slots(2)),
    ("a slot, with a wait", |redlock| {
        redlock.lock("k").slots(2).wait(secs(60))
    }),
    ("a set", |redlock| {
        redlock.lock_all(["k", "l"]).wait(Duration::ZERO)
    }),
    ("a set, with a wait", |redlock| {
        redlock.lock_all(["k", "l"]).wait(secs(60))
    }),
];

/// Sends 32 requests at once, and returns their outcomes, as the names of their errors, with their times.
async fn crowd(
    redlock: &Redlock,
    request: fn(&Redlock) -> LockRequest,
) -> Vec<(&'static str, Duration)> {
    let began = Instant::now();
    let mut calls = JoinSet::new();
    for _ in 0..32 {
        let request = request(redlock).into_future();
        calls.spawn(async move {
            let outcome = match request.await {
                Ok(guard) => {
                    sleep(ms(1)).await;
                    drop(guard);
                    "granted"
                }
                Err(LockError::Contended { .. }) => "contended",
                Err(LockError::Unavailable { .. }) => "unavailable",
                Err(LockError::Closed) => "closed",
                Err(_) => "another",
            };
            (outcome, began.elapsed())
        });
    }
    calls.join_all().await
}

fn names(outcomes: &[(&'static str, Duration)]) -> BTreeSet<&'static str> {
    outcomes.iter().map(|(name, _)| *name).collect()
}

/// Nodes that are silent, refuse, are down, or answer late: all callers hear of it from the first that asks, or from the
/// second if they wait.
#[tokio::test(start_paused = true)]
async fn outage_fails_all_callers_of_a_crowd_at_once() {
    for gate in [Gate::Never, Gate::Failing, Gate::Down, Gate::Slow(ms(200))] {
        for (kind, request) in KINDS {
            let nodes = ScriptedNodes::new(3);
            nodes.set(1, gate);
            nodes.set(2, gate);
            let outcomes = crowd(&redlock(&nodes), request).await;
            assert_eq!(names(&outcomes), ["unavailable"].into(), "{kind}, {gate:?}");
            let last = outcomes.iter().map(|(_, after)| *after).max().unwrap();
            let attempts = match kind {
                "a long wait" | "a slot, with a wait" | "a set, with a wait" => 2,
                _ => 1,
            };
            let bound = attempts * ms(50) + ms(5);
            assert!(last <= bound, "{kind}, {gate:?}: {last:?}");
            // Callers ask that do not wait for others.
            let asking = match kind {
                _ if matches!(gate, Gate::Failing | Gate::Down) => continue,
                "a reader" => 32,
                "one of two slots" | "a slot, with a wait" => 2,
                _ => usize::try_from(attempts).unwrap(),
            };
            assert_eq!(nodes.sent(0, OpKind::Acquire), asking, "{kind}, {gate:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn outage_fails_all_executions_of_a_crowd_at_once() {
    let nodes = ScriptedNodes::new(3);
    nodes.set(1, Gate::Never);
    nodes.set(2, Gate::Never);
    let redlock = redlock(&nodes);
    let began = Instant::now();
    let mut calls = JoinSet::new();
    for wait in [ms(0), ms(5), secs(60)].repeat(10) {
        let once = redlock.once("k").wait(wait);
        calls.spawn(once.run(|_| async { Ok::<_, ()>(()) }));
    }
    for outcome in calls.join_all().await {
        let Err(OnceError::Lock(LockError::Unavailable { .. })) = outcome else {
            panic!("{outcome:?}");
        };
    }
    assert!(began.elapsed() <= ms(105), "{:?}", began.elapsed());
}

/// The others are refused for the one that is granted.
#[tokio::test(start_paused = true)]
async fn crowd_at_a_free_key_is_contended_only_once_it_is_granted() {
    let nodes = ScriptedNodes::new(3);
    set_all(&nodes, OpKind::Acquire, Gate::Slow(ms(20)));
    for (kind, request) in KINDS {
        let outcomes = crowd(&redlock(&nodes), request).await;
        let granted = outcomes.iter().filter(|(name, _)| *name == "granted");
        let first = granted.clone().map(|(_, after)| *after).min().unwrap();
        for (name, after) in &outcomes {
            assert!(*name != "unavailable" && *after >= ms(20), "{kind}");
            let is_in_time = *name == "granted" || *after < first + ms(2);
            assert!(is_in_time, "{kind}: {after:?}");
        }
        if kind.contains("long wait") || kind.contains("with a wait") || kind == "a reader" {
            assert_eq!(granted.count(), 32, "{kind}");
        }
    }
}

/// The caller that asks goes away: the next one asks, and is not refused for a key that is free.
#[tokio::test(start_paused = true)]
async fn caller_that_leaves_while_it_asks_is_followed_by_the_next() {
    for (kind, request) in KINDS {
        let nodes = ScriptedNodes::new(3);
        set_all(&nodes, OpKind::Acquire, Gate::Slow(ms(20)));
        let redlock = redlock(&nodes);
        let mut leaving = JoinSet::new();
        for _ in 0..2 {
            leaving.spawn(request(&redlock).into_future());
        }
        tokio::task::yield_now().await;
        let staying = tokio::spawn(request(&redlock).into_future());
        sleep(ms(10)).await;
        leaving.shutdown().await;
        let outcome = staying.await.unwrap();
        assert!(outcome.is_ok(), "{kind}: {outcome:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn drain_while_a_caller_asks_closes_all_that_wait_for_its_decision() {
    for (kind, request) in KINDS.into_iter().filter(|(kind, _)| *kind != "a reader") {
        let nodes = ScriptedNodes::new(3);
        set_all(&nodes, OpKind::Acquire, Gate::Slow(ms(20)));
        let redlock = redlock(&nodes);
        let drain = async {
            sleep(ms(2)).await;
            redlock.drain(secs(1)).await
        };
        let (outcomes, _) = tokio::join!(crowd(&redlock, request), drain);
        assert_eq!(names(&outcomes), ["closed", "granted"].into(), "{kind}");
    }
}

#[tokio::test(start_paused = true)]
async fn set_that_waits_for_one_key_blocks_no_other_one() {
    let nodes = ScriptedNodes::new(3);
    let (here, there) = (redlock(&nodes), redlock(&nodes));
    for held_here in [true, false] {
        let holder = if held_here { &here } else { &there };
        let b = holder.lock("b").await.unwrap();
        let set = tokio::spawn(here.lock_all(["a", "b", "c"]).wait(secs(60)).into_future());
        // Far more often than a set gives way when it is its turn.
        for round in 0..50 {
            sleep(ms(97)).await;
            let (a, c) = tokio::join!(here.lock("a").wait(ms(100)), here.try_lock("c"));
            assert!(a.is_ok() && c.is_ok(), "{held_here}, {round}: {a:?}, {c:?}");
        }
        drop(b);
        let began = Instant::now();
        assert!(set.await.unwrap().is_ok());
        assert!(began.elapsed() < secs(5), "{:?}", began.elapsed());
    }
}

/// The future of a caller that asks may not be polled again, and its place in the queue is not given up either.
#[tokio::test(start_paused = true)]
async fn caller_whose_future_is_not_polled_does_not_keep_others_from_the_key() {
    let nodes = ScriptedNodes::new(3);
    set_all(&nodes, OpKind::Acquire, Gate::Slow(ms(20)));
    for wait in [Duration::ZERO, secs(5)] {
        let redlock = redlock(&nodes);
        let mut asking = pin!(redlock.lock("k").into_future());
        let mut queued = pin!(redlock.lock("k").into_future());
        for stopped in [asking.as_mut(), queued.as_mut()] {
            assert!(timeout(ms(1), stopped).await.is_err());
        }
        // What was sent is granted by the nodes, until its ttl: they decide.
        let began = Instant::now();
        held_for(redlock.lock("k").wait(wait)).await;
        assert!(began.elapsed() <= wait + ms(500), "{:?}", began.elapsed());
        sleep(secs(10)).await;
        assert!(redlock.try_lock("k").await.is_ok());
    }
}

/// The lease task cannot see the end of its lock, because the home was not run meanwhile.
#[test]
#[expect(clippy::disallowed_methods, reason = "it is to rest")]
fn lock_that_ended_while_its_home_rested_goes_to_the_next_caller() {
    let home = real_runtime();
    for is_dropped in [true, false] {
        let redlock = Redlock::builder().embedded(3).ttl(ms(200)).build().unwrap();
        let guard = home.block_on(redlock.lock("k").into_future()).unwrap();
        let kept = (!is_dropped).then_some(guard);
        std::thread::sleep(ms(300));
        home.block_on(async {
            let began = Instant::now();
            let next = redlock.lock("k").wait(secs(10)).await;
            assert!(next.is_ok(), "{next:?}");
            assert!(began.elapsed() < secs(5), "{:?}", began.elapsed());
            next.unwrap().release().await.unwrap();
        });
        assert!(kept.is_none_or(|guard| !guard.is_valid()));
    }
}
