//! Five nodes in this process, behind a network whose faults the page controls.
//!
//! The nodes run the crate's own [`Store`], and its own restart guard decides which of them may vote.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until};
use tower_redlock::NodeFailure;
use tower_redlock::protocol::admission::{Admissions, Generation, Introduction};
use tower_redlock::protocol::message::{Command, Op, Reply};
use tower_redlock::protocol::{OwnerToken, Store};
use tower_redlock::test_util::{SimNetwork, SimRequest};

use crate::board::{Board, Reach};
use crate::events::lock;
use crate::{NODES, RESTART_GUARD};

/// The nodes of one instance.
#[derive(Debug)]
pub(crate) struct EmbeddedNodes {
    memories: Arc<Vec<Mutex<Memory>>>,
    board: Arc<Board>,
    epoch: Instant,
    is_guarded: bool,
    links: Mutex<Vec<AbortHandle>>,
}

/// One node, without its network.
#[derive(Debug)]
struct Memory {
    store: Store,
    /// The number of the process, and when it started by the clock of the nodes.
    run: u32,
    started: Duration,
}

/// A request on its way.
#[derive(Debug)]
struct Transit {
    request: SimRequest,
    arrives: Instant,
    /// Whether the page has shown already that no answer comes.
    is_shown: bool,
}

/// The connections of one client to all nodes.
#[derive(Debug)]
struct Line {
    server: usize,
    board: Arc<Board>,
    links: Vec<mpsc::UnboundedSender<Transit>>,
}

/// The connection of one client to one node, which delivers requests in order.
struct Link {
    server: usize,
    node: usize,
    name: Arc<str>,
    board: Arc<Board>,
    memories: Arc<Vec<Mutex<Memory>>>,
    epoch: Instant,
    /// What the client knows of the memory of its nodes, with the restart guard.
    admissions: Option<Arc<Mutex<Admissions>>>,
    admitted: Option<(u32, Generation)>,
}

impl EmbeddedNodes {
    pub(crate) fn new(board: &Arc<Board>, is_guarded: bool) -> Self {
        let memories = (0..NODES).map(|_| {
            // As if the nodes had been up for long: the page begins with nodes that vote.
            let mut store = Store::new();
            store.admit(&random_owner(), &run_id(0), Duration::ZERO);
            Mutex::new(Memory {
                store,
                run: 0,
                started: Duration::ZERO,
            })
        });
        Self {
            memories: Arc::new(memories.collect()),
            board: Arc::clone(board),
            epoch: Instant::now(),
            is_guarded,
            links: Mutex::default(),
        }
    }

    /// Connects a server of the bank.
    pub(crate) fn connect(&self, server: usize) -> Arc<dyn SimNetwork> {
        let window = RESTART_GUARD;
        let admissions = Arc::new(Mutex::new(Admissions::new(window)));
        let links = (0..NODES).map(|node| {
            let (sender, requests) = mpsc::unbounded_channel();
            let link = Link {
                server,
                node,
                name: format!("node {}", node + 1).into(),
                board: Arc::clone(&self.board),
                memories: Arc::clone(&self.memories),
                epoch: self.epoch,
                admissions: self.is_guarded.then(|| Arc::clone(&admissions)),
                admitted: None,
            };
            let task = Handle::current().spawn(link.run(requests));
            lock(&self.links).push(task.abort_handle());
            sender
        });
        Arc::new(Line {
            server,
            board: Arc::clone(&self.board),
            links: links.collect(),
        })
    }

    pub(crate) fn restart(&self, node: usize) {
        let mut memory = lock(&self.memories[node]);
        *memory = Memory {
            store: Store::new(),
            run: memory.run + 1,
            started: clock(self.epoch),
        };
        self.board.forgot(node);
    }

    pub(crate) fn wipe(&self, node: usize) {
        lock(&self.memories[node]).store = Store::new();
        self.board.forgot(node);
    }
}

impl Drop for EmbeddedNodes {
    fn drop(&mut self) {
        for link in lock(&self.links).drain(..) {
            link.abort();
        }
    }
}

impl SimNetwork for Line {
    fn carry(&self, node: usize, request: SimRequest) {
        let is_silent = self.board.reach(node, self.server) == Reach::Silent;
        let op = &request.command().op;
        if is_silent && *op != Op::Ping {
            let kind = kind_of(op);
            self.board
                .vote(self.server, node, kind, "silent", Duration::ZERO);
        }
        // Fails when the instance ends; the dropped request is answered as disconnected.
        drop(self.links[node].send(Transit {
            request,
            arrives: Instant::now() + self.board.delay(node),
            is_shown: is_silent,
        }));
    }
}

impl Link {
    async fn run(mut self, mut requests: mpsc::UnboundedReceiver<Transit>) {
        while let Some(transit) = requests.recv().await {
            sleep_until(transit.arrives).await;
            self.deliver(transit.request, transit.is_shown).await;
        }
    }

