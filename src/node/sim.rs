//! Nodes behind a simulated network.

use std::fmt;
use std::sync::Arc;

use tokio::time::Instant;

use crate::node::failure::NodeFailure;
use crate::node::job::Job;
pub use crate::node::release_signal::Subscriber as SimSubscriber;
use crate::node::release_signal::Subscription;
use crate::node::traits::Node;
use crate::protocol::message::{Command, Reply};

/// The network between one process and its nodes, implemented by a simulation.
///
/// # Contract
///
/// * [`carry`](Self::carry) returns at once.
/// * Requests of one process reach a node in the order in which they were sent, unless a connection breaks.
/// * A release is not dropped while its key may still be there, but sent again.
pub trait SimNetwork: fmt::Debug + Send + Sync + 'static {
    /// Takes a request to the node with this index.
    fn carry(&self, node: usize, request: SimRequest);

    /// Subscribes to the releases of a lock at a node, until [`unsubscribe`](Self::unsubscribe) is called. A new
    /// subscriber of a lock replaces the previous one. Returns at once.
    ///
    /// The default implementation publishes no releases.
    fn subscribe(&self, _node: usize, _lock: &Arc<[u8]>, _subscriber: SimSubscriber) {}

    /// Ends the subscription to the releases of a lock at a node. Returns at once.
    fn unsubscribe(&self, _node: usize, _lock: &Arc<[u8]>) {}
}

/// A request in transit. Dropping it answers it with [`NodeFailure::Disconnected`].
#[derive(Debug)]
pub struct SimRequest(Job);

impl SimRequest {
    /// Returns the command, which is [`Op::Ping`](crate::protocol::message::Op::Ping) for a health check.
    #[must_use]
    pub fn command(&self) -> &Command {
        &self.0.packet.command
    }

    /// Returns whether to send the request. An acquisition whose attempt is decided must not be sent; a release
    /// must be sent, and reach the node in any case, until its key has certainly expired.
    #[must_use]
    pub fn is_wanted(&self, now: Instant) -> bool {
        self.0.is_wanted(now)
    }

    /// Returns whether the node notifies the subscribers of each lock that the request releases. It releases a
    /// lock only if the owner still holds it.
    #[must_use]
    pub fn notifies(&self) -> bool {
        self.0.packet.notifies
    }

    /// Sets the number of subscribers that the node published the release to.
    pub fn set_subscribers(&mut self, subscribers: usize) {
        self.0.sender.set_subscribers(subscribers);
    }

    /// Answers the request.
    pub fn answer(self, outcome: Result<Reply, NodeFailure>) {
        self.0.sender.send(outcome);
    }
}

/// One node behind a simulated network.
#[derive(Debug)]
pub(crate) struct SimNode {
    name: Arc<str>,
    index: usize,
    network: Arc<dyn SimNetwork>,
}

impl SimNode {
    pub(crate) fn new(index: usize, network: Arc<dyn SimNetwork>) -> Self {
        Self {
            name: format!("sim-{index}").into(),
            index,
            network,
        }
    }
}

impl Node for SimNode {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn submit(&self, job: Job) {
        self.network.carry(self.index, SimRequest(job));
    }

    fn subscribe(&self, lock: &Arc<[u8]>, subscriber: SimSubscriber) -> Option<Subscription> {
        self.network.subscribe(self.index, lock, subscriber);
        let (network, index, lock) = (Arc::clone(&self.network), self.index, Arc::clone(lock));
        let unsubscribe = move || network.unsubscribe(index, &lock);
        Some(Subscription(Box::new(unsubscribe)))
    }
}
