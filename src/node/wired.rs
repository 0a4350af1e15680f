//! Nodes behind a wire that a simulation carries every request over.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::node::job::{Job, Request};
use crate::node::{Ear, Listening, Node, NodeFailure, NodeState};
use crate::protocol::message::{Command, Reply};

/// The way from one process to its nodes, for a simulation to implement.
///
/// # Contract
///
/// What holds for every node: [`carry`](Self::carry) returns at once; what one process sends reaches
/// a node in the order in which it was sent, unless a connection breaks in between; and a release is
/// not dropped while its key may still be there, but sent again.
pub trait Wire: fmt::Debug + Send + Sync + 'static {
    /// Takes a request to a node, given by its place in the list of nodes.
    fn carry(&self, node: usize, parcel: Parcel);
}

/// A request on its way. Dropped unanswered, it is answered with [`NodeFailure::Disconnected`].
#[derive(Debug)]
pub struct Parcel(Job);

impl Parcel {
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

    /// Answers the request.
    pub fn answer(self, outcome: Result<Reply, NodeFailure>) {
        self.0.ballot.cast(outcome);
    }
}

/// One node at the end of a wire.
#[derive(Debug)]
pub(crate) struct WiredNode {
    name: Arc<str>,
    index: usize,
    wire: Arc<dyn Wire>,
}

impl WiredNode {
    pub(crate) fn new(index: usize, wire: Arc<dyn Wire>) -> Self {
        Self {
            name: format!("wired-{index}").into(),
            index,
            wire,
        }
    }
}

impl Node for WiredNode {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn submit(&self, job: Job) {
        self.wire.carry(self.index, Parcel(job));
    }

    /// A simulation has no second wire.
    fn listen(&self, _: &Arc<[u8]>, _: &Arc<Ear>, _: usize) -> Option<Listening> {
        None
    }

    fn extra_patience(&self) -> Duration {
        Duration::ZERO
    }

    fn state(&self) -> NodeState {
        NodeState::Up
    }
}