    async fn deliver(&mut self, request: SimRequest, mut is_shown: bool) {
        let began = Instant::now();
        loop {
            let (is_broken, why) = match self.board.reach(self.node, self.server) {
                Reach::Open => break,
                Reach::Silent => (false, "it is paused"),
                Reach::Broken(why) => (true, why),
            };
            if is_broken {
                self.admitted = None;
            }
            let is_wanted = request.is_wanted(Instant::now());
            // A release is sent again while its key may be there. A paused node executes later what is still wanted.
            if !is_wanted || is_broken && !request.command().op.is_release() {
                if !is_shown {
                    self.show(&request, "failed", began);
                }
                return request.answer(Err(NodeFailure::Unreachable {
                    node: Arc::clone(&self.name),
                    why: why.into(),
                }));
            }
            is_shown |= !is_broken;
            sleep(PROBE).await;
        }
        let outcome = self.execute(request.command());
        if !is_shown {
            self.show(&request, answer_of(request.command(), &outcome), began);
        }
        request.answer(outcome);
    }

    fn execute(&mut self, command: &Command) -> Result<Reply, NodeFailure> {
        let now = clock(self.epoch);
        let memories = Arc::clone(&self.memories);
        let mut memory = lock(&memories[self.node]);
        let admitted = self.admit(&mut memory, now);
        if command.op == Op::Ping {
            return admitted.map(|_| Reply::Released);
        }
        let reply = match admitted {
            Ok(Some(generation)) => memory.store.apply_in(&generation, command, now),
            Ok(None) => memory.store.apply(command, now),
            // Only locking depends on the memory.
            Err(failure) if matches!(command.op, Op::Acquire { .. } | Op::Confirm { .. }) => {
                return Err(failure);
            }
            Err(_) => memory.store.apply(command, now),
        };
        if reply == Reply::Amnesia {
            self.admitted = None;
            self.admit(&mut memory, now)?;
        }
        self.observe(command, &reply);
        Ok(reply)
    }

    /// Lets the crate's restart guard decide whether the node may vote; returns the generation of its memory.
    fn admit(
        &mut self,
        memory: &mut Memory,
        now: Duration,
    ) -> Result<Option<Generation>, NodeFailure> {
        let Some(admissions) = &self.admissions else {
            return Ok(None);
        };
        if let Some((run, generation)) = &self.admitted
            && *run == memory.run
        {
            return Ok(Some(generation.clone()));
        }
        let run_id = run_id(memory.run);
        let generation = memory.store.admit(&random_owner(), &run_id, now);
        let run_id: Arc<str> = format!("{}, {run_id}", self.name).into();
        let introduction = Introduction {
            replication_id: Arc::clone(&run_id),
            run_id,
            uptime: now.saturating_sub(memory.started),
            generation: generation.clone(),
            now,
        };
        let left = lock(admissions).admit(&self.name, introduction, now);
        if left.is_zero() {
            self.admitted = Some((memory.run, generation.clone()));
            return Ok(Some(generation));
        }
        Err(NodeFailure::Quarantined {
            node: Arc::clone(&self.name),
            left,
        })
    }

    /// Shows what a request for the account's lock changed.
    fn observe(&self, command: &Command, reply: &Reply) {
        let is_account = command
            .names
            .iter()
            .any(|name| name.lock == self.board.account);
        if !is_account {
            return;
        }
        let owner = command.owner.to_value();
        match (&command.op, reply) {
            (Op::Acquire { ttl, .. }, Reply::Granted(fence))
            | (Op::Confirm { ttl, .. }, Reply::At(fence)) => {
                self.board
                    .granted(self.node, self.server, &owner, *ttl, *fence);
            }
            (_, Reply::Released) => self.board.released(self.node, &owner),
            _ => {}
        }
    }

    fn show(&self, request: &SimRequest, answer: &str, began: Instant) {
        let op = &request.command().op;
        if *op != Op::Ping {
            let took = began.elapsed() + self.board.delay(self.node);
            let kind = kind_of(op);
            self.board.vote(self.server, self.node, kind, answer, took);
        }
    }
}

fn kind_of(op: &Op) -> &'static str {
    match op {
        Op::Acquire { .. } => "acquire",
        Op::Confirm { .. } => "confirm",
        Op::Release | Op::ReleaseExecuted | Op::ReleaseAfter { .. } => "release",
        Op::Inspect | Op::Scan { .. } => "inspect",
        Op::Revoke { .. } => "revoke",
        Op::Shared(_) => "shared",
        Op::Record { .. } | Op::TopUp { .. } | Op::Look | Op::Fetch => "record",
        Op::Ping => "ping",
    }
}

fn answer_of(command: &Command, outcome: &Result<Reply, NodeFailure>) -> &'static str {
    match outcome {
        Ok(Reply::Lost) if command.op.is_release() => "released",
        Ok(Reply::Granted(_) | Reply::At(_)) => "granted",
        Ok(
            Reply::Held { .. } | Reply::HeldShared { .. } | Reply::HeldSlot { .. } | Reply::Lost,
        ) => "held",
        Ok(Reply::Released) => "released",
        Ok(Reply::Done { .. } | Reply::Whole(_)) => "stored",
        Err(NodeFailure::Quarantined { .. }) => "quarantined",
        _ => "failed",
    }
}

/// Returns the clock of all nodes, which began long before the playground.
fn clock(epoch: Instant) -> Duration {
    NODE_EPOCH + epoch.elapsed()
}

fn run_id(run: u32) -> String {
    format!("run {run}")
}

fn random_owner() -> OwnerToken {
    OwnerToken::from_random(fastrand::u128(..).to_le_bytes())
}

/// How often a link looks whether its node is back.
const PROBE: Duration = Duration::from_millis(20);

/// The age of the nodes at the beginning.
const NODE_EPOCH: Duration = Duration::from_secs(1_000_000);
