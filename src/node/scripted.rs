//! Embedded nodes whose replies a test delays, loses or forges.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::node::Mutex;
use crate::node::embedded::EmbeddedNode;
use crate::node::failure::NodeFailure;
use crate::node::job::Job;
use crate::node::release_signal::{Subscriber, Subscription};
use crate::node::traits::Node;
#[cfg(feature = "unstable-protocol")]
use crate::protocol::message::{Command, Reply};
use crate::protocol::message::{Op, SharedOp};

/// How a scripted node treats the requests that reach it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Gate {
    /// Executes and answers the request at once.
    Ready,
    /// Executes and answers the request after this delay, in order.
    Slow(Duration),
    /// Answers with an error without executing the request.
    Failing,
    /// Neither executes nor answers the request.
    Never,
    /// Executes the request at once and never answers.
    Mute,
    /// Fails the request at once, as a node that is known to be unreachable.
    Down,
    /// Panics in the task that submits the request.
    Panic,
}

/// The kind of a request; each can have its own [`Gate`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum OpKind {
    /// The first request of an attempt.
    Acquire,
    /// The second phase of an attempt, or an extension.
    Confirm,
    /// The release.
    Release,
    /// A writer that waits keeps new readers out.
    Announce,
    /// A writer no longer waits.
    Withdraw,
    /// The reading of what the node knows of a key, or of which locks it has.
    Inspect,
    /// The deletion of a lock of any owner.
    Revoke,
    /// The writing of a record.
    Record,
    /// The reading of a record's head.
    Look,
    /// The reading of a whole record.
    Fetch,
    /// A health check.
    Ping,
}

/// Embedded nodes that a test controls; clones control the same nodes.
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

// Without the whole content of the nodes.
opaque_debug! { ScriptedNodes }

impl ScriptedNodes {
    /// Creates `count` nodes that answer at once.
    #[must_use]
    pub fn new(count: usize) -> Self {
        Self {
            nodes: (0..count).map(ScriptedNode::new).collect(),
        }
    }

    /// Sets the gate of all requests to `node` from now on.
    ///
    /// # Panics
    ///
    /// If there is no such node.
    pub fn set(&self, node: usize, gate: Gate) {
        let mut script = self.nodes[node].script.lock();
        script.gate = Some(gate);
        script.by_kind.clear();
    }

    /// Sets the gate of one kind of requests to `node` from now on.
    ///
    /// # Panics
    ///
    /// If there is no such node.
    pub fn set_for(&self, node: usize, kind: OpKind, gate: Gate) {
        self.nodes[node].script.lock().by_kind.insert(kind, gate);
    }

    /// Makes `node` refuse new subscriptions to releases, as a server whose user may not subscribe.
    ///
    /// # Panics
    ///
    /// If there is no such node.
    pub fn silence(&self, node: usize) {
        self.nodes[node].script.lock().is_silent = true;
    }

    /// Returns the number of unexpired locks on each node.
    #[must_use]
    pub fn locks(&self) -> Vec<usize> {
        self.nodes.iter().map(|node| node.store.held()).collect()
    }

    /// Returns the number of requests of one kind that were sent to `node`.
    ///
    /// # Panics
    ///
    /// If there is no such node.
    #[must_use]
    pub fn sent(&self, node: usize, kind: OpKind) -> usize {
        let script = self.nodes[node].script.lock();
        script.sent.get(&kind).copied().unwrap_or(0)
    }

    /// Deletes all data of `node`, as a restart without persistence does.
    ///
    /// # Panics
    ///
    /// If there is no such node.
    pub fn wipe(&self, node: usize) {
        self.nodes[node].store.wipe();
    }

