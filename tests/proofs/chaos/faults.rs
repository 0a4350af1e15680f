//! Real servers, the faults that they suffer, and the run.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::io::Write as _;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use support::{Cluster, Proxy, Random, RedisServer, ms, secs};
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{Instant, sleep, timeout};
use tower_redlock::deadpool_redis::Config;
use tower_redlock::test_util::Traces;
use tower_redlock::{NodeState, Redlock, RedlockBuilder, RestartGuard, Retry};

use crate::chaos::clients::Client;
use crate::chaos::history::{History, unpoisoned};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn faults_of_a_minority_break_neither_mutual_exclusion_nor_tokens() {
    run(60, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn faults_of_a_minority_let_no_writer_in_beside_readers() {
    let history = run(10, true).await;
    assert!(history.counted("readers", "beside another") > 0, "too tame");
    assert!(history.all_counted("writes") > 0, "too tame");
}

/// Runs for so many seconds if no others are asked for; fails if what happened breaks a promise.
async fn run(seconds: u64, reads: bool) -> History {
    let seconds = setting("CHAOS_SECONDS").unwrap_or(seconds);
    let seed = setting("CHAOS_SEED").unwrap_or_else(|| RandomState::new().build_hasher().finish());
    say(&format!("chaos: {seconds} s with CHAOS_SEED={seed}"));
    let mut history = World::start().await.suffer(seconds, seed, reads).await;
    history.check(if reads {
        "chaos_with_readers.jsonl"
    } else {
        "chaos.jsonl"
    });
    say(&history.to_string());

    let violations = &history.violations;
    if let Some(first) = violations.first() {
        let count = violations.len();
        say(&history.traces_of(first));
        panic!("CHAOS_SEED={seed}: violated: {first} ({count} violations)");
    }
    let acquired = u64::try_from(history.records.len()).unwrap();
    assert!(acquired > 20, "it came to a stand");
    assert!(history.counted("refused", "contended") > 0, "too tame");
    if seconds >= 60 {
        for kind in KINDS {
            assert!(history.counted("faults", kind.name()) > 0, "no {kind:?}");
        }
        assert!(history.all_counted("lost") > 0, "too tame");
        // With readers, writers are rarer than the late writes of others.
        assert!(reads || history.counted("writes", "refused, too late") > 0);
    }
    history
}

/// Prints at once: what a passed test prints by `println!` is not shown.
pub(crate) fn say(text: &str) {
    let written = io::stderr().write_all(format!("{text}\n").as_bytes());
    written.expect("the standard error output is open");
}

pub(crate) fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    let number = u64::from_str(&text);
    Some(number.unwrap_or_else(|_| panic!("{name} is {text:?}, but must be a number")))
}

/// The nodes, those who ask them, and what is known of both.
pub(crate) struct World {
    pub(crate) nodes: Vec<tokio::sync::Mutex<Node>>,
    /// Separate lock services, as in separate processes: they meet on the nodes only.
    pub(crate) instances: Vec<Redlock>,
    pub(crate) history: Arc<Mutex<History>>,
    pub(crate) is_over: Arc<AtomicBool>,
}

pub(crate) struct Node {
    pub(crate) server: RedisServer,
    pub(crate) wire: Proxy,
}

impl World {
    /// Starts it and waits until all nodes may vote.
    pub(crate) async fn start() -> Arc<Self> {
        let cluster = Cluster::start(NODES);
        let mut nodes = Vec::new();
        for server in cluster.servers {
            let wire = Proxy::start(server.addr()).await;
            nodes.push(Node { server, wire });
        }
        let traces: Vec<Traces> = (0..INSTANCES).map(|_| Traces::default()).collect();
        let instances = (0..INSTANCES).map(|number| {
            let urls = nodes.iter().map(|node| node.wire.url());
            // Half of them over redis-rs's connections, half over their own.
            let by_pool = |builder: RedlockBuilder, url: String| {
                builder.pool(
                    Config::from_url(url)
                        .create_pool(None)
                        .expect("a URL is enough"),
                )
            };
            let builder = match number % 4 {
                0 | 1 => Redlock::builder().urls(urls),
                _ => urls.fold(Redlock::builder(), by_pool),
            };
            builder
                .traces(&traces[number])
                .ttl(TTL)
                .node_timeout(ms(100))
                .restart_guard(RestartGuard::For(WINDOW))
                // Soon there when a key seems to be free, as it is on a node that forgot it.
                .retry(Retry::new(ms(5), ms(50)))
                // Some holders outstay their locks, and then only the storage stops them.
                .renew(number % 2 == 0)
                .build()
                .expect("the settings are valid")
        });
        let world = Self {
            instances: instances.collect(),
            history: Arc::new(Mutex::new(History {
                traces,
                ..History::default()
            })),
            nodes: nodes.into_iter().map(tokio::sync::Mutex::new).collect(),
            is_over: Arc::default(),
        };
        for node in 0..NODES {
            world.wait_until_admitted(node).await;
        }
        Arc::new(world)
    }

    /// Lets clients and faults loose for a while, and returns what happened.
    pub(crate) async fn suffer(self: Arc<Self>, seconds: u64, seed: u64, reads: bool) -> History {
        let mut clients = JoinSet::new();
        for number in 0..CLIENTS {
            let client = Client::new(&self, seed, number, reads);
            clients.spawn(client.run());
        }
        let until = Instant::now() + secs(seconds);
        let plan = Arc::new(Mutex::new(Plan::new(seed)));
        let mut breakers = JoinSet::new();
        for _ in 0..MINORITY {
            let (world, plan) = (Arc::clone(&self), Arc::clone(&plan));
            breakers.spawn(world.break_nodes(plan, until));
        }
        while let Some(ended) = breakers.join_next().await {
            ended.expect("every node is mended and admitted again");
        }
        self.is_over.store(true, Ordering::Relaxed);
        while let Some(ended) = clients.join_next().await {
            ended.expect("no client meets an error that is not its lot");
        }
        self.wait_until_free(Instant::now()).await;
        for node in 0..NODES {
            self.wait_until_admitted(node).await;
        }
        let all = self.instances[0].lock_all(KEYS).await;
        assert!(all.is_ok(), "after all faults: {all:?}");
        std::mem::take(&mut unpoisoned(&self.history))
    }

    /// Waits until no node holds a lock, for as long as what was left behind may live.
    pub(crate) async fn wait_until_free(&self, all_ended: Instant) {
        loop {
            let mut left = Vec::new();
            for node in &self.nodes {
                left.extend(node.lock().await.server.keys(LOCKS));
            }
            let took = all_ended.elapsed();
            if left.is_empty() {
                say(&format!(
                    "chaos: all keys free {took:?} after the last holder"
                ));
                return;
            }
            assert!(took < TTL + NOISE, "still locked after {took:?}: {left:?}");
            sleep(ms(5)).await;
        }
    }

    /// Breaks one node after the other as planned, and mends each.
    pub(crate) async fn break_nodes(self: Arc<Self>, plan: Arc<Mutex<Plan>>, until: Instant) {
        while Instant::now() < until {
            let fault = unpoisoned(&plan).next();
            let mut node = self.nodes[fault.node].lock().await;
            fault.inflict(&mut node, &self).await;
            self.count("faults", fault.kind.name());
            if Instant::now() < until {
                self.wait_until_admitted(fault.node).await;
                drop(node);
                sleep(fault.pause).await;
            }
        }
    }

    /// Waits until every instance lets a node vote.
    pub(crate) async fn wait_until_admitted(&self, node: usize) {
        let admitted = async {
            for redlock in &self.instances {
                while redlock.health().await.nodes[node].state != NodeState::Up {
                    sleep(ms(50)).await;
                }
            }
        };
        let in_time = timeout(secs(30), admitted).await;
        in_time.expect("a node that works again is admitted again");
    }

    /// Waits a moment until a lock lives on no more nodes than it needs, this one among them: that
    /// is when forgetting it does the most harm.
    pub(crate) async fn wait_for_bare_majority(&self, server: &RedisServer) {
        for _ in 0..100 {
            let is_bare = block_in_place(|| {
                let here = server.keys(LOCKS);
                // Those that are broken now are in the hands of those who broke them.
                let others = self.nodes.iter().filter_map(|node| node.try_lock().ok());
                let there: Vec<_> = others.flat_map(|node| node.server.keys(LOCKS)).collect();
                let copies = |key| 1 + there.iter().filter(|other| *other == key).count();
                here.iter().any(|key| copies(key) == NODES / 2 + 1)
            });
            if is_bare {
                return;
            }
            sleep(ms(10)).await;
        }
    }

    pub(crate) fn count(&self, what: &'static str, which: &'static str) {
        unpoisoned(&self.history).count(what, which);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Killed,
    Stopped,
    Flushed,
    Partitioned,
    Cut,
    Slowed,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Killed => "killed and restarted empty",
            Self::Stopped => "stopped beyond the ttl",
            Self::Flushed => "flushed",
            Self::Partitioned => "partitioned",
            Self::Cut => "connections cut",
            Self::Slowed => "slowed",
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    pub(crate) node: usize,
    pub(crate) lasts: Duration,
    pub(crate) pause: Duration,
}

impl Fault {
    /// Breaks a node and mends it; its memory may be lost.
    pub(crate) async fn inflict(self, Node { server, wire }: &mut Node, world: &World) {
        match self.kind {
            Kind::Killed => {
                world.wait_for_bare_majority(server).await;
                block_in_place(|| server.kill());
                sleep(self.lasts / 4).await;
                block_in_place(|| server.restart());
            }
            Kind::Stopped => {
                block_in_place(|| server.stop());
                sleep(TTL + self.lasts).await;
                server.cont();
            }
            Kind::Flushed => {
                world.wait_for_bare_majority(server).await;
                block_in_place(|| server.command(&["FLUSHALL"]));
                // An instance that has not asked for a lock since does not know of it.
                sleep(WINDOW).await;
            }
            Kind::Partitioned => {
                wire.black_hole();
                sleep(2 * self.lasts).await;
                wire.pass();
            }
            Kind::Cut => {
                wire.cut();
                sleep(self.lasts / 2).await;
                wire.pass();
            }
            Kind::Slowed => {
                wire.delay(self.lasts / 5);
                sleep(2 * self.lasts).await;
                wire.pass();
            }
        }
    }
}

/// The faults in their order, which follows from the seed.
pub(crate) struct Plan {
    pub(crate) random: Random,
    /// Dealt like cards, so that no kind is long in coming.
    pub(crate) kinds: Vec<Kind>,
}

impl Plan {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            random: Random(seed),
            kinds: Vec::new(),
        }
    }

    pub(crate) fn next(&mut self) -> Fault {
        if self.kinds.is_empty() {
            self.kinds.extend(KINDS);
        }
        let card = self.random.index(self.kinds.len());
        Fault {
            kind: self.kinds.swap_remove(card),
            node: self.random.index(NODES),
            lasts: self.random.up_to(secs(1)),
            pause: self.random.up_to(ms(200)),
        }
    }
}

pub(crate) const NODES: usize = 5;

pub(crate) const INSTANCES: usize = 8;

pub(crate) const CLIENTS: u64 = 32;

/// How many nodes are broken at once.
pub(crate) const MINORITY: usize = 2;

pub(crate) const KEYS: [&str; 4] = ["a", "b", "c", "d"];

pub(crate) const LOCKS: &str = "redlock:{?}";

pub(crate) const SETS: [&[&str]; 10] = [
    &["a"],
    &["b"],
    &["c"],
    &["d"],
    &["a", "b"],
    &["b", "c"],
    &["c", "d"],
    &["d", "a"],
    &["b", "d"],
    &["a", "b", "c", "d"],
];

pub(crate) const KINDS: [Kind; 6] = [
    Kind::Killed,
    Kind::Stopped,
    Kind::Flushed,
    Kind::Partitioned,
    Kind::Cut,
    Kind::Slowed,
];

/// Short, so that locks expire and are renewed, and nodes are admitted again, often.
pub(crate) const TTL: Duration = secs(1);

pub(crate) const WINDOW: Duration = secs(2);

/// What a busy machine may add.
pub(crate) const NOISE: Duration = secs(1);
