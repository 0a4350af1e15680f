//! Embedded nodes whose answers a test can delay, lose or forge.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::node::embedded::EmbeddedNode;
use crate::node::job::{Job, Request};
use crate::node::{Node, NodeFailure, NodeState, ReleaseSignal, Subscription};
use crate::protocol::message::{Command, Op, Reply};

/// What happens to the requests that reach a scripted node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Gate {
    /// Carried out and answered at once.
    Ready,
    /// Carried out and answered after a while, in order.
    Slow(Duration),
    /// Answered with an error, not carried out.
    Failing,
    /// Not carried out, never answered.
    Never,
    /// Carried out at once, never answered.
    Mute,
    /// Known to be unreachable before anything is sent.
    Down,
    /// The lease task that asks panics.
    Panic,
}

/// The kind of a request, to give each its own [`Gate`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum OpKind {
    /// The first request of an attempt.
    Acquire,
    /// The second phase of an attempt, or an extension.
    Confirm,
    /// The release.
    Release,
    /// A record to keep.
    Record,
    /// A look at a record.
    Look,
    /// The reading of a whole record.
    Fetch,
    /// A question whether the node answers.
    Ping,
}

/// Embedded nodes under a test's control; clones control the same nodes.
///
/// ```
/// use tower_redlock::test_util::{Gate, ScriptedNodes};
/// use tower_redlock::{LockError, Redlock};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() {
/// let nodes = ScriptedNodes::new(3);
/// let redlock = Redlock::builder().scripted(&nodes).build().unwrap();
/// nodes.set(0, Gate::Never);
/// assert!(redlock.try_lock("still a majority").await.is_ok());
/// nodes.set(1, Gate::Failing);
/// let refused = redlock.try_lock("not any more").await;
/// assert!(matches!(refused, Err(LockError::Unavailable { .. })));
/// # }
/// ```
#[derive(Clone)]
pub struct ScriptedNodes {
    pub(crate) nodes: Vec<Arc<ScriptedNode>>,
}

/// By hand: a derived one would show everything that the nodes remember.
impl fmt::Debug for ScriptedNodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptedNodes")
            .field("nodes", &self.nodes.len())
            .finish_non_exhaustive()
    }
}

impl ScriptedNodes {
    /// Makes `count` nodes that all answer at once.
    #[must_use]
    pub fn new(count: usize) -> Self {
        Self {
            nodes: (0..count).map(|i| Arc::new(ScriptedNode::new(i))).collect(),
        }
    }

    /// Sets what happens to all requests to `node` from now on.
    ///
    /// # Panics
    ///
    /// If there is no such node.
    pub fn set(&self, node: usize, gate: Gate) {
        let mut script = self.nodes[node].script();
        script.gate = gate;
        script.by_kind.clear();
    }

    /// Sets what happens to one kind of requests to `node` from now on.
    ///
    /// # Panics
    ///
    /// If there is no such node.
    pub fn set_for(&self, node: usize, kind: OpKind, gate: Gate) {
        self.nodes[node].script().by_kind.insert(kind, gate);
    }

    /// Makes `node` tell nobody new of released locks, as a server whose user may not subscribe.
    ///
    /// # Panics
    ///
    /// If there is no such node.
    pub fn silence(&self, node: usize) {
        self.nodes[node].script().is_silent = true;
    }

    /// Returns on how many nodes each has how many locks that have not expired.
    #[must_use]
    pub fn locks(&self) -> Vec<usize> {
        self.nodes.iter().map(|node| node.store.held()).collect()
    }

    /// Returns how many requests of a kind `node` was sent.
    ///
    /// # Panics
    ///
    /// If there is no such node.
    #[must_use]
    pub fn sent(&self, node: usize, kind: OpKind) -> usize {
        let script = self.nodes[node].script();
        script.sent.get(&kind).copied().unwrap_or(0)
    }

    /// Makes `node` forget everything, as a restart without persistence does.
    ///
    /// # Panics
    ///
    /// If there is no such node.
    pub fn wipe(&self, node: usize) {
        self.nodes[node].store.wipe();
    }

    /// Carries out a request at `node` directly, as if another process had sent it.
    ///
    /// # Panics
    ///
    /// If there is no such node.
    #[allow(
        clippy::must_use_candidate,
        reason = "called for what it does at the node"
    )]
    pub fn apply(&self, node: usize, command: &Command) -> Reply {
        self.nodes[node].store.apply(command)
    }
}

