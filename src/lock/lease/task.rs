//! The state that all steps of a lease task share.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::task;
use tokio::time::Instant;

use crate::lock::cluster::Cluster;
use crate::lock::lease::announce::Announcement;
use crate::lock::queue::Places;
use crate::lock::registry::Ticket;
use crate::lock::slots::SlotTable;
use crate::lock::time::Timer;
use crate::node::telemetry::LockLabels;
use crate::node::{NodeFailure, VoteReceiver};
use crate::protocol::lease::Access;
use crate::protocol::message::Reply;
use crate::protocol::round::{Answer, ReleaseRound};
use crate::protocol::{FencingToken, KeyNames, LockKeys};

/// The task that owns one lock; the other files of this folder have its steps.
pub(crate) struct LeaseTask {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) keys: LockKeys,
    pub(super) terms: Terms,
    /// The number of the slot, if the lock is one of several.
    pub(super) slot: Option<usize>,
    pub(crate) votes: VoteReceiver,
    /// The releases under way, of failed attempts and of the lock itself.
    pub(super) releases: Vec<Release>,
    pub(crate) ticket: Ticket,
    /// The task that requested the lock, which is not the one that owns it from the grant on.
    pub(super) task: Option<task::Id>,
    /// The labels of the lock in spans and metrics.
    pub(super) labels: LockLabels,
    /// The places of the keys in the queue, which know the processes that wait for each key.
    pub(super) places: Places,
    pub(crate) timer: Timer,
    /// Present while the caller waits for readers to leave.
    pub(super) announcement: Option<Box<Announcement>>,
}

/// What a caller asked for.
pub(crate) struct Terms {
    pub(crate) names: Arc<[KeyNames]>,
    pub(crate) ttl: Duration,
    /// Whether the lock comes with a fencing token.
    pub(crate) is_fenced: bool,
    pub(crate) access: Access,
    /// The slots of a caller that takes any of them. Dropped when it has one.
    pub(crate) slot_table: Option<Box<SlotTable>>,
    /// Present if the lock is one of several leases of its caller. The times of all of them begin when it has them.
    pub(crate) earlier: Option<Earlier>,
    /// How long the keys stay taken at least, counted from the grant.
    pub(crate) hold_at_least: Option<Duration>,
}

/// The leases that a caller has acquired before, in other groups, for the same lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Earlier {
    /// Their highest token. That of the next lease is not lower.
    pub(crate) token: Option<FencingToken>,
    /// The slots that the next lease may have, one bit for each.
    pub(crate) slots: u64,
}

impl Default for Earlier {
    fn default() -> Self {
        Self {
            token: None,
            slots: u64::MAX,
        }
    }
}

/// A release under way.
pub(super) struct Release {
    /// Those of an earlier slot may differ from those of the task.
    pub(super) keys: LockKeys,
    pub(super) phase: u32,
    pub(super) round: ReleaseRound,
    /// When the silent nodes count as failed; `None` once they do.
    pub(super) due: Option<Instant>,
    pub(super) failures: Failures,
    /// When the keys have expired on every node for certain.
    pub(super) gone_at: Instant,
}

/// The failures of nodes in one phase, by node number.
#[derive(Debug, Clone, Default)]
pub(crate) struct Failures(BTreeMap<usize, NodeFailure>);

impl LeaseTask {
    pub(crate) fn new(
        cluster: &Arc<Cluster>,
        keys: LockKeys,
        terms: Terms,
        ticket: Ticket,
        labels: LockLabels,
    ) -> Self {
        Self {
            votes: VoteReceiver::new(&cluster.names),
            cluster: Arc::clone(cluster),
            keys,
            terms,
            slot: None,
            releases: Vec::new(),
            ticket,
            task: task::try_id(),
            labels,
            places: Places::default(),
            timer: Timer::default(),
            announcement: None,
        }
    }
}

impl Failures {
    /// Keeps the outcome of a node if it is a failure, and returns it as an answer for the rounds.
    pub(crate) fn note(&mut self, node: usize, outcome: Result<Reply, NodeFailure>) -> Answer {
        match outcome {
            Ok(reply) => {
                self.0.remove(&node);
                Answer::Replied(reply)
            }
            Err(failure) => {
                self.set(node, failure);
                Answer::Failed
            }
        }
    }

    pub(crate) fn set(&mut self, node: usize, failure: NodeFailure) {
        self.0.insert(node, failure);
    }

    /// Returns the failures, and those of the nodes that had not answered when the others decided.
    pub(crate) fn list(
        mut self,
        cluster: &Cluster,
        silent: impl Iterator<Item = usize>,
    ) -> Vec<NodeFailure> {
        for number in silent {
            let node = Arc::clone(&cluster.names[number]);
            let unanswered = NodeFailure::Unanswered { node };
            self.0.entry(number).or_insert(unanswered);
        }
        self.0.into_values().collect()
    }
}
