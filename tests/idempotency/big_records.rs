//! Records too big for every reply: one fetch serves all concurrent duplicates, beside the locks.

use std::collections::BTreeSet;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use futures_util::future::join_all;
use support::{
    Answer, Cluster, Deadline, Executed, MonitorLog, Proxy, ms, once, secs, set_all, until,
    until_all_up, wait_until,
};
use tokio::task::JoinHandle;
use tokio::time::{Instant, advance, sleep};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{Redlock, RestartGuard};

use crate::payments;

/// What is paid for, with a long receipt.
fn app(executed: &Executed, redlock: &Redlock, size: usize) -> Router {
    let executed = executed.clone();
    let pay = async move || {
        let number = executed.one_more();
        let mut receipt = format!("payment {number} ").into_bytes();
        receipt.resize(size, b'a' + u8::try_from(number).unwrap());
        receipt
    };
    let layer = once(redlock).max_response_body(size);
    Router::new()
        .route("/payments", post(pay))
        .route_layer(layer)
}

async fn pay(app: &Router, key: &str) -> Answer {
    payments::pay(app, "/payments", key).await
}

#[track_caller]
fn assert_replays(again: &Answer, first: &Answer) {
    assert!(again.is_replayed(), "{} {}", again.status, again.code());
    // Not by `assert_eq`, which would print both.
    assert!(again.body == first.body, "it is another body");
}

/// Three nodes that answer after some milliseconds, and a payment that all of them have the record of.
async fn recorded(answers_after: Duration) -> (ScriptedNodes, Executed, Router, Answer) {
    let nodes = ScriptedNodes::new(3);
    let redlock = Redlock::builder()
        .scripted(&nodes)
        .node_timeout(NODE_TIMEOUT);
    let executed = Executed::default();
    let app = app(&executed, &redlock.build().unwrap(), SIZE);
    let first = pay(&app, "a").await;
    sleep(secs(1)).await;
    (0..3).for_each(|node| nodes.set(node, Gate::Slow(answers_after)));
    (nodes, executed, app, first)
}

fn readings(nodes: &ScriptedNodes) -> usize {
    let nodes = (0..3).map(|node| nodes.sent(node, OpKind::Fetch));
    nodes.sum()
}

