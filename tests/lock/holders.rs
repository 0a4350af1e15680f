//! Who holds a lock: what refused callers, operators and the log hear, with scripted nodes on a paused clock.

use std::future::IntoFuture;
use std::time::Duration;

use support::{Log, ms, secs};
use tokio::time::sleep;
use tower_redlock::protocol::message::{Op, SharedOp};
use tower_redlock::protocol::{Holder, Namespace, OwnerToken, Shown, holder};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{BuildError, LockError, LockRequest, OnceError, Redlock};
use tracing::Level;

use crate::common::{Foreign, builder, processes};

/// Two processes with labels.
fn labelled(nodes: &ScriptedNodes) -> [Redlock; 2] {
    ["server-a", "server-b"].map(|label| builder(nodes).holder(label).build().unwrap())
}

async fn holder_heard(request: LockRequest) -> Option<Holder> {
    match request.await {
        Err(LockError::Contended { holder, .. }) => holder,
        other => panic!("not contended: {other:?}"),
    }
}

async fn heard(request: LockRequest) -> String {
    let holder = holder_heard(request).await;
    holder.map_or_else(|| "nobody".into(), |holder| holder.to_string())
}

/// Requests of a process that has died.
fn dead(key: &str) -> Foreign {
    let holder = holder::parse(b"1 dead\t");
    let mut dead = Foreign::new(key);
    dead.owner = OwnerToken::showing([1; 16], Shown::new(None, holder));
    dead
}

#[tokio::test(start_paused = true)]
async fn refused_callers_hear_who_holds_the_lock() {
    let nodes = ScriptedNodes::new(3);
    let [one, other] = labelled(&nodes);
    let unfenced = builder(&nodes).fencing(false).holder("one").build();
    let _plain = unfenced.unwrap().try_lock("plain").await.unwrap();
    assert_eq!(heard(other.try_lock("plain")).await, "one");
    let _guard = one.try_lock("k").note("POST /k").await.unwrap();
    for redlock in [&one, &other] {
        let holder = holder_heard(redlock.try_lock("k")).await.unwrap();
        assert_eq!(holder.label(), Some("server-a"));
        assert_eq!(holder.note(), Some("POST /k"));
        // To the second.
        assert!(holder.since().elapsed().unwrap() < secs(60));
        // Also those that wait, those behind them, and those of which the key is one of several.
        let waiting = redlock.lock("k").wait(secs(1));
        let behind = redlock.lock("k").wait(secs(1));
        let (first, second) = tokio::join!(heard(waiting), heard(behind));
        assert_eq!([first, second], ["server-a (POST /k)"; 2]);
        let several = redlock.lock_all(["a", "k"]).label("k").wait(Duration::ZERO);
        assert_eq!(heard(several).await, "server-a (POST /k)");
        let reading = redlock.try_lock("k").shared();
        assert_eq!(heard(reading).await, "server-a (POST /k)");
    }
    let error = other.try_lock("k").await.unwrap_err().to_string();
    let expected = "the lock is held by server-a (POST /k); ";
    assert!(error.starts_with(expected), "{error}");
}

#[tokio::test(start_paused = true)]
async fn holder_of_an_execution_is_heard_and_requests_are_still_told_apart() {
    let nodes = ScriptedNodes::new(3);
    let both = labelled(&nodes);
    let one = both[0].clone();
    let execution = one.once("k").fingerprint(b"a").run(async move |_| {
        for redlock in &both {
            let once = |fingerprint| {
                let once = redlock.once("k").fingerprint(fingerprint);
                once.run(async |_| Ok::<(), ()>(()))
            };
            match once(b"a").await {
                Err(OnceError::Lock(LockError::Contended { holder, .. })) => {
                    assert_eq!(holder.unwrap().label(), Some("server-a"));
                }
                refused => panic!("{refused:?}"),
            }
            assert_eq!(once(b"b").await, Err(OnceError::OtherRequest));
        }
        Ok::<(), ()>(())
    });
    execution.await.unwrap();
}