    /// Executes a command at `node` directly, as if another process had sent it.
    ///
    /// # Panics
    ///
    /// If there is no such node.
    #[cfg(feature = "unstable-protocol")]
    #[allow(
        clippy::must_use_candidate,
        reason = "called for its effect on the node"
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

#[derive(Debug, Default)]
struct Script {
    /// Ready if there is none.
    gate: Option<Gate>,
    by_kind: BTreeMap<OpKind, Gate>,
    sent: BTreeMap<OpKind, usize>,
    /// Whether it refuses subscriptions to releases.
    is_silent: bool,
    /// Jobs that are never answered; dropping them would send a failure.
    unanswered: Vec<Job>,
}

/// One client's connection to a scripted node. Slow requests delay later ones of the same client only.
#[derive(Debug)]
pub(crate) struct ScriptedLane {
    node: Arc<ScriptedNode>,
    /// Delivers the last job that was slow, or behind a slow one.
    last: Mutex<Option<JoinHandle<()>>>,
}

impl ScriptedNode {
    fn new(index: usize) -> Arc<Self> {
        Arc::new(Self {
            store: Arc::new(EmbeddedNode::new(index, Arc::default())),
            script: Mutex::default(),
        })
    }
}

impl ScriptedLane {
    pub(crate) fn to(node: &Arc<ScriptedNode>) -> Self {
        Self {
            node: Arc::clone(node),
            last: Mutex::default(),
        }
    }

    /// Delivers a job after a delay, behind all earlier ones.
    fn post(&self, delay: Duration, job: Job) {
        let arrives = Instant::now() + delay;
        let mut last = self.last.lock();
        let before = last.take_if(|before| !before.is_finished());
        if delay.is_zero() && before.is_none() {
            return self.node.store.submit(job);
        }
        let store = Arc::clone(&self.node.store);
        *last = Some(tokio::spawn(async move {
            if let Some(before) = before {
                drop(before.await);
            }
            tokio::time::sleep_until(arrives).await;
            store.submit(job);
        }));
    }
}

impl Node for ScriptedLane {
    fn name(&self) -> &Arc<str> {
        self.node.store.name()
    }

    fn subscribe(&self, lock: &Arc<[u8]>, subscriber: Subscriber) -> Option<Subscription> {
        let is_silent = self.node.script.lock().is_silent;
        (!is_silent).then(|| self.node.store.subscribe(lock, subscriber))?
    }

    fn submit(&self, job: Job) {
        let kind = kind_of(job.op());
        let gate = {
            let mut script = self.node.script.lock();
            *script.sent.entry(kind).or_default() += 1;
            script.by_kind.get(&kind).copied().or(script.gate)
        };
        let node = Arc::clone(self.name());
        match gate.unwrap_or(Gate::Ready) {
            Gate::Ready => self.post(Duration::ZERO, job),
            Gate::Slow(delay) => self.post(delay, job),
            Gate::Failing => {
                job.sender
                    .send(Err(NodeFailure::refused(&node, "scripted failure")));
            }
            Gate::Down => job.sender.send(Err(NodeFailure::Unreachable {
                node,
                why: "scripted as down".into(),
            })),
            Gate::Mute => {
                self.node.store.apply(&job.packet.command);
                self.node.script.lock().unanswered.push(job);
            }
            Gate::Never => self.node.script.lock().unanswered.push(job),
            Gate::Panic => panic!("scripted panic"),
        }
    }
}

fn kind_of(op: &Op) -> OpKind {
    match op {
        Op::Acquire { .. } | Op::Shared(SharedOp::Acquire { .. }) => OpKind::Acquire,
        Op::Confirm { .. } | Op::Shared(SharedOp::Confirm { .. }) => OpKind::Confirm,
        Op::Release
        | Op::ReleaseExecuted
        | Op::ReleaseAfter { .. }
        | Op::Shared(SharedOp::Release) => OpKind::Release,
        Op::Inspect | Op::Scan { .. } => OpKind::Inspect,
        Op::Revoke { .. } => OpKind::Revoke,
        Op::Shared(SharedOp::Announce { .. }) => OpKind::Announce,
        Op::Shared(SharedOp::Withdraw) => OpKind::Withdraw,
        Op::Record { .. } | Op::TopUp { .. } => OpKind::Record,
        Op::Look => OpKind::Look,
        Op::Fetch => OpKind::Fetch,
        Op::Ping => OpKind::Ping,
    }
}
