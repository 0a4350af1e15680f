//! Jobs: requests on their way to one node, and the packets that all nodes of one attempt share.

use std::sync::Arc;
#[cfg(feature = "redis")]
use std::sync::OnceLock;
#[cfg(feature = "redis")]
use std::time::Duration;

use tokio::time::Instant;

#[cfg(feature = "redis")]
use crate::node::failure::NodeFailure;
#[cfg(feature = "redis")]
use crate::node::redis::{ENCODED_PING, EncodedCommand, GenerationCheck, Operation};
use crate::node::votes::VoteSender;
use crate::protocol::message::Command;
#[cfg(any(feature = "redis", feature = "test-util"))]
use crate::protocol::message::Op;
#[cfg(feature = "redis")]
use crate::protocol::message::{Reply, transit};

/// A request on its way to one node.
#[derive(Debug)]
pub(crate) struct Job {
    /// What it asks for; `None` for a health check.
    pub(crate) packet: Option<Arc<Packet>>,
    pub(crate) sender: VoteSender,
    /// When the request has become useless: for a release, when its lock has certainly expired, unless it also
    /// takes back an intent.
    #[cfg_attr(
        not(any(feature = "redis", feature = "test-util")),
        expect(dead_code, reason = "embedded nodes answer at once")
    )]
    pub(crate) useful_until: Instant,
    /// How often it was sent.
    #[cfg(feature = "redis")]
    times_sent: u8,
}

/// A command, encoded once and shared by all nodes.
#[derive(Debug)]
pub(crate) struct Packet {
    pub(crate) command: Command,
    /// Whether a node does more than it must: it notifies the subscribers of a lock that it releases, or says what
    /// refuses an acquisition, which the plain `SET` does not.
    pub(crate) notifies: bool,
    /// When the intent has certainly expired, for a release that takes one back; until when the keys stay taken, for one
    /// that leaves them taken.
    #[cfg_attr(
        not(any(feature = "redis", feature = "test-util")),
        expect(dead_code, reason = "embedded nodes answer at once")
    )]
    pub(crate) until: Option<Instant>,
    /// The command as it goes over the wire.
    #[cfg(feature = "redis")]
    encoded: OnceLock<EncodedCommand>,
}

impl Packet {
    /// Creates the packet of a command. For some releases, a time counts; see [`until`](Self::until).
    pub(crate) fn new(command: Command, notifies: bool, until: Option<Instant>) -> Arc<Self> {
        Arc::new(Self {
            command,
            notifies,
            until,
            #[cfg(feature = "redis")]
            encoded: OnceLock::new(),
        })
    }
}

impl Job {
    pub(crate) fn new(
        packet: Option<Arc<Packet>>,
        sender: VoteSender,
        useful_until: Instant,
    ) -> Self {
        Self {
            packet,
            sender,
            useful_until,
            #[cfg(feature = "redis")]
            times_sent: 0,
        }
    }
}

/// For nodes that queue jobs.
#[cfg(any(feature = "redis", feature = "test-util"))]
impl Job {
    /// Returns the operation; `None` for a health check.
    pub(crate) fn op(&self) -> Option<&Op> {
        Some(&self.packet.as_ref()?.command.op)
    }

    /// Returns whether this is a release, which must reach the node in any case.
    pub(crate) fn is_release(&self) -> bool {
        self.op().is_some_and(Op::is_release)
    }

    /// Returns whether to send the job.
    ///
    /// An acquisition must not be sent once its attempt is decided: no release would follow it.
    pub(crate) fn is_wanted(&self, now: Instant) -> bool {
        #[cfg(feature = "redis")]
        if self.sender.is_called_off() {
            return false;
        }
        if self.is_release() {
            self.may_unlock(now) || self.takes_back_intent(now)
        } else {
            self.sender.is_open()
        }
    }

    /// Returns whether this is a release whose lock may still be there.
    pub(crate) fn may_unlock(&self, now: Instant) -> bool {
        self.is_release() && now < self.useful_until
    }

    /// Returns whether this is a release whose intent may still be there.
    fn takes_back_intent(&self, now: Instant) -> bool {
        let until = self.packet.as_ref().and_then(|packet| packet.until);
        until.is_some_and(|until| now < until)
    }
}

/// For nodes behind a connection that may break.
#[cfg(feature = "redis")]
impl Job {
    /// Returns the request as it goes over the wire. A command is encoded for the first node to which it is sent; the
    /// checks of all nodes have the same key.
    pub(crate) fn encoded(&self, check: &GenerationCheck) -> &EncodedCommand {
        let Some(packet) = &self.packet else {
            return &ENCODED_PING;
        };
        let encode = || EncodedCommand::new(&packet.command, packet.notifies, check);
        packet.encoded.get_or_init(encode)
    }

