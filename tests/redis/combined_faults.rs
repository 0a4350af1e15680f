//! Faults below HTTP that come together: runtimes that end or rest, releases that are refused on a bad wire,
//! names that lead to one server, and lease tasks that die.

use std::future::IntoFuture;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::post;
use tokio::runtime::{Builder, Runtime};
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, ServiceExt};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    ExecutionHandle, IdempotencyLayer, LockError, NodeState, Redlock, RedlockBuilder, RestartGuard,
    scope,
};

use crate::support::{
    Answer, Cluster, Executed, Proxy, Random, RedisServer, SlowReadiness, free_port, ms, secs,
    until, until_all_up,
};

const LONGEST: Duration = Duration::from_secs(15);

/// Without the restart guard, and with patience: a busy machine may be slow.
fn builder(urls: impl IntoIterator<Item = String>) -> RedlockBuilder {
    let builder = Redlock::builder().urls(urls).node_timeout(ms(400));
    builder.restart_guard(RestartGuard::Off)
}

fn many_threads() -> Runtime {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(1).enable_all().build().unwrap()
}

/// A runtime that does nothing but while it is blocked on.
fn one_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn name_of(key: &str) -> String {
    format!("redlock:{{{key}}}")
}

/// Counts an execution when the handler begins, and answers with the validity that is left.
fn app_of(executed: &Executed) -> Router {
    let executed = executed.clone();
    let pay = async move |execution: ExecutionHandle| {
        executed.one_more();
        format!("{}", execution.valid_for().as_millis())
    };
    Router::new().route("/", post(pay))
}

fn request(key: &str) -> Request {
    let request = Request::post("/").header("idempotency-key", key);
    request.body(Body::empty()).unwrap()
}

async fn pay(app: &Router, key: &str) -> Answer {
    Answer::to(app, request(key)).await
}

fn once(redlock: &Redlock) -> IdempotencyLayer {
    IdempotencyLayer::new(redlock.clone(), scope::public())
}

/// Executes with a service that is ready after so long.
async fn pay_late(redlock: &Redlock, executed: &Executed, after: Duration) -> Response {
    let slow = once(redlock).layer(SlowReadiness::of_clones(app_of(executed), after));
    slow.oneshot(request("a")).await.unwrap().map(Body::new)
}

async fn text(response: Response) -> String {
    let body = axum::body::to_bytes(response.into_body(), 1 << 20).await;
    String::from_utf8(body.unwrap().to_vec()).unwrap()
}

// Runtimes.

/// A runtime that was asked last before the lane's own ended, and that rests since then, is alive all the
/// same.
#[test]
fn lane_moves_past_an_idle_runtime_to_a_running_one() {
    let server = RedisServer::start();
    let (resting, going_on) = (one_thread(), many_threads());
    let wire = going_on.block_on(Proxy::start(server.addr()));
    let redlock = builder([wire.url()]).node_timeout(secs(2));
    let redlock = redlock.build().unwrap();
    let first = many_threads();
    let guard = first.block_on(redlock.lock("warm").into_future()).unwrap();
    first.block_on(guard.release()).unwrap();
    wire.delay(ms(300));
    let asking = going_on.spawn(redlock.lock("asked").into_future());
    going_on.block_on(until("asked", LONGEST, || async {
        server.exists(&name_of("asked"))
    }));
    let other = redlock.lock("other").into_future();
    assert!(
        resting
            .block_on(async { timeout(ms(20), other).await })
            .is_err()
    );
    going_on.block_on(until("asked", LONGEST, || async {
        server.exists(&name_of("other"))
    }));
    first.shutdown_background();
    wire.pass();
    let asked = going_on.block_on(asking).unwrap();
    let later = going_on.block_on(redlock.try_lock("later").into_future());
    assert!(later.is_ok(), "{later:?}");
    assert!(asked.is_ok(), "{asked:?}");
    drop(resting);
}

/// The runtime in which a node was first asked something need not be blocked on again.
#[test]
fn node_is_reached_from_one_runtime_while_the_runtime_of_its_lane_is_idle() {
    let server = RedisServer::start();
    let redlock = builder([server.url()]).build().unwrap();
    let (resting, going_on) = (one_thread(), many_threads());
    let guard = resting.block_on(redlock.lock("k").into_future()).unwrap();
    resting.block_on(guard.release()).unwrap();
    going_on.block_on(until("locked", LONGEST, || async {
        redlock.try_lock("k").await.is_ok()
    }));
    drop(resting);
}

