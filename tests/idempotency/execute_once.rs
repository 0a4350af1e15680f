//! `Redlock::once`: work that is executed once per key, with no HTTP.

use std::future::pending;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use support::{ms, real_runtime, redlock, secs, set_all, three_nodes, three_nodes_with};
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{ExecuteOnce, LockError, LostReason, OnceError, Outcome, Redlock};

use crate::payments::gate_records;

const SECOND: Duration = secs(1);

pub(crate) type Ran = Result<Outcome<usize>, OnceError<&'static str, usize>>;

pub(crate) fn is_contended(ran: &Ran) -> bool {
    matches!(ran, Err(OnceError::Lock(LockError::Contended { .. })))
}

/// The number of executions.
#[derive(Clone, Default)]
pub(crate) struct Counter(Arc<AtomicUsize>);

impl Counter {
    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    /// Work that takes a while and returns its number.
    pub(crate) async fn work(self, takes: Duration) -> Result<usize, &'static str> {
        sleep(takes).await;
        Ok(self.0.fetch_add(1, Ordering::SeqCst) + 1)
    }

    pub(crate) async fn run(&self, once: ExecuteOnce) -> Ran {
        let counter = self.clone();
        once.run(|_| counter.work(Duration::ZERO)).await
    }
}

pub(crate) fn scene() -> (ScriptedNodes, Redlock, Counter) {
    let (nodes, redlock) = three_nodes();
    (nodes, redlock, Counter::default())
}

#[tokio::test(start_paused = true)]
async fn run_executes_once_and_replays_the_result() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Invoice {
        number: String,
        lines: Vec<(u32, f64)>,
        #[serde(default)]
        note: Option<String>,
    }
    let (redlock, counter) = (Redlock::in_memory(3), Counter::default());
    let invoice = || Invoice {
        number: "2026-17".to_owned(),
        lines: vec![(2, 9.5), (1, 0.25)],
        note: None,
    };
    let (began, begun) = mpsc::channel();
    for attempt in 0..3 {
        let (counter, made, began) = (counter.clone(), invoice(), began.clone());
        let once = redlock.once(("invoice", "17"));
        let outcome = once.run(|execution| async move {
            counter.work(Duration::ZERO).await?;
            assert!(execution.is_valid() && execution.fencing_token().is_some());
            began.send(execution).unwrap();
            Ok::<_, &str>(made)
        });
        let outcome = outcome.await.unwrap();
        assert_eq!(outcome.is_replayed(), attempt > 0);
        assert_eq!(outcome.into_inner(), invoice());
    }
    assert_eq!(counter.count(), 1);
    let execution = begun.recv().unwrap();
    assert!(!execution.is_valid());
    assert_eq!(execution.lost().await, LostReason::Released);
    assert!(redlock.drain(SECOND).await.is_clean());
}

#[tokio::test(start_paused = true)]
async fn fingerprint_refuses_another_request_with_the_same_key() {
    let (redlock, counter) = (Redlock::in_memory(3), Counter::default());
    let once = |payload: &'static str| redlock.once("k").fingerprint(payload);
    let first = counter.run(once("amount=5")).await;
    assert_eq!(first, Ok(Outcome::Executed(1)));
    let other = counter.run(once("amount=6")).await;
    assert_eq!(other, Err(OnceError::OtherRequest));
    let same = counter.run(once("amount=5")).await;
    assert_eq!(same, Ok(Outcome::Replayed(1)));
    // Also while the first is being executed.
    let slow = counter.clone();
    let running = redlock.once("slow").fingerprint("a");
    let running = tokio::spawn(running.run(move |_| slow.work(SECOND)));
    sleep(SECOND / 2).await;
    let other = redlock.once("slow").fingerprint("b").wait(SECOND);
    assert_eq!(counter.run(other).await, Err(OnceError::OtherRequest));
    assert_eq!(running.await.unwrap(), Ok(Outcome::Executed(2)));
}

#[tokio::test(start_paused = true)]
async fn retention_ends_the_replays() {
    let (redlock, counter) = (Redlock::in_memory(3), Counter::default());
    let once = || redlock.once("k").retention(60 * SECOND);
    assert_eq!(counter.run(once()).await, Ok(Outcome::Executed(1)));
    sleep(59 * SECOND).await;
    assert_eq!(counter.run(once()).await, Ok(Outcome::Replayed(1)));
    sleep(2 * SECOND).await;
    assert_eq!(counter.run(once()).await, Ok(Outcome::Executed(2)));
}

