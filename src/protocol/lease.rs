//! The lease machine: the life of one lock, from its first request to the last answer.
//!
//! # The algorithm
//!
//! A [`Lease`] knows no clock and sends nothing. Its driver tells it what happened and when, and carries out what it
//! asks for:
//!
//! ```text
//!                  granted                         the last holder goes
//!   Acquiring ──────────────────▶ Holding ────────────────────────────────▶ Releasing ──▶ settled
//!       │                          │   ▲                                      ▲
//!       │                          ▼   │ extended, or missed                  │
//!       │                         extending                                   │
//!       │                                                                     │
//!       └─ refused, granted too late, or the caller went away ────────────────┘
//! ```
//!
//! *One owner.* A lease is one attempt with one owner token. A caller that tries again makes another lease, while that
//! of the refused attempt may still be releasing. What is late can therefore not be taken for something else.
//!
//! *Requests and answers.* A request goes to several nodes at once and has a number, which its answers carry. While the
//! lease acquires or extends, only answers to the current request count: an answer to an older one must not vouch for a
//! newer expiry.
//!
//! *What may be held.* The lease remembers each node to which it sent a request that may lock or extend the key, until
//! the node has answered that it holds nothing, or was certainly never asked. Each way out of acquiring and holding goes
//! through `release`, which sends a release to all of them.
//!
//! *Validity.* It counts from before the first request: `ttl - drift`, see
//! [`validity`](crate::protocol::validity). An extension that a majority confirmed counts from before *its* request, and
//! never shortens the validity. The lock is lost one [tick](TICK) before the end, because a timer may be late by that
//! much.
//!
//! *Silence.* A node that is silent for longer than the node timeout counts as failed for the decision under way, and
//! for nothing else: it may have executed the request, and is released.
//!
//! *Wake-ups.* [`awaited`](Lease::awaited) says how many more answers can decide anything. A driver that waits for so
//! many is woken once, and not by each answer.
//!
//! The rules for the votes are those of [`round`](crate::protocol::round); the machine adds the time and the order. What
//! an execution adds is told in `record`.

use std::time::Duration;

use crate::protocol::acquire::{AcquireRound, AcquireStep};
use crate::protocol::message::Answer;
use crate::protocol::quorum::{NodeSet, Quorum};
use crate::protocol::round::ReleaseRound;

mod io;
mod life;
mod record;
#[cfg(test)]
mod tests;
mod trace;

/// What nodes keep under a key; an alias for drivers, which pass it on and do not look into it.
pub(crate) use crate::protocol::record::Record as Stored;
pub use crate::protocol::round::Decided;
use io::ACQUIRE;
pub use io::{
    Access, Awaited, Effect, Event, Input, LeaseRequest, LeaseSpec, LostReason, OnceSpec,
};
use life::{Acquiring, LifeStage};
pub use life::{Lease, TICK};
pub use trace::{LeaseOutput, Trace};

impl Lease {
    /// Begins an attempt: asks every node for the lock. `patience` is how much longer than the node timeout a node may
    /// take for its first answer, because there is no connection to it yet.
    #[inline]
    pub fn new(
        spec: LeaseSpec,
        quorum: Quorum,
        now: Duration,
        patience: impl Fn(usize) -> Duration,
    ) -> Self {
        let due = now + spec.node_timeout;
        let (mut connecting, mut deadline) = (Vec::new(), due);
        for node in 0..quorum.nodes() {
            let patience = patience(node);
            if !patience.is_zero() {
                connecting.push((node, due + patience));
                deadline = deadline.max(due + patience);
            }
        }
        let (ttl, retention) = (spec.ttl, spec.retention);
        let acquire = spec.access.acquire(spec.proposal, ttl, retention);
        let mut lease = Self {
            stage: LifeStage::Acquiring(Acquiring {
                round: match spec.once {
                    Some(once) => AcquireRound::of_execution(quorum, once.fingerprint),
                    None => AcquireRound::new(quorum),
                },
                confirm: None,
                repair: None,
                due,
                connecting: connecting.into(),
                deadline,
            }),
            spec,
            quorum,
            number: 0,
            began: now,
            may_hold: NodeSet::default(),
            gone_at: now,
            request: None,
            event: None,
            unread: None,
            ends: false,
            is_begun: false,
        };
        lease.lock(acquire, ttl, NodeSet::all(quorum), now);
        lease
    }

    /// Takes an input. Times never go back.
    pub fn handle(&mut self, input: Input, now: Duration) {
        match input {
            Input::Answered {
                node,
                number,
                answer,
            } => self.on_answer(node, number, &answer, now),
            Input::TimedOut => self.on_timeout(now),
            Input::Delivered { at } => {
                if let LifeStage::Holding(holding) = &mut self.stage {
                    holding.delivered_at = Some(at);
                }
            }
            Input::Extend { ttl, token } => self.on_extend(ttl, token, now),
            Input::Revoked => self.lose(LostReason::Revoked),
            Input::StopRenewing => self.stop_renewing(),
            Input::Dropped { publishes, effect } => self.on_dropped(publishes, effect, now),
            Input::Begin => self.on_begin(now),
            Input::Record { record, retention } => self.on_record(record, retention, now),
            Input::Read(record) => self.on_read(record, now),
            Input::Repaired(decided) => self.on_repaired(decided, now),
        }
    }

