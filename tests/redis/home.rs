//! The home of background work: the runtime in which connections and leases live. It may end, rest, or be a thread of its
//! own, while callers run in other runtimes.

#![expect(
    clippy::disallowed_methods,
    reason = "synchronous programs block their threads"
)]

use std::fs;
use std::future::IntoFuture;
use std::sync::OnceLock;
use std::thread;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use support::{
    Cluster, Proxy, RedisServer, assert_matches, lock_and_release, ms, once, secs, send, set_all,
    three_nodes, until,
};
use tokio::runtime::Runtime;
use tokio::time::{Instant, sleep, timeout};
use tower_redlock::test_util::{Gate, OpKind};
use tower_redlock::{
    LockError, LockGuard, LockHandle, LostReason, NodeFailure, NodeState, Redlock, RedlockBuilder,
    RedlockLayer, ReleaseError, key,
};

use crate::patient::{
    LONGEST, builder, failures, guarded, many_threads, name_of, one_thread, pay, until_locked,
};

/// Locks as a synchronous program does, which runs its runtime for nothing else.
fn lock_alone(runtime: &Runtime, redlock: &Redlock) -> Result<LockGuard, LockError> {
    runtime.block_on(redlock.try_lock("k").into_future())
}

fn built_within(runtime: &Runtime, builder: RedlockBuilder) -> Redlock {
    let _within = runtime.enter();
    builder.build().unwrap()
}

/// Calls until the outcome is the expected one, with pauses in which no runtime runs.
fn call_until<T>(what: &str, mut call: impl FnMut() -> Option<T>) -> T {
    for _ in 0..150 {
        if let Some(found) = call() {
            return found;
        }
        thread::sleep(ms(100));
    }
    panic!("never {what}");
}

/// Asserts that the failures of all nodes say that the home is not run, and what to do.
fn assert_not_run(nodes: &[NodeFailure]) {
    assert_eq!(nodes.len(), 3);
    for failure in nodes {
        assert_matches!(failure, NodeFailure::Unreachable { .. });
        let (text, why) = (failure.to_string(), "is not run at present");
        let remedy = "give RedlockBuilder one that always runs with .runtime(..)";
        assert!(text.contains(&format!("{why}; {remedy}")), "{text}");
    }
}

/// The state of a node does not outlive the time at which the node was to be asked again, although no lane had a turn.
#[test]
fn synchronous_program_gets_through_quarantine_and_a_stop_of_the_servers() {
    let cluster = Cluster::start(3);
    let redlock = guarded(cluster.urls())
        .connect_timeout(ms(300))
        .build()
        .unwrap();
    let runtime = one_thread();
    let refused = lock_alone(&runtime, &redlock).unwrap_err();
    let is_quarantined = |failure: &NodeFailure| matches!(failure, NodeFailure::Quarantined { .. });
    assert!(failures(&refused).iter().any(is_quarantined), "{refused:?}");
    let locked = |runtime| {
        let guard = call_until("locked", || lock_alone(runtime, &redlock).ok());
        runtime.block_on(guard.release()).unwrap();
    };
    locked(&runtime);
    cluster.servers.iter().for_each(RedisServer::stop);
    call_until("refused", || lock_alone(&runtime, &redlock).err());
    cluster.servers.iter().for_each(RedisServer::cont);
    locked(&runtime);
    // Refusals in a row, between which it does not run for a moment either.
    cluster.servers.iter().for_each(RedisServer::stop);
    let began = Instant::now();
    while began.elapsed() < secs(2) {
        lock_alone(&runtime, &redlock).unwrap_err();
    }
    cluster.servers.iter().for_each(RedisServer::cont);
    locked(&runtime);
}

