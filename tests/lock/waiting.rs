//! `wait` and `Retry`: waiters of one process, of several processes, and split votes.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use support::{ms, secs, set_all};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout};
use tower_redlock::Redlock;
use tower_redlock::protocol::Retry;
use tower_redlock::protocol::message::Op;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes, SimNetwork, SimRequest};

use crate::common::{Foreign, builder, held_for, is_contended, polling, processes};

// Rules: http.queue
#[tokio::test(start_paused = true)]
async fn local_waiters_are_granted_in_the_order_of_their_requests() {
    let (nodes, [redlock]) = processes();
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
    let elapsed = released.elapsed();
    assert!(elapsed <= ms(20 * 11), "{elapsed:?}");
}

#[tokio::test(start_paused = true)]
async fn wait_that_ends_returns_contended_with_retry_after() {
    let (_nodes, [here, there]) = processes();
    let guard = here.try_lock("k").await.unwrap();
    for other in [&here, &there] {
        for wait in [ms(0), ms(1), ms(777), secs(7)] {
            let began = Instant::now();
            let left = held_for(other.lock("k").wait(wait)).await;
            assert!(left > secs(5) && left <= secs(10), "{left:?}");
            let waited = began.elapsed();
            assert!(waited >= wait && waited <= wait + ms(2), "{waited:?}");
        }
    }
    assert!(guard.is_valid());
}

#[tokio::test(start_paused = true)]
async fn waiter_that_no_node_tells_of_releases_polls_ever_more_rarely() {
    let nodes = ScriptedNodes::new(3);
    Foreign::holding("k", &nodes, secs(60));
    (0..3).for_each(|node| nodes.silence(node));
    let retry = Retry::new(ms(10), secs(1)).poll_interval(Duration::MAX);
    let redlock = builder(&nodes).retry(retry).build().unwrap();
    assert!(is_contended(&redlock.lock("k").wait(secs(20)).await));
    // One a second at least; with the first delay for all of them, there were thousands.
    let sent = nodes.sent(0, OpKind::Acquire);
    assert!((20..100).contains(&sent), "{sent}");
}

