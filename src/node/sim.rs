//! Nodes behind a network that a simulation carries every request over.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::node::job::{Job, Request};
use crate::node::{Node, NodeFailure, NodeState, ReleaseSignal, Subscription};
use crate::protocol::message::{Command, Reply};

/// The way from one process to its nodes, for a simulation to implement.
///
/// # Contract
///
/// What holds for every node: [`carry`](Self::carry) returns at once; what one process sends reaches
/// a node in the order in which it was sent, unless a connection breaks in between; and a release is
/// not dropped while its key may still be there, but sent again.
pub trait SimNetwork: fmt::Debug + Send + Sync + 'static {
    /// Takes a request to a node, given by its place in the list of nodes.
    fn carry(&self, node: usize, request: SimRequest);

    /// Takes the wish to hear of releases of a lock at a node, until [`hush`](Self::unsubscribe) is called; of a
    /// lock that is listened for already, the new listener takes the place of the old. Returns at once.
    ///
    /// Without an implementation no node ever tells.
    fn subscribe(&self, _node: usize, _lock: &Arc<[u8]>, _listener: SimSubscriber) {}

    /// Takes note that nobody wants to hear of releases of a lock at a node any more. Returns at once.
    fn unsubscribe(&self, _node: usize, _lock: &Arc<[u8]>) {}
}

/// Who hears of releases of one lock at one node. What it is told may be late, repeated, lost or untrue:
/// it is a hint to ask.
#[derive(Debug)]
pub struct SimSubscriber {
    signal: Arc<ReleaseSignal>,
    node: usize,
}

impl SimSubscriber {
    /// Notes whether the node would tell of a release from now on; at first it would not.
    pub fn set_subscribed(&self, subscribed: bool) {
        self.signal.set_subscribed(self.node, subscribed);
    }

    /// Tells of a release that so many processes were told of, this one included.
    pub fn notify(&self, listeners: usize) {
        self.signal.notify(self.node, listeners);
    }
}

/// A request on its way. Dropped unanswered, it is answered with [`NodeFailure::Disconnected`].
#[derive(Debug)]
pub struct SimRequest(Job);

impl SimRequest {
    /// Returns what is asked; `None` if it is only whether the node answers.
    #[must_use]
    pub fn command(&self) -> Option<&Command> {
        match &self.0.request {
            Request::Command(packet) => Some(&packet.command),
            Request::Ping => None,
        }
    }

    /// Returns whether to send it still makes sense: an acquisition that is decided must not go out,
    /// a release must until its key has expired in any case.
    #[must_use]
    pub fn is_wanted(&self, now: Instant) -> bool {
        self.0.is_wanted(now)
    }

    /// Returns whether it must reach the node whatever happens.
    #[must_use]
    pub fn is_release(&self) -> bool {
        self.0.is_release()
    }

    /// Returns whether those who listen are to be told if the node gives back one of the locks, which
    /// it does only if that is still the owner's.
    #[must_use]
    pub fn notifies(&self) -> bool {
        matches!(&self.0.request, Request::Command(packet) if packet.tells)
    }

    /// Notes how many processes the node told of a release.
    pub fn set_subscribers(&mut self, listeners: usize) {
        self.0.sender.set_subscribers(listeners);
    }

    /// Answers the request.
    pub fn answer(self, outcome: Result<Reply, NodeFailure>) {
        self.0.sender.send(outcome);
    }
}

/// One node at the end of a network.
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

    fn subscribe(
        &self,
        lock: &Arc<[u8]>,
        signal: &Arc<ReleaseSignal>,
        node: usize,
    ) -> Option<Subscription> {
        let listener = SimSubscriber {
            signal: Arc::clone(signal),
            node,
        };
        self.network.subscribe(self.index, lock, listener);
        let (network, index, lock) = (Arc::clone(&self.network), self.index, Arc::clone(lock));
        Some(Subscription::new(move || network.unsubscribe(index, &lock)))
    }

    fn extra_patience(&self) -> Duration {
        Duration::ZERO
    }

    fn state(&self) -> NodeState {
        NodeState::Up
    }
}
