//! `Redlock::once` under dropped futures, shutdown, unreadable records, extreme settings and nested locks.

use std::future::pending;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use support::{Log, assert_matches, ms, poll_times, real_runtime, redlock, secs};
use tokio::runtime::Builder;
use tokio::time::sleep;
use tower_redlock::protocol::message::{Command, Op, Reply};
use tower_redlock::protocol::{Namespace, OwnerToken};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{ExecuteOnce, LockError, OnceError, Outcome, Redlock};

use crate::execute_once::{Counter, Ran, is_contended, scene};

/// Returns how much longer each node keeps the record of a key, as it tells another process.
fn left(key: &str, nodes: &ScriptedNodes) -> [Duration; 3] {
    let names = Namespace::default().names_with_record(&key.into(), None, |_| [0; 32]);
    let look = Command {
        names: [names.unwrap()].into(),
        owner: OwnerToken::from_random([2; 16]),
        op: Op::Look,
    };
    [0, 1, 2].map(|node| match nodes.apply(node, &look) {
        Reply::Done { expires_in, .. } => expires_in,
        reply => panic!("node {node}: {reply:?}"),
    })
}

/// Whether or not the work of the dropped call is executed, it is executed once, and no key is left.
#[tokio::test(start_paused = true)]
async fn dropping_the_future_at_any_poll_executes_at_most_once_and_leaves_no_key() {
    use Gate::{Mute, Ready, Slow};
    for slow in [Ready, Slow(ms(20)), Slow(ms(120)), Mute] {
        let mut times = 0;
        loop {
            let nodes = ScriptedNodes::new(3);
            nodes.set(0, slow);
            nodes.set(1, Slow(ms(10)));
            let (redlock, counter) = (redlock(&nodes), Counter::default());
            let work = counter.clone();
            let call = redlock.once("k").run(move |_| work.work(ms(30)));
            let ended = poll_times(&mut Box::pin(call), times, 4).await;
            let before = counter.count();
            let again = counter.run(redlock.once("k").wait(secs(5))).await;
            let what = format!("{slow:?}, {times} polls, {before} executed: {again:?}");
            assert_eq!(again.map(Outcome::into_inner), Ok(1), "{what}");
            assert_eq!(counter.count(), 1, "{what}");
            let drained = redlock.drain(secs(1)).await;
            assert_eq!(drained.held, [], "{what}");
            assert_eq!(nodes.locks()[1..], [0, 0], "{what}");
            if let Some(ran) = ended {
                assert_eq!(ran, Ok(Outcome::Executed(1)), "{what}");
                break;
            }
            times += 1;
        }
        assert!(times > 3, "{slow:?}: {times}");
    }
}

/// The caller is no task of the runtime that ends, so it does not end with it.
#[test]
fn a_runtime_that_ends_during_the_work_makes_its_outcome_unknown() {
    let mut runtime = Builder::new_multi_thread();
    let runtime = runtime.worker_threads(1).enable_all().build().unwrap();
    let handle = runtime.handle().clone();
    let (began, begun) = mpsc::channel();
    let (ended, end) = mpsc::channel();
    let (redlock, counter) = (Redlock::in_memory(3), Counter::default());
    let call = redlock.once("k");
    thread::spawn(move || {
        let call = call.run(move |_| async move {
            began.send(()).unwrap();
            pending::<Result<usize, &'static str>>().await
        });
        ended.send(handle.block_on(call)).unwrap();
    });
    begun.recv_timeout(secs(10)).unwrap();
    runtime.shutdown_background();
    assert_eq!(end.recv_timeout(secs(10)), Ok(Err(OnceError::Unknown)));
    let again = counter.run(redlock.once("k"));
    let again = real_runtime().block_on(again);
    assert!(is_contended(&again), "until its ttl: {again:?}");
}

#[tokio::test(start_paused = true)]
async fn a_recorded_result_that_cannot_be_fetched_is_undecided() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let text = "x".repeat(20_000);
    let made = text.clone();
    let first = redlock.once("k").run(|_| async { Ok::<_, ()>(made) });
    assert!(first.await.is_ok());
    (0..3).for_each(|node| nodes.set_for(node, OpKind::Fetch, Gate::Failing));
    let again = || redlock.once("k").run(|_| pending::<Result<String, ()>>());
    assert_eq!(again().await, Err(OnceError::Undecided));
    nodes.set_for(1, OpKind::Fetch, Gate::Ready);
    assert_eq!(again().await, Ok(Outcome::Replayed(text)));
}

