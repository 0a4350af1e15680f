//! One node, one command: what a lock needs of a Redis server, and the embedded node beside it.
//!
//! A [`Node`] takes a [`Job`] and answers it by casting its [`VoteSender`]. Taking a job never waits
//! and never fails, so a lease can hand out a request or a release from anywhere, also from a
//! destructor, and what travels to a node can be queued, batched or sent as the node sees fit.

mod embedded;
mod failure;
mod job;
mod mutex;
#[cfg(feature = "redis")]
pub(crate) mod redis;
mod release_signal;
#[cfg(feature = "test-util")]
pub(crate) mod scripted;
#[cfg(feature = "test-util")]
pub(crate) mod sim;
#[cfg(feature = "test-util")]
pub(crate) mod sim_env;
mod system;
pub(crate) mod telemetry;
mod votes;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use embedded::EmbeddedNode;
pub use failure::NodeFailure;
pub(crate) use job::{Job, Packet, Request, Trail, transit, transit_of};
pub(crate) use mutex::Mutex;
pub(crate) use release_signal::{ReleaseSignal, Subscription};
pub(crate) use system::{next_proposal, random_u64, sha256, unguessable};
pub(crate) use votes::{Threshold, Vote, VoteReceiver};

/// One independent lock server.
///
/// # Contract
///
/// * `submit` returns at once. The vote is cast exactly once, from anywhere, at any time, or
///   never, if the node never answers; dropping it casts a failure.
/// * Jobs of one caller reach the server in the order they were submitted, so that a release always
///   comes after the acquisition it undoes, also when the answer to that is still out. Only a
///   broken connection may reorder them, which leaves a key locked until its ttl at worst.
/// * A release is never dropped while the key may still be there.
pub(crate) trait Node: fmt::Debug + Send + Sync + 'static {
    /// Returns the name for errors, logs and metrics: the address, never with credentials.
    fn name(&self) -> &Arc<str>;

    /// Hands a job over.
    fn submit(&self, job: Job);

    /// Hands a job over whose answer may be big: it is in no order with the others, and where others
    /// could wait behind it, it has a way of its own.
    fn fetch(&self, job: Job) {
        self.submit(job);
    }

    /// Returns how much longer than the node timeout to wait for a job that is submitted now: the
    /// connect timeout before the first connection, else nothing.
    fn extra_patience(&self) -> Duration;

    /// Lets an signal, which knows this node as number `node`, hear of releases of a lock, for as long as
    /// what is returned lives. A node that cannot tell never does.
    fn subscribe(
        &self,
        lock: &Arc<[u8]>,
        signal: &Arc<ReleaseSignal>,
        node: usize,
    ) -> Option<Subscription>;

    /// Returns what is known about the node without asking it.
    fn state(&self) -> NodeState;
}

/// What is known about a node.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum NodeState {
    /// The node answers, or has not been asked yet.
    Up,
    /// The node answers but may not vote: it lost its memory not long ago.
    Quarantined {
        /// How long it is kept out from now.
        left: Duration,
    },
    /// The node does not answer.
    Unreachable {
        /// What went wrong, without credentials.
        why: Arc<str>,
        /// For how long it has not answered.
        since: Duration,
    },
}
