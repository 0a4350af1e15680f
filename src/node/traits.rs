//! The trait of all nodes, and the state that it tells.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::node::job::{Executed, Job, Packet};
use crate::node::release_signal::{Subscriber, Subscription};

/// One independent lock server.
///
/// # Contract
///
/// * [`submit`](Self::submit) returns at once. The node sends the vote exactly once, at any time and from any
///   thread, or never if the server never answers. Dropping the job sends a failure.
/// * Jobs of one caller reach the server in the order in which they were submitted. A release therefore follows
///   the acquisition that it undoes, even if that has not been answered yet. Only a broken connection may reorder
///   them, which at worst leaves a key locked until its ttl.
/// * A release is never dropped while the key may still be there.
pub(crate) trait Node: fmt::Debug + Send + Sync + 'static {
    /// Returns the name for errors, logs and metrics: the address, never with credentials.
    fn name(&self) -> &Arc<str>;

    /// Submits a job.
    fn submit(&self, job: Job);

    /// Executes a command now, without a job, if the node lives in this process. Otherwise, returns `None`. The time counts
    /// from the epoch of the home.
    fn execute(&self, _: &Packet, _now: Duration) -> Option<Executed> {
        None
    }

    /// Submits a job whose reply may be big.
    ///
    /// It has no order relative to other jobs. A node on which they would wait behind the reply reads it on a
    /// separate connection.
    fn fetch(&self, job: Job) {
        self.submit(job);
    }

    /// Returns how much longer than the node timeout to wait for a job submitted now: the connect timeout while it is
    /// not known whether the server can be reached, and otherwise zero.
    fn extra_patience(&self) -> Duration {
        Duration::ZERO
    }

    /// Subscribes to the releases of a lock, until the returned subscription is dropped. Returns `None` if the node
    /// cannot publish releases.
    fn subscribe(&self, lock: &Arc<[u8]>, subscriber: Subscriber) -> Option<Subscription>;

    /// Returns what is known about the node, without asking it.
    fn state(&self) -> NodeState {
        NodeState::Up
    }
}

/// The state of a node, as far as this process knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum NodeState {
    /// The node answers, or has not been asked yet.
    Up,
    /// The node answers, but must not vote: it was started, restarted or flushed recently.
    Quarantined {
        /// The remaining time of the quarantine.
        left: Duration,
    },
    /// The node does not answer.
    Unreachable {
        /// The last error, without credentials.
        why: Arc<str>,
        /// How long it has not answered.
        since: Duration,
    },
}