#[tokio::test(start_paused = true)]
async fn concurrent_duplicates_share_one_fetch_and_cache_nothing() {
    let (nodes, executed, app, first) = recorded(TRIP).await;
    for read in 1..=3 {
        let duplicates = (0..CROWD).map(|_| pay(&app, "a"));
        let answers = join_all(duplicates).await;
        for again in &answers {
            assert_replays(again, &first);
            // In memory it is there once.
            assert_eq!(again.body.as_ptr(), answers[0].body.as_ptr());
        }
        assert_eq!(readings(&nodes), read);
    }
    assert_eq!(executed.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn fetch_goes_on_for_other_duplicates_when_the_first_is_dropped() {
    let (nodes, executed, app, first) = recorded(TRIP).await;
    set_all(&nodes, OpKind::Fetch, Gate::Slow(4 * TRIP));
    let mut ended = 0;
    for polls in 0..40 {
        let before = readings(&nodes);
        let mut goes_away = tokio_test::task::spawn(pay(&app, "a"));
        let mut others = Vec::new();
        for _ in 0..polls {
            if goes_away.poll().is_ready() {
                ended += 1;
                break;
            }
            advance(ms(1)).await;
            if readings(&nodes) > before && others.is_empty() {
                others = duplicates(&app);
            }
        }
        drop(goes_away);
        if others.is_empty() {
            others = duplicates(&app);
        }
        for other in others {
            assert_replays(&other.await.unwrap(), &first);
        }
        assert_eq!(readings(&nodes) - before, 1, "after {polls} polls");
    }
    assert!(
        (5..25).contains(&ended),
        "both sides of the end are seen: {ended}"
    );
    assert_eq!(executed.count(), 1);
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

fn duplicates(app: &Router) -> Vec<JoinHandle<Answer>> {
    let duplicates = (0..3).map(|_| {
        let app = app.clone();
        tokio::spawn(async move { pay(&app, "a").await })
    });
    duplicates.collect()
}

#[tokio::test(start_paused = true)]
async fn fetch_goes_on_to_the_next_node_after_a_failure_or_silence() {
    // Two of three, so that whichever is asked first, the last is asked in the end.
    for good in 0..3 {
        for (gate, patience) in [
            (Gate::Failing, Duration::ZERO),
            (Gate::Down, Duration::ZERO),
            (Gate::Never, 2 * NODE_TIMEOUT),
        ] {
            let (nodes, _, app, first) = recorded(TRIP).await;
            for other in (0..3).filter(|other| *other != good) {
                nodes.set_for(other, OpKind::Fetch, gate);
            }
            let began = Instant::now();
            assert_replays(&pay(&app, "a").await, &first);
            let took = began.elapsed();
            // Two round trips, and not the second that a body may take.
            let most = 2 * TRIP + patience + ms(5);
            assert!(took <= most, "{gate:?}, but for {good}: {took:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn record_that_no_node_returns_is_unavailable_and_never_executed_again() {
    for gate in [Gate::Failing, Gate::Down, Gate::Never] {
        let (nodes, executed, app, first) = recorded(TRIP).await;
        set_all(&nodes, OpKind::Fetch, gate);
        let began = Instant::now();
        let duplicates = (0..CROWD).map(|_| pay(&app, "a"));
        for refused in join_all(duplicates).await {
            let told = refused.told();
            assert_eq!(told, (503, "lock-unavailable"), "{gate:?}");
        }
        let took = began.elapsed();
        let most = TRIP + 3 * NODE_TIMEOUT + ms(1_005);
        assert!(took <= most, "{gate:?}: {took:?}");
        assert_eq!(readings(&nodes), 3, "each once, for all");
        // A failure is reported only to the requests that waited for it.
        (0..3).for_each(|node| nodes.set(node, Gate::Ready));
        assert_replays(&pay(&app, "a").await, &first);
        assert_eq!(executed.count(), 1);
    }
}

/// Servers behind wires that can be slow, and a client of theirs.
struct Nodes {
    cluster: Cluster,
    wires: Vec<Proxy>,
    redlock: Redlock,
}

impl Nodes {
    async fn start(node_timeout: Duration) -> Self {
        let cluster = Cluster::start(3);
        let wires = cluster.proxies().await;
        let redlock = Redlock::builder()
            .urls(wires.iter().map(Proxy::url))
            .node_timeout(node_timeout)
            .restart_guard(RestartGuard::Off);
        let nodes = Self {
            cluster,
            wires,
            redlock: redlock.build().unwrap(),
        };
        until_all_up(&nodes.redlock, PATIENCE).await;
        nodes
    }

    /// Waits until all have so many records: the last of them is written after the answer.
    async fn wait_until_recorded(&self, count: usize) {
        let have_it = || {
            let mut servers = self.cluster.servers.iter();
            servers.all(|server| server.keys("*:done").len() == count)
        };
        wait_until("recorded by all nodes", PATIENCE, have_it).await;
    }

    fn delay(&self, delay: Duration) {
        for wire in &self.wires {
            wire.delay(delay);
        }
    }
}

/// The clients that sent a command, as often as they did: those that sent it themselves, and not a script.
fn senders(log: &MonitorLog, verb: &str) -> Vec<String> {
    let verb = format!("] \"{verb}\" ");
    let lines = log.lines();
    let lines = lines
        .iter()
        .filter(|line| line.to_ascii_lowercase().contains(&verb));
    let who = lines.filter_map(|line| line.split_once('[')?.1.split_once(']'));
    let who = who.map(|(who, _)| who.to_owned());
    who.filter(|who| !who.ends_with("lua")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_mebibyte_record_is_fetched_once_for_100_duplicates_beside_the_lane() {
    const NODE_TIMEOUT: Duration = secs(2);
    const WAVES: usize = 3;
    let nodes = Nodes::start(NODE_TIMEOUT).await;
    let executed = Executed::default();
    let app = app(&executed, &nodes.redlock, MEBIBYTE);
    let first = pay(&app, "a").await;
    assert_eq!(first.body.len(), MEBIBYTE);
    nodes.wait_until_recorded(1).await;
    let logs = nodes.cluster.servers.iter().map(MonitorLog::start);
    let logs: Vec<_> = logs.collect();
    // So that all have come before the first is answered.
    nodes.delay(ms(150));

    for _ in 0..WAVES {
        let duplicates = (0..CROWD).map(|_| pay(&app, "a"));
        for again in join_all(duplicates).await {
            assert_replays(&again, &first);
        }
    }
    let mut read = 0;
    for log in &logs {
        let lane: BTreeSet<String> = senders(log, "evalsha").into_iter().collect();
        assert_eq!(lane.len(), 1, "of all duplicates");
        let readers = senders(log, "get");
        read += readers.len();
        assert!(readers.iter().all(|reader| !lane.contains(reader)));
    }
    assert_eq!(read, WAVES);
    assert_eq!(nodes.redlock.health().await.up(), 3);
    assert_eq!(executed.count(), 1);
}

#[tokio::test]
async fn fetch_succeeds_beside_a_node_that_hangs_or_closes_the_connection() {
    let mut nodes = Nodes::start(secs(1)).await;
    let executed = Executed::default();
    let app = app(&executed, &nodes.redlock, SIZE);
    let first = pay(&app, "a").await;
    nodes.wait_until_recorded(1).await;
    for hung in &nodes.cluster.servers {
        // With a connection to read on that is open already, if there is one.
        assert_replays(&pay(&app, "a").await, &first);
        hung.stop();
        for _ in 0..3 {
            assert_replays(&pay(&app, "a").await, &first);
        }
        hung.cont();
        until_all_up(&nodes.redlock, PATIENCE).await;
    }
    let logs = nodes.cluster.servers.iter().map(MonitorLog::start);
    let logs: Vec<_> = logs.collect();
    let read = || logs.iter().map(|log| senders(log, "get").len());
    assert_replays(&pay(&app, "a").await, &first);
    let reads: Vec<usize> = read().collect();
    assert_eq!(reads.iter().sum::<usize>(), 1);
    // As a server does to who is idle for too long.
    for (log, server) in logs.iter().zip(&nodes.cluster.servers) {
        for addr in senders(log, "get") {
            let addr = addr.rsplit(' ').next().unwrap();
            let killed = server.command(&["CLIENT", "KILL", "ADDR", addr]);
            assert_eq!(killed.as_int(), Some(1));
        }
    }
    assert_replays(&pay(&app, "a").await, &first);
    let twice: Vec<usize> = reads.iter().map(|reads| 2 * reads).collect();
    assert_eq!(read().collect::<Vec<_>>(), twice, "of the same node");

    // Not a second time for the node that is not there: it could not be written to.
    nodes.cluster.servers[2].kill();
    until("seen to be gone", PATIENCE, || async {
        nodes.redlock.health().await.up() != 3
    })
    .await;
    assert_replays(&pay(&app, "a").await, &first);
    let drained = nodes.redlock.drain(PATIENCE).await;
    assert_eq!(drained.held, []);
    assert_eq!(read().sum::<usize>(), 3);
    assert_eq!(executed.count(), 1);
}

#[tokio::test]
async fn fetched_record_that_differs_from_its_head_is_not_replayed() {
    const TRIP: Duration = ms(100);
    let nodes = Nodes::start(secs(2)).await;
    let executed = Executed::default();
    let app = app(&executed, &nodes.redlock, SIZE);
    let first = pay(&app, "a").await;
    let other = pay(&app, "b").await;
    assert!(first.body != other.body);
    nodes.wait_until_recorded(2).await;
    let names = nodes.cluster.servers[0].keys("*:done");
    let [one, two] = names.as_slice() else {
        panic!("{} of two records", names.len());
    };
    nodes.cluster.command(&["COPY", two, "saved"]);
    // Another's is put in its place, it is damaged, or taken away.
    let spoil: [&[&str]; 3] = [
        &["COPY", one, two, "REPLACE"],
        &["SETRANGE", two, "20000", "?"],
        &["DEL", two],
    ];
    for command in spoil {
        nodes.cluster.command(&["COPY", "saved", two, "REPLACE"]);
        nodes.delay(TRIP);
        let spoiling = async {
            // The nodes have answered with the head by now, which no request has received yet.
            sleep(TRIP / 2).await;
            nodes.cluster.command(command);
        };
        let (a, b, ()) = tokio::join!(pay(&app, "a"), pay(&app, "b"), spoiling);
        let (good, bad): (Vec<_>, Vec<_>) = [(a, &first), (b, &other)]
            .into_iter()
            .partition(|(answer, _)| answer.status == StatusCode::OK);
        assert_eq!((good.len(), bad.len()), (1, 1), "{command:?}");
        assert_replays(&good[0].0, good[0].1);
        assert_eq!(bad[0].0.code(), "request-in-progress", "{command:?}");
        assert_eq!(executed.count(), 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_mebibyte_record_slower_than_node_timeout_is_recorded() {
    const NODE_TIMEOUT: Duration = ms(200);
    let nodes = Nodes::start(NODE_TIMEOUT).await;
    let executed = Executed::default();
    let app = app(&executed, &nodes.redlock, MEBIBYTE);
    // For longer than it takes to replace a silent connection, three node timeouts, and for less than a
    // mebibyte may take.
    for wire in &nodes.wires {
        wire.narrow(1024 * 1200);
    }
    let mut first = pay(&app, "a").await;
    // Of a busy machine not even a small request may be in time.
    let deadline = Deadline::after(PATIENCE);
    while first.code() == "lock-unavailable" && !deadline.is_over() {
        first = pay(&app, "a").await;
    }
    assert_eq!(first.status, StatusCode::OK);
    nodes.wait_until_recorded(1).await;
    assert!(!first.headers.contains_key("idempotency-recorded"));
    assert_replays(&pay(&app, "a").await, &first);
    assert_eq!(executed.count(), 1);
}

const NODE_TIMEOUT: Duration = ms(50);

/// How long a node takes to answer.
const TRIP: Duration = ms(5);

const CROWD: usize = 100;

const SIZE: usize = 60_000;

const MEBIBYTE: usize = 1024 * 1024;

/// How long anything may take that must happen.
const PATIENCE: Duration = secs(10);