/// Nor is anything lost when that one goes on: there is one lane, and it is in order.
#[test]
fn lane_replaced_while_its_runtime_was_idle_still_releases_its_locks() {
    let server = RedisServer::start();
    let redlock = builder([server.url()]).ttl(secs(60)).build().unwrap();
    let (resting, going_on) = (one_thread(), many_threads());
    let held = resting
        .block_on(redlock.lock("held").into_future())
        .unwrap();
    // Its lease task runs where it was asked for, so this is released when that goes on.
    drop(held);
    going_on.block_on(until("locked", LONGEST, || async {
        match redlock.try_lock("k").await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(_) => false,
        }
    }));
    for round in 0..50 {
        let key = format!("k{round}");
        let runtime = if round % 2 == 0 { &resting } else { &going_on };
        runtime.block_on(async {
            let guard = redlock.lock(key.as_str()).await.unwrap();
            guard.release().await.unwrap();
        });
    }
    resting.block_on(until("free", LONGEST, || async {
        server.keys("redlock:{*}").is_empty()
    }));
    resting.block_on(async { drop(redlock) });
    going_on.block_on(until("closed", LONGEST, || async {
        let clients = server.command(&["CLIENT", "LIST"]);
        clients.as_str().unwrap().lines().count() <= 1
    }));
}

