//! What travels to a node, and where its vote goes.

use std::sync::Arc;
#[cfg(feature = "redis")]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::node::failure::NodeFailure;
#[cfg(any(feature = "redis", feature = "test-util"))]
use crate::protocol::message::Op;
use crate::protocol::message::{Command, Reply};

/// A request on its way to one node.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) request: Request,
    pub(crate) ballot: Ballot,
    /// When the request is of no use any more: a release, when its key has expired anyway.
    #[cfg_attr(
        not(any(feature = "redis", feature = "test-util")),
        expect(dead_code, reason = "embedded nodes answer at once")
    )]
    pub(crate) useful_until: Instant,
}

/// What is asked of the node.
#[derive(Debug, Clone)]
pub(crate) enum Request {
    Command(Arc<Packet>),
    /// Only whether the node answers.
    Ping,
}

#[cfg(feature = "redis")]
impl Request {
    /// Returns the name of its kind in metrics.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Command(packet) => match packet.command.op {
                Op::Acquire { .. } => "acquire",
                Op::Confirm { .. } => "confirm",
                Op::Release | Op::ReleaseExecuted => "release",
                Op::Record { .. } => "record",
                Op::TopUp { .. } => "top_up",
                Op::Look => "look",
            },
            Self::Ping => "ping",
        }
    }
}

/// For nodes that keep jobs waiting.
#[cfg(any(feature = "redis", feature = "test-util"))]
impl Job {
    /// Whether this is a release, which must reach the node whatever else happens.
    pub(crate) fn is_release(&self) -> bool {
        matches!(&self.request, Request::Command(packet) if matches!(packet.command.op, Op::Release | Op::ReleaseExecuted))
    }

    /// Returns what is sent of it to a node that is known not to answer or not to vote; what is not is
    /// answered.
    ///
    /// A node that may not vote can still be told of releases and records, and asked for a record: what
    /// it has counts, and what it does not have may have been forgotten.
    #[cfg(feature = "redis")]
    pub(crate) fn despite(mut self, failure: &NodeFailure) -> Option<Self> {
        if self.is_release() {
            return Some(self);
        }
        let may_not_vote = matches!(failure, NodeFailure::Quarantined { .. });
        if let Request::Command(packet) = &self.request
            && may_not_vote
        {
            let Command { names, owner, op } = &packet.command;
            let is_recorded = names.iter().any(|name| name.record.is_some());
            match op {
                Op::Record { .. } | Op::TopUp { .. } | Op::Look => return Some(self),
                Op::Acquire { .. } if is_recorded => {
                    let look = Packet::new(Command {
                        names: Arc::clone(names),
                        owner: owner.clone(),
                        op: Op::Look,
                    });
                    self.request = Request::Command(look);
                    if let Some(open) = &mut self.ballot.0 {
                        open.without_record = Some(failure.clone());
                    }
                    return Some(self);
                }
                _ => {}
            }
        }
        self.ballot.cast(Err(failure.clone()));
        None
    }

    /// Whether sending it still makes sense.
    ///
    /// An acquisition must not go out once its attempt is decided: nothing would release it.
    pub(crate) fn is_wanted(&self, now: Instant) -> bool {
        if self.is_release() {
            now < self.useful_until
        } else {
            self.ballot.is_open()
        }
    }
}

/// A command and its encoding for the wire, made once and shared by all nodes.
#[derive(Debug)]
pub(crate) struct Packet {
    pub(crate) command: Command,
    #[cfg(feature = "redis")]
    pub(crate) wire: OnceLock<deadpool_redis::redis::Cmd>,
}

impl Packet {
    pub(crate) fn new(command: Command) -> Arc<Self> {
        Arc::new(Self {
            command,
            #[cfg(feature = "redis")]
            wire: OnceLock::new(),
        })
    }
}

/// Where the votes of one lease are collected.
#[derive(Debug)]
pub(crate) struct Tally {
    votes: mpsc::UnboundedSender<Vote>,
    /// The phase that is being voted on. Votes of other phases are still delivered, but requests of
    /// other phases that have not been sent need not be.
    phase: AtomicU32,
}

/// One node's vote in one phase of a lease.
#[derive(Debug)]
pub(crate) struct Vote {
    pub(crate) node: usize,
    pub(crate) phase: u32,
    pub(crate) outcome: Result<Reply, NodeFailure>,
}

impl Tally {
    pub(crate) fn new() -> (Arc<Self>, mpsc::UnboundedReceiver<Vote>) {
        let (votes, collected) = mpsc::unbounded_channel();
        let phase = AtomicU32::new(0);
        (Arc::new(Self { votes, phase }), collected)
    }

    /// Begins a new phase, which closes the ballots of the one before, and returns its number.
    pub(crate) fn next_phase(&self) -> u32 {
        self.phase.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Makes the ballot of one node for the current phase.
    pub(crate) fn ballot(self: &Arc<Self>, node: usize, name: &Arc<str>) -> Ballot {
        Ballot(Some(Open {
            tally: Arc::clone(self),
            phase: self.phase.load(Ordering::Acquire),
            node,
            name: Arc::clone(name),
            without_record: None,
        }))
    }
}

/// The right to cast one vote. Dropped without a vote, it casts a failure.
#[derive(Debug)]
pub(crate) struct Ballot(Option<Open>);

#[derive(Debug)]
struct Open {
    tally: Arc<Tally>,
    phase: u32,
    node: usize,
    name: Arc<str>,
    /// The vote if the node has no record: it may be read, and not vote.
    without_record: Option<NodeFailure>,
}

impl Ballot {
    pub(crate) fn cast(mut self, outcome: Result<Reply, NodeFailure>) {
        self.deliver(|open| match &open.without_record {
            Some(failure) if outcome == Ok(Reply::NotDone) => Err(failure.clone()),
            _ => outcome,
        });
    }

    /// Whether the phase of this ballot is still being voted on.
    #[cfg(any(feature = "redis", feature = "test-util"))]
    pub(crate) fn is_open(&self) -> bool {
        self.0.as_ref().is_some_and(|open| {
            open.tally.phase.load(Ordering::Acquire) == open.phase && !open.tally.votes.is_closed()
        })
    }

    fn deliver(&mut self, outcome: impl FnOnce(&Open) -> Result<Reply, NodeFailure>) {
        if let Some(open) = self.0.take() {
            let vote = Vote {
                node: open.node,
                phase: open.phase,
                outcome: outcome(&open),
            };
            // A lease that has ended has no use for late votes.
            drop(open.tally.votes.send(vote));
        }
    }
}

impl Drop for Ballot {
    fn drop(&mut self) {
        self.deliver(|open| {
            Err(NodeFailure::Disconnected {
                node: Arc::clone(&open.name),
                why: "the request was dropped unanswered".into(),
            })
        });
    }
}