#[tokio::test(start_paused = true)]
async fn a_result_of_another_type_is_not_shown_in_the_log() {
    let (log, _subscribed) = Log::subscribed();
    let redlock = Redlock::in_memory(3);
    let first = redlock.once("k");
    let first = first.run(|_| async { Ok::<_, ()>("4111-1111".to_owned()) });
    assert!(first.await.is_ok());
    let number = redlock.once("k").run(|_| pending::<Result<u32, ()>>());
    assert_eq!(number.await, Err(OnceError::NotKept));
    let log = log.text();
    assert!(log.contains("u32") && !log.contains("4111"), "{log}");
}

#[tokio::test(start_paused = true)]
async fn settings_out_of_range_are_refused_or_bounded() {
    let (redlock, counter) = (Redlock::in_memory(3), Counter::default());
    let run = async |once: ExecuteOnce| counter.run(once).await;
    let too_long = run(redlock.once("k").ttl(secs(3_600))).await;
    assert_matches!(too_long, Err(OnceError::Lock(LockError::TtlTooLong { .. })));
    for ttl in [Duration::ZERO, ms(2)] {
        let too_short = run(redlock.once("k").ttl(ttl)).await;
        assert_matches!(
            too_short,
            Err(OnceError::Lock(LockError::TtlTooShort { .. }))
        );
    }
    let empty = run(redlock.once("")).await;
    assert_matches!(empty, Err(OnceError::Lock(LockError::Key(_))));
    assert_eq!(counter.count(), 0);
    let forever = redlock.once("forever").wait(Duration::MAX);
    let forever = forever.max_hold(Duration::MAX).retention(Duration::MAX);
    assert_eq!(run(forever).await, Ok(Outcome::Executed(1)));
    sleep(secs(99 * 365 * 24 * 3_600)).await;
    assert_eq!(run(redlock.once("forever")).await, Ok(Outcome::Replayed(1)));
    let short = || redlock.once("short").retention(Duration::ZERO);
    assert_eq!(run(short()).await, Ok(Outcome::Executed(2)));
    sleep(ms(2)).await;
    assert_eq!(run(short()).await, Ok(Outcome::Executed(3)));
    let none = || redlock.once("none").max_result(0);
    assert_eq!(run(none()).await, Ok(Outcome::Executed(4)));
    assert_eq!(run(none()).await, Err(OnceError::NotKept));
}

#[tokio::test(start_paused = true)]
async fn a_plain_lock_and_an_execution_of_one_key_exclude_each_other() {
    let nodes = ScriptedNodes::new(3);
    for other in [true, false] {
        let here = redlock(&nodes);
        let there = if other { redlock(&nodes) } else { here.clone() };
        let (counter, key) = (Counter::default(), format!("k{other}"));
        let guard = here.lock(&*key).await.unwrap();
        let refused = counter.run(there.once(&*key)).await;
        assert!(is_contended(&refused), "{refused:?}");
        guard.release().await.unwrap();
        let slow = counter.clone();
        let running = tokio::spawn(there.once(&*key).run(move |_| slow.work(secs(1))));
        sleep(ms(100)).await;
        let refused = here.try_lock(&*key).await;
        assert_matches!(refused, Err(LockError::Contended { .. }));
        let waited = here.lock(&*key).wait(secs(5)).await.unwrap();
        assert_eq!(counter.count(), 1);
        assert_eq!(running.await.unwrap(), Ok(Outcome::Executed(1)));
        drop(waited);
        sleep(ms(10)).await;
        let replayed = counter.run(there.once(&*key)).await;
        assert_eq!(replayed, Ok(Outcome::Replayed(1)));
    }
}

