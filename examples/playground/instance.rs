//! One bank with its nodes, servers and callers. The page shows one instance at a time.

use std::array;
use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};
use tower_redlock::{NodeState, Redlock, RestartGuard};

use crate::board::{Board, Power};
use crate::checker::{Checker, Counters};
use crate::client::{self, Answer};
use crate::cluster::Cluster;
use crate::events::Feed;
use crate::server::Server;
use crate::storage::Storage;
use crate::{CALLERS, NODES, SERVERS, TTL};

/// A bank.
#[derive(Debug)]
pub(crate) struct Instance {
    pub(crate) feed: Feed,
    pub(crate) weakness: Option<Weakness>,
    pub(crate) board: Arc<Board>,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) storage: Arc<Storage>,
    checker: Arc<Checker>,
    servers: Arc<[Server; SERVERS.len()]>,
    load: Arc<AtomicBool>,
    callers: Arc<AtomicUsize>,
    disconnect: [Arc<Notify>; CALLERS.len()],
    tasks: Vec<AbortHandle>,
}

/// The setting that is weaker than in production.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Weakness {
    NoFencing,
    NoRestartGuard,
}

impl Weakness {
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::NoFencing => "fencing is off",
            Self::NoRestartGuard => "the restart guard is off",
        }
    }
}

impl Instance {
    pub(crate) async fn start(
        feed: Feed,
        weakness: Option<Weakness>,
        with_redis: bool,
    ) -> Result<Arc<Self>, Box<dyn Error + Send + Sync>> {
        let board = Board::new(feed.clone());
        let is_guarded = weakness != Some(Weakness::NoRestartGuard);
        let cluster = Arc::new(Cluster::start(&board, is_guarded, with_redis).await?);
        let builder = || {
            let builder = Redlock::builder().ttl(TTL).node_timeout(NODE_TIMEOUT);
            match weakness {
                None => builder,
                // Without fencing, nothing here restarts a node; the guard would only delay the step.
                Some(Weakness::NoFencing) => {
                    builder.fencing(false).restart_guard(RestartGuard::Off)
                }
                Some(Weakness::NoRestartGuard) => builder.restart_guard(RestartGuard::Off),
            }
        };
        let storage = Arc::new(Storage::new(feed.clone()));
        let checker = Checker::new(feed.clone());
        let serve = |server: usize| -> Result<Server, Box<dyn Error + Send + Sync>> {
            let holder = format!("server {}", SERVERS[server]);
            let redlock = cluster.connect(builder().holder(holder), server);
            Server::start(server, redlock, &checker, &storage)
        };
        let servers = Arc::new([serve(0)?, serve(1)?]);
        let mut instance = Self {
            feed,
            weakness,
            board,
            cluster,
            storage,
            checker,
            servers,
            load: Arc::default(),
            callers: Arc::new(AtomicUsize::new(DEFAULT_CALLERS)),
            disconnect: array::from_fn(|_| Arc::default()),
            tasks: Vec::new(),
        };
        instance.tasks = instance.spawn_tasks();
        Ok(Arc::new(instance))
    }

    fn spawn_tasks(&self) -> Vec<AbortHandle> {
        let observer = tokio::spawn(observe(Arc::clone(&self.servers), Arc::clone(&self.board)));
        let (checker, cluster) = (Arc::clone(&self.checker), Arc::clone(&self.cluster));
        let ticker = tokio::spawn(async move {
            loop {
                sleep(TICK).await;
                checker.tick();
                cluster.notice_ends();
            }
        });
        let callers = (0..CALLERS.len()).map(|caller| {
            let (load, count) = (Arc::clone(&self.load), Arc::clone(&self.callers));
            let caller = self.caller(caller);
            tokio::spawn(async move {
                loop {
                    let is_active = load.load(Ordering::Relaxed)
                        && caller.number < count.load(Ordering::Relaxed);
                    if !is_active {
                        sleep(TICK).await;
                        continue;
                    }
                    let hold = fastrand::u64(100..300);
                    caller.deposit(5, &format!("hold_ms={hold}")).await;
                    sleep(Duration::from_millis(fastrand::u64(100..400))).await;
                }
            })
        });
        let tasks = [observer, ticker].into_iter().chain(callers);
        tasks.map(|task| task.abort_handle()).collect()
    }

    /// Returns a caller, whose requests go to one server.
    pub(crate) fn caller(&self, number: usize) -> Caller {
        let server = number % SERVERS.len();
        Caller {
            number,
            server,
            address: self.servers[server].address,
            checker: Arc::clone(&self.checker),
            disconnect: Arc::clone(&self.disconnect[number]),
        }
    }

    pub(crate) fn set_load(&self, load: bool) {
        self.load.store(load, Ordering::Relaxed);
    }

    pub(crate) fn set_callers(&self, count: usize) {
        self.callers.store(count, Ordering::Relaxed);
    }

    /// Pauses the server of a caller, as a garbage collection would.
    pub(crate) fn pause(&self, caller: usize) {
        self.servers[caller % SERVERS.len()].pause(PAUSE);
    }

    pub(crate) fn disconnect(&self, caller: usize) {
        self.disconnect[caller].notify_waiters();
    }

    pub(crate) fn is_holding(&self, caller: usize) -> bool {
        self.checker.is_holding(caller)
    }

    pub(crate) fn counters(&self) -> Counters {
        self.checker.counters()
    }

