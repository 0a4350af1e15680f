//! What a lease task knows in each of its steps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::lock::cluster::Cluster;
use crate::lock::queue::RemoteWaiters;
use crate::lock::registry::Ticket;
use crate::lock::time::Timer;
use crate::node::{NodeFailure, VoteReceiver};
use crate::protocol::message::Reply;
use crate::protocol::round::{Answer, ReleaseRound};
use crate::protocol::{KeyNames, LockKeys};

/// The task that owns one lock. Its steps are in the other files of this folder.
pub(crate) struct LeaseTask {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) keys: LockKeys,
    pub(crate) names: Arc<[KeyNames]>,
    pub(crate) ttl: Duration,
    /// Whether the lock comes with a fencing token.
    pub(crate) is_fenced: bool,
    pub(crate) votes: VoteReceiver,
    /// The releases that some node has not confirmed, of failed attempts and of the lock itself.
    pub(super) releases: Vec<Release>,
    pub(crate) ticket: Ticket,
    /// What the lock is called in metrics.
    pub(super) label: &'static str,
    /// The processes that wait for each key.
    pub(super) remote: Vec<Arc<RemoteWaiters>>,
    pub(crate) timer: Timer,
}

/// A release under way.
pub(super) struct Release {
    pub(super) phase: u32,
    pub(super) round: ReleaseRound,
    /// When the silent nodes are given up on; `None` once they are.
    pub(super) due: Option<Instant>,
    pub(super) failures: Failures,
    /// When nothing can be left to release.
    pub(super) gone_at: Instant,
}

/// Why nodes did not vote in a phase, by number.
#[derive(Debug, Default)]
pub(crate) struct Failures(BTreeMap<usize, NodeFailure>);

impl LeaseTask {
    pub(crate) fn new(
        cluster: &Arc<Cluster>,
        keys: LockKeys,
        names: Arc<[KeyNames]>,
        ttl: Duration,
        is_fenced: bool,
        ticket: Ticket,
        label: &'static str,
    ) -> Self {
        Self {
            votes: VoteReceiver::new(&cluster.names),
            cluster: Arc::clone(cluster),
            keys,
            names,
            ttl,
            is_fenced,
            releases: Vec::new(),
            ticket,
            label,
            remote: Vec::new(),
            timer: Timer::default(),
        }
    }
}

impl Failures {
    /// Notes why a node did not vote, and returns its answer as the rounds take it.
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

    pub(crate) fn list(&self) -> Vec<NodeFailure> {
        self.0.values().cloned().collect()
    }
}
