//! Release signals: waiters of other processes are notified, and processes get fair shares.

use std::future::IntoFuture;
use std::time::Duration;

use support::{Cluster, RedisServer, assert_matches, ms, polls_rarely, secs, wait_until};
use tokio::runtime;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep};
use tower_redlock::protocol::message::{Command, Op, Reply};
use tower_redlock::protocol::{Namespace, OwnerToken};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{LockError, LockGuard, Redlock, RedlockBuilder, Retry};

use crate::patient;

fn scripted(nodes: &ScriptedNodes) -> Redlock {
    polls_rarely(Redlock::builder().scripted(nodes))
        .build()
        .unwrap()
}

/// A lock that a waiter of another process has listened for a second to be released.
async fn held_and_waited_for() -> (ScriptedNodes, LockGuard, JoinHandle<Locked>) {
    let nodes = ScriptedNodes::new(3);
    let [ours, theirs] = [(); 2].map(|()| scripted(&nodes));
    let held = ours.lock("k").await.unwrap();
    let waiting = tokio::spawn(theirs.lock("k").wait(HOUR).into_future());
    sleep(secs(1)).await;
    (nodes, held, waiting)
}

type Locked = Result<LockGuard, LockError>;

fn over(cluster: &Cluster) -> RedlockBuilder {
    patient::builder(cluster.urls())
}

#[tokio::test(start_paused = true)]
async fn remote_waiter_is_notified_of_the_release() {
    let (nodes, held, waiting) = held_and_waited_for().await;
    // The refused attempt, and one after it listens, for what it may have missed before.
    assert_eq!(nodes.sent(0, OpKind::Acquire), 1 + 2);
    sleep(secs(5)).await;
    assert_eq!(nodes.sent(0, OpKind::Acquire), 1 + 2);
    let released = Instant::now();
    held.release().await.unwrap();
    assert!(waiting.await.unwrap().unwrap().is_valid());
    assert!(released.elapsed() < ms(5), "{:?}", released.elapsed());
}

#[tokio::test(start_paused = true)]
async fn lock_all_subscribes_to_all_its_keys() {
    let nodes = ScriptedNodes::new(3);
    let [ours, theirs] = [(); 2].map(|()| scripted(&nodes));
    let held = [ours.lock("a").await.unwrap(), ours.lock("c").await.unwrap()];
    let set = theirs.lock_all(["a", "b", "c"]).wait(HOUR).into_future();
    let waiting = tokio::spawn(set);
    sleep(secs(1)).await;
    let released = Instant::now();
    for held in held {
        held.release().await.unwrap();
        sleep(ms(10)).await;
    }
    drop(waiting.await.unwrap().unwrap());
    assert!(released.elapsed() < ms(25), "{:?}", released.elapsed());
}