#[derive(Debug)]
pub(crate) struct ScriptedNode {
    store: Arc<EmbeddedNode>,
    script: Mutex<Script>,
}

#[derive(Debug)]
struct Script {
    gate: Gate,
    by_kind: BTreeMap<OpKind, Gate>,
    sent: BTreeMap<OpKind, usize>,
    /// Whether it tells nobody of a release.
    is_silent: bool,
    /// Jobs that are never answered; dropping them would answer.
    unanswered: Vec<Job>,
}

/// One client's way to a scripted node. Another client's requests are not kept waiting by its own.
#[derive(Debug)]
pub(crate) struct ScriptedLane {
    node: Arc<ScriptedNode>,
    /// The jobs that are on their way, in order, once there has been a slow one.
    wire: Mutex<Option<mpsc::UnboundedSender<(Instant, Job)>>>,
}

impl ScriptedNode {
    fn new(index: usize) -> Self {
        Self {
            store: Arc::new(EmbeddedNode::new(index)),
            script: Mutex::new(Script {
                gate: Gate::Ready,
                by_kind: BTreeMap::new(),
                sent: BTreeMap::new(),
                is_silent: false,
                unanswered: Vec::new(),
            }),
        }
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ScriptedLane {
    pub(crate) fn to(node: &Arc<ScriptedNode>) -> Self {
        Self {
            node: Arc::clone(node),
            wire: Mutex::default(),
        }
    }

    /// Puts a job on the wire, behind all that are on it.
    fn post(&self, delay: Duration, job: Job) {
        let arrives = Instant::now() + delay;
        let mut wire = self.wire.lock().unwrap_or_else(PoisonError::into_inner);
        let job = match &*wire {
            Some(wire) => match wire.send((arrives, job)) {
                Ok(()) => return,
                Err(mpsc::error::SendError((_, job))) => job,
            },
            None if delay.is_zero() => return self.node.store.submit(job),
            None => job,
        };
        let (sender, mut jobs) = mpsc::unbounded_channel::<(Instant, Job)>();
        let store = Arc::clone(&self.node.store);
        tokio::spawn(async move {
            while let Some((arrives, job)) = jobs.recv().await {
                tokio::time::sleep_until(arrives).await;
                store.submit(job);
            }
        });
        drop(sender.send((arrives, job)));
        *wire = Some(sender);
    }
}

impl Node for ScriptedLane {
    fn name(&self) -> &Arc<str> {
        self.node.store.name()
    }

    fn submit(&self, job: Job) {
        let kind = kind_of(&job);
        let mut script = self.node.script();
        *script.sent.entry(kind).or_default() += 1;
        let gate = script.by_kind.get(&kind).copied().unwrap_or(script.gate);
        let node = Arc::clone(self.name());
        match gate {
            Gate::Ready => {
                drop(script);
                self.post(Duration::ZERO, job);
            }
            Gate::Slow(delay) => {
                drop(script);
                self.post(delay, job);
            }
            Gate::Failing => job.sender.send(Err(NodeFailure::Refused {
                node,
                why: "scripted failure".into(),
            })),
            Gate::Down => job.sender.send(Err(NodeFailure::Unreachable {
                node,
                why: "scripted to be down".into(),
            })),
            Gate::Mute => {
                if let Request::Command(packet) = &job.request {
                    self.node.store.apply(&packet.command);
                }
                script.unanswered.push(job);
            }
            Gate::Never => script.unanswered.push(job),
            Gate::Panic => panic!("scripted panic"),
        }
    }

    fn subscribe(
        &self,
        lock: &Arc<[u8]>,
        signal: &Arc<ReleaseSignal>,
        node: usize,
    ) -> Option<Subscription> {
        let is_deaf = self.node.script().is_silent;
        (!is_deaf).then(|| self.node.store.subscribe(lock, signal, node))?
    }

    fn extra_patience(&self) -> Duration {
        Duration::ZERO
    }

    fn state(&self) -> NodeState {
        NodeState::Up
    }
}

fn kind_of(job: &Job) -> OpKind {
    match &job.request {
        Request::Ping => OpKind::Ping,
        Request::Command(packet) => match packet.command.op {
            Op::Acquire { .. } => OpKind::Acquire,
            Op::Confirm { .. } => OpKind::Confirm,
            Op::Release | Op::ReleaseExecuted => OpKind::Release,
            Op::Record { .. } | Op::TopUp { .. } => OpKind::Record,
            Op::Look => OpKind::Look,
            Op::Fetch => OpKind::Fetch,
        },
    }
}
