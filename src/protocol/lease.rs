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
//! *Validity.* It counts from before the first request: `ttl - drift`, see [`validity`]. An extension that a majority
//! confirmed counts from before *its* request, and never shortens the validity. The lock is lost one [tick](TICK)
//! before the end, because a timer may be late by that much.
//!
//! *Silence.* A node that is silent for longer than the node timeout counts as failed for the decision under way, and
//! for nothing else: it may have executed the request, and is released.
//!
//! *Wake-ups.* [`awaited`](Lease::awaited) says how many more answers can decide anything. A driver that waits for so
//! many is woken once, and not by each answer.
//!
//! The rules for the votes are those of [`round`](crate::protocol::round); the machine adds the time and the order.

use std::time::Duration;

use crate::protocol::message::Op;
use crate::protocol::quorum::{NodeSet, Quorum};
use crate::protocol::round::{
    AcquireStep, Answer, ExtendRound, ExtendStep, ReleaseRound, ReleaseStep,
};
use crate::protocol::validity::{self, whole_millis};

mod access;
mod io;
mod stages;
#[cfg(test)]
mod tests;
mod view;

pub use access::Access;
pub use io::{Awaited, Event, Input, LeaseRequest, LeaseSpec, Loss};
use stages::{ACQUIRE, Acquiring, Extending, Holding, LifeStage, Releasing};

/// The resolution of timers: what is due by then counts as due.
pub const TICK: Duration = Duration::from_millis(1);

/// The life of one lock.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Lease {
    spec: LeaseSpec,
    quorum: Quorum,
    stage: LifeStage,
    /// The number of the last request.
    number: u32,
    /// The time before the first request.
    began: Duration,
    /// The nodes that may hold the key for this owner, until the release begins.
    may_hold: NodeSet,
    /// When every node has certainly forgotten the lock.
    gone_at: Duration,
    /// The last request, until the driver has taken it.
    request: Option<(Op, NodeSet, bool)>,
    /// What the driver has not taken yet. No input leads to more than one event before the end.
    event: Option<Event>,
    /// Whether the end is still to be told.
    ends: bool,
}

impl Lease {
    /// Begins an attempt: asks every node for the lock. `patience` is how much longer than the node timeout a node may
    /// take for its first answer, because there is no connection to it yet.
    #[must_use]
    pub fn new(
        spec: LeaseSpec,
        quorum: Quorum,
        now: Duration,
        patience: impl Fn(usize) -> Duration,
    ) -> Self {
        let acquiring = Acquiring::new(quorum, now + spec.node_timeout, patience);
        let (ttl, retention) = (spec.ttl, spec.retention);
        let acquire = spec.access.acquire(spec.proposal, ttl, retention);
        let mut lease = Self {
            stage: LifeStage::Acquiring(acquiring),
            spec,
            quorum,
            number: 0,
            began: now,
            may_hold: NodeSet::default(),
            gone_at: now,
            request: None,
            event: None,
            ends: false,
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
            Input::NeverSent { node, number } => {
                if number == ACQUIRE && matches!(self.stage, LifeStage::Acquiring(_)) {
                    self.may_hold.remove(node);
                }
                self.on_answer(node, number, &Answer::Failed, now);
            }
            Input::TimedOut => self.on_timeout(now),
            Input::Abandoned => {
                if let LifeStage::Acquiring(_) = self.stage {
                    // Publishes: an earlier release may not have been published, because this caller waited.
                    self.release(true, None, now);
                }
            }
            Input::Delivered { at } => {
                if let LifeStage::Holding(holding) = &mut self.stage {
                    holding.delivered_at = Some(at);
                }
            }
            Input::Extend { ttl, token } => self.on_extend(ttl, token, now),
            Input::Revoked => self.lose(Loss::Revoked),
            Input::StopRenewing => {
                if let LifeStage::Holding(holding) = &mut self.stage {
                    holding.renew_at = None;
                }
            }
            Input::Dropped { publishes } => self.on_dropped(publishes, now),
        }
    }