#[test]
fn callers_hear_that_the_home_is_not_run() {
    let cluster = Cluster::start(3);
    let (resting, other) = (one_thread(), many_threads());
    let redlock = built_within(&resting, builder(cluster.urls()).ttl(secs(2)));
    let held = resting.block_on(redlock.lock("held").into_future());
    let held = held.unwrap();
    let asked = other.spawn(redlock.lock("asked").into_future());
    let extended = resting.block_on(async { held.extend(secs(2)).await });
    extended.unwrap();
    // It asked while its nodes were reached, and hears nothing any more.
    let asked = match other.block_on(asked).unwrap() {
        Ok(guard) => guard,
        Err(_) => resting.block_on(async {
            let asked = other.spawn(redlock.lock("asked").into_future());
            asked.await.unwrap().unwrap()
        }),
    };
    other.block_on(async {
        let began = Instant::now();
        let refused = redlock.lock("free").await.unwrap_err();
        assert_matches!(refused, LockError::Unavailable { reached: 0, .. });
        assert_not_run(failures(&refused));
        assert!(began.elapsed() < secs(4), "{:?}", began.elapsed());
        for node in redlock.health().await.nodes {
            let NodeState::Unreachable { why, .. } = &node.state else {
                panic!("{node:?}");
            };
            assert!(why.contains("is not run"), "{node:?}");
        }
        let released = timeout(LONGEST, asked.release()).await.expect("it hangs");
        let Err(ReleaseError::Unavailable { nodes, .. }) = &released else {
            panic!("{released:?}");
        };
        assert_not_run(nodes);
    });
    // It was asked for in the home, so its task was to tell of the loss; nobody did.
    assert!(other.block_on(async {
        sleep(secs(2)).await;
        !held.is_valid()
    }));
    // The home goes on: it is in order at once.
    drop(held);
    resting.block_on(until_locked(&redlock, "k"));
}

/// The guard of a caller elsewhere tells in time that the lock is over.
#[test]
fn loss_is_told_elsewhere_also_by_a_home_that_is_not_run() {
    let cluster = Cluster::start(3);
    let (resting, other) = (one_thread(), many_threads());
    let redlock = built_within(&resting, builder(cluster.urls()).ttl(secs(1)));
    let held = resting.block_on(async {
        let held = other.spawn(redlock.lock("k").into_future());
        held.await.unwrap().unwrap()
    });
    let lost = other.block_on(async { timeout(LONGEST, held.lost()).await });
    assert_eq!(lost.expect("it is never told"), LostReason::Expired);
    assert!(!held.is_valid());
}

#[test]
fn all_works_in_a_home_of_its_own_while_the_programs_runtime_rests() {
    let cluster = Cluster::start(3);
    let (background, resting, other) = (many_threads(), one_thread(), many_threads());
    let builder = builder(cluster.urls()).ttl(secs(1));
    let redlock = built_within(&resting, builder.runtime(background.handle().clone()));
    let held = resting.block_on(redlock.lock("held").into_future());
    let held = held.unwrap();
    other.block_on(async {
        // Longer than the ttl: somebody renews it.
        sleep(secs(3)).await;
        let refused = redlock.try_lock("held").await.unwrap_err();
        assert_matches!(refused, LockError::Contended { .. });
        let guard = redlock.lock("free").await.unwrap();
        guard.extend(secs(1)).await.unwrap();
        guard.release().await.unwrap();
    });
    assert!(held.is_valid());
    // A waiter is woken by the release, which nobody of its runtime sends.
    let waiting = other.spawn(redlock.lock("held").wait(LONGEST).into_future());
    other.block_on(async { sleep(ms(100)).await });
    drop(held);
    let next = other.block_on(waiting).unwrap().unwrap();
    // Its own runtime ends, and its lock lives on.
    drop(other);
    thread::sleep(secs(2));
    assert!(next.is_valid());
    resting.block_on(next.release()).unwrap();
    background.block_on(cluster.wait_until_free(LONGEST));
}

/// Blocks the only thread of the program's runtime, as careless handlers do.
async fn think(lock: LockHandle) -> String {
    let blocked = thread::spawn(|| thread::sleep(secs(5)));
    blocked.join().expect("it sleeps");
    format!("{} {:?}", lock.is_valid(), lock.fencing_token().is_some())
}

