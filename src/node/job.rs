//! What travels to a node.

use std::sync::Arc;
#[cfg(feature = "redis")]
use std::sync::OnceLock;
#[cfg(feature = "redis")]
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

#[cfg(feature = "redis")]
use crate::node::failure::NodeFailure;
use crate::node::votes::VoteSender;
use crate::protocol::Record;
#[cfg(feature = "redis")]
use crate::protocol::message::Reply;
use crate::protocol::message::{Command, Op};

/// A request on its way to one node.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) request: Request,
    pub(crate) sender: VoteSender,
    /// When the request is of no use any more: a release, when its lock has expired anyway, but for an
    /// intent that it takes back.
    #[cfg_attr(
        not(any(feature = "redis", feature = "test-util")),
        expect(dead_code, reason = "embedded nodes answer at once")
    )]
    pub(crate) useful_until: Instant,
}

impl Job {
    pub(crate) fn new(request: Request, sender: VoteSender, useful_until: Instant) -> Self {
        Self {
            request,
            sender,
            useful_until,
        }
    }
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
                Op::Fetch => "fetch",
            },
            Self::Ping => "ping",
        }
    }
}

/// Where the requests of one attempt went out, and where they never will.
///
/// An acquisition that was not sent needs no release, and must not be sent any more once that is decided.
/// Both are looked at by the one task that sends, so neither can come between the other's look and act.
#[derive(Debug, Clone, Default)]
pub(crate) struct Trail(#[cfg(feature = "redis")] Arc<Marks>);

/// By node, one bit each.
#[cfg(feature = "redis")]
#[derive(Debug, Default)]
struct Marks {
    sent: AtomicU64,
    called_off: AtomicU64,
}

#[cfg(feature = "redis")]
impl Trail {
    fn mark_sent(&self, node: usize) {
        self.0.sent.fetch_or(bit(node), Ordering::Relaxed);
    }

    /// Calls off what was not sent; returns whether nothing was.
    fn call_off(&self, node: usize) -> bool {
        let bit = bit(node);
        let unsent = bit != 0 && self.0.sent.load(Ordering::Relaxed) & bit == 0;
        if unsent {
            self.0.called_off.fetch_or(bit, Ordering::Relaxed);
        }
        unsent
    }

    fn is_called_off(&self, node: usize) -> bool {
        self.0.called_off.load(Ordering::Relaxed) & bit(node) != 0
    }
}

/// Beyond 64 nodes there is none, and whatever was sent is released.
#[cfg(feature = "redis")]
fn bit(node: usize) -> u64 {
    u32::try_from(node)
        .ok()
        .and_then(|node| 1_u64.checked_shl(node))
        .unwrap_or(0)
}

#[cfg(feature = "redis")]
impl Job {
    /// Notes that it is on its way.
    pub(crate) fn mark_sent(&self) {
        if let Request::Command(packet) = &self.request {
            packet.trail.mark_sent(self.sender.node());
        }
    }

    /// Answers the request, which may be sent again though nothing waits for its answer any more.
    pub(crate) fn answer(&mut self, outcome: Result<Reply, NodeFailure>) {
        std::mem::replace(&mut self.sender, VoteSender::spent()).send(outcome);
    }

    /// Whether this is the release of what was never sent, which is called off instead.
    pub(crate) fn calls_off(&self) -> bool {
        match &self.request {
            Request::Command(packet) if self.is_release() => {
                packet.trail.call_off(self.sender.node())
            }
            _ => false,
        }
    }

    fn is_called_off(&self) -> bool {
        match &self.request {
            Request::Command(packet) => packet.trail.is_called_off(self.sender.node()),
            Request::Ping => false,
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

    /// Whether it does no harm if it is carried out twice, and is answered the same. An acquisition is, if it
    /// is a script that knows its owner again.
    #[cfg(feature = "redis")]
    pub(crate) fn may_be_repeated(&self) -> bool {
        !matches!(&self.request, Request::Command(packet)
            if matches!(packet.command.op, Op::Acquire { proposal: None, .. }))
    }

    /// Whether it is sent again when a connection breaks on which it was sent: always a release, and what
    /// may be carried out twice as long as its answer is waited for. A record is written once.
    #[cfg(feature = "redis")]
    pub(crate) fn is_sent_again(&self) -> bool {
        let is_repeatable = match &self.request {
            Request::Command(packet) => matches!(
                packet.command.op,
                Op::Record { .. } | Op::TopUp { .. } | Op::Look
            ),
            Request::Ping => false,
        };
        self.is_release() || (is_repeatable && self.sender.is_open())
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
                    let look = Command {
                        names: Arc::clone(names),
                        owner: owner.clone(),
                        op: Op::Look,
                    };
                    let look = Packet::of_attempt(look, false, packet.trail.clone());
                    self.request = Request::Command(look);
                    self.sender.fail_without_record(failure.clone());
                    return Some(self);
                }
                _ => {}
            }
        }
        self.sender.send(Err(failure.clone()));
        None
    }

    /// Returns the size of the record that it carries.
    #[cfg(feature = "redis")]
    pub(crate) fn bytes(&self) -> usize {
        match &self.request {
            Request::Command(packet) => carried(&packet.command.op),
            Request::Ping => 0,
        }
    }

    /// Returns how much longer than the node timeout it may take for what it carries.
    #[cfg(feature = "redis")]
    pub(crate) fn transit(&self) -> Duration {
        transit_of(self.bytes())
    }

    /// Whether sending it still makes sense.
    ///
    /// An acquisition must not go out once its attempt is decided: nothing would release it.
    pub(crate) fn is_wanted(&self, now: Instant) -> bool {
        #[cfg(feature = "redis")]
        if self.is_called_off() {
            return false;
        }
        if self.is_release() {
            self.may_unlock(now) || self.takes_back_intent(now)
        } else {
            self.sender.is_open()
        }
    }

    /// Whether this is a release whose lock may be there.
    pub(crate) fn may_unlock(&self, now: Instant) -> bool {
        self.is_release() && now < self.useful_until
    }

    /// Whether this is a release of whose attempt nothing but the intent can be there.
    #[cfg(feature = "redis")]
    pub(crate) fn is_about_intent(&self, now: Instant) -> bool {
        self.is_release() && !self.may_unlock(now)
    }

    /// Whether this is a release whose intent may be there.
    fn takes_back_intent(&self, now: Instant) -> bool {
        match &self.request {
            Request::Command(packet) => packet.intent_until.is_some_and(|until| now < until),
            Request::Ping => false,
        }
    }
}