    /// Returns its row in the table of operations.
    pub(crate) fn operation(&self) -> &'static Operation {
        let Some(packet) = &self.packet else {
            return ENCODED_PING.operation;
        };
        match packet.encoded.get() {
            Some(encoded) => encoded.operation,
            None => Operation::of(&packet.command, packet.notifies, false),
        }
    }

    /// Marks the job as sent. How long a release leaves the keys taken is counted from now on.
    pub(crate) fn mark_sent(&mut self) {
        self.times_sent = self.times_sent.saturating_add(1);
        let Some(packet) = &self.packet else {
            return;
        };
        self.sender.mark_sent();
        if let (Op::ReleaseAfter { .. }, Some(until)) = (&packet.command.op, packet.until) {
            let left = until.saturating_duration_since(Instant::now());
            let op = Op::ReleaseAfter { left };
            self.packet = Some(packet.with(op, packet.notifies));
        }
    }

    /// Returns whether this is a release that leaves the keys taken for a while.
    pub(crate) fn leaves_taken(&self) -> bool {
        matches!(self.op(), Some(Op::ReleaseAfter { left }) if !left.is_zero())
    }

    /// Returns whether the server may have executed it before, on a connection that is gone.
    pub(crate) fn is_repeated(&self) -> bool {
        self.times_sent > 1
    }

    /// Answers the job and keeps it, to be sent again and answered once more.
    pub(crate) fn answer(&mut self, outcome: Result<Reply, NodeFailure>) {
        let again = self.sender.again();
        std::mem::replace(&mut self.sender, again).send(outcome);
    }

    /// Marks the attempt as released if this is its release, so that its acquisition is neither sent nor repeated
    /// behind it. Returns whether the acquisition was never sent, so that the release is not needed either.
    pub(crate) fn calls_off(&self) -> bool {
        self.is_release() && self.sender.mark_released()
    }

    /// Returns whether to send the job again after a server has refused it without executing it.
    pub(crate) fn may_be_repeated(&self, now: Instant) -> bool {
        let is_ping = self.packet.is_none();
        let is_over = is_ping || self.sender.is_released();
        self.is_wanted(now) && (self.is_release() || !is_over)
    }

    /// Turns an acquisition that the plain `SET` refused, without a reason, into one by a script, which has one and
    /// recognises its owner. Returns whether this was one.
    pub(crate) fn ask_why(&mut self) -> bool {
        if let Some(packet) = self.packet.as_ref().filter(|packet| !packet.notifies)
            && matches!(packet.command.op, Op::Acquire { proposal: None, .. })
        {
            self.packet = Some(packet.with(packet.command.op.clone(), true));
            return true;
        }
        false
    }

    /// Returns whether to send the job again after the connection on which it was sent has broken: a release
    /// always, a record or a look while the caller waits for its reply. A record is written only once.
    pub(crate) fn is_sent_again(&self) -> bool {
        self.is_release() || self.is_record() && self.sender.is_open()
    }

    /// Returns whether this reads or writes a record. It may be repeated, and counts also at a node that has lost its
    /// memory.
    fn is_record(&self) -> bool {
        matches!(
            self.op(),
            Some(Op::Record { .. } | Op::TopUp { .. } | Op::Look)
        )
    }

    /// Returns what to send to a node in spite of this failure of the node. The error is a job that is not sent.
    ///
    /// Releases are always sent. A quarantined node is also sent records and asked for them: a record that it has
    /// counts, but it may have forgotten one that it does not have.
    pub(crate) fn despite(mut self, failure: &NodeFailure) -> Result<Self, Self> {
        let is_quarantined = matches!(failure, NodeFailure::Quarantined { .. });
        if self.is_release() || is_quarantined && self.is_record() {
            return Ok(self);
        }
        match &self.packet {
            Some(packet) if is_quarantined && packet.acquires_with_record() => {
                self.packet = Some(packet.with(Op::Look, false));
                self.sender.fail_without_record(failure.clone());
                Ok(self)
            }
            _ => Err(self),
        }
    }

    /// Returns the size of the record that the job carries.
    pub(crate) fn bytes(&self) -> usize {
        self.op().map_or(0, Op::record_bytes)
    }

    /// Returns how much longer than the node timeout the job may take because of its size.
    pub(crate) fn transit(&self) -> Duration {
        transit(self.bytes())
    }
}

#[cfg(feature = "redis")]
impl Packet {
    /// Returns the packet of another operation of the same attempt.
    fn with(&self, op: Op, notifies: bool) -> Arc<Self> {
        let command = Command {
            op,
            names: Arc::clone(&self.command.names),
            owner: self.command.owner.clone(),
        };
        Self::new(command, notifies, self.until)
    }

    fn acquires_with_record(&self) -> bool {
        let Command { names, op, .. } = &self.command;
        matches!(op, Op::Acquire { .. }) && names.iter().any(|name| name.record.is_some())
    }
}
