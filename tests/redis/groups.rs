//! Groups of real servers: what the failure of a whole group does to the keys of the others.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use support::{Cluster, Deadline, RedisServer, alone, assert_matches, lock_and_release, ms, secs};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tower_redlock::{
    LockError, LockKey, NodeFailure, Readiness, Redlock, RedlockBuilder, RestartGuard,
};

use crate::patient::{self, failures, one_thread, until_locked};

const TTL: Duration = secs(2);

/// Long, so that a busy machine makes no node late.
const NODE_TIMEOUT: Duration = ms(1_500);

/// How long the load lasts before the failure, and as long after it.
const LOAD: Duration = secs(2);

fn builder(clusters: &[Cluster]) -> RedlockBuilder {
    let builder = patient::builder([]).ttl(TTL).node_timeout(NODE_TIMEOUT);
    let groups = clusters.iter().map(Cluster::urls);
    groups.fold(builder, RedlockBuilder::group)
}

/// Keys of a group.
async fn keys_of(redlock: &Redlock, group: &str, count: usize) -> Vec<LockKey> {
    let mut keys = Vec::new();
    for number in 0.. {
        let key = LockKey::from(("account", number));
        if *redlock.inspect(&key).await.group == *group {
            keys.push(key);
        }
        if keys.len() == count {
            break;
        }
    }
    keys
}

async fn key_of(redlock: &Redlock, group: &str) -> LockKey {
    keys_of(redlock, group, 1).await.remove(0)
}

/// Clients that lock the keys of one group, and how long each lock took.
struct Load {
    is_over: Arc<AtomicBool>,
    clients: Vec<JoinHandle<Vec<(Instant, Duration, Result<(), LockError>)>>>,
}

impl Load {
    async fn start(redlock: &Redlock, group: &str) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let keys = keys_of(redlock, group, 4).await.into_iter();
        let clients = keys.map(|key| {
            let (redlock, is_over) = (redlock.clone(), Arc::clone(&is_over));
            tokio::spawn(async move {
                let mut locks = Vec::new();
                while !is_over.load(Ordering::Relaxed) {
                    let began = Instant::now();
                    let locked = redlock.try_lock(&key).await;
                    let outcome = locked.as_ref().map(drop).map_err(Clone::clone);
                    locks.push((began, began.elapsed(), outcome));
                    if let Ok(guard) = locked {
                        drop(guard.release().await);
                    }
                    sleep(ms(1)).await;
                }
                locks
            })
        });
        Self {
            clients: clients.collect(),
            is_over,
        }
    }

    async fn end(self) -> Vec<(Instant, Duration, Result<(), LockError>)> {
        self.is_over.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        for client in self.clients {
            all.extend(client.await.unwrap());
        }
        all
    }
}

/// The time within which 99 of a hundred were locked.
fn p99(times: impl Iterator<Item = Duration>) -> Duration {
    let mut times: Vec<_> = times.collect();
    times.sort_unstable();
    times[times.len() * 99 / 100]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_of_a_whole_group_leaves_the_keys_of_the_other_alone() {
    let _alone = alone().await;
    let mut clusters = [Cluster::start(3), Cluster::start(3)];
    let redlock = builder(&clusters).build().unwrap();
    let load = Load::start(&redlock, "0").await;
    let dying = Load::start(&redlock, "1").await;
    sleep(LOAD).await;
    let killed = Instant::now();
    clusters[1].servers.iter_mut().for_each(RedisServer::kill);
    let dead = Instant::now();
    sleep(LOAD).await;
    let health = redlock.health().await;
    let (alive, dying) = (load.end().await, dying.end().await);
    let refused = alive.iter().filter(|(_, _, locked)| locked.is_err());
    assert_eq!(refused.count(), 0);
    let of = |is_after: bool| {
        let times = alive.iter();
        let times = times.filter(move |(began, ..)| (*began >= killed) == is_after);
        times.map(|(_, took, _)| *took)
    };
    assert!(of(true).count() > 100, "too tame");
    let (before, after) = (p99(of(false)), p99(of(true)));
    println!(
        "p99 of the other group: {before:?} before the kill, {after:?} after it ({} and {} locks)",
        of(false).count(),
        of(true).count()
    );
    // Once the connections are known to be broken, its keys are refused, and nothing else happens to them.
    let late = dying.iter().filter(|(began, ..)| *began > dead + ms(500));
    for (_, _, locked) in late {
        assert_matches!(locked, Err(LockError::Unavailable { .. }));
    }
    let readiness = health.groups.iter().map(|group| group.readiness());
    assert!(readiness.eq([Readiness::Ready, Readiness::Down]));
    assert_eq!(health.readiness(), Readiness::Degraded);
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

#[test]
fn metrics_of_nodes_have_their_group_if_there_are_several() {
    let clusters = [Cluster::start(1), Cluster::start(1)];
    for groups in 1..=2 {
        let recorder = DebuggingRecorder::new();
        let snapshotter = recorder.snapshotter();
        recorded(&recorder, async {
            let redlock = builder(&clusters[..groups]).build().unwrap();
            for group in ["0", "1"].iter().take(groups) {
                lock_and_release(&redlock, key_of(&redlock, group).await).await;
            }
        });
        let mut found = BTreeSet::new();
        for (metric, ..) in snapshotter.snapshot().into_vec() {
            let key = metric.key();
            if let Some(what) = key.name().strip_prefix("redlock_node_") {
                let label = |name| key.labels().find(|label| label.key() == name);
                let group = label("group").map(|label| label.value().to_owned());
                let node = label("node").unwrap().value().to_owned();
                found.insert((what.to_owned(), node, group));
            }
        }
        let all = clusters[..groups].iter().enumerate();
        let expected = all.flat_map(|(group, cluster)| {
            let node = cluster.servers[0].addr().to_string();
            let group = (groups > 1).then(|| group.to_string());
            ["call_seconds", "up"].map(|what| (what.to_owned(), node.clone(), group.clone()))
        });
        assert_eq!(found, expected.collect());
    }
}

/// The requests of a reader are told from those of other callers.
#[test]
fn metrics_of_nodes_name_the_kind_of_each_request() {
    let clusters = [Cluster::start(1)];
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let ops = || {
        let snapshot = snapshotter.snapshot().into_vec().into_iter();
        let calls = snapshot.filter(|(_, _, _, value)| match value {
            DebugValue::Histogram(values) => !values.is_empty(),
            DebugValue::Counter(_) | DebugValue::Gauge(_) => false,
        });
        let labels = calls.flat_map(|(metric, ..)| metric.key().clone().into_parts().1);
        let ops = labels.filter(|label| label.key() == "op" && label.value() != "ping");
        ops.map(|label| label.value().to_owned())
            .collect::<BTreeSet<_>>()
    };
    recorded(&recorder, async {
        let redlock = builder(&clusters).build().unwrap();
        let reading = redlock.lock("k").shared().await.unwrap();
        reading.extend(TTL).await.unwrap();
        reading.release().await.unwrap();
        let expected = ["acquire_shared", "confirm_shared", "release_shared"];
        assert_eq!(ops(), expected.map(str::to_owned).into());
        let writing = redlock.lock("k").await.unwrap();
        writing.extend(TTL).await.unwrap();
        writing.release().await.unwrap();
        let expected = ["acquire", "confirm", "release"];
        assert_eq!(ops(), expected.map(str::to_owned).into());
    });
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