/// Returns how much longer than the node timeout a request may take for what it carries.
pub(crate) fn transit(op: &Op) -> Duration {
    transit_of(carried(op))
}

fn carried(op: &Op) -> usize {
    match op {
        Op::Record { record, .. } | Op::TopUp { record, .. } => record.as_bytes().len(),
        _ => 0,
    }
}

/// Returns how much longer than the node timeout so many bytes may be on the wire: a second for each
/// mebibyte, at ten megabits a second, and nothing for what travels with every answer.
pub(crate) fn transit_of(bytes: usize) -> Duration {
    if bytes <= Record::MAX_INLINE {
        return Duration::ZERO;
    }
    let kibibytes = u32::try_from(bytes / 1024).unwrap_or(u32::MAX);
    Duration::from_secs(1) * kibibytes / 1024
}

/// A command and its encoding for the wire, made once and shared by all nodes.
#[derive(Debug)]
pub(crate) struct Packet {
    pub(crate) command: Command,
    /// Whether those who wait for what it releases are to be told.
    pub(crate) tells: bool,
    /// Of a release that takes back an intent: when that has expired anyway.
    #[cfg_attr(
        not(any(feature = "redis", feature = "test-util")),
        expect(dead_code, reason = "embedded nodes answer at once")
    )]
    pub(crate) intent_until: Option<Instant>,
    /// Of the attempt that it belongs to.
    #[cfg_attr(
        not(feature = "redis"),
        expect(dead_code, reason = "embedded nodes keep nothing waiting")
    )]
    pub(crate) trail: Trail,
    #[cfg(feature = "redis")]
    pub(crate) wire: OnceLock<deadpool_redis::redis::Cmd>,
    /// The same for a connection that is not redis-rs's.
    #[cfg(feature = "redis")]
    pub(crate) packed: OnceLock<crate::node::redis::Packed>,
}

impl Packet {
    pub(crate) fn new(command: Command) -> Arc<Self> {
        Self::of_attempt(command, false, Trail::default())
    }

    pub(crate) fn of_attempt(command: Command, tells: bool, trail: Trail) -> Arc<Self> {
        Self::taking_back(None, command, tells, trail)
    }

    /// Of a release that also takes back an intent, which has expired by `intent_until` if there is one.
    pub(crate) fn taking_back(
        intent_until: Option<Instant>,
        command: Command,
        tells: bool,
        trail: Trail,
    ) -> Arc<Self> {
        Arc::new(Self {
            command,
            tells,
            intent_until,
            trail,
            #[cfg(feature = "redis")]
            wire: OnceLock::new(),
            #[cfg(feature = "redis")]
            packed: OnceLock::new(),
        })
    }
}