/// A refusal that too few nodes have told of names nobody, rather than one that has died.
#[tokio::test(start_paused = true)]
async fn the_holder_is_the_one_that_most_nodes_name_and_a_draw_names_none() {
    for (count, left_behind, name) in [(3, 0, "nobody"), (5, 0, "server-a"), (5, 4, "server-a")] {
        let nodes = ScriptedNodes::new(count);
        let [one, other] = labelled(&nodes);
        dead("k").acquire(&nodes, left_behind, secs(60));
        let _guard = one.try_lock("k").await.unwrap();
        sleep(ms(1)).await;
        // The first answers of a majority decide.
        assert_eq!(heard(other.try_lock("k")).await, name);
        nodes.set_for(left_behind, OpKind::Acquire, Gate::Slow(ms(5)));
        assert_eq!(heard(other.try_lock("k")).await, "server-a");
    }
}

#[tokio::test(start_paused = true)]
async fn nobody_is_named_who_has_no_label_and_no_note() {
    let (_nodes, [one, other]) = processes();
    let guard = one.try_lock("k").await.unwrap();
    for redlock in [&one, &other] {
        assert_eq!(heard(redlock.try_lock("k")).await, "nobody");
    }
    drop(guard);
    sleep(ms(1)).await;
    let _guard = one.try_lock("k").note("nightly").await.unwrap();
    assert_eq!(heard(other.try_lock("k")).await, "unnamed (nightly)");
}

#[tokio::test(start_paused = true)]
async fn inspection_names_all_holders() {
    let nodes = ScriptedNodes::new(3);
    let [one, other] = labelled(&nodes);
    let holders = async |key: &str| -> Vec<String> {
        let holders = one.inspect(key).await.holders();
        holders.iter().map(ToString::to_string).collect()
    };
    assert!(holders("k").await.is_empty());
    let _guard = one.try_lock("k").await.unwrap();
    assert_eq!(holders("k").await, ["server-a"]);
    let read = async |redlock: &Redlock, note: &str| {
        let reading = redlock.try_lock("x").label("k").shared();
        reading.note(note).await.unwrap()
    };
    let _first = read(&one, "1").await;
    let _others = (read(&other, "2").await, read(&other, "3").await);
    let mut readers = holders("x").await;
    readers.sort_unstable();
    assert_eq!(readers, ["server-a (1)", "server-b (2)", "server-b (3)"]);
    // One that has died at a minority of the nodes.
    let mut dead = dead("x");
    let names = dead.names.iter().cloned();
    let names = names.map(|name| Namespace::default().with_shared(name));
    dead.names = names.collect();
    dead.send(&nodes, 0, Op::Shared(SharedOp::Acquire { ttl: secs(60) }));
    assert_eq!(holders("x").await.len(), 3);
    let reader = || one.try_lock("y").label("k").shared();
    let many = (0..40).map(|number| reader().note(number.to_string()).into_future());
    let _many = futures_util::future::try_join_all(many).await.unwrap();
    assert_eq!(holders("y").await.len(), 16);
}

#[tokio::test(start_paused = true)]
async fn log_of_a_refused_caller_names_the_holder() {
    let nodes = ScriptedNodes::new(3);
    let [one, other] = labelled(&nodes);
    let lock = |redlock: &Redlock| redlock.try_lock(("account", "ann@example.com")).label("k");
    let _guard = lock(&one).note("POST /x").await.unwrap();
    let (log, _subscribed) = Log::with_spans(Level::DEBUG);
    assert!(lock(&other).await.is_err());
    let once = |redlock: &Redlock| redlock.once("k").note("POST /y");
    let execution = once(&one).run(async move |_| {
        let refused = once(&other).run(async |_| Ok::<(), ()>(())).await;
        assert!(refused.is_err());
        Ok::<(), ()>(())
    });
    execution.await.unwrap();
    let text = log.text();
    for holder in ["holder=server-a (POST /x)", "holder=server-a (POST /y)"] {
        assert!(text.contains(holder), "{text}");
    }
    assert!(!text.contains("ann@"), "{text}");
}

#[test]
fn labels_of_processes_are_short_and_can_be_shown() {
    let build = |label: &str| -> Result<Redlock, BuildError> {
        Redlock::builder().embedded(1).holder(label).build()
    };
    for label in ["a", "host/17", "é😀", &"x".repeat(64)] {
        assert!(build(label).is_ok(), "{label}");
    }
    let long = ["x".repeat(65), "€".repeat(22)];
    for label in ["", "a\nb", "a\tb", "\u{7f}", &long[0], &long[1]] {
        let error = build(label).unwrap_err().to_string();
        for told in ["holder", "64 bytes"] {
            assert!(error.contains(told), "{error}");
        }
    }
}