/// The first to ask for a record reads it for all, in a runtime of which nothing may come any more.
#[test]
fn big_record_is_replayed_while_the_runtime_that_fetches_it_is_idle() {
    let nodes = ScriptedNodes::new(3);
    let redlock = Redlock::builder().scripted(&nodes).build().unwrap();
    let layer = once(&redlock).max_response_body(100_000);
    let app = Router::new().route("/", post(async || vec![b'x'; 50_000]));
    let app = app.route_layer(layer);
    let (resting, going_on) = (one_thread(), many_threads());
    let first = going_on.block_on(pay(&app, "a"));
    assert_eq!(first.status, StatusCode::OK);
    for node in 0..3 {
        nodes.set_for(node, OpKind::Fetch, Gate::Slow(ms(40)));
    }
    assert!(
        resting
            .block_on(async { timeout(ms(20), pay(&app, "a")).await })
            .is_err()
    );
    for node in 0..3 {
        nodes.set(node, Gate::Ready);
    }
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

/// The head of the local queue goes away with its runtime, and the next is let in.
#[test]
fn dropped_runtime_of_the_first_waiter_lets_the_next_waiter_in() {
    let cluster = Cluster::start(3);
    let redlock = builder(cluster.urls()).build().unwrap();
    let (first, second) = (many_threads(), many_threads());
    let guard = second.block_on(redlock.lock("k").into_future()).unwrap();
    for _ in 0..3 {
        first.spawn(redlock.lock("k").wait(LONGEST).into_future());
    }
    second.block_on(async { sleep(ms(100)).await });
    let last = second.spawn(redlock.lock("k").wait(LONGEST).into_future());
    second.block_on(async { sleep(ms(50)).await });
    drop(first);
    second.block_on(guard.release()).unwrap();
    let last = second.block_on(last).unwrap().unwrap();
    second.block_on(last.release()).unwrap();
    second.block_on(cluster.wait_until_free(LONGEST));
}

#[test]
fn block_on_within_spawn_blocking_locks_and_releases() {
    let cluster = Cluster::start(3);
    let redlock = builder(cluster.urls()).build().unwrap();
    let runtime = many_threads();
    runtime.block_on(async {
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let redlock = redlock.clone();
            tasks.spawn_blocking(move || {
                let handle = tokio::runtime::Handle::current();
                for _ in 0..5 {
                    let asked = redlock.lock("k").wait(LONGEST).into_future();
                    let guard = handle.block_on(asked).unwrap();
                    handle.block_on(guard.release()).unwrap();
                }
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
        cluster.wait_until_free(LONGEST).await;
    });
}

// Releases that are refused for now.

/// Servers that refuse every write, as with too few replicas.
fn refuse_writes(server: &RedisServer, refuse: bool) {
    let replicas = if refuse { "1" } else { "0" };
    server.command(&["CONFIG", "SET", "min-replicas-to-write", replicas]);
}

#[tokio::test]
async fn refused_release_is_repeated_on_a_new_connection_before_the_ttl() {
    let server = RedisServer::start();
    let wire = Proxy::start(server.addr()).await;
    let redlock = builder([wire.url()]).ttl(secs(60)).build().unwrap();
    let guard = redlock.lock("k").await.unwrap();
    refuse_writes(&server, true);
    assert!(guard.release().await.is_err());
    wire.cut();
    sleep(ms(300)).await;
    wire.pass();
    sleep(ms(500)).await;
    assert!(server.exists(&name_of("k")));
    refuse_writes(&server, false);
    until("free", LONGEST, || async { !server.exists(&name_of("k")) }).await;
}

#[tokio::test]
async fn refused_release_outlives_its_redlock_and_drain_names_the_node() {
    let server = RedisServer::start();
    let wire = Proxy::start(server.addr()).await;
    let redlock = builder([wire.url()]).ttl(secs(60)).build().unwrap();
    let guard = redlock.lock("k").await.unwrap();
    refuse_writes(&server, true);
    assert!(guard.release().await.is_err());
    let drained = redlock.drain(secs(2)).await;
    assert_eq!(drained.unconfirmed.len(), 1, "{drained:?}");
    drop(redlock);
    wire.cut();
    sleep(ms(300)).await;
    wire.pass();
    refuse_writes(&server, false);
    until("free", LONGEST, || async { !server.exists(&name_of("k")) }).await;
}

/// The next runtime has it from the lane of the one that ended.
#[test]
fn refused_release_outlives_its_runtime() {
    let server = RedisServer::start();
    let redlock = builder([server.url()]).ttl(secs(60)).build().unwrap();
    let (first, second) = (many_threads(), many_threads());
    let guard = first.block_on(redlock.lock("k").into_future()).unwrap();
    refuse_writes(&server, true);
    assert!(first.block_on(guard.release()).is_err());
    drop(first);
    refuse_writes(&server, false);
    second.block_on(until("free", LONGEST, || async {
        redlock.health().await;
        !server.exists(&name_of("k"))
    }));
}

/// A release that is refused is of its own owner: when it is accepted at last, the key may be another's.
#[tokio::test]
async fn refused_release_does_not_release_the_next_holder() {
    let server = RedisServer::start();
    let wire = Proxy::start(server.addr()).await;
    let ours = builder([wire.url()]).ttl(secs(60)).build().unwrap();
    let theirs = builder([server.url()]).build().unwrap();
    let guard = ours.lock("k").await.unwrap();
    refuse_writes(&server, true);
    assert!(guard.release().await.is_err());
    wire.cut();
    server.command(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
    server.command(&["DEL", &name_of("k")]);
    let next = theirs.lock("k").await.unwrap();
    wire.pass();
    sleep(ms(800)).await;
    assert!(next.is_valid() && server.exists(&name_of("k")));
    next.release().await.unwrap();
}

#[tokio::test]
async fn full_server_extends_and_releases_locks_and_grants_none() {
    let server = RedisServer::start();
    for fencing in [true, false] {
        for keys in [&["k"][..], &["k", "l"]] {
            let redlock = builder([server.url()]).fencing(fencing).build().unwrap();
            let guard = redlock.lock_all(keys.iter().copied()).await.unwrap();
            server.command(&["CONFIG", "SET", "maxmemory", "1"]);
            guard.extend(secs(10)).await.unwrap();
            let refused = redlock.try_lock("other").await.unwrap_err();
            assert!(matches!(refused, LockError::Unavailable { .. }));
            guard.release().await.unwrap();
            for key in keys {
                assert!(!server.exists(&name_of(key)), "{key} {fencing}");
            }
            server.command(&["CONFIG", "SET", "maxmemory", "0"]);
            assert!(!server.exists(&name_of("other")));
        }
    }
}

/// A server that comes back without its memory has nothing to release, and is asked for locks.
#[tokio::test]
async fn server_restarted_with_refused_releases_pending_grants_again() {
    let mut server = RedisServer::start();
    let redlock = builder([server.url()]).ttl(secs(60)).build().unwrap();
    let mut guards = Vec::new();
    for key in 0..200 {
        guards.push(redlock.lock(format!("k{key}")).await.unwrap());
    }
    refuse_writes(&server, true);
    for guard in guards {
        drop(guard);
    }
    sleep(ms(300)).await;
    server.kill();
    server.restart();
    until("granted", LONGEST, || async {
        match redlock.try_lock("k0").await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(_) => false,
        }
    })
    .await;
    assert!(server.keys("redlock:{k*}").is_empty());
}

// Without fencing, with the guard.

const TTL: Duration = secs(1);
const WINDOW: Duration = secs(2);

fn guarded(urls: impl IntoIterator<Item = String>) -> RedlockBuilder {
    let builder = builder(urls).ttl(TTL);
    builder.restart_guard(RestartGuard::For(WINDOW))
}

#[tokio::test]
async fn fencing_off_respects_locks_of_plain_clients_and_foreign_keys() {
    let cluster = Cluster::start(3);
    let redlock = guarded(cluster.urls()).fencing(false).build().unwrap();
    until_all_up(&redlock, LONGEST).await;
    let at_all = |command: &[&str]| {
        for server in &cluster.servers {
            server.command(command);
        }
    };
    let refused = |error: LockError| match error {
        LockError::Contended { retry_after, .. } => retry_after,
        other => panic!("{other:?}"),
    };
    let (plain, endless, list) = (name_of("plain"), name_of("endless"), name_of("list"));
    at_all(&["SET", &plain, "theirs", "PX", "5000"]);
    at_all(&["SET", &endless, "theirs"]);
    at_all(&["LPUSH", &list, "theirs"]);
    let left = refused(redlock.try_lock("plain").await.unwrap_err());
    assert!(
        left.is_some_and(|left| left > secs(3) && left <= secs(5)),
        "{left:?}"
    );
    assert_eq!(
        refused(redlock.try_lock("endless").await.unwrap_err()),
        None
    );
    let set = redlock
        .lock_all(["free", "plain"])
        .wait(Duration::ZERO)
        .await;
    let left = refused(set.unwrap_err());
    assert!(left.is_some_and(|left| left > secs(3)), "{left:?}");
    let foreign = redlock.try_lock("list").await.unwrap_err();
    assert!(matches!(&foreign, LockError::Unavailable { nodes, .. } if nodes.len() >= 2));
    for server in &cluster.servers {
        assert_eq!(server.command(&["GET", &plain]).as_str(), Some("theirs"));
        assert_eq!(server.command(&["LLEN", &list]).as_int(), Some(1));
        assert!(!server.exists(&name_of("free")));
    }
}

/// The same owner is never told that it holds what it asks for: the answer got lost with the connection.
#[tokio::test]
async fn fencing_off_lost_answer_does_not_block_its_own_retry() {
    let server = RedisServer::start();
    let wire = Proxy::start(server.addr()).await;
    let redlock = guarded([wire.url()]).fencing(false).ttl(ms(950));
    let redlock = redlock.build().unwrap();
    until_all_up(&redlock, LONGEST).await;
    for _ in 0..5 {
        wire.delay(ms(200));
        let asked = redlock.lock("k").wait(secs(3)).into_future();
        let cutting = async {
            sleep(ms(100)).await;
            wire.cut();
            sleep(ms(50)).await;
            wire.pass();
        };
        let (guard, ()) = tokio::join!(asked, cutting);
        if let Ok(guard) = guard {
            assert!(server.exists(&name_of("k")));
            guard.release().await.ok();
        }
        until_all_up(&redlock, LONGEST).await;
        redlock.lock("k").await.unwrap().release().await.unwrap();
        assert!(!server.exists(&name_of("k")));
    }
}

// Twins.

/// What holds a lock is a majority of servers, and not of names.
#[tokio::test]
async fn changing_addresses_make_no_majority_of_one_server() {
    let cluster = Cluster::start(3);
    until_all_up(&guarded(cluster.urls()).build().unwrap(), LONGEST).await;
    let mut wires = Vec::new();
    for server in &cluster.servers {
        wires.push(Proxy::start(server.addr()).await);
    }
    let urls: Vec<_> = wires.iter().map(Proxy::url).collect();
    let redlock = guarded(urls).build().unwrap();
    let mut random = Random(20_261_122);
    let mut granted = 0;
    let began = Instant::now();
    while began.elapsed() < secs(9) {
        let wire = usize::try_from(random.below(3)).unwrap();
        let server = usize::try_from(random.below(3)).unwrap();
        // Nearly always right, so that there are locks at all.
        if random.below(8) == 0 {
            wires[wire].lead_to(cluster.servers[server].addr());
            wires[wire].cut();
            wires[wire].pass();
        } else {
            wires[wire].lead_to(cluster.servers[wire].addr());
        }
        for _ in 0..20 {
            if let Ok(guard) = redlock.try_lock("k").await {
                let name = name_of("k");
                let have = || cluster.servers.iter().filter(|server| server.exists(&name));
                let count = have().count();
                assert!(count >= 2 || !guard.is_valid(), "held by {count} server");
                granted += 1;
                guard.release().await.ok();
            }
            sleep(ms(10)).await;
        }
    }
    assert!(granted > 0, "nothing was tried");
    let connections: usize = wires.iter().map(Proxy::connections).sum();
    assert!(connections < 9 * 3 * 20, "{connections} connections");
}

/// The first vote of a server came under a name that leads elsewhere by now, so that it is no twin when
/// another name leads to it for the first time.
#[tokio::test]
async fn server_that_voted_under_one_name_does_not_vote_at_once_under_another() {
    let cluster = Cluster::start(2);
    let window = secs(4);
    let ttl = secs(3);
    let settled = guarded(cluster.urls()).ttl(ttl).max_ttl(ttl);
    until_all_up(
        &settled
            .restart_guard(RestartGuard::For(window))
            .build()
            .unwrap(),
        LONGEST,
    )
    .await;
    let fast = Proxy::start(cluster.servers[0].addr()).await;
    let slow = Proxy::start(cluster.servers[0].addr()).await;
    slow.delay(ms(250));
    let away = format!("redis://127.0.0.1:{}", free_port());
    let redlock = builder([fast.url(), slow.url(), away]).connect_timeout(secs(3));
    let redlock = redlock.ttl(ttl).restart_guard(RestartGuard::For(window));
    let redlock = redlock.build().unwrap();
    let moving = async {
        let name = name_of("k");
        until("asked", LONGEST, || async {
            cluster.servers[0].exists(&name)
        })
        .await;
        fast.lead_to(cluster.servers[1].addr());
        fast.cut();
        fast.pass();
    };
    let (asked, ()) = tokio::join!(redlock.try_lock("k").into_future(), moving);
    let name = name_of("k");
    let have = cluster.servers.iter().filter(|server| server.exists(&name));
    let have = have.count();
    assert!(asked.is_err(), "held by {have} server");
}

#[tokio::test]
async fn three_addresses_of_one_server_do_not_vote_or_reconnect_endlessly() {
    let server = RedisServer::start();
    until_all_up(&guarded([server.url()]).build().unwrap(), LONGEST).await;
    let mut wires = Vec::new();
    for _ in 0..3 {
        wires.push(Proxy::start(server.addr()).await);
    }
    let redlock = guarded(wires.iter().map(Proxy::url)).build().unwrap();
    until("known", LONGEST, || async {
        let health = redlock.health().await;
        health
            .nodes
            .iter()
            .all(|node| matches!(&node.state, NodeState::Unreachable { .. }))
    })
    .await;
    let before: usize = wires.iter().map(Proxy::connections).sum();
    let began = Instant::now();
    while began.elapsed() < secs(11) {
        let refused = redlock.try_lock("k").await;
        assert!(matches!(refused, Err(LockError::Unavailable { .. })));
        sleep(ms(20)).await;
    }
    let after: usize = wires.iter().map(Proxy::connections).sum();
    assert!(after - before <= 3 * 3, "{} connections", after - before);
    assert!(!server.exists(&name_of("k")));
}

// Executions that begin late, and lease tasks that die.

fn scripted(nodes: &ScriptedNodes) -> RedlockBuilder {
    Redlock::builder().scripted(nodes)
}

#[tokio::test(start_paused = true)]
async fn late_execution_does_not_exceed_its_max_hold() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let redlock = scripted(&nodes).build().unwrap();
    let layer = once(&redlock).max_hold(secs(12));
    let slow = layer.layer(SlowReadiness::of_clones(app_of(&executed), secs(11)));
    let valid_for = text(slow.oneshot(request("a")).await.unwrap().map(Body::new)).await;
    let valid_for: u64 = valid_for.parse().unwrap();
    assert!((900..1_100).contains(&valid_for), "{valid_for} ms");
}

#[tokio::test(start_paused = true)]
async fn late_execution_is_not_renewed_with_renew_off() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let redlock = scripted(&nodes).renew(false).build().unwrap();
    let valid_for = text(pay_late(&redlock, &executed, secs(8)).await).await;
    let valid_for: u64 = valid_for.parse().unwrap();
    assert!((1_500..2_000).contains(&valid_for), "{valid_for} ms");
}

#[tokio::test(start_paused = true)]
async fn lock_lost_before_the_execution_begins_leaves_no_key() {
    for (gone, status) in [(secs(1), 503), (secs(20), 503)] {
        let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
        let redlock = scripted(&nodes).build().unwrap();
        let layer = once(&redlock).at_most_once(true);
        let slow = layer.layer(SlowReadiness::of_clones(app_of(&executed), secs(25)));
        let going = async {
            sleep(gone).await;
            nodes.wipe(0);
            nodes.wipe(1);
        };
        let (answer, ()) = tokio::join!(slow.oneshot(request("a")), going);
        assert_eq!(answer.unwrap().status(), status);
        assert_eq!(executed.count(), 0);
        sleep(secs(1)).await;
        assert_eq!(nodes.locks(), [0, 0, 0], "{gone:?}");
        let app = app_of(&executed).layer(once(&redlock).at_most_once(true));
        assert_eq!(pay(&app, "a").await.status, StatusCode::OK);
    }
}

#[tokio::test(start_paused = true)]
async fn drain_before_an_execution_begins_ends_the_request_in_order() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let redlock = scripted(&nodes).build().unwrap();
    let draining = async {
        sleep(secs(1)).await;
        redlock.drain(secs(30)).await
    };
    let (answer, drained) = tokio::join!(pay_late(&redlock, &executed, secs(5)), draining);
    assert_eq!(answer.status(), StatusCode::OK);
    assert!(drained.is_clean(), "{drained:?}");
    assert_eq!((executed.count(), nodes.locks()), (1, vec![0, 0, 0]));
}

