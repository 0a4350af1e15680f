//! Lanes whose runtime is idle or ends: another runtime takes over, and no lock is left.

use std::future::IntoFuture;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use support::{Cluster, Proxy, RedisServer, ms, once, secs, until};
use tokio::time::{sleep, timeout};
use tower_redlock::Redlock;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};

use crate::patient::{LONGEST, builder, many_threads, name_of, one_thread, pay};

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
