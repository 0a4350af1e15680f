//! What a lease task knows in all of its parts.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::lock::front::Rivals;
use crate::lock::redlock::Inner;
use crate::lock::registry::{Stage, Ticket};
use crate::node::{NodeFailure, Tally, Votes};
use crate::protocol::message::Reply;
use crate::protocol::round::{Answer, ReleaseRound};
use crate::protocol::{Fingerprint, KeyNames, LockKey, LockKeys};

/// Resolution of tokio's timers: what is to happen by an instant is armed this much earlier.
pub(super) const TICK: Duration = Duration::from_millis(1);

/// The task that owns one lock.
pub(super) struct LeaseTask {
    pub(super) inner: Arc<Inner>,
    pub(super) keys: LockKeys,
    pub(super) names: Arc<[KeyNames]>,
    pub(super) ttl: Duration,
    pub(super) tally: Arc<Tally>,
    pub(super) votes: Votes,
    /// Releases that some node has not confirmed yet, of failed attempts and of the lock itself.
    pub(super) releases: Vec<Release>,
    pub(super) stage: watch::Receiver<Stage>,
    pub(super) ticket: Ticket,
    pub(super) label: &'static str,
    /// What is asked for, if the key keeps records.
    pub(super) asked_for: Option<Fingerprint>,
    /// By key, the other processes that want it.
    pub(super) rivals: Vec<Arc<Rivals>>,
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

/// Why nodes did not vote in a phase, by node.
pub(super) struct Failures(pub(super) Vec<Option<NodeFailure>>);

impl LeaseTask {
    /// Returns the key of a record; a set keeps none.
    pub(super) fn recorded_key(&self) -> &LockKey {
        &self.keys.as_slice()[0]
    }

    pub(super) fn timed_out(&self, node: usize) -> NodeFailure {
        NodeFailure::TimedOut {
            node: Arc::clone(self.inner.nodes[node].name()),
            after: self.inner.settings.node_timeout,
        }
    }
}

impl Failures {
    pub(super) fn none(nodes: usize) -> Self {
        Self(vec![None; nodes])
    }

    /// Notes why a node did not vote, and returns its vote as the rounds take it.
    pub(super) fn note(&mut self, node: usize, outcome: Result<Reply, NodeFailure>) -> Answer {
        match outcome {
            Ok(reply) => {
                self.0[node] = None;
                Answer::Replied(reply)
            }
            Err(failure) => {
                self.0[node] = Some(failure);
                Answer::Failed
            }
        }
    }

    pub(super) fn list(&self) -> Vec<NodeFailure> {
        self.0.iter().flatten().cloned().collect()
    }
}

/// Waits until the shutdown has come as far as `stage`.
pub(super) async fn reached(stages: &mut watch::Receiver<Stage>, stage: Stage) {
    if stages.wait_for(|now| *now >= stage).await.is_err() {
        // The registry is gone with the last Redlock; nobody can drain it any more.
        std::future::pending().await
    }
}