/// Although its task waits for a node that hangs.
#[tokio::test(start_paused = true)]
async fn an_execution_that_a_majority_has_recorded_is_not_held() {
    let nodes = ScriptedNodes::new(3);
    nodes.set_for(2, OpKind::Record, Gate::Mute);
    let (redlock, counter) = (redlock(&nodes), Counter::default());
    assert!(counter.run(redlock.once("k")).await.is_ok());
    let drained = redlock.drain(ms(0)).await;
    assert_eq!(drained.held, [], "{drained:?}");
}

/// At its timeout a drain stops the renewal, not the work, whose result is still recorded.
#[tokio::test(start_paused = true)]
async fn drain_lets_the_work_end_and_records_its_result() {
    let nodes = ScriptedNodes::new(3);
    for (patience, held) in [(secs(60), 0), (ms(100), 1)] {
        let (redlock, counter) = (redlock(&nodes), Counter::default());
        let key = format!("{patience:?}");
        let slow = counter.clone();
        let running = tokio::spawn(redlock.once(&*key).run(move |_| slow.work(secs(5))));
        let waiting = redlock.once(&*key).wait(secs(30));
        let waiting = tokio::spawn(waiting.run(|_| pending::<Result<usize, &str>>()));
        sleep(ms(100)).await;
        let drained = redlock.drain(patience).await;
        assert_eq!(drained.held.len(), held);
        let refused = waiting.await.unwrap();
        assert_eq!(refused, Err(OnceError::Lock(LockError::Closed)));
        assert_eq!(running.await.unwrap(), Ok(Outcome::Executed(1)));
        let other = self::redlock(&nodes);
        let replayed = counter.run(other.once(&*key)).await;
        assert_eq!(replayed, Ok(Outcome::Replayed(1)));
    }
}

#[tokio::test(start_paused = true)]
async fn max_waiters_counts_the_calls_that_wait_for_an_execution() {
    let nodes = ScriptedNodes::new(3);
    let redlock = Redlock::builder().scripted(&nodes).max_waiters(1);
    let (redlock, counter) = (redlock.build().unwrap(), Counter::default());
    let slow = counter.clone();
    let running = tokio::spawn(redlock.once("k").run(move |_| slow.work(secs(1))));
    sleep(ms(100)).await;
    let one = counter.clone();
    let waiting = redlock.once("k").wait(secs(5));
    let waiting = tokio::spawn(async move { one.run(waiting).await });
    sleep(ms(100)).await;
    let refused = counter.run(redlock.once("k").wait(secs(5))).await;
    let overloaded = LockError::Overloaded { max: 1 };
    assert_eq!(refused, Err(OnceError::Lock(overloaded)));
    assert_eq!(running.await.unwrap(), Ok(Outcome::Executed(1)));
    assert_eq!(waiting.await.unwrap(), Ok(Outcome::Replayed(1)));
}

