//! `wait` and `Retry`: waiters of one process, of several processes, and split votes.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use support::{assert_matches, ms, secs};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout};
use tower_redlock::protocol::Retry;
use tower_redlock::protocol::message::{Op, Reply};
use tower_redlock::protocol::retry::split_delay;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{LockError, Redlock};

use crate::common::{Foreign, builder, polling, processes, random};

#[tokio::test(start_paused = true)]
async fn wait_and_max_hold_of_duration_max_do_not_overflow() {
    let (_nodes, [redlock]) = processes();
    let lock = redlock.lock("k").wait(Duration::MAX);
    let guard = lock.max_hold(Duration::MAX).await.unwrap();
    sleep(secs(60)).await;
    assert!(guard.is_valid());
    let waiting = tokio::spawn(redlock.lock("k").wait(Duration::MAX).into_future());
    sleep(secs(60)).await;
    drop(guard);
    assert!(waiting.await.unwrap().is_ok());
}

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
            let refused = other.lock("k").wait(wait).await;
            let Err(LockError::Contended { retry_after, .. }) = refused else {
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
async fn waiter_that_no_node_tells_of_releases_polls_ever_more_rarely() {
    let nodes = ScriptedNodes::new(3);
    let holder = Foreign::new("k");
    (0..3).for_each(|node| {
        nodes.silence(node);
        drop(holder.acquire(&nodes, node, secs(60)));
    });
    let retry = Retry::new(ms(10), secs(1)).poll_interval(Duration::MAX);
    let redlock = builder(&nodes).retry(retry).build().unwrap();
    let refused = redlock.lock("k").wait(secs(20)).await;
    assert_matches!(refused, Err(LockError::Contended { .. }));
    // One a second at least; with the first delay for all of them, there were thousands.
    let sent = nodes.sent(0, OpKind::Acquire);
    assert!((20..100).contains(&sent), "{sent}");
}

#[tokio::test(start_paused = true)]
async fn lock_of_a_dead_process_is_granted_as_soon_as_it_expires() {
    let nodes = ScriptedNodes::new(3);
    let dead = Foreign::new("k");
    (0..3).for_each(|node| drop(dead.acquire(&nodes, node, secs(2))));
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
    let holder = Foreign::new("k");
    (0..3).for_each(|node| drop(holder.acquire(&nodes, node, secs(60))));
    let retry = Retry::new(Duration::ZERO, Duration::ZERO);
    let redlock = builder(&nodes).retry(retry).wait(ms(20)).build().unwrap();
    let refused = redlock.lock("k").await;
    assert_matches!(refused, Err(LockError::Contended { .. }));
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
            sleep(split_delay(attempt, now - asked, random())).await;
        }
        unreachable!()
    }
}

// Rules: lock.split
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
    assert!(splits > rounds / 2, "{splits} splits in {rounds} rounds");
    let winners = our_wins + their_wins;
    assert!(winners * 100 >= rounds * 99, "{winners} of {rounds}");
    // Neither by the other one giving up.
    let fewest = our_wins.min(their_wins);
    assert!(fewest > rounds / 10, "{our_wins} and {their_wins}");
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
        let refused = redlock.try_lock("k").await;
        assert_matches!(refused, Err(LockError::Contended { .. }));
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
        let services = services.iter();
        let asking = services.map(|redlock| redlock.try_lock("k").into_future());
        let outcomes = futures_util::future::join_all(asking).await;
        let granted = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
        assert!(granted <= 1, "two winners in round {round}");
        winners += granted;
    }
    assert!(winners * 100 >= rounds * 99, "{winners} of {rounds}");
}

/// The release before it may not have been published, because this caller waited; so its own is.
#[tokio::test(start_paused = true)]
async fn attempt_that_is_dropped_wakes_the_waiters_of_other_processes() {
    let nodes = ScriptedNodes::new(3);
    let [here, there] = polling(&nodes, secs(60));
    let holder = Foreign::new("k");
    (0..3).for_each(|node| drop(holder.acquire(&nodes, node, secs(300))));
    let waiting = tokio::spawn(there.lock("k").wait(secs(300)).into_future());
    sleep(ms(10)).await;
    // Made by hand, this is not published.
    (0..3).for_each(|node| drop(holder.send(&nodes, node, Op::Release)));
    sleep(ms(10)).await;
    assert!(!waiting.is_finished());
    (0..3).for_each(|node| nodes.set_for(node, OpKind::Acquire, Gate::Slow(ms(20))));
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
    let refused = here.try_lock("k").await;
    assert_matches!(refused, Err(LockError::Contended { .. }));
    assert!(began.elapsed() < ms(5), "{:?}", began.elapsed());
}
