//! A `Redlock` that outlives the runtimes it is used from: the state of a node when one runtime ended does
//! not keep the next from reaching that node.

use std::future::IntoFuture;
use std::time::Duration;

use axum::BoxError;
use support::{Proxy, RedisServer, until};
use tokio::runtime::{Builder, Runtime};
use tower_redlock::{LockError, NodeFailure, NodeState, Redlock, RedlockBuilder, RestartGuard};

const LONGEST: Duration = Duration::from_secs(15);

fn builder(url: &str) -> RedlockBuilder {
    // Not what is tested: a busy machine may be slow.
    let node_timeout = Duration::from_millis(300);
    Redlock::builder().url(url).node_timeout(node_timeout)
}

fn runtime() -> Runtime {
    let mut builder = Builder::new_multi_thread();
    let builder = builder.worker_threads(1).enable_all();
    builder.build().expect("a runtime can be built")
}

async fn until_locked(redlock: &Redlock) {
    until("locked", LONGEST, || async {
        match redlock.try_lock("k").await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(_) => false,
        }
    })
    .await;
}

async fn state(redlock: &Redlock) -> NodeState {
    redlock.health().await.nodes[0].state.clone()
}

async fn until_unreachable(redlock: &Redlock) {
    until("unreachable", LONGEST, || async {
        matches!(state(redlock).await, NodeState::Unreachable { .. })
    })
    .await;
}

#[test]
fn killed_node_is_asked_again_by_the_next_runtime() {
    let mut server = RedisServer::start();
    let redlock = builder(&server.url()).restart_guard(RestartGuard::Off);
    let redlock = redlock.build().expect("the settings are valid");
    let first = runtime();
    first.block_on(until_locked(&redlock));
    server.kill();
    first.block_on(until_unreachable(&redlock));
    drop(first);
    server.restart();
    runtime().block_on(until_locked(&redlock));
}

#[test]
fn quarantined_node_is_asked_again_by_the_next_runtime() {
    let server = RedisServer::start();
    let guard = RestartGuard::For(Duration::from_secs(2));
    let redlock = builder(&server.url()).ttl(Duration::from_secs(1));
    let redlock = redlock.restart_guard(guard).build();
    let redlock = redlock.expect("the settings are valid");
    runtime().block_on(async {
        assert!(redlock.try_lock("k").await.is_err());
        let state = state(&redlock).await;
        assert!(matches!(state, NodeState::Quarantined { .. }), "{state:?}");
    });
    runtime().block_on(until_locked(&redlock));
}

#[test]
fn node_with_a_duplicate_address_is_asked_again_by_the_next_runtime() {
    let servers = [RedisServer::start(), RedisServer::start()];
    let second = runtime();
    let name = second.block_on(Proxy::start(servers[0].addr()));
    let guard = RestartGuard::For(Duration::from_secs(2));
    let redlock = builder(&servers[0].url()).url(name.url());
    let redlock = redlock.ttl(Duration::from_secs(1)).restart_guard(guard);
    let redlock = redlock.build().expect("the settings are valid");
    runtime().block_on(until("twins", LONGEST, || async {
        let refused = redlock.try_lock("k").await;
        refused.is_err_and(|error| error.to_string().contains("are one server; list it once"))
    }));
    name.lead_to(servers[1].addr());
    second.block_on(until_locked(&redlock));
}

/// What talks to a node runs where it was first needed, and carries the commands of all.
#[test]
fn dropped_runtime_fails_no_command_of_another_runtime() {
    let server = RedisServer::start();
    let second = runtime();
    let wire = second.block_on(Proxy::start(server.addr()));
    let is_locked = |key: &str| server.exists(&format!("redlock:{{{key}}}"));
    for key in ["asked", "released"] {
        let redlock = builder(&wire.url()).restart_guard(RestartGuard::Off);
        let redlock = redlock.node_timeout(Duration::from_secs(3)).build();
        let redlock = redlock.expect("the settings are valid");
        let first = runtime();
        first.block_on(until_locked(&redlock));
        let guard = match key {
            "released" => Some(second.block_on(redlock.lock(key).into_future())),
            _ => None,
        };
        // It is carried out at once, and answered when the first is gone.
        wire.delay(Duration::from_millis(300));
        let asking = async {
            let guard = match guard {
                Some(guard) => guard?,
                None => redlock.lock(key).await?,
            };
            guard.release().await?;
            Ok::<(), BoxError>(())
        };
        let ending = async {
            until("carried out", LONGEST, || async {
                is_locked(key) == (key == "asked")
            })
            .await;
            first.shutdown_background();
        };
        let (outcome, ()) = second.block_on(async { tokio::join!(asking, ending) });
        assert!(outcome.is_ok(), "{key}: {outcome:?}");
        wire.pass();
        second.block_on(until("free", LONGEST, || async { !is_locked(key) }));
    }
}

/// The server executes what it got before the connection ended.
#[test]
fn lock_asked_for_by_a_dropped_runtime_is_released_at_a_server_that_was_stopped() {
    let server = RedisServer::start();
    let redlock = builder(&server.url()).restart_guard(RestartGuard::Off);
    let redlock = redlock.ttl(Duration::from_secs(60));
    let redlock = redlock.node_timeout(Duration::from_secs(10));
    let redlock = redlock.connect_timeout(Duration::from_millis(300)).build();
    let redlock = redlock.expect("the settings are valid");
    let (first, second) = (runtime(), runtime());
    first.block_on(until_locked(&redlock));
    server.stop();
    let asking = async {
        // The lane notices that the server is silent only later.
        let refused = redlock.try_lock("k").await.unwrap_err();
        let LockError::Unavailable { nodes, .. } = &refused else {
            panic!("{refused:?}");
        };
        assert!(
            matches!(nodes[0], NodeFailure::Disconnected { .. }),
            "{refused:?}"
        );
    };
    let ending = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        first.shutdown_background();
    };
    second.block_on(async { tokio::join!(asking, ending) });
    server.cont();
    second.block_on(until("free", LONGEST, || async {
        !server.exists("redlock:{k}")
    }));
}
