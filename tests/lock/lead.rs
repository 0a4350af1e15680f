//! Leading: one process at a time does the work, with embedded nodes on a paused clock.

use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;
use support::{Executed, Log, assert_matches, ms, secs, subscribe};
use tokio::task::JoinHandle;
use tokio::time::{Instant, advance, sleep, timeout};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{FencingToken, LockError, LockGuard, Redlock, Retry};

use crate::common::{builder, is_contended, polling, process_with, processes, processes_of};

/// The terms of all leaders, in the order in which they began.
#[derive(Debug, Clone, Default)]
struct Terms {
    inside: Arc<AtomicUsize>,
    began: Arc<Mutex<Vec<(usize, FencingToken, Instant)>>>,
}

/// Counts a leader for as long as its work is there.
struct Inside(Arc<AtomicUsize>);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Terms {
    /// Begins the term of a process, which lasts until the returned value is dropped.
    fn begin(&self, process: usize, guard: &LockGuard) -> Inside {
        let before = self.inside.fetch_add(1, Ordering::SeqCst);
        assert_eq!(before, 0, "two leaders");
        let token = guard.fencing_token().unwrap();
        let began = (process, token, Instant::now());
        self.began.lock().unwrap().push(began);
        Inside(Arc::clone(&self.inside))
    }

    fn leaders(&self) -> Vec<usize> {
        let began = self.began.lock().unwrap();
        began.iter().map(|(process, ..)| *process).collect()
    }
}

/// Leads in a process of its own, for so long each time.
fn lead_for(
    term: Duration,
    redlock: &Redlock,
    process: usize,
    terms: &Terms,
) -> JoinHandle<Result<(), LockError>> {
    let terms = terms.clone();
    tokio::spawn(redlock.lead("k", move |guard| {
        let inside = terms.begin(process, &guard);
        async move {
            let _inside = (inside, guard);
            sleep(term).await;
        }
    }))
}

fn lead(redlock: &Redlock, process: usize, terms: &Terms) -> JoinHandle<Result<(), LockError>> {
    lead_for(Duration::MAX, redlock, process, terms)
}

#[tokio::test(start_paused = true)]
async fn one_process_leads_until_it_is_drained_and_the_next_one_follows_at_once() {
    let nodes = ScriptedNodes::new(3);
    let processes = processes_of::<3>(&nodes);
    let terms = Terms::default();
    let leading = processes.iter().enumerate();
    let leading = leading.map(|(number, redlock)| lead(redlock, number, &terms));
    let mut leading: Vec<_> = leading.collect();
    sleep(secs(60)).await;
    let mut left: Vec<usize> = (0..3).collect();
    while let Some(leader) = terms.leaders().last().copied().filter(|_| !left.is_empty()) {
        left.retain(|process| *process != leader);
        let began = Instant::now();
        let drained = processes[leader].drain(secs(5)).await;
        assert!(drained.is_clean(), "{drained:?}");
        let ended = std::mem::replace(&mut leading[leader], tokio::spawn(async { Ok(()) }));
        ended.await.unwrap().unwrap();
        assert!(began.elapsed() < ms(500), "{:?}", began.elapsed());
        sleep(ms(1_000)).await;
        let follows = usize::from(!left.is_empty());
        assert_eq!(terms.inside.load(Ordering::SeqCst), follows);
    }
    assert_eq!(terms.leaders().len(), 3);
    let terms = terms.began.lock().unwrap();
    let is_sorted = terms.is_sorted_by(|(_, one, _), (_, next, _)| one < next);
    assert!(is_sorted, "{terms:?}");
    assert_eq!(nodes.locks(), [0; 3]);
}