    /// Returns the request to send, if there is one. To be called after each input.
    pub fn poll_request(&mut self) -> Option<LeaseRequest> {
        let (op, nodes, publishes) = self.request.take()?;
        Some(LeaseRequest {
            number: self.number,
            op,
            nodes,
            publishes,
            gone_at: self.gone_at,
        })
    }

    /// Returns whether there is a request to send.
    #[must_use]
    pub fn is_asking(&self) -> bool {
        self.request.is_some()
    }

    /// Returns whether there is an event.
    #[must_use]
    pub fn has_news(&self) -> bool {
        self.event.is_some() || self.ends
    }

    /// Returns the next event. To be called after each input until there is none.
    pub fn poll_event(&mut self) -> Option<Event> {
        let end = |ends: &mut bool| std::mem::take(ends).then_some(Event::Settled);
        self.event.take().or_else(|| end(&mut self.ends))
    }

    /// Returns the nodes that have been silent for too long by now. [`Input::TimedOut`] counts them as failed.
    #[must_use]
    pub fn overdue(&self, now: Duration) -> NodeSet {
        match &self.stage {
            LifeStage::Acquiring(acquiring) => acquiring.overdue(now),
            LifeStage::Holding(holding) => match &holding.extending {
                Some(extending) if extending.began + self.spec.node_timeout <= now => {
                    extending.round.silent()
                }
                _ => NodeSet::default(),
            },
            LifeStage::Releasing(releasing) if releasing.due <= now => releasing.round.silent(),
            LifeStage::Releasing(_) => NodeSet::default(),
        }
    }

    fn on_answer(&mut self, node: usize, number: u32, answer: &Answer, now: Duration) {
        match &mut self.stage {
            LifeStage::Acquiring(acquiring) => {
                let step = acquiring.on_answer(node, number, answer);
                self.on_acquire_step(step, now);
            }
            LifeStage::Holding(holding) => {
                let extending = holding.extending.as_mut();
                if let Some(extending) = extending.filter(|extending| extending.number == number) {
                    let step = extending.round.on_confirm(node, answer);
                    self.on_extend_step(step, now);
                }
            }
            LifeStage::Releasing(releasing) => {
                if releasing.number == number {
                    releasing.round.on_release(node, answer);
                    self.tell_release();
                }
            }
        }
    }

    fn on_timeout(&mut self, now: Duration) {
        self.check_validity(now);
        let number = self.number;
        for node in self.overdue(now).iter() {
            self.on_answer(node, number, &Answer::Failed, now);
            if self.request.is_some() || self.event.is_some() {
                // Decided: the others are silent about a request that is over.
                break;
            }
        }
        self.renew(now);
    }

    fn on_acquire_step(&mut self, step: AcquireStep, now: Duration) {
        let LifeStage::Acquiring(acquiring) = &mut self.stage else {
            return;
        };
        match step {
            AcquireStep::Wait => {}
            AcquireStep::Confirm(number) => {
                acquiring.confirm = Some(self.number + 1);
                let nodes = acquiring.round.unconfirmed().collect();
                let token = self.spec.proposal.map(|_| number);
                self.confirm(token, self.spec.ttl, nodes, now);
            }
            AcquireStep::Granted(number) => self.on_granted(number, now),
            AcquireStep::Refused(refusal) => {
                // A node that refused the only `ACQUIRE` of this owner holds nothing for it.
                let refused = |node: &usize| acquiring.round.is_refused_by(*node);
                let refused = (0..self.quorum.nodes()).filter(refused).collect();
                self.may_hold = self.may_hold.without(refused);
                self.tell(Event::Refused(refusal));
                self.release(false, None, now);
            }
        }
    }

