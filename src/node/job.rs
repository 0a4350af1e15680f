//! Jobs: requests on their way to one node.

use std::sync::Arc;
#[cfg(feature = "redis")]
use std::time::Duration;

use tokio::time::Instant;

#[cfg(feature = "redis")]
use crate::node::failure::NodeFailure;
use crate::node::packet::Packet;
use crate::node::votes::VoteSender;
#[cfg(feature = "redis")]
use crate::protocol::message::{Command, Op, Reply, SharedOp, transit};

/// A request on its way to one node.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) request: Request,
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

/// A request to one node.
#[derive(Debug, Clone)]
pub(crate) enum Request {
    Command(Arc<Packet>),
    /// A health check.
    Ping,
}

impl Job {
    pub(crate) fn new(request: Request, sender: VoteSender, useful_until: Instant) -> Self {
        Self {
            request,
            sender,
            useful_until,
            #[cfg(feature = "redis")]
            times_sent: 0,
        }
    }
}

#[cfg(feature = "redis")]
impl Request {
    /// Returns the name of its kind in metrics.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Command(packet) => match packet.command.op {
                Op::Acquire { .. } => "acquire",
                Op::Confirm { .. } => "confirm",
                Op::Release | Op::ReleaseExecuted | Op::ReleaseAfter { .. } => "release",
                Op::Inspect => "inspect",
                Op::Revoke { .. } => "revoke",
                Op::Shared(SharedOp::Acquire { .. }) => "acquire_shared",
                Op::Shared(SharedOp::Confirm { .. }) => "confirm_shared",
                Op::Shared(SharedOp::Release) => "release_shared",
                Op::Shared(SharedOp::Announce { .. }) => "announce",
                Op::Shared(SharedOp::Withdraw) => "withdraw",
                Op::Record { .. } => "record",
                Op::TopUp { .. } => "top_up",
                Op::Look => "look",
                Op::Fetch => "fetch",
            },
            Self::Ping => "ping",
        }
    }
}

/// For nodes that queue jobs.
#[cfg(any(feature = "redis", feature = "test-util"))]
impl Job {
    /// Returns whether this is a release, which must reach the node in any case.
    pub(crate) fn is_release(&self) -> bool {
        matches!(
            &self.request,
            Request::Command(packet) if packet.command.op.is_release()
        )
    }

    /// Returns whether to send the job.
    ///
    /// An acquisition must not be sent once its attempt is decided: no release would follow it.
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

    /// Returns whether this is a release whose lock may still be there.
    pub(crate) fn may_unlock(&self, now: Instant) -> bool {
        self.is_release() && now < self.useful_until
    }

    /// Returns whether this is a release whose intent may still be there.
    fn takes_back_intent(&self, now: Instant) -> bool {
        match &self.request {
            Request::Command(packet) => packet.until.is_some_and(|until| now < until),
            Request::Ping => false,
        }
    }
}

/// For nodes behind a connection that may break.
#[cfg(feature = "redis")]
impl Job {
    /// Marks the job as sent. How long a release leaves the keys taken is counted from now on.
    pub(crate) fn mark_sent(&mut self) {
        self.times_sent = self.times_sent.saturating_add(1);
        let Request::Command(packet) = &self.request else {
            return;
        };
        packet.trail.mark_sent(self.sender.node());
        if let (Op::ReleaseAfter { .. }, Some(until)) = (&packet.command.op, packet.until) {
            let mut command = packet.command.clone();
            let left = until.saturating_duration_since(Instant::now());
            command.op = Op::ReleaseAfter { left };
            let (notifies, trail) = (packet.notifies, packet.trail.clone());
            let packet = Packet::of_release(Some(until), command, notifies, trail);
            self.request = Request::Command(packet);
        }
    }

    /// Returns whether this is a release that leaves the keys taken for a while.
    pub(crate) fn leaves_taken(&self) -> bool {
        matches!(&self.request, Request::Command(packet)
            if matches!(packet.command.op, Op::ReleaseAfter { left } if !left.is_zero()))
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
        match &self.request {
            Request::Command(packet) if self.is_release() => {
                let (trail, node) = (&packet.trail, self.sender.node());
                trail.mark_released(node);
                trail.is_called_off(node)
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

    /// Returns whether to send the job again after a server has refused it without executing it.
    pub(crate) fn may_be_repeated(&self, now: Instant) -> bool {
        let is_released = match &self.request {
            Request::Command(packet) => packet.trail.is_released(self.sender.node()),
            Request::Ping => true,
        };
        self.is_wanted(now) && (self.is_release() || !is_released)
    }

    /// Turns an acquisition that the plain `SET` refused, without a reason, into one by a script, which has one and
    /// recognises its owner. Returns whether this was one.
    pub(crate) fn ask_why(&mut self) -> bool {
        if let Request::Command(packet) = &self.request
            && matches!(packet.command.op, Op::Acquire { proposal: None, .. })
            && !packet.notifies
        {
            let packet = Packet::of_attempt(packet.command.clone(), true, packet.trail.clone());
            self.request = Request::Command(packet);
            return true;
        }
        false
    }

    /// Returns whether to send the job again after the connection on which it was sent has broken: a release
    /// always, a record or a look while the caller waits for its reply. A record is written only once.
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

    /// Returns what to send to a node in spite of this failure of the node, or answers the job with the failure.
    ///
    /// Releases are always sent. A quarantined node is also sent records and asked for them: a record that it has
    /// counts, but it may have forgotten one that it does not have.
    pub(crate) fn despite(mut self, failure: &NodeFailure) -> Option<Self> {
        if self.is_release() {
            return Some(self);
        }
        let is_quarantined = matches!(failure, NodeFailure::Quarantined { .. });
        if let Request::Command(packet) = &self.request
            && is_quarantined
        {
            let Command { names, owner, op } = &packet.command;
            let is_recorded = names.iter().any(|name| name.record.is_some());
            match op {
                Op::Record { .. } | Op::TopUp { .. } | Op::Look => {
                    return Some(self);
                }
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
        self.fail(failure);
        None
    }

    /// Answers the job with a failure to send it.
    pub(crate) fn fail(self, failure: &NodeFailure) {
        self.sender.send(Err(failure.clone()));
    }

    /// Returns the size of the record that the job carries.
    pub(crate) fn bytes(&self) -> usize {
        match &self.request {
            Request::Command(packet) => packet.bytes(),
            Request::Ping => 0,
        }
    }

    /// Returns how much longer than the node timeout the job may take because of its size.
    pub(crate) fn transit(&self) -> Duration {
        transit(self.bytes())
    }

    /// Returns whether this is a release whose lock has expired, so that at most an intent is left to take back.
    pub(crate) fn is_about_intent(&self, now: Instant) -> bool {
        self.is_release() && !self.may_unlock(now)
    }
}