/// The setting of the later call decides whether it looks for an earlier execution.
#[tokio::test(start_paused = true)]
async fn at_most_once_takes_effect_only_in_calls_that_set_it() {
    for (first, second, then) in [
        (true, true, Err(OnceError::Unknown)),
        (true, false, Ok(Outcome::Executed(1))),
        (false, true, Ok(Outcome::Executed(1))),
        (false, false, Ok(Outcome::Executed(1))),
    ] {
        let (nodes, redlock, counter) = scene();
        let once = redlock.once("k").at_most_once(first);
        let failed: Ran = once.run(|_| async { Err("declined") }).await;
        assert_eq!(failed, Err(OnceError::Work("declined")));
        assert_eq!(nodes.locks(), [0, 0, 0]);
        let again = counter.run(redlock.once("k").at_most_once(second)).await;
        assert_eq!(again, then, "{first} {second}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_local_waiter_gets_the_result_without_asking_the_nodes() {
    let (nodes, redlock, counter) = scene();
    let slow = counter.clone();
    let running = tokio::spawn(redlock.once("k").run(move |_| slow.work(secs(1))));
    sleep(ms(100)).await;
    let impatient = counter.run(redlock.once("k")).await;
    assert!(is_contended(&impatient), "{impatient:?}");
    let waited = counter.run(redlock.once("k").wait(secs(5))).await;
    assert_eq!(waited, Ok(Outcome::Replayed(1)));
    assert_eq!(running.await.unwrap(), Ok(Outcome::Executed(1)));
    assert_eq!(nodes.sent(0, OpKind::Acquire), 1);
}

/// A caller that comes after the record was left in this process: it may have expired since.
#[tokio::test(start_paused = true)]
async fn a_local_waiter_that_came_after_the_result_asks_the_nodes() {
    let (redlock, counter) = (Redlock::in_memory(3), Counter::default());
    let slow = counter.clone();
    let once = redlock.once("k").retention(ms(100));
    let running = tokio::spawn(once.run(move |_| slow.work(secs(1))));
    sleep(ms(100)).await;
    // Holds the key in this process from the record on.
    let guard = redlock.lock("k").wait(secs(5)).await.unwrap();
    assert_eq!(running.await.unwrap(), Ok(Outcome::Executed(1)));
    sleep(ms(200)).await;
    let waiting = redlock.once("k").wait(secs(5));
    let late = counter.clone();
    let waiting = tokio::spawn(async move { late.run(waiting).await });
    sleep(ms(200)).await;
    drop(guard);
    assert_eq!(waiting.await.unwrap(), Ok(Outcome::Executed(2)));
}

/// All nodes forget the key during the work, so another service executes it too, and records first.
#[tokio::test(start_paused = true)]
async fn work_that_was_overtaken_returns_the_record_of_the_same_request_only() {
    for (payload, expected) in [
        ("same", Ok(Outcome::Replayed(1))),
        ("other", Err(OnceError::Conflicting)),
    ] {
        let nodes = ScriptedNodes::new(3);
        let (here, there) = (redlock(&nodes), redlock(&nodes));
        let counter = Counter::default();
        let slow = counter.clone();
        let once = here.once("k").fingerprint("same");
        let running = tokio::spawn(once.run(move |_| slow.work(secs(1))));
        sleep(ms(100)).await;
        (0..3).for_each(|node| nodes.wipe(node));
        let first = counter.run(there.once("k").fingerprint(payload)).await;
        assert_eq!(first, Ok(Outcome::Executed(1)));
        assert_eq!(running.await.unwrap(), expected, "{payload}");
    }
}

/// A mebibyte may take a second longer than the node timeout.
#[tokio::test(start_paused = true)]
async fn a_large_record_has_time_to_be_repaired() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let text = "x".repeat(1_000_000);
    let made = text.clone();
    let once = || redlock.once("k").max_result(2_000_000);
    let first = once().run(|_| async { Ok::<_, ()>(made) }).await;
    assert!(first.is_ok());
    (0..2).for_each(|node| {
        nodes.wipe(node);
        nodes.set_for(node, OpKind::Record, Gate::Slow(ms(500)));
    });
    let again = once().run(|_| pending::<Result<String, ()>>()).await;
    assert_eq!(again, Ok(Outcome::Replayed(text)));
}

/// Otherwise each replay could lengthen the life of a record.
// Rules: node.copy
#[tokio::test(start_paused = true)]
async fn a_record_that_a_node_lacks_is_kept_there_for_the_rest_of_the_retention() {
    let nodes = ScriptedNodes::new(3);
    let (ours, theirs) = (redlock(&nodes), redlock(&nodes));
    let counter = Counter::default();
    // The executing process writes the record again, once the node is overdue.
    nodes.set_for(2, OpKind::Record, Gate::Never);
    let once = ours.once("k").retention(secs(60));
    assert_eq!(counter.run(once).await, Ok(Outcome::Executed(1)));
    nodes.set_for(2, OpKind::Record, Gate::Ready);
    sleep(secs(20)).await;
    assert_eq!(nodes.sent(2, OpKind::Record), 2);
    assert_eq!(left("k", &nodes), [secs(40); 3]);
    // A replay writes it to the node that lost it, as soon as that has answered.
    nodes.wipe(2);
    nodes.set_for(2, OpKind::Acquire, Gate::Slow(ms(50)));
    let replayed = counter.run(theirs.once("k").retention(secs(60))).await;
    assert_eq!(replayed, Ok(Outcome::Replayed(1)));
    sleep(secs(10)).await;
    assert_eq!(left("k", &nodes), [secs(30); 3]);
}