    fn on_granted(&mut self, number: u64, now: Duration) {
        let LifeStage::Acquiring(acquiring) = &self.stage else {
            return;
        };
        let acknowledged = acquiring.round.acknowledged(number);
        // After the last answer that counts.
        let elapsed = now.saturating_sub(self.began);
        let Some(left) = validity::remaining(self.spec.ttl, elapsed) else {
            self.tell(Event::TooLate { elapsed });
            return self.release(false, None, now);
        };
        let valid_until = now + left;
        let is_renewed = self.spec.renews || self.spec.is_partial;
        self.stage = LifeStage::Holding(Holding {
            token: self.spec.proposal.map(|_| number),
            valid_until,
            lost: None,
            delivered_at: None,
            renew_at: is_renewed.then(|| self.began + self.spec.ttl / 3),
            extending: None,
        });
        self.tell(Event::Granted {
            number,
            acknowledged,
            valid_until,
        });
    }

    fn on_extend(&mut self, ttl: Option<Duration>, token: Option<u64>, now: Duration) {
        self.check_validity(now);
        if let LifeStage::Holding(holding) = &self.stage
            && holding.lost.is_none()
        {
            self.extend(ttl.unwrap_or(self.spec.ttl), token, true, now);
        }
    }

    /// Renews the lock if it is time.
    fn renew(&mut self, now: Duration) {
        let LifeStage::Holding(holding) = &self.stage else {
            return;
        };
        let is_due = holding.renew_at.is_some_and(|at| at <= now);
        if !is_due || holding.extending.is_some() {
            return;
        }
        let is_partial = self.spec.is_partial && holding.delivered_at.is_none();
        let is_renewed = self.spec.renews || is_partial;
        match self.renewal_ttl(holding, now).filter(|_| is_renewed) {
            Some(ttl) => self.extend(ttl, None, false, now),
            None => self.handle(Input::StopRenewing, now),
        }
    }

    fn extend(&mut self, ttl: Duration, raised: Option<u64>, is_asked: bool, now: Duration) {
        let LifeStage::Holding(holding) = &mut self.stage else {
            return;
        };
        let token = raised.or(holding.token);
        holding.extending = Some(Extending {
            round: ExtendRound::new(self.quorum, token.unwrap_or(0)),
            number: self.number + 1,
            began: now,
            ttl,
            token,
            is_asked,
        });
        self.confirm(token, ttl, NodeSet::all(self.quorum), now);
    }

    fn on_extend_step(&mut self, step: ExtendStep, now: Duration) {
        if step == ExtendStep::Wait {
            return;
        }
        self.check_validity(now);
        let LifeStage::Holding(holding) = &mut self.stage else {
            return;
        };
        // None of a lost lock.
        let Some(extending) = holding.extending.take() else {
            return;
        };
        match step {
            ExtendStep::Wait => {}
            ExtendStep::Lost => self.lose(Loss::Gone),
            ExtendStep::Extended => {
                let lifetime = validity::lifetime(extending.ttl).unwrap_or_default();
                // A shorter ttl does not take anything back.
                holding.valid_until = holding.valid_until.max(extending.began + lifetime);
                if extending.is_asked {
                    self.spec.ttl = extending.ttl;
                    holding.token = extending.token;
                }
                let next = extending.began + self.spec.ttl / 3;
                holding.renew_at = holding.renew_at.map(|_| next);
                let (valid_until, is_asked) = (holding.valid_until, extending.is_asked);
                self.tell(Event::Extended {
                    valid_until,
                    is_asked,
                });
            }
            ExtendStep::Missed { reached } => {
                let next = now + (self.spec.ttl / 10).max(TICK);
                holding.renew_at = holding.renew_at.map(|_| next);
                if extending.is_asked {
                    let silent = extending.round.silent();
                    self.tell(Event::NotExtended { reached, silent });
                }
            }
        }
    }

    /// Returns the ttl of the next renewal, cut so that the validity ends with the longest hold; `None` if it does
    /// already.
    fn renewal_ttl(&self, holding: &Holding, now: Duration) -> Option<Duration> {
        let ttl = self.spec.ttl;
        let Some(end) = self.hold_until(holding) else {
            return Some(ttl);
        };
        let enough = validity::ttl_for(end.saturating_sub(now).saturating_add(2 * TICK));
        (holding.valid_until < end.saturating_add(TICK)).then(|| ttl.min(enough))
    }