/// A result over 16 KiB is fetched, one over `max_result` is not kept.
#[tokio::test(start_paused = true)]
async fn max_result_bounds_the_results_that_are_kept() {
    let redlock = Redlock::in_memory(3);
    for (bytes, is_kept) in [(100, true), (20_000, true), (40_000, false)] {
        let text = "x".repeat(bytes);
        let once = || redlock.once(bytes.to_string()).max_result(30_000);
        let made = text.clone();
        let first = once().run(|_| async { Ok::<_, ()>(made) }).await;
        assert_eq!(first, Ok(Outcome::Executed(text.clone())));
        let second = once().run(|_| pending::<Result<String, ()>>()).await;
        if is_kept {
            assert_eq!(second, Ok(Outcome::Replayed(text)));
        } else {
            assert_eq!(second, Err(OnceError::NotKept));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn dropping_the_future_leaves_the_execution_running_with_its_lock() {
    let (nodes, redlock) = three_nodes_with(|builder| builder.renew(false));
    let counter = Counter::default();
    let slow = counter.clone();
    let call = redlock.once("k").run(move |_| slow.work(30 * SECOND));
    timeout(SECOND, call).await.unwrap_err();
    // Longer than the ttl of 10 s.
    sleep(20 * SECOND).await;
    let other = counter.run(redlock.once("k")).await;
    assert!(is_contended(&other), "{other:?}");
    sleep(15 * SECOND).await;
    let later = counter.run(redlock.once("k")).await;
    assert_eq!(later, Ok(Outcome::Replayed(1)));
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn max_hold_stops_the_work_and_keeps_the_key_until_its_ttl() {
    use Gate::{Failing, Ready};
    // Two node timeouts of 50 ms are the shortest time that work gets. Also with a lock that ended before.
    for (max_hold, latest, renewals) in [
        (15 * SECOND, 16 * SECOND, Ready),
        (60 * SECOND, 61 * SECOND, Failing),
        (ms(50), ms(100), Ready),
        (ms(1), ms(100), Ready),
        (Duration::ZERO, ms(100), Ready),
    ] {
        for (at_most_once, then) in [
            (false, Ok(Outcome::Executed(1))),
            (true, Err(OnceError::Unknown)),
        ] {
            let (nodes, redlock, counter) = scene();
            set_all(&nodes, OpKind::Confirm, renewals);
            let once = || redlock.once("k").at_most_once(at_most_once);
            let once = || once().max_hold(max_hold);
            let slow = counter.clone();
            let stopped = once().run(move |_| slow.work(3_600 * SECOND));
            let stopped = timeout(latest, stopped).await.unwrap();
            assert_eq!(stopped, Err(OnceError::Unknown), "{max_hold:?}");
            sleep(20 * SECOND).await;
            assert_eq!(counter.run(once()).await, then, "{max_hold:?}");
        }
    }
}

/// The panic of the work, of the closure itself, and of the serialization of the result.
#[tokio::test(start_paused = true)]
async fn a_panic_reaches_the_caller_and_keeps_the_key_until_its_ttl() {
    #[derive(Deserialize)]
    struct Unserializable;
    impl Serialize for Unserializable {
        fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            panic!("as the test wants it")
        }
    }
    let (nodes, redlock, counter) = scene();
    let work = redlock.once("work").run(|_| async {
        assert!(std::hint::black_box(false), "as the test wants it");
        Ok::<usize, ()>(1)
    });
    assert!(tokio::spawn(work).await.unwrap_err().is_panic());
    let closure = redlock.once("closure").run(|_| {
        assert!(std::hint::black_box(false), "as the test wants it");
        pending::<Result<usize, &str>>()
    });
    assert!(tokio::spawn(closure).await.unwrap_err().is_panic());
    let result = redlock.once("result");
    let result = result.run(|_| async { Ok::<_, ()>(Unserializable) });
    let result = tokio::spawn(async move { result.await.map(drop).map_err(drop) });
    assert!(result.await.unwrap_err().is_panic());
    sleep(SECOND).await;
    assert_eq!(nodes.locks(), [3, 3, 3]);
    sleep(10 * SECOND).await;
    assert_eq!(nodes.locks(), [0, 0, 0]);
    let executed = counter.run(redlock.once("work")).await;
    assert_eq!(executed, Ok(Outcome::Executed(1)));
}

// Rules: once.unrecorded
#[tokio::test(start_paused = true)]
async fn a_result_that_no_majority_records_is_returned_as_unrecorded() {
    let (nodes, redlock, counter) = scene();
    gate_records(&nodes, 0..2, Gate::Failing);
    nodes.set_for(2, OpKind::Record, Gate::Failing);
    let unrecorded = counter.run(redlock.once("k")).await;
    assert_eq!(unrecorded, Err(OnceError::Unrecorded(1)));
    // The key stays locked, so that no other call executes beside it.
    let other = counter.run(redlock.once("k")).await;
    assert!(is_contended(&other), "{other:?}");
}

#[tokio::test(start_paused = true)]
async fn a_record_on_a_minority_is_undecided_while_a_majority_is_silent() {
    let (nodes, redlock, counter) = scene();
    let executed = counter.run(redlock.once("k")).await;
    assert_eq!(executed, Ok(Outcome::Executed(1)));
    // What a majority forgot, it may have had: only one copy is left.
    nodes.wipe(0);
    nodes.wipe(1);
    nodes.set_for(0, OpKind::Record, Gate::Failing);
    nodes.set_for(1, OpKind::Record, Gate::Failing);
    let undecided = counter.run(redlock.once("k")).await;
    assert_eq!(undecided, Err(OnceError::Undecided));
    // The next call repairs the record.
    (0..2).for_each(|node| nodes.set_for(node, OpKind::Record, Gate::Ready));
    let replayed = counter.run(redlock.once("k")).await;
    assert_eq!(replayed, Ok(Outcome::Replayed(1)));
    assert_eq!(counter.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn wait_goes_on_while_the_result_is_being_recorded() {
    let (nodes, executor, counter) = scene();
    (1..3).for_each(|node| nodes.set_for(node, OpKind::Record, Gate::Slow(SECOND / 50)));
    let duplicates = async {
        // One node has the record, and the others hold the key for the execution.
        sleep(SECOND / 100).await;
        let other = redlock(&nodes);
        let undecided = counter.run(other.once("k")).await;
        assert_eq!(undecided, Err(OnceError::Undecided));
        counter.run(other.once("k").wait(SECOND)).await
    };
    let (executed, replayed) = tokio::join!(counter.run(executor.once("k")), duplicates);
    assert_eq!(executed, Ok(Outcome::Executed(1)));
    assert_eq!(replayed, Ok(Outcome::Replayed(1)));
}

/// The limits of JSON, as the documentation of `run` names them.
#[tokio::test(start_paused = true)]
async fn result_that_json_cannot_tell_apart_is_replayed_as_documented() {
    let redlock = redlock(&ScriptedNodes::new(3));
    async fn twice<T>(redlock: &Redlock, key: &str, result: T) -> Result<T, OnceError<(), T>>
    where
        T: Clone + Serialize + serde::de::DeserializeOwned + Send + 'static,
    {
        for _ in 0..2 {
            let result = result.clone();
            let outcome = redlock.once(key).run(async move |_| Ok(result)).await?;
            if outcome.is_replayed() {
                return Ok(outcome.into_inner());
            }
        }
        panic!("it was not replayed");
    }
    assert_eq!(twice(&redlock, "unit", Some(())).await, Ok(None));
    assert_eq!(twice(&redlock, "nan", Some(f64::NAN)).await, Ok(None));
    assert_eq!(twice(&redlock, "nested", Some(None::<u8>)).await, Ok(None));
    let not_kept = twice(&redlock, "infinite", f64::INFINITY).await;
    assert_eq!(not_kept, Err(OnceError::NotKept));
    // Variants have names, so these are kept.
    let kept = Ok::<(), Vec<u8>>(());
    assert_eq!(twice(&redlock, "named", kept.clone()).await, Ok(kept));
}

/// The home hears of the outcome and of the end of its caller at the same time.
#[test]
fn outcome_of_a_caller_whose_runtime_ends_is_recorded_by_the_home() {
    let mut home = Builder::new_multi_thread();
    let home = home.worker_threads(1).enable_all().build().unwrap();
    let nodes = ScriptedNodes::new(3);
    let redlock = Redlock::builder().scripted(&nodes);
    let redlock = redlock.runtime(home.handle().clone()).build().unwrap();
    let (resume, resumed) = mpsc::channel();
    let callers = real_runtime();
    callers.block_on(async {
        let (done, is_done) = oneshot::channel();
        let handle = home.handle().clone();
        let work = async move |_| {
            // Nothing runs in the home until the runtime of the caller has ended.
            let (paused, is_paused) = oneshot::channel();
            handle.spawn(async move {
                paused.send(()).unwrap();
                resumed.recv().unwrap();
            });
            is_paused.await.unwrap();
            done.send(()).unwrap();
            Ok::<_, ()>("first".to_owned())
        };
        tokio::spawn(redlock.once("k").run(work));
        is_done.await.unwrap();
    });
    drop(callers);
    resume.send(()).unwrap();
    let again = redlock.once("k");
    let again = again.run(async |_| Ok::<_, ()>("again".to_owned()));
    let again = home.block_on(again);
    assert_eq!(again, Ok(Outcome::Replayed("first".to_owned())));
}