/// However many times its future was polled: nothing was executed, so nothing is left.
#[tokio::test(start_paused = true)]
async fn request_dropped_before_its_execution_leaves_no_intent() {
    for gate in [Gate::Ready, Gate::Slow(ms(5))] {
        for late in [Duration::ZERO, ms(10), ms(200)] {
            for polls in 1..40 {
                let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
                for node in 0..3 {
                    nodes.set(node, gate);
                }
                let redlock = scripted(&nodes).build().unwrap();
                let layer = || once(&redlock).at_most_once(true);
                let slow = layer().layer(SlowReadiness::of_clones(app_of(&executed), late));
                let mut asked = tokio_test::task::spawn(slow.oneshot(request("a")));
                let mut done = false;
                for _ in 0..polls {
                    done |= asked.poll().is_ready();
                    if done {
                        break;
                    }
                    for _ in 0..3 {
                        tokio::task::yield_now().await;
                    }
                    if polls > 5 && !asked.is_woken() {
                        sleep(ms(3)).await;
                    }
                }
                drop(asked);
                if executed.count() > 0 || done {
                    continue;
                }
                sleep(secs(60)).await;
                if executed.count() > 0 {
                    continue;
                }
                let again = pay(&app_of(&executed).layer(layer()), "a").await;
                let code = again.code();
                assert_eq!(
                    again.status,
                    StatusCode::OK,
                    "{gate:?} {late:?} {polls} {code}"
                );
            }
        }
    }
}