#[test]
fn handler_that_blocks_the_only_thread_keeps_its_lock_until_max_hold() {
    let cluster = Cluster::start(3);
    let background = many_threads();
    let redlock = builder(cluster.urls()).ttl(secs(1));
    let redlock = redlock.runtime(background.handle().clone());
    let redlock = redlock.build().unwrap();
    let another_process = builder(cluster.urls()).ttl(secs(1)).build().unwrap();
    let handler = |name: &'static str, max_hold| {
        let redlock = redlock.clone();
        thread::spawn(move || {
            let layer = RedlockLayer::new(redlock, key::literal(name));
            let app = Router::new().route("/", post(think));
            let app = app.route_layer(layer.max_hold(max_hold));
            one_thread().block_on(send(&app, "POST", "/"))
        })
    };
    let began = Instant::now();
    let (kept, lost) = (handler("kept", secs(60)), handler("lost", secs(2)));
    let other = many_threads();
    other.block_on(async {
        let is_free = async |key| match another_process.try_lock(key).await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(error) => {
                assert_matches!(error, LockError::Contended { .. });
                false
            }
        };
        sleep(ms(500)).await;
        assert!(!is_free("kept").await && !is_free("lost").await);
        until("over", LONGEST, || is_free("lost")).await;
        assert!(began.elapsed() > ms(1_500), "{:?}", began.elapsed());
        sleep(secs(4).saturating_sub(began.elapsed())).await;
        assert!(!is_free("kept").await);
    });
    let kept = kept.join().unwrap();
    assert_eq!((kept.status, &*kept.text()), (StatusCode::OK, "true true"));
    let lost = lost.join().unwrap();
    assert_ne!(lost.status, StatusCode::OK, "{:?}", lost.body);
}

/// Returns how much memory this process has, in KiB.
fn memory() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = resident.and_then(|rest| rest.split_whitespace().next());
    kib.map_or(0, |kib| kib.parse().expect("it is a number"))
}

/// A synchronous program may have one runtime for each call, and the service in a static.
#[test]
fn one_runtime_for_each_call_leaks_nothing() {
    static REDLOCK: OnceLock<Redlock> = OnceLock::new();
    // Not in a static, where nothing would end it.
    let server = RedisServer::start();
    let redlock = REDLOCK.get_or_init(|| builder([server.url()]).build().unwrap());
    let call = || {
        let runtime = one_thread();
        runtime.block_on(lock_and_release(redlock, "k"));
        // The home, the lane, and what wakes locks that rest.
        assert!(runtime.metrics().num_alive_tasks() <= 3);
    };
    (0..200).for_each(|_| call());
    let before = memory();
    (0..800).for_each(|_| call());
    let after = memory();
    let clients = || {
        let clients = server.command(&["CLIENT", "LIST"]);
        clients.as_str().unwrap().lines().count()
    };
    println!(
        "1,000 runtimes: {} connections, {before} KiB after 200 calls, {after} KiB at the end",
        clients()
    );
    assert!(after < before + 4 * 1024, "{before} KiB, {after} KiB");
    call_until("closed", || (clients() <= 1).then_some(()));
}

#[track_caller]
fn assert_disconnected(refused: &LockError) {
    let failure = &failures(refused)[0];
    assert_matches!(failure, NodeFailure::Disconnected { .. });
}

/// No key stays beyond its ttl, nothing hangs, and everybody is told.
#[test]
fn home_that_ends_with_locks_requests_and_releases_leaves_nothing() {
    let server = RedisServer::start();
    let other = many_threads();
    let wire = other.block_on(Proxy::start(server.addr()));
    let redlock = builder([wire.url()]).ttl(secs(60)).node_timeout(secs(2));
    // The next home may connect over the slow wire.
    let redlock = redlock.connect_timeout(secs(5));
    let home = many_threads();
    let redlock = redlock.runtime(home.handle().clone()).build().unwrap();
    let lock = |key: &'static str| other.block_on(redlock.lock(key).into_future()).unwrap();
    let (held, dropped, releasing) = (lock("held"), lock("dropped"), lock("releasing"));
    wire.delay(ms(300));
    drop(dropped);
    let releasing = other.spawn(releasing.release());
    let asking = other.spawn(redlock.lock("asked").into_future());
    other.block_on(until("asked", LONGEST, || async {
        server.exists(&name_of("asked"))
    }));
    home.shutdown_background();
    other.block_on(async {
        let lost = timeout(LONGEST, held.lost()).await.expect("it is not told");
        assert_eq!(lost, LostReason::Abandoned);
        assert!(!held.is_valid());
        let asked = timeout(LONGEST, asking).await.expect("it hangs").unwrap();
        assert_disconnected(&asked.unwrap_err());
        let released = timeout(LONGEST, releasing).await.expect("it hangs");
        assert!(released.unwrap().is_err());
        wire.pass();
        // The next use has a new home, which sends what the other one left.
        let guard = redlock.lock("next").await.unwrap();
        for key in ["asked", "dropped", "releasing"] {
            until("free", LONGEST, || async { !server.exists(&name_of(key)) }).await;
        }
        guard.release().await.unwrap();
        let drained = redlock.drain(secs(1)).await;
        assert!(drained.held.is_empty(), "{drained:?}");
    });
    // Under its holder, a lock is never released.
    assert!(server.exists(&name_of("held")));
    drop(held);
}