#[tokio::test(start_paused = true)]
async fn silent_minority_does_not_delay_a_remote_waiter() {
    for (silent, told) in [(2, true), (3, false)] {
        let nodes = ScriptedNodes::new(5);
        (0..silent).for_each(|node| nodes.silence(node));
        let builder = Redlock::builder().scripted(&nodes);
        let builder = builder.retry(Retry::new(HOUR, HOUR).poll_interval(HOUR));
        let [ours, theirs] = [(); 2].map(|()| builder.clone().build().unwrap());
        let held = ours.lock("k").await.unwrap();
        let waiting = tokio::spawn(theirs.lock("k").wait(2 * HOUR).into_future());
        sleep(secs(1)).await;
        held.release().await.unwrap();
        sleep(ms(5)).await;
        assert_eq!(waiting.is_finished(), told);
        drop(waiting.await.unwrap().unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn split_votes_after_a_release_signal_are_retried_at_once() {
    let (nodes, held, waiting) = held_and_waited_for().await;
    nodes.set(2, Gate::Down);
    (0..2).for_each(|node| nodes.set_for(node, OpKind::Acquire, Gate::Slow(ROUND_TRIP)));
    held.release().await.unwrap();
    // Another who was told gets one node, and gives it up again as it gets no other.
    let names = Namespace::default().names(&["k"].into_iter().collect(), |_| [0; 32]);
    let rival = |op| Command {
        names: names.clone().unwrap(),
        owner: OwnerToken::from_random([7; 16]),
        op,
    };
    let acquire = Op::Acquire {
        proposal: Some(1),
        ttl: HOUR,
        retention: HOUR,
    };
    assert_matches!(nodes.apply(1, &rival(acquire)), Reply::Granted(_));
    sleep(2 * ROUND_TRIP).await;
    assert!(!waiting.is_finished());
    nodes.apply(1, &rival(Op::Release));
    let granted = tokio::time::timeout(ms(100), waiting).await;
    assert!(granted.unwrap().unwrap().unwrap().is_valid());
}

#[tokio::test(start_paused = true)]
async fn processes_under_full_contention_get_fair_shares() {
    const PROCESSES: usize = 8;
    const CYCLES: usize = 4_000;
    let nodes = ScriptedNodes::new(5);
    let time = ms(3) * u32::try_from(CYCLES).unwrap();
    let shares = shares(PROCESSES, time, || Redlock::builder().scripted(&nodes)).await;
    let total: usize = shares.iter().sum();
    let mean = total / PROCESSES;
    assert!(total > CYCLES / 2, "{shares:?}");
    for &share in &shares {
        // Even shares are for real clocks to show: on a paused one those who draw the same tick come in the
        // order of their tasks, every time.
        assert!(share * 3 >= mean && share <= mean * 2, "{shares:?}");
    }
    let sent: usize = (0..5).map(|node| nodes.sent(node, OpKind::Acquire)).sum();
    let released: usize = (0..5).map(|node| nodes.sent(node, OpKind::Release)).sum();
    let commands = (sent + released) / total;
    // Of seven in vain most were not made. The same tick again: on real clocks it is less.
    assert!(commands <= 40, "{commands} commands a cycle");
}

#[tokio::test]
async fn redis_nodes_have_subscribers_only_while_callers_wait() {
    let cluster = Cluster::start(3);
    let [ours, theirs] = [(); 2].map(|()| polls_rarely(over(&cluster)).build().unwrap());
    let mut held = Vec::new();
    for key in ["a", "b", "c", "d", "e"] {
        held.push(ours.lock(key).await.unwrap());
    }
    let mut waiting = JoinSet::new();
    for key in ["a", "b", "c", "d", "e"] {
        for _ in 0..10 {
            waiting.spawn(theirs.lock(key).wait(HOUR).into_future());
        }
    }
    for server in &cluster.servers {
        wait_until("subscribed", PATIENCE, || channels(server) == 5).await;
        // Of the process that waits, one.
        assert_eq!(listeners(server), 1);
    }
    let released = Instant::now();
    drop(held);
    while let Some(granted) = waiting.join_next().await {
        drop(granted.unwrap().unwrap());
    }
    assert!(released.elapsed() < HOUR / 100, "{:?}", released.elapsed());
    for server in &cluster.servers {
        wait_until("unsubscribed", PATIENCE, || channels(server) == 0).await;
    }
}

#[tokio::test]
async fn listener_subscribes_again_after_its_connection_is_killed() {
    let cluster = Cluster::start(3);
    let [ours, theirs] = [(); 2].map(|()| polls_rarely(over(&cluster)).build().unwrap());
    let held = ours.lock("k").await.unwrap();
    let waiting = tokio::spawn(theirs.lock("k").wait(HOUR).into_future());
    for server in &cluster.servers {
        wait_until("subscribed", PATIENCE, || channels(server) == 1).await;
        server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    }
    for server in &cluster.servers {
        wait_until("subscribed", PATIENCE, || channels(server) == 1).await;
    }
    held.release().await.unwrap();
    let granted = tokio::time::timeout(PATIENCE, waiting).await;
    assert!(granted.unwrap().unwrap().unwrap().is_valid());
}

#[tokio::test]
async fn remote_waiter_whose_listener_runtime_ends_polls_instead() {
    let cluster = Cluster::start(3);
    let builder = over(&cluster).retry(Retry::default().poll_interval(HOUR));
    // So long that the end of the lock is nothing to wait for.
    let builder = builder.ttl(3 * PATIENCE);
    let [ours, theirs] = [(); 2].map(|()| builder.clone().build().unwrap());
    let mut held = Vec::new();
    for key in ["a", "b"] {
        held.push(ours.lock(key).await.unwrap());
    }
    // The connections for the locks themselves belong to this runtime.
    theirs.lock("c").await.unwrap().release().await.unwrap();
    let mut builder = runtime::Builder::new_multi_thread();
    let other = builder.worker_threads(1).enable_all().build().unwrap();
    let first = other.spawn(theirs.lock("a").wait(HOUR).into_future());
    for server in &cluster.servers {
        wait_until("subscribed", PATIENCE, || channels(server) == 1).await;
    }
    let second = tokio::spawn(theirs.lock("b").wait(HOUR).into_future());
    for server in &cluster.servers {
        wait_until("subscribed", PATIENCE, || channels(server) == 2).await;
    }
    other.shutdown_background();
    assert!(first.await.is_err());
    drop(held);
    let granted = tokio::time::timeout(PATIENCE, second).await;
    assert!(granted.unwrap().unwrap().unwrap().is_valid());
}

/// Returns how often each of some processes got a lock that sixteen tasks of each come back to at once.
async fn shares(
    processes: usize,
    time: Duration,
    builder: impl Fn() -> RedlockBuilder,
) -> Vec<usize> {
    let end = Instant::now() + time;
    let mut tasks = JoinSet::new();
    for process in 0..processes {
        let redlock = builder().build().unwrap();
        for _ in 0..16 {
            let redlock = redlock.clone();
            tasks.spawn(async move {
                let mut granted = 0;
                while Instant::now() < end {
                    let guard = redlock.lock("k").wait(HOUR).await.unwrap();
                    sleep(ms(2)).await;
                    guard.release().await.unwrap();
                    granted += 1;
                }
                (process, granted)
            });
        }
    }
    let mut shares = vec![0; processes];
    while let Some(ended) = tasks.join_next().await {
        let (process, granted): (usize, usize) = ended.unwrap();
        shares[process] += granted;
    }
    shares
}

/// Returns the number of locks with subscribers.
fn channels(server: &RedisServer) -> usize {
    let reply = server.command(&["PUBSUB", "CHANNELS"]);
    reply.as_array().unwrap().len()
}

/// Returns how many connections listen.
fn listeners(server: &RedisServer) -> usize {
    let reply = server.command(&["CLIENT", "LIST", "TYPE", "pubsub"]);
    reply.as_str().unwrap().lines().count()
}

const ROUND_TRIP: Duration = ms(5);
const HOUR: Duration = secs(60 * 60);
const PATIENCE: Duration = secs(20);