/// A lease task that dies while its execution runs leaves the lock to its ttl, and that is told.
#[tokio::test(start_paused = true)]
async fn drain_reports_the_lock_of_a_lease_task_that_panicked_in_an_execution() {
    let nodes = ScriptedNodes::new(3);
    let redlock = scripted(&nodes).build().unwrap();
    let pay = Router::new().route("/", post(async || sleep(secs(5)).await));
    let pay = pay.layer(once(&redlock));
    let executing = tokio::spawn(pay.oneshot(request("a")));
    sleep(secs(1)).await;
    nodes.set_for(1, OpKind::Confirm, Gate::Panic);
    executing.await.unwrap().unwrap();
    assert_eq!(nodes.locks(), [1, 1, 1]);
    let drained = redlock.drain(secs(1)).await;
    assert!(!drained.is_clean(), "{drained:?}");
    assert_eq!(drained.unconfirmed.len(), 3, "{drained:?}");
    sleep(secs(20)).await;
    assert_eq!(nodes.locks(), [0, 0, 0]);
    assert!(redlock.drain(secs(1)).await.is_clean());
}

#[tokio::test(start_paused = true)]
async fn drain_reports_the_lock_of_a_lease_task_that_panicked_under_its_guard() {
    let nodes = ScriptedNodes::new(3);
    let redlock = scripted(&nodes).build().unwrap();
    let guard = redlock.lock("k").await.unwrap();
    nodes.set_for(1, OpKind::Confirm, Gate::Panic);
    sleep(secs(5)).await;
    assert!(!guard.is_valid());
    assert_eq!(nodes.locks(), [1, 1, 1]);
    let drained = redlock.drain(secs(1)).await;
    assert_eq!(drained.unconfirmed.len(), 3, "{drained:?}");
    drop(guard);
    sleep(secs(20)).await;
    assert!(redlock.drain(secs(1)).await.is_clean());
}