    /// Returns the request to send, if there is one. To be called after each input.
    pub fn poll_request(&mut self) -> Option<LeaseRequest> {
        // Asked first, because most inputs lead to none.
        self.request.is_some().then(|| self.request.take())?
    }

    /// Returns the next event. To be called after each input until there is none.
    pub fn poll_event(&mut self) -> Option<Event> {
        if self.event.is_some() {
            return self.event.take();
        }
        if let Some(unread) = self.unread.take() {
            return Some(Event::Unread(unread));
        }
        std::mem::take(&mut self.ends).then_some(Event::Settled)
    }

    /// Returns the nodes that have been silent for too long by now. [`Input::TimedOut`] counts them as failed.
    pub fn overdue(&self, now: Duration) -> NodeSet {
        if let LifeStage::Acquiring(acquiring) = &self.stage {
            let silent = acquiring.round.silent().iter();
            return silent.filter(|node| acquiring.due(*node) <= now).collect();
        }
        let open = self.open_request().filter(|(_, due, _)| *due <= now);
        open.map(|(silent, ..)| silent).unwrap_or_default()
    }

    /// Takes the answer of a node, as [`Input::Answered`] has it.
    #[inline]
    pub fn on_answer(&mut self, node: usize, number: u32, answer: &Answer, now: Duration) {
        match &mut self.stage {
            LifeStage::Acquiring(acquiring) => {
                if number == ACQUIRE && *answer == Answer::NeverSent {
                    self.may_hold.remove(node);
                }
                match acquiring.on_answer(node, number, answer) {
                    // Most answers decide nothing.
                    AcquireStep::Wait => {}
                    step => self.on_step(step, now),
                }
            }
            LifeStage::Holding(holding) => {
                if let Some(pending) = &mut holding.pending {
                    pending.on_answer(node, number, answer);
                }
                if let Some(extending) = &mut holding.extending
                    && number == self.number
                {
                    let step = extending.round.on_answer(node, answer);
                    self.on_extend_step(step, now);
                }
            }
            LifeStage::Recording(recording) => {
                if recording.number == number {
                    self.on_recording_answer(node, answer, now);
                }
            }
            LifeStage::Releasing { round, .. } if number == self.number => {
                let was_open = !round.silent().is_empty();
                round.on_release(node, answer);
                self.ends |= was_open && round.silent().is_empty();
                self.tell_release();
            }
            LifeStage::Releasing { .. } => {}
        }
    }

    /// Takes a step of the attempt.
    fn on_step(&mut self, step: AcquireStep, now: Duration) {
        match step {
            AcquireStep::Wait => {}
            AcquireStep::Confirm(number) => {
                if let LifeStage::Acquiring(acquiring) = &mut self.stage {
                    acquiring.confirm = Some(self.number + 1);
                    let nodes = acquiring.round.unconfirmed();
                    let token = self.spec.proposal.map(|_| number);
                    self.confirm(token, self.spec.ttl, nodes, now);
                }
            }
            AcquireStep::Granted(number) => self.on_granted(number, now),
            AcquireStep::Refused(refusal) => self.refuse(Event::Refused(refusal), now),
            AcquireStep::Repair(record) => self.repair(record, now),
            AcquireStep::Decided(Decided::Recorded(record)) => self.replay(record, now),
            AcquireStep::Decided(decided) => self.refuse(Event::Decided(decided), now),
        }
    }

    fn on_timeout(&mut self, now: Duration) {
        self.check_validity(now);
        let number = self.asked();
        for node in self.overdue(now).iter() {
            self.on_answer(node, number, &Answer::Failed, now);
        }
        self.renew(now);
    }
}