    /// Waits until the callers' requests are answered, after the load was switched off.
    pub(crate) async fn settle(&self) {
        self.set_load(false);
        let deadline = Instant::now() + PAUSE + 2 * TTL;
        let is_busy = |caller| self.checker.is_asking(caller) || self.is_holding(caller);
        sleep(5 * TICK).await;
        while (0..CALLERS.len()).any(is_busy) && Instant::now() < deadline {
            sleep(TICK).await;
        }
    }

    /// Waits until this many nodes may vote.
    pub(crate) async fn wait_for_voters(&self, count: usize) {
        while self.board.voters() < count {
            sleep(TICK).await;
        }
    }

    /// Restores all nodes, and waits until they may vote.
    pub(crate) async fn heal(&self) -> Result<(), Box<dyn Error + Send + Sync>> {
        for node in 0..NODES {
            self.board.set_delay(node, Duration::ZERO);
            for server in 0..SERVERS.len() {
                self.board.cut(node, server, false);
            }
            match self.board.power(node) {
                Power::Up => {}
                Power::Hung => self.cluster.resume(node)?,
                Power::Down => self.cluster.restart(node).await?,
            }
        }
        // The observer needs a moment to see a node that has just come back.
        sleep(5 * TICK).await;
        self.wait_for_voters(NODES).await;
        Ok(())
    }

    pub(crate) fn view(&self, mode: &str) -> Value {
        let paused = array::from_fn(|server| self.servers[server].clock.paused_for());
        let servers = self.servers.iter().zip(SERVERS).zip(paused);
        let servers = servers.map(|((server, name), paused): (_, Option<Duration>)| {
            json!({
                "name": name,
                "state": if paused.is_some() { "paused" } else { "running" },
                "left_ms": paused.map(|left| left.as_millis()),
                "url": format!("http://{}", server.address),
            })
        });
        let count = self.callers.load(Ordering::Relaxed);
        json!({
            "type": "state",
            "at": self.feed.now(),
            "instance": self.feed.instance(),
            "mode": mode,
            "weak": self.weakness.map(Weakness::text),
            "ttl_ms": TTL.as_millis(),
            "quorum": NODES / 2 + 1,
            "first_token": self.checker.first_token().map(|token| token.to_string()),
            "nodes": self.board.view(),
            "servers": servers.collect::<Value>(),
            "callers": self.checker.view_callers(count, paused.map(|paused| paused.is_some())),
            "load": self.load.load(Ordering::Relaxed),
            "account": self.storage.view(),
            "counters": self.checker.view_counters(&self.storage),
        })
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// A client of the bank.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) number: usize,
    server: usize,
    address: SocketAddr,
    checker: Arc<Checker>,
    disconnect: Arc<Notify>,
}

impl Caller {
    /// Deposits into the shared account; returns `None` if the caller disconnects.
    pub(crate) async fn deposit(&self, amount: u64, parameters: &str) -> Option<Answer> {
        let path = format!("/accounts/joint/deposit?amount={amount}&{parameters}");
        self.post(&path, None).await
    }

    /// Pays once per key.
    pub(crate) async fn pay(&self, amount: u64, idempotency_key: &str) -> Option<Answer> {
        let path = format!("/payments?amount={amount}");
        self.post(&path, Some(idempotency_key)).await
    }

    /// Sends this caller's requests to the other server.
    pub(crate) fn at_the_other_server(&self, instance: &Instance) -> Self {
        let server = (self.server + 1) % SERVERS.len();
        Self {
            server,
            address: instance.servers[server].address,
            ..self.clone()
        }
    }

    async fn post(&self, path: &str, idempotency_key: Option<&str>) -> Option<Answer> {
        self.checker.ask(self.number);
        let answer = tokio::select! {
            answer = client::post(self.address, path, self.number, idempotency_key) => answer,
            () = self.disconnect.notified() => None,
        };
        let Some(answer) = answer else {
            self.checker.give_up(self.number);
            return None;
        };
        let code = if answer.is_replay {
            "replayed"
        } else {
            &answer.code
        };
        let holder = &answer.body["holder"];
        self.checker
            .answered(self.number, answer.status, code, holder);
        if answer.status >= 400 {
            self.checker
                .refused(self.number, self.server, answer.status, code);
        }
        Some(answer)
    }
}

/// Shows which nodes are quarantined, as the servers know it.
async fn observe(servers: Arc<[Server; SERVERS.len()]>, board: Arc<Board>) {
    loop {
        let mut states: Vec<Vec<NodeState>> = vec![Vec::new(); NODES];
        for server in &*servers {
            let nodes = server.health().await.map(|health| health.nodes);
            for (index, node) in nodes.into_iter().flatten().enumerate() {
                states[index].push(node.state);
            }
        }
        for (node, states) in states.iter().enumerate() {
            if let Some(state) = states.iter().min_by_key(|state| rank(state)) {
                board.observed(node, state);
            }
        }
        sleep(TICK).await;
    }
}

/// Orders what several servers know of one node: a quarantine is of the node itself, a broken connection may not be.
fn rank(state: &NodeState) -> u8 {
    match state {
        NodeState::Quarantined { .. } => 0,
        NodeState::Up => 1,
        _ => 2,
    }
}

/// How often the page's view is brought up to date.
pub(crate) const TICK: Duration = Duration::from_millis(100);

const DEFAULT_CALLERS: usize = 5;

/// The pause of the page's button.
const PAUSE: Duration = Duration::from_secs(4);

/// Longer than the delay that the page offers, so that a delayed node is slow and not silent.
const NODE_TIMEOUT: Duration = Duration::from_millis(250);