/// At each kind of request, before, in and after an execution: what is left ends by its ttl, the key is
/// free for others then, and intents stay only where something may have been executed.
#[tokio::test(start_paused = true)]
async fn lease_task_panic_at_any_request_of_an_execution_executes_at_most_once() {
    for kind in [
        OpKind::Acquire,
        OpKind::Confirm,
        OpKind::Release,
        OpKind::Record,
        OpKind::Look,
    ] {
        for node in 0..3 {
            for (late, ms_executing) in [(0, 0), (200, 0), (0, 5_000)] {
                let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
                let redlock = scripted(&nodes).build().unwrap();
                let counted = executed.clone();
                let pay_for = async move || {
                    counted.one_more();
                    sleep(ms(ms_executing)).await;
                };
                let inner = Router::new().route("/", post(pay_for));
                let layer = || once(&redlock).at_most_once(true);
                nodes.set_for(node, kind, Gate::Panic);
                let slow = layer().layer(SlowReadiness::of_clones(inner.clone(), ms(late)));
                let answer = timeout(secs(120), slow.oneshot(request("a"))).await;
                let status = answer.expect("it hangs").unwrap().status();
                nodes.set(node, Gate::Ready);
                let count = executed.count();
                sleep(secs(30)).await;
                let case = format!("{kind:?} at {node}, {late}, {ms_executing}: {status}");
                assert_eq!(nodes.locks(), [0, 0, 0], "{case}");
                let again = timeout(secs(60), pay(&inner.layer(layer()), "a")).await;
                let again = again.expect("it hangs");
                match count {
                    0 => assert_eq!(again.status, StatusCode::OK, "{case}"),
                    _ => assert_eq!(executed.count(), 1, "{case}: executed again"),
                }
                assert!(redlock.drain(secs(1)).await.is_clean(), "{case}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn guard_dropped_during_an_extension_leaves_no_lock() {
    for (slow, pause) in [(5, 0), (5, 3), (30, 10), (200, 60)] {
        let nodes = ScriptedNodes::new(3);
        let redlock = scripted(&nodes).build().unwrap();
        let guard = redlock.lock("k").await.unwrap();
        for node in 0..3 {
            nodes.set_for(node, OpKind::Confirm, Gate::Slow(ms(slow)));
        }
        {
            let mut extending = tokio_test::task::spawn(guard.extend(secs(10)));
            assert!(extending.poll().is_pending());
            sleep(ms(pause)).await;
        }
        drop(guard);
        sleep(ms(500)).await;
        assert_eq!(nodes.locks(), [0, 0, 0], "{slow} {pause}");
        assert!(redlock.try_lock("k").await.is_ok());
    }
}

#[tokio::test(start_paused = true)]
async fn caller_dropped_during_a_repair_leaves_no_lock_and_the_record() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let redlock = scripted(&nodes).build().unwrap();
    let app = app_of(&executed).layer(once(&redlock));
    for node in 0..2 {
        nodes.set_for(node, OpKind::Record, Gate::Failing);
        nodes.set_for(node, OpKind::Look, Gate::Failing);
    }
    assert_eq!(pay(&app, "a").await.status, StatusCode::OK);
    sleep(secs(60)).await;
    for node in 0..2 {
        nodes.set(node, Gate::Ready);
        nodes.set_for(node, OpKind::Record, Gate::Slow(ms(30)));
    }
    nodes.set_for(2, OpKind::Acquire, Gate::Never);
    let slow = once(&redlock).layer(SlowReadiness::of_clones(app_of(&executed), ms(200)));
    let left = timeout(ms(215), slow.oneshot(request("a"))).await;
    assert!(left.is_err(), "{left:?}");
    nodes.set(2, Gate::Ready);
    sleep(secs(1)).await;
    assert_eq!(nodes.locks(), [0, 0, 0]);
    assert!(pay(&app, "a").await.is_replayed());
    assert_eq!(executed.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn two_phases_share_one_deadline_with_a_long_node_timeout() {
    for node_timeout in [ms(2), ms(50), secs(4)] {
        let nodes = ScriptedNodes::new(3);
        let redlock = scripted(&nodes).node_timeout(node_timeout).build().unwrap();
        // Unequal numbers, so that there is a second phase.
        for node in 0..3 {
            let other = scripted(&nodes).build().unwrap();
            for more in 0..3 {
                nodes.set(
                    more,
                    if more == node {
                        Gate::Ready
                    } else {
                        Gate::Down
                    },
                );
            }
            drop(other.try_lock("k").await);
            nodes.set(node, Gate::Ready);
            sleep(ms(1)).await;
        }
        for node in 0..3 {
            nodes.set(node, Gate::Slow(node_timeout * 6 / 10));
        }
        sleep(secs(20)).await;
        let began = Instant::now();
        let asked = redlock.try_lock("k").await;
        let took = began.elapsed();
        assert!(
            took <= node_timeout * 2,
            "{node_timeout:?} {took:?} {asked:?}"
        );
        drop(asked);
        sleep(secs(30)).await;
        assert_eq!(nodes.locks(), [0, 0, 0]);
    }
}

/// One server is away while very many requests leave before they begin.
#[tokio::test]
async fn dropped_requests_beside_a_stopped_server_delay_neither_drain_nor_lane() {
    let cluster = Cluster::start(3);
    let wire = Proxy::start(cluster.servers[2].addr()).await;
    let urls = [
        cluster.servers[0].url(),
        cluster.servers[1].url(),
        wire.url(),
    ];
    let redlock = builder(urls).ttl(secs(1)).build().unwrap();
    redlock.lock("warm").await.unwrap().release().await.unwrap();
    let executed = Executed::default();
    let layer = once(&redlock).at_most_once(true);
    wire.black_hole();
    let mut tasks = tokio::task::JoinSet::new();
    for key in 0..3_000 {
        let slow = layer.layer(SlowReadiness::of_clones(app_of(&executed), secs(60)));
        let asked = slow.oneshot(request(&key.to_string()));
        tasks.spawn(async move { timeout(ms(300), asked).await.is_ok() });
        if key % 100 == 0 {
            sleep(ms(10)).await;
        }
    }
    while let Some(answered) = tasks.join_next().await {
        assert!(!answered.unwrap());
    }
    let began = Instant::now();
    let drained = redlock.drain(secs(30)).await;
    assert!(began.elapsed() < secs(10) && drained.held.is_empty());
    for server in &cluster.servers[..2] {
        assert_eq!(server.keys("*:intent").len(), 0);
    }
    assert_eq!(executed.count(), 0);
    drop((redlock, layer));
    // Two ttls, and it does not try to connect any more.
    sleep(secs(4)).await;
    let connections = wire.connections();
    sleep(secs(2)).await;
    assert_eq!(wire.connections(), connections);
}