/// What a driver may ask a lease.
impl Lease {
    /// Returns when to handle [`Input::TimedOut`], if nothing else happens before.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let due = self.open_request().map(|(_, due, _)| due);
        let LifeStage::Holding(holding) = &self.stage else {
            return due;
        };
        let lost_at = holding.valid_until.saturating_sub(TICK);
        let lost_at = holding.lost.is_none().then_some(lost_at);
        let renew_at = holding.renew_at.filter(|_| due.is_none());
        [lost_at, due, renew_at].into_iter().flatten().min()
    }

    /// Returns how many answers may decide what happens next; `None` if none can.
    pub fn awaited(&self) -> Option<Awaited> {
        let number = self.asked();
        let (silent, is_undecided) = match &self.stage {
            // A late grant may be of exactly the number that is being confirmed.
            LifeStage::Acquiring(_) if number != ACQUIRE => return Some(Awaited::default()),
            LifeStage::Acquiring(acquiring) => (acquiring.round.unanswered(), true),
            _ => {
                let (silent, _, is_undecided) = self.open_request()?;
                (silent, is_undecided)
            }
        };
        let answers = match is_undecided {
            true => (self.quorum.decisive() + silent.len()).saturating_sub(self.quorum.nodes()),
            false => silent.len(),
        };
        Some(Awaited { number, answers })
    }

    /// Returns whether answers to this request still count.
    pub fn counts(&self, number: u32) -> bool {
        match &self.stage {
            LifeStage::Acquiring(acquiring) => acquiring.counts(number),
            LifeStage::Holding(holding) => {
                holding.pending.is_some() || holding.extending.is_some() && number == self.number
            }
            LifeStage::Recording(_) | LifeStage::Releasing { .. } => number == self.asked(),
        }
    }

    /// Returns the number of the request that the silent nodes have not answered.
    pub(super) fn asked(&self) -> u32 {
        match &self.stage {
            LifeStage::Acquiring(acquiring) => acquiring.silence(),
            LifeStage::Recording(recording) => recording.number,
            LifeStage::Holding(_) | LifeStage::Releasing { .. } => self.number,
        }
    }

    /// Returns the nodes that have not answered it, when they count as failed, and whether it may be decided before they
    /// have answered; `None` if there is none.
    pub(super) fn open_request(&self) -> Option<(NodeSet, Duration, bool)> {
        let (silent, due, is_undecided) = match &self.stage {
            LifeStage::Acquiring(acquiring) if acquiring.is_reading() => return None,
            LifeStage::Acquiring(acquiring) => {
                let silent = acquiring.round.silent();
                let due = silent.iter().map(|node| acquiring.due(node)).min()?;
                (silent, due, true)
            }
            LifeStage::Holding(holding) => {
                let extending = holding.extending.as_ref()?;
                let due = extending.began + self.spec.node_timeout;
                (extending.round.silent(), due, true)
            }
            LifeStage::Recording(recording) => {
                let (silent, is_undecided) = recording.open_request();
                (silent, recording.due, is_undecided)
            }
            LifeStage::Releasing {
                round,
                due,
                is_awaited,
            } => (round.silent(), *due, *is_awaited),
        };
        (!silent.is_empty()).then_some((silent, due, is_undecided))
    }

    /// Returns the number of the last request.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns whether the lock is neither granted nor given up.
    pub fn is_acquiring(&self) -> bool {
        matches!(self.stage, LifeStage::Acquiring(_))
    }

    /// Returns the silent nodes that would break a tie between this acquisition and others.
    #[must_use]
    pub fn tie_breakers(&self) -> NodeSet {
        match &self.stage {
            LifeStage::Acquiring(acquiring) => acquiring.round.tie_breakers(),
            _ => NodeSet::default(),
        }
    }

    /// Returns whether an extension is under way.
    pub fn is_extending(&self) -> bool {
        matches!(&self.stage, LifeStage::Holding(holding) if holding.extending.is_some())
    }

    /// Returns the nodes that may still have the lock.
    pub fn may_hold(&self) -> NodeSet {
        self.release_round().1.unreleased()
    }

    /// Returns whether it is granted, and neither released nor about to record.
    pub fn is_holding(&self) -> bool {
        matches!(self.stage, LifeStage::Holding(_))
    }

    /// Returns whether nothing is executed under the lock that might be.
    pub fn is_unused(&self) -> bool {
        self.spec.once.is_some() && !self.is_begun
    }

    /// Returns whether an attempt has ended and goes on without its caller: a replay, to the nodes that lack the record.
    pub fn outlives_caller(&self) -> bool {
        // Without an outcome of its own, it is the replay of another.
        matches!(&self.stage, LifeStage::Recording(recording) if recording.own.is_none())
    }

    /// Returns whether nothing is left to do.
    pub fn is_settled(&self) -> bool {
        matches!(&self.stage, LifeStage::Releasing { round, .. } if round.silent().is_empty())
    }

    /// Returns whether the release has begun.
    pub fn is_releasing(&self) -> bool {
        matches!(self.stage, LifeStage::Releasing { .. })
    }

    /// Returns the number of the release and the answers to it. Before it has begun, they are those of one that begins now.
    pub fn release_round(&self) -> (u32, ReleaseRound) {
        match &self.stage {
            LifeStage::Releasing { round, .. } => (self.number, round.clone()),
            _ => {
                let round = ReleaseRound::new(self.quorum, self.may_hold);
                (self.number + 1, round)
            }
        }
    }

    /// Returns when every node has certainly forgotten the lock.
    pub fn gone_at(&self) -> Duration {
        self.gone_at
    }
}