#[tokio::test(start_paused = true)]
async fn lock_of_a_dead_process_is_granted_as_soon_as_it_expires() {
    let nodes = ScriptedNodes::new(3);
    Foreign::holding("k", &nodes, secs(2));
    let began = Instant::now();
    let redlock = builder(&nodes).build().unwrap();
    drop(redlock.lock("k").await.unwrap());
    let waited = began.elapsed();
    // The nodes said when it expires, so the wait is not a blind one: at most one base delay more.
    let expected = secs(2)..=secs(2) + ms(13);
    assert!(expected.contains(&waited), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn retry_without_a_delay_does_not_spin_on_a_paused_clock() {
    let nodes = ScriptedNodes::new(3);
    Foreign::holding("k", &nodes, secs(60));
    let retry = Retry::new(Duration::ZERO, Duration::ZERO);
    let redlock = builder(&nodes).retry(retry).wait(ms(20)).build().unwrap();
    assert!(is_contended(&redlock.lock("k").await));
    assert!(nodes.sent(0, OpKind::Acquire) <= 22);
}

/// The links of a process to two nodes, which take their time: requests of two services of this process would reach
/// all nodes in the same order. There is none to the third node.
#[derive(Debug)]
struct Links {
    nodes: ScriptedNodes,
    delays: [Duration; 2],
    attempts: AtomicUsize,
}

impl Links {
    fn to(nodes: &ScriptedNodes, delays: [Duration; 2]) -> Arc<Self> {
        let (nodes, attempts) = (nodes.clone(), AtomicUsize::new(0));
        Arc::new(Self {
            nodes,
            delays,
            attempts,
        })
    }
}

impl SimNetwork for Links {
    fn carry(&self, node: usize, request: SimRequest) {
        if node == 0 && matches!(request.command().op, Op::Acquire { .. }) {
            self.attempts.fetch_add(1, Ordering::SeqCst);
        }
        let Some(delay) = self.delays.get(node).copied() else {
            return;
        };
        let nodes = self.nodes.clone();
        tokio::spawn(async move {
            sleep(delay).await;
            let reply = nodes.apply(node, request.command());
            request.answer(Ok(reply));
        });
    }
}

// Rules: lock.split
#[tokio::test(start_paused = true)]
async fn split_votes_grant_exactly_one_caller_without_a_wait() {
    // By chance, one in 300 has no winner. Of this many, fewer than one in 100 have none.
    let rounds = 2_000;
    let (mut wins, mut splits) = ([0; 2], 0);
    for round in 0..rounds {
        let nodes = ScriptedNodes::new(3);
        // Each of the two nodes is nearer to one of the two processes, so each process gets its own.
        let (near, far) = (ms(1), ms(2 + round % 2));
        let links = [[near, far], [far, near]].map(|delays| Links::to(&nodes, delays));
        let [ours, theirs] = links.each_ref().map(|links| {
            let links: Arc<dyn SimNetwork> = Arc::<Links>::clone(links);
            let redlock = Redlock::builder().simulated(3, links).build().unwrap();
            redlock.try_lock("k").into_future()
        });
        let outcomes = tokio::join!(ours, theirs);
        let granted = [outcomes.0.is_ok(), outcomes.1.is_ok()];
        assert_ne!(granted, [true; 2], "two winners in round {round}");
        for (wins, is_granted) in wins.iter_mut().zip(granted) {
            *wins += u64::from(is_granted);
        }
        let attempts = links.map(|links| links.attempts.load(Ordering::SeqCst));
        splits += u64::from(attempts.iter().any(|attempts| *attempts > 1));
    }
    assert!(splits > rounds / 2, "{splits} splits in {rounds} rounds");
    let winners: u64 = wins.iter().sum();
    assert!(winners * 100 >= rounds * 99, "{winners} of {rounds}");
    // Neither by the other one giving up.
    assert!(wins.iter().all(|wins| *wins > rounds / 10), "{wins:?}");
}

/// As many callers as there are slots, or more, whichever slots they ask for at first.
// Rules: slots
#[tokio::test(start_paused = true)]
async fn split_votes_leave_no_slot_free_for_which_a_caller_is_refused() {
    for (round, slots) in (0..300).flat_map(|round| [(round, 4), (round, 8), (round, 9)]) {
        let nodes = ScriptedNodes::new(3);
        let (near, far) = (ms(1), ms(2 + round % 2));
        let others = [ms(1 + round % 3), ms(1 + round % 2)];
        let processes = [[near, far], [far, near], others].map(|delays| {
            let redlock = Redlock::builder().simulated(3, Links::to(&nodes, delays));
            redlock.node_timeout(secs(1)).build().unwrap()
        });
        let lock = |caller: usize| processes[caller % 3].try_lock("k").slots(slots);
        let callers = 0..slots + [0, 3][slots % 2];
        let outcomes = join_all(callers.map(|caller| lock(caller).into_future())).await;
        let taken = outcomes.iter().flatten().map(|guard| guard.slot());
        let taken: BTreeSet<_> = taken.collect();
        assert_eq!(taken.len(), slots, "round {round}: {outcomes:?}");
    }
}

/// One node is the holder's, one is down, and the third grants: that is what a split vote looks like.
// Rules: lock.split
#[tokio::test(start_paused = true)]
async fn possible_split_vote_delays_contended_by_at_most_one_node_timeout() {
    let mut longest = Duration::ZERO;
    for _ in 0..200 {
        let nodes = ScriptedNodes::new(3);
        Foreign::new("k").acquire(&nodes, 0, secs(10));
        nodes.set(1, Gate::Down);
        let redlock = builder(&nodes).build().unwrap();
        let asked = Instant::now();
        assert!(is_contended(&redlock.try_lock("k").await));
        longest = longest.max(asked.elapsed());
    }
    // And one tick of the timer.
    assert!(longest <= ms(50) + ms(1), "{longest:?}");
}

/// The release before it may not have been published, because this caller waited; so its own is.
#[tokio::test(start_paused = true)]
async fn attempt_that_is_dropped_wakes_the_waiters_of_other_processes() {
    let nodes = ScriptedNodes::new(3);
    let [here, there] = polling(&nodes, secs(60));
    let holder = Foreign::holding("k", &nodes, secs(300));
    let waiting = tokio::spawn(there.lock("k").wait(secs(300)).into_future());
    sleep(ms(10)).await;
    // Made by hand, this is not published.
    (0..3).for_each(|node| drop(holder.send(&nodes, node, Op::Release)));
    sleep(ms(10)).await;
    assert!(!waiting.is_finished());
    set_all(&nodes, OpKind::Acquire, Gate::Slow(ms(20)));
    let dropped = timeout(ms(10), here.try_lock("k").into_future()).await;
    assert!(dropped.is_err());
    let granted = timeout(secs(1), waiting).await.expect("it is woken");
    assert!(granted.unwrap().is_ok());
}

/// Another process holds a majority, and the attempts get a node that has forgotten it: each of them is a split vote, but
/// no more is to be expected of the next ones.
#[tokio::test(start_paused = true)]
async fn a_caller_behind_one_that_waits_for_long_after_split_votes_is_refused_at_once() {
    let (nodes, [here, there]) = processes();
    let _held = there.lock("k").await.unwrap();
    // The first to answer.
    nodes.wipe(0);
    let _waiting = tokio::spawn(here.lock("k").wait(secs(5)).into_future());
    sleep(ms(200)).await;
    let began = Instant::now();
    assert!(is_contended(&here.try_lock("k").await));
    assert!(began.elapsed() < ms(5), "{:?}", began.elapsed());
}