    /// Returns when the longest hold is over, if that is known.
    fn hold_until(&self, holding: &Holding) -> Option<Duration> {
        let began = match self.spec.is_partial {
            true => holding.delivered_at?,
            false => self.began,
        };
        Some(began.saturating_add(self.spec.max_hold?))
    }

    /// Declares the lock lost if its validity has ended, or ends before a timer can fire.
    fn check_validity(&mut self, now: Duration) {
        let LifeStage::Holding(holding) = &self.stage else {
            return;
        };
        let valid_until = holding.valid_until;
        if valid_until <= now + TICK {
            let at_max_hold = |end: Duration| end.saturating_add(TICK) <= valid_until;
            self.lose(match self.hold_until(holding).is_some_and(at_max_hold) {
                true => Loss::MaxHold,
                false => Loss::Expired,
            });
        }
    }

    /// A lost lock is no longer renewed. Its keys are released when the last holder is gone.
    fn lose(&mut self, loss: Loss) {
        if let LifeStage::Holding(holding) = &mut self.stage
            && holding.lost.is_none()
        {
            holding.lost = Some(loss);
            holding.renew_at = None;
            holding.extending = None;
            self.tell(Event::Lost(loss));
        }
    }

    fn on_dropped(&mut self, publishes: bool, now: Duration) {
        if let LifeStage::Holding(holding) = &self.stage {
            // A lost lock may have another holder by now.
            let is_lost = holding.lost.is_some() || holding.valid_until <= now;
            let stays_until = self.spec.hold_at_least.zip(holding.delivered_at);
            let stays_until = stays_until.map(|(least, at)| at.saturating_add(least));
            let stays_until = stays_until.filter(|_| !is_lost);
            let left = whole_millis(stays_until.unwrap_or(now).saturating_sub(now));
            self.release(publishes, Some(left), now);
        }
    }

    /// Releases the lock on every node that may hold it. Every life ends here. For a lock that was held, with how long
    /// its keys stay taken.
    fn release(&mut self, publishes: bool, held: Option<Duration>, now: Duration) {
        self.stage = LifeStage::Releasing(Releasing {
            round: ReleaseRound::new(self.quorum, self.may_hold),
            number: self.number + 1,
            due: now + self.spec.node_timeout,
            is_awaited: held.is_some(),
            is_settled: false,
        });
        if !self.may_hold.is_empty() {
            self.number += 1;
            let release = self.spec.access.release(held.unwrap_or_default());
            self.request = Some((release, self.may_hold, publishes));
        }
        self.tell_release();
    }

    fn tell(&mut self, event: Event) {
        debug_assert!(self.event.is_none(), "the driver takes each event");
        self.event = Some(event);
    }

    fn tell_release(&mut self) {
        let LifeStage::Releasing(releasing) = &mut self.stage else {
            return;
        };
        let step = releasing.round.step();
        if !releasing.is_settled && releasing.round.silent().is_empty() {
            releasing.is_settled = true;
            self.ends = true;
        }
        if releasing.is_awaited && step != ReleaseStep::Wait {
            releasing.is_awaited = false;
            self.tell(Event::Released(step));
        }
    }

    fn confirm(&mut self, token: Option<u64>, ttl: Duration, nodes: NodeSet, now: Duration) {
        let confirm = self.spec.access.confirm(token, ttl, self.spec.retention);
        self.lock(confirm, ttl.max(self.spec.ttl), nodes, now);
    }

    /// Sends a request that may lock or extend the keys.
    fn lock(&mut self, op: Op, ttl: Duration, nodes: NodeSet, now: Duration) {
        // Twice the ttl, because a request may be on its way for as long as a ttl. Never earlier than before, because no
        // request shortens the ttl that an earlier one set.
        self.gone_at = self.gone_at.max(now + 2 * ttl);
        self.may_hold = self.may_hold.union(nodes);
        self.number += 1;
        self.request = Some((op, nodes, false));
    }
}
