//! Looking into a key and revoking it on real servers, some of which are dead, hang, or were restarted.

use std::future::IntoFuture;

use futures_util::future::join_all;
use support::{Cluster, assert_matches, ms, secs, until_all_up};
use tokio::time::sleep;
use tower_redlock::{
    KeyState, LockRequest, LostReason, NodeFailure, Redlock, ReleaseError, Released, RestartGuard,
};

use crate::patient::builder;
use crate::wire::PATIENCE;

fn redlock(cluster: &Cluster) -> Redlock {
    builder(cluster.urls()).build().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn quarantined_nodes_say_so_and_are_not_asked_to_revoke() {
    let mut cluster = Cluster::start(3);
    let window = secs(4);
    let redlock = builder(cluster.urls()).ttl(secs(2));
    let redlock = redlock.restart_guard(RestartGuard::For(window));
    let redlock = redlock.build().unwrap();
    until_all_up(&redlock, secs(20)).await;
    let guard = redlock.lock("k").await.unwrap();
    cluster.servers[1].kill();
    cluster.servers[1].restart();
    let quarantined = async {
        loop {
            let seen = redlock.inspect("k").await;
            if let Err(NodeFailure::Quarantined { left, .. }) = &seen.nodes[1].outcome {
                assert!(*left <= window + secs(1), "{left:?}");
                return seen;
            }
            sleep(ms(20)).await;
        }
    };
    let seen = tokio::time::timeout(secs(3), quarantined).await.unwrap();
    assert_matches!(seen.state(), Some(KeyState::Held { .. }), "{seen:?}");
    let revoked = redlock.revoke("k").await.unwrap();
    assert_eq!((revoked.held, revoked.failures.len()), (2, 1));
    assert_eq!(guard.lost().await, LostReason::Revoked);
}

/// How a lock is asked for.
type Kind = fn(LockRequest) -> LockRequest;

#[tokio::test]
async fn release_says_that_the_servers_no_longer_had_the_lock() {
    let cluster = Cluster::start(3);
    let (ours, other) = (redlock(&cluster), redlock(&cluster));
    let unfenced = builder(cluster.urls()).fencing(false).build().unwrap();
    for redlock in [&ours, &other, &unfenced] {
        until_all_up(redlock, PATIENCE).await;
    }
    let gone = Err(ReleaseError::Lost(LostReason::Gone));
    let kinds: [Kind; 4] = [
        |lock| lock,
        LockRequest::shared,
        |lock| lock.slots(2),
        |lock| lock.hold_at_least(secs(5)),
    ];
    let cases = [
        (&["k"][..], &ours),
        (&["k", "l"], &ours),
        (&["k"], &unfenced),
    ];
    for of in kinds {
        for (keys, redlock) in cases {
            let guard = of(redlock.lock_all(keys.iter().copied())).await.unwrap();
            cluster.command(&["FLUSHDB"]);
            assert_eq!(guard.release().await, gone, "{keys:?}");
        }
    }
    // Releases that share a call.
    let keys: Vec<String> = (0..20).map(|key| format!("k{key}")).collect();
    let asked = keys.iter().map(|key| ours.lock(key.clone()).into_future());
    let guards = join_all(asked).await;
    for key in keys.iter().step_by(2) {
        other.revoke(key.clone()).await.unwrap();
    }
    let released = guards.into_iter().map(|guard| guard.unwrap().release());
    for (place, released) in join_all(released).await.into_iter().enumerate() {
        let freed = Ok(Released::Freed);
        assert_eq!(released, if place % 2 == 0 { gone.clone() } else { freed });
    }
    cluster.wait_until_free(PATIENCE).await;
}