#[tokio::test(start_paused = true)]
async fn work_is_cancelled_when_the_lock_is_lost_and_begins_again_later() {
    let (nodes, [redlock]) = processes();
    let terms = Terms::default();
    let leading = lead(&redlock, 0, &terms);
    sleep(secs(5)).await;
    (0..2).for_each(|node| nodes.set(node, Gate::Failing));
    // The validity ends before the ttl.
    sleep(secs(10)).await;
    assert_eq!(terms.inside.load(Ordering::SeqCst), 0);
    sleep(secs(60)).await;
    assert!(!leading.is_finished());
    (0..2).for_each(|node| nodes.set(node, Gate::Ready));
    sleep(secs(15)).await;
    assert_eq!(terms.inside.load(Ordering::SeqCst), 1);
    assert_eq!(terms.leaders(), [0, 0]);
    // Revoked: deposed at once, and a candidate again.
    redlock.revoke("k").await.unwrap();
    sleep(secs(1)).await;
    assert_eq!(terms.leaders(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn leadership_is_logged_when_it_is_gained_and_lost() {
    let (_nodes, redlock) = process_with(|builder| builder);
    let (log, _guard) = Log::subscribed();
    let leading = redlock.lead(("report", 7), |_| std::future::pending());
    assert!(timeout(secs(1), leading.label("nightly")).await.is_err());
    let leading = redlock.lead(("report", 7), |_| std::future::pending());
    let revoked = async {
        sleep(secs(1)).await;
        redlock.revoke(("report", 7)).await.unwrap();
        sleep(secs(1)).await;
    };
    tokio::select! {
        _ = leading => unreachable!(),
        () = revoked => {}
    }
    let text = log.text();
    let events = text.lines().filter(|line| line.contains("leadership"));
    let events: Vec<_> = events
        .map(|line| {
            assert!(line.contains("INFO") && !line.contains("key"), "{line}");
            let is_gained = line.contains("redlock leadership gained");
            assert!(is_gained || line.contains("redlock leadership lost"));
            let resource = line.split("resource=").nth(1).unwrap();
            (is_gained, resource.split('"').nth(1).unwrap())
        })
        .collect();
    let term = |resource| [(true, resource), (false, resource)];
    let expected = [term("nightly"), term("report"), term("report")].concat();
    assert_eq!(events, expected, "{text}");
}

#[tokio::test(start_paused = true)]
async fn dropping_the_future_resigns() {
    let (nodes, [one, other]) = processes();
    let terms = Terms::default();
    let leading = lead(&one, 0, &terms);
    sleep(secs(1)).await;
    leading.abort();
    assert!(leading.await.unwrap_err().is_cancelled());
    assert_eq!(terms.inside.load(Ordering::SeqCst), 0);
    sleep(ms(10)).await;
    assert!(other.try_lock("k").await.is_ok());
    sleep(ms(10)).await;
    // A candidate that gives up leaves nothing either.
    let guard = one.try_lock("k").await.unwrap();
    let waiting = lead(&other, 1, &terms);
    sleep(secs(1)).await;
    waiting.abort();
    guard.release().await.unwrap();
    sleep(ms(100)).await;
    assert_eq!(nodes.locks(), [0; 3]);
    assert_eq!(terms.leaders(), [0]);
}

#[tokio::test(start_paused = true)]
async fn work_that_returns_lets_others_lead_and_leads_again() {
    let (_nodes, processes) = processes::<2>();
    let terms = Terms::default();
    for (number, redlock) in processes.iter().enumerate() {
        lead_for(ms(50), redlock, number, &terms);
    }
    sleep(secs(30)).await;
    for number in 0..2 {
        let leaders = terms.leaders();
        let turns = leaders.iter().filter(|leader| **leader == number);
        assert!(turns.count() > 20, "{leaders:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_the_work_is_passed_on_and_the_key_is_free() {
    let (_nodes, redlock) = process_with(|builder| builder);
    let leading = redlock.lead("k", |_guard| async { panic!("the work fails") });
    assert!(tokio::spawn(leading).await.unwrap_err().is_panic());
    sleep(ms(10)).await;
    assert!(redlock.try_lock("k").await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn requests_that_can_never_succeed_are_errors_and_others_are_repeated() {
    let (nodes, [redlock]) = processes();
    let work = |_guard| async {};
    let refused = redlock.lead("", work).await.unwrap_err();
    assert_matches!(refused, LockError::Key(_));
    let refused = redlock.lead("k", work).ttl(secs(1_000_000));
    let refused = refused.await.unwrap_err();
    assert_matches!(refused, LockError::TtlTooLong { .. });
    // Each grant comes after the lock is over.
    (0..3).for_each(|node| nodes.set(node, Gate::Slow(ms(45))));
    let late = redlock.lead("k", work).ttl(ms(40));
    assert!(timeout(secs(1), late).await.is_err());
    assert!(nodes.sent(0, OpKind::Acquire) > 1);
    let before = nodes.sent(0, OpKind::Acquire);
    (0..3).for_each(|node| nodes.set(node, Gate::Down));
    assert!(timeout(secs(60), redlock.lead("k", work)).await.is_err());
    // Every 125 ms on average; without longer pauses, every 5 ms.
    let asked = nodes.sent(0, OpKind::Acquire) - before;
    assert!((100..1_500).contains(&asked), "{asked}");
    // At a drain also while nodes are down.
    let leading = tokio::spawn(redlock.lead("k", work));
    sleep(secs(3)).await;
    redlock.drain(secs(1)).await;
    timeout(secs(1), leading).await.unwrap().unwrap().unwrap();
    let mut leading = redlock.lead("k", work);
    assert!((&mut leading).await.is_ok(), "it is drained");
    let again = timeout(secs(1), &mut leading).await;
    assert!(again.is_err(), "pending when it is polled again");
}

/// The key is one of the crate's ordinary keys, so other callers see that it is held, also if the guard was dropped before
/// the work began, as in `|_| async { .. }`.
#[tokio::test(start_paused = true)]
async fn the_key_is_held_while_the_process_leads_even_beyond_the_max_hold_of_the_builder() {
    let (_nodes, redlock) = process_with(|builder| builder.max_hold(secs(20)));
    let began = Executed::default();
    tokio::spawn(redlock.lead("k", {
        let began = began.clone();
        move |_guard| {
            began.one_more();
            std::future::pending::<()>()
        }
    }));
    for _ in 0..10 {
        sleep(secs(10)).await;
        assert!(redlock.try_lock("k").await.is_err());
    }
    assert_eq!(began.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn candidates_do_not_count_against_the_cap_on_waiters() {
    let (nodes, redlock) = process_with(|builder| builder.max_waiters(1));
    let [other] = processes_of(&nodes);
    let _leader = other.lock("leader").await.unwrap();
    for _ in 0..3 {
        tokio::spawn(redlock.lead("leader", |_| async {}));
    }
    sleep(secs(1)).await;
    let _guard = redlock.try_lock("x").await.unwrap();
    assert!(is_contended(&redlock.lock("x").wait(ms(100)).await));
}

/// The lease reports the loss late, because its thread was busy too.
#[tokio::test]
#[expect(clippy::disallowed_methods, reason = "it is to block the runtime")]
async fn work_that_blocks_its_thread_beyond_the_lock_is_not_polled_again() {
    let redlock = Redlock::builder().embedded(3).ttl(ms(200));
    let redlock = redlock.build().unwrap();
    let polls: Arc<Mutex<Vec<bool>>> = Arc::default();
    let leading = tokio::spawn(redlock.lead("k", {
        let polls = Arc::clone(&polls);
        move |guard: LockGuard| {
            let (polls, mut is_first) = (Arc::clone(&polls), true);
            poll_fn(move |context| {
                polls.lock().unwrap().push(guard.is_valid());
                if std::mem::take(&mut is_first) {
                    std::thread::sleep(ms(400));
                    // At once, before the runtime looks at its timers.
                    context.waker().wake_by_ref();
                }
                Poll::Pending
            })
        }
    }));
    sleep(ms(1_000)).await;
    leading.abort();
    let polls = polls.lock().unwrap();
    assert!(polls.len() > 1, "it leads again");
    assert!(polls.iter().all(|is_valid| *is_valid), "{polls:?}");
}

/// The pauses grow with the failures in a row, and begin anew with each term.
#[tokio::test(start_paused = true)]
async fn failed_campaigns_before_a_term_do_not_delay_the_next_one() {
    let retry = Retry::new(ms(10), secs(3_600));
    let (nodes, redlock) = process_with(|builder| builder.retry(retry));
    (0..3).for_each(|node| nodes.set(node, Gate::Down));
    let terms = Terms::default();
    lead_for(secs(1), &redlock, 0, &terms);
    // So many that the next pause would be one of minutes.
    while nodes.sent(0, OpKind::Acquire) < 16 {
        sleep(secs(1)).await;
    }
    (0..3).for_each(|node| nodes.set(node, Gate::Ready));
    while terms.leaders().is_empty() {
        sleep(secs(1)).await;
    }
    sleep(secs(25)).await;
    let terms = terms.began.lock().unwrap();
    assert!(terms.len() > 20, "{} terms", terms.len());
    for term in terms.windows(2) {
        let between = term[1].2 - term[0].2;
        assert!(between < ms(1_020), "{between:?}");
    }
}

/// Such as work that cannot connect to its database.
#[tokio::test(start_paused = true)]
async fn pauses_grow_between_terms_in_which_the_work_returns_at_once() {
    let (_nodes, redlock) = process_with(|builder| builder);
    let terms = Terms::default();
    lead_for(Duration::ZERO, &redlock, 0, &terms);
    sleep(secs(60)).await;
    let terms = terms.leaders().len();
    assert!((100..1_000).contains(&terms), "{terms} terms in a minute");
}

/// So that a process that ends after it has led leaves the key free.
#[tokio::test(start_paused = true)]
async fn the_future_ends_after_its_release_and_waits_no_longer_than_the_node_timeout() {
    for (gate, took) in [(Gate::Slow(ms(30)), ms(30)), (Gate::Never, ms(50))] {
        for keeps_guard in [false, true] {
            let (nodes, redlock) = process_with(|builder| builder.node_timeout(ms(50)));
            let kept: Arc<Mutex<Option<LockGuard>>> = Arc::default();
            let leading = tokio::spawn(redlock.lead("k", {
                let kept = Arc::clone(&kept);
                move |guard| {
                    if keeps_guard {
                        *kept.lock().unwrap() = Some(guard);
                    }
                    std::future::pending::<()>()
                }
            }));
            sleep(secs(1)).await;
            (0..3).for_each(|node| nodes.set_for(node, OpKind::Release, gate));
            let draining = tokio::spawn(async move { redlock.drain(secs(5)).await });
            let began = Instant::now();
            leading.await.unwrap().unwrap();
            // A guard that the work has passed on keeps the lock, and is not waited for.
            let expected = if keeps_guard { ms(0) } else { took };
            let (elapsed, expected) = (began.elapsed(), expected..=expected + ms(2));
            assert!(
                expected.contains(&elapsed),
                "{gate:?}, {keeps_guard}: {elapsed:?}"
            );
            let is_free = nodes.locks() == [0; 3];
            assert_eq!(is_free, gate != Gate::Never && !keeps_guard);
            draining.abort();
        }
    }
}

/// A log in which the first grant takes as long as a process may be stopped.
#[derive(Clone, Default)]
struct SlowLog(Arc<AtomicUsize>);

impl io::Write for SlowLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let is_grant = String::from_utf8_lossy(bytes).contains("lock acquired");
        if is_grant && self.0.fetch_add(1, Ordering::SeqCst) == 0 {
            // The clock is set at its first poll.
            let _ = advance(secs(20)).now_or_never();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn work_does_not_begin_with_a_lock_that_is_over() {
    let log = SlowLog::default();
    let grants = Arc::clone(&log.0);
    let debug = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG);
    let _subscribed = subscribe(debug.with_writer(move || log.clone()).finish());
    let redlock = builder(&ScriptedNodes::new(3)).build().unwrap();
    let begun = Arc::new(Mutex::new(Vec::new()));
    let leading = redlock.lead("k", {
        let begun = Arc::clone(&begun);
        move |guard| {
            // The part of the closure that no executor polls.
            begun.lock().unwrap().push(guard.is_valid());
            std::future::pending()
        }
    });
    assert!(timeout(secs(60), leading).await.is_err());
    assert!(grants.load(Ordering::SeqCst) > 1);
    assert_eq!(*begun.lock().unwrap(), [true]);
}

#[tokio::test(start_paused = true)]
async fn watchers_hear_of_each_leader_and_of_the_time_without_one() {
    let nodes = ScriptedNodes::new(3);
    let process = |label: &str| {
        let builder = builder(&nodes).holder(label);
        builder.build().unwrap()
    };
    let (one, other) = (process("one"), process("other"));
    let mut watch = builder(&nodes).build().unwrap().leader("k");
    assert_eq!(watch.changed().await, Ok(None));
    let mut last = None;
    for (redlock, label) in [(&one, "one"), (&other, "other"), (&one, "one")] {
        let (began, guard) = (Instant::now(), redlock.lock("k").await.unwrap());
        let leader = watch.changed().await.unwrap().unwrap();
        assert!(began.elapsed() <= secs(1), "{:?}", began.elapsed());
        assert_eq!(leader.holder.unwrap().label(), Some(label));
        assert_eq!(leader.fencing_token, guard.fencing_token());
        assert!(leader.fencing_token > last);
        last = leader.fencing_token;
        // No change while it is renewed; the watch may be dropped meanwhile.
        assert!(timeout(secs(60), watch.changed()).await.is_err());
        let before = Instant::now();
        guard.release().await.unwrap();
        assert_eq!(watch.changed().await, Ok(None));
        assert!(before.elapsed() <= ms(10), "{:?}", before.elapsed());
    }
    // An outage is no change.
    let guard = one.lock("k").await.unwrap();
    assert!(watch.changed().await.unwrap().is_some());
    (0..2).for_each(|node| nodes.set(node, Gate::Failing));
    assert!(timeout(secs(5), watch.changed()).await.is_err());
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn watch_asks_no_more_often_than_the_poll_interval_and_ends_with_the_service() {
    let nodes = ScriptedNodes::new(3);
    let [redlock] = polling(&nodes, secs(2));
    let mut watch = redlock.leader("k");
    assert_eq!(watch.changed().await, Ok(None));
    let before = nodes.sent(0, OpKind::Inspect);
    assert!(timeout(secs(20), watch.changed()).await.is_err());
    let asked = nodes.sent(0, OpKind::Inspect) - before;
    assert!((9..=12).contains(&asked), "{asked}");
    redlock.drain(secs(1)).await;
    assert_eq!(watch.changed().await, Err(LockError::Closed));
    let invalid = builder(&nodes).build().unwrap().leader("").changed().await;
    assert_matches!(invalid, Err(LockError::Key(_)));
}

/// A node that has forgotten the lock grants it to each candidate that asks, and is released.
#[tokio::test(start_paused = true)]
async fn attempts_of_candidates_are_no_change_of_the_leader() {
    let (nodes, [one, other, third]) = processes();
    let guard = one.lock("k").await.unwrap();
    nodes.wipe(2);
    let mut watch = third.leader("k");
    let leader = watch.changed().await.unwrap().unwrap();
    assert_eq!(leader.fencing_token, guard.fencing_token());
    for _ in 0..5 {
        assert!(other.try_lock("k").await.is_err());
        assert!(timeout(secs(2), watch.changed()).await.is_err());
    }
}