/// The next home waits with timers of its own for what the calls of the former one have left.
#[test]
fn call_dropped_after_the_end_of_its_runtime_is_finished_in_the_next_one() {
    let (nodes, redlock) = three_nodes();
    (0..3).for_each(|node| nodes.set(node, Gate::Never));
    let ended = one_thread();
    let mut asking = redlock.lock("k").into_future();
    let asked = ended.block_on(async { timeout(ms(10), &mut asking).await });
    assert!(asked.is_err());
    drop(ended);
    one_thread().block_on(async {
        assert!(!redlock.health().await.has_quorum());
        drop(asking);
        // It panics instead if it waits in vain for the timer of the former one, and nobody hears of the key.
        let drained = redlock.drain(secs(5)).await;
        assert_eq!(drained.unconfirmed.len(), 3, "{drained:?}");
    });
}

async fn state(redlock: &Redlock) -> NodeState {
    redlock.health().await.nodes[0].state.clone()
}

#[test]
fn quarantined_node_is_asked_again_by_the_next_home() {
    let server = RedisServer::start();
    let redlock = guarded([server.url()]).build().unwrap();
    many_threads().block_on(async {
        assert!(redlock.try_lock("k").await.is_err());
        let state = state(&redlock).await;
        assert_matches!(state, NodeState::Quarantined { .. });
    });
    many_threads().block_on(until_locked(&redlock, "k"));
}

/// The first to ask for a record reads it for all, in a runtime of which nothing may come any more.
#[test]
fn big_record_is_replayed_while_the_runtime_that_fetches_it_is_idle() {
    let (nodes, redlock) = three_nodes();
    let layer = once(&redlock).max_response_body(100_000);
    let app = Router::new().route("/", post(async || vec![b'x'; 50_000]));
    let app = app.route_layer(layer);
    let (resting, going_on) = (one_thread(), many_threads());
    let first = going_on.block_on(pay(&app, "a"));
    assert_eq!(first.status, StatusCode::OK);
    set_all(&nodes, OpKind::Fetch, Gate::Slow(ms(40)));
    let fetching = resting.block_on(async { timeout(ms(20), pay(&app, "a")).await });
    assert!(fetching.is_err());
    (0..3).for_each(|node| nodes.set(node, Gate::Ready));
    let again = going_on.block_on(async { timeout(LONGEST, pay(&app, "a")).await });
    let again = again.expect("it waits for a runtime that rests");
    assert!(again.is_replayed(), "{} {}", again.status, again.code());
    drop(resting);
}

#[test]
fn runtime_dropped_while_connecting_leaves_a_redlock_that_connects() {
    let server = RedisServer::start();
    let second = many_threads();
    let wire = second.block_on(Proxy::start(server.addr()));
    let redlock = builder([wire.url()]).build().unwrap();
    wire.black_hole();
    let first = many_threads();
    let asked = first.block_on(async { timeout(ms(50), redlock.lock("k").into_future()).await });
    assert!(asked.is_err());
    drop(first);
    wire.pass();
    let guard = second.block_on(redlock.lock("k").into_future()).unwrap();
    second.block_on(guard.release()).unwrap();
    assert!(!server.exists(&name_of("k")));
}
