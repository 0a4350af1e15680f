//! Groups of real servers: what the failure of a whole group does to the keys of the others.

use std::collections::BTreeSet;
use std::time::Duration;

use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use support::{Cluster, Deadline, RedisServer, ms, secs};
use tokio::time::sleep;
use tower_redlock::{LockKey, NodeFailure, Readiness, Redlock, RedlockBuilder, RestartGuard};

use crate::patient::{self, failures, one_thread, until_locked};

const TTL: Duration = secs(1);

/// Long, so that a busy machine makes no node late.
const NODE_TIMEOUT: Duration = ms(700);

fn builder(clusters: &[Cluster]) -> RedlockBuilder {
    let builder = patient::builder([]).ttl(TTL).node_timeout(NODE_TIMEOUT);
    let groups = clusters.iter().map(Cluster::urls);
    groups.fold(builder, RedlockBuilder::group)
}

/// A key of a group.
async fn key_of(redlock: &Redlock, group: &str) -> LockKey {
    for number in 0.. {
        let key = LockKey::from(("account", number));
        if *redlock.inspect(&key).await.group == *group {
            return key;
        }
    }
    unreachable!("a group has keys")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn group_that_restarts_empty_is_quarantined_alone() {
    let mut clusters = [Cluster::start(3), Cluster::start(3)];
    let window = 2 * TTL;
    let redlock = builder(&clusters).restart_guard(RestartGuard::For(window));
    let redlock = redlock.build().unwrap();
    let keys = [key_of(&redlock, "0").await, key_of(&redlock, "1").await];
    for key in &keys {
        until_locked(&redlock, key).await;
    }
    let servers = clusters[1].servers.iter_mut();
    servers.for_each(RedisServer::restart);
    let deadline = Deadline::after(secs(10));
    loop {
        let health = redlock.health().await;
        assert!(redlock.try_lock(&keys[0]).await.is_ok());
        if health.groups[1].readiness() == Readiness::Quarantined {
            assert_eq!(health.groups[0].readiness(), Readiness::Ready);
            assert_eq!(health.readiness(), Readiness::Degraded);
            break;
        }
        assert!(!deadline.is_over(), "{health:?}");
        sleep(ms(10)).await;
    }
    // Its servers have forgotten all locks.
    let refused = redlock.try_lock(&keys[1]).await.unwrap_err();
    let is_quarantined = |node: &NodeFailure| matches!(node, NodeFailure::Quarantined { .. });
    assert!(failures(&refused).iter().any(is_quarantined), "{refused:?}");
    until_locked(&redlock, &keys[1]).await;
}

/// Runs on one thread, whose recorder the lanes of the nodes find.
fn recorded(recorder: &DebuggingRecorder, run: impl Future<Output = ()>) {
    metrics::with_local_recorder(recorder, || one_thread().block_on(run));
}

/// Those of a reader are told from those of other callers.
#[test]
fn metrics_of_nodes_name_the_kind_of_each_request_and_the_group_if_there_are_several() {
    let clusters = [Cluster::start(1), Cluster::start(1)];
    for groups in 1..=2 {
        let recorder = DebuggingRecorder::new();
        let snapshotter = recorder.snapshotter();
        recorded(&recorder, async {
            let redlock = builder(&clusters[..groups]).build().unwrap();
            for group in ["0", "1"].iter().take(groups) {
                let key = key_of(&redlock, group).await;
                for lock in [redlock.lock(&key), redlock.lock(&key).shared()] {
                    let guard = lock.await.unwrap();
                    guard.extend(TTL).await.unwrap();
                    guard.release().await.unwrap();
                }
            }
        });
        let mut found = BTreeSet::new();
        for (metric, _, _, value) in snapshotter.snapshot().into_vec() {
            let label = |name| metric.key().labels().find(|label| label.key() == name);
            let label = |name| label(name).map(|label| label.value().to_owned());
            let is_unused = matches!(value, DebugValue::Histogram(values) if values.is_empty());
            let of_node = metric.key().name().strip_prefix("redlock_node_");
            if let Some(what) =
                of_node.filter(|_| !is_unused && label("op").as_deref() != Some("ping"))
            {
                let what = label("op").unwrap_or_else(|| what.to_owned());
                found.insert((what, label("node").unwrap(), label("group")));
            }
        }
        let all = clusters[..groups].iter().enumerate();
        let expected = all.flat_map(|(group, cluster)| {
            let node = cluster.servers[0].addr().to_string();
            let group = (groups > 1).then(|| group.to_string());
            let of_node =
                "up inspect acquire confirm release acquire_shared confirm_shared release_shared";
            let of_node = of_node.split(' ');
            of_node.map(move |what| (what.to_owned(), node.clone(), group.clone()))
        });
        assert_eq!(found, expected.collect());
    }
}

/// A majority must be of independent servers, also if their groups differ: two names of one server are found by its
/// run id, and neither votes, as within a group.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_of_two_groups_votes_in_neither() {
    let cluster = Cluster::start(2);
    let [one, other] = [&cluster.servers[0], &cluster.servers[1]];
    let alias = one.url().replace("127.0.0.1", "localhost");
    let groups = [one.url(), alias, other.url()].map(|url| [url]);
    let builder = groups.into_iter().fold(builder(&[]), RedlockBuilder::group);
    let redlock = builder.build().unwrap();
    for group in ["0", "1", "2"] {
        drop(redlock.try_lock(key_of(&redlock, group).await).await);
    }
    let health = redlock.health().await;
    let ready = health.groups.iter().map(|group| group.has_quorum());
    assert!(ready.eq([false, false, true]), "{health:?}");
}
