//! The steps of a life: what an input leads to.

use std::time::Duration;

use crate::protocol::lease::io::{Effect, Event, LeaseSpec, Loss};
use crate::protocol::lease::stages::{Extending, Holding, LifeStage, Pending, Purpose, Releasing};
use crate::protocol::message::Op;
use crate::protocol::quorum::{NodeSet, Quorum};
use crate::protocol::record::Record;
use crate::protocol::round::{
    AcquireStep, Answer, ExtendRound, ExtendStep, ReleaseRound, ReleaseStep,
};
use crate::protocol::validity::{self, whole_millis};

/// The resolution of timers: what is due by then counts as due.
pub const TICK: Duration = Duration::from_millis(1);

/// The life of one lock.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Lease {
    pub(super) spec: LeaseSpec,
    pub(super) quorum: Quorum,
    pub(super) stage: LifeStage,
    /// The number of the last request.
    pub(super) number: u32,
    /// The time before the first request.
    pub(super) began: Duration,
    /// The nodes that may hold the key for this owner, until the release begins.
    pub(super) may_hold: NodeSet,
    /// When every node has certainly forgotten the lock.
    pub(super) gone_at: Duration,
    /// The last request, until the driver has taken it.
    pub(super) request: Option<(Op, NodeSet, bool)>,
    /// What the driver has not taken yet. No input leads to more than one event before the end.
    pub(super) event: Option<Event>,
    /// What is to be read, after the event.
    pub(super) unread: Option<Record>,
    /// Whether the end is still to be told.
    pub(super) ends: bool,
    /// Whether something may have been executed under the lock.
    pub(super) is_begun: bool,
}

impl Lease {
    pub(super) fn on_acquire_step(&mut self, step: AcquireStep, now: Duration) {
        let LifeStage::Acquiring(acquiring) = &mut self.stage else {
            return;
        };
        match step {
            AcquireStep::Wait => {}
            AcquireStep::Confirm(number) => {
                acquiring.confirm = Some(self.number + 1);
                let nodes = acquiring.round.acquiring().unconfirmed();
                let token = self.spec.proposal.map(|_| number);
                self.confirm(token, self.spec.ttl, nodes, now);
            }
            AcquireStep::Granted(number) => self.on_granted(number, now),
            AcquireStep::Refused(refusal) => {
                self.forget_refused();
                self.tell(Event::Refused(refusal));
                self.release(false, None, now);
            }
        }
    }

    /// A node that refused the only `ACQUIRE` of this owner holds nothing for it.
    pub(super) fn forget_refused(&mut self) {
        if let LifeStage::Acquiring(acquiring) = &self.stage {
            let refused = acquiring.round.acquiring().refused();
            self.may_hold = self.may_hold.without(refused);
        }
    }

    pub(super) fn on_granted(&mut self, number: u64, now: Duration) {
        let LifeStage::Acquiring(acquiring) = &self.stage else {
            return;
        };
        let acknowledged = acquiring.round.acquiring().acknowledged(number).len();
        // After the last answer that counts.
        let elapsed = now.saturating_sub(self.began);
        let Some(left) = validity::remaining(self.spec.ttl, elapsed) else {
            self.tell(Event::TooLate { elapsed });
            return self.release(false, None, now);
        };
        let valid_until = now + left;
        let is_renewed = self.spec.renews || self.spec.is_partial;
        let purpose = match self.spec.once {
            None => Purpose::Lock,
            Some(_) => Purpose::Pending(Box::new(Pending::new(acquiring.clone(), now))),
        };
        self.stage = LifeStage::Holding(Holding {
            token: self.spec.proposal.map(|_| number),
            valid_until,
            lost: None,
            delivered_at: None,
            renew_at: is_renewed.then(|| self.began + self.spec.ttl / 3),
            extending: None,
            purpose,
        });
        self.tell(Event::Granted {
            number,
            acknowledged,
            valid_until,
        });
    }

    pub(super) fn on_extend(&mut self, ttl: Option<Duration>, token: Option<u64>, now: Duration) {
        self.check_validity(now);
        if let LifeStage::Holding(holding) = &self.stage
            && holding.lost.is_none()
        {
            self.extend(ttl.unwrap_or(self.spec.ttl), token, true, now);
        }
    }

    /// Renews the lock if it is time.
    pub(super) fn renew(&mut self, now: Duration) {
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
            None => self.stop_renewing(),
        }
    }

    pub(super) fn stop_renewing(&mut self) {
        if let LifeStage::Holding(holding) = &mut self.stage {
            holding.renew_at = None;
        }
    }

    pub(super) fn extend(
        &mut self,
        ttl: Duration,
        raised: Option<u64>,
        is_asked: bool,
        now: Duration,
    ) {
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

    pub(super) fn on_extend_step(&mut self, step: ExtendStep, now: Duration) {
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
    pub(super) fn renewal_ttl(&self, holding: &Holding, now: Duration) -> Option<Duration> {
        let ttl = self.spec.ttl;
        let Some(end) = self.hold_until(holding) else {
            return Some(ttl);
        };
        let enough = validity::ttl_for(end.saturating_sub(now).saturating_add(2 * TICK));
        (holding.valid_until < end.saturating_add(TICK)).then(|| ttl.min(enough))
    }

    /// Returns when the longest hold is over, if that is known.
    pub(super) fn hold_until(&self, holding: &Holding) -> Option<Duration> {
        let began = match self.spec.is_partial {
            true => holding.delivered_at?,
            false => self.began,
        };
        Some(began.saturating_add(self.spec.max_hold?))
    }

    /// Declares the lock lost if its validity has ended, or ends before a timer can fire.
    pub(super) fn check_validity(&mut self, now: Duration) {
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
    pub(super) fn lose(&mut self, loss: Loss) {
        if let LifeStage::Holding(holding) = &mut self.stage
            && holding.lost.is_none()
        {
            holding.lost = Some(loss);
            holding.renew_at = None;
            holding.extending = None;
            self.tell(Event::Lost(loss));
        }
    }

    pub(super) fn on_dropped(&mut self, publishes: bool, effect: Effect, now: Duration) {
        match effect {
            Effect::Unknown => {}
            Effect::NotBegun => self.is_begun = false,
            Effect::WithoutEffect => self.is_begun = true,
        }
        if let LifeStage::Holding(holding) = &self.stage {
            if self.is_begun && effect == Effect::Unknown {
                return self.leave();
            }
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
    pub(super) fn release(&mut self, publishes: bool, held: Option<Duration>, now: Duration) {
        let round = ReleaseRound::new(self.quorum, self.may_hold);
        let step = round.step();
        self.stage = LifeStage::Releasing(Releasing {
            round,
            number: self.number + 1,
            due: now + self.spec.node_timeout,
            is_awaited: held.is_some(),
            is_settled: false,
        });
        if !self.may_hold.is_empty() {
            self.number += 1;
            let release = match self.is_begun {
                true => Op::ReleaseExecuted,
                false => self.spec.access.release(held.unwrap_or_default()),
            };
            self.request = Some((release, self.may_hold, publishes));
        }
        self.tell_release(step);
    }

    /// Leaves the keys on the nodes until their ttl.
    pub(super) fn leave(&mut self) {
        let mut round = ReleaseRound::new(self.quorum, self.may_hold);
        for node in self.may_hold.iter() {
            round.on_release(node, &Answer::Failed);
        }
        self.stage = LifeStage::Releasing(Releasing {
            round,
            number: self.number + 1,
            due: Duration::ZERO,
            is_awaited: false,
            is_settled: true,
        });
        self.ends = true;
    }

    pub(super) fn tell(&mut self, event: Event) {
        debug_assert!(self.event.is_none(), "the driver takes each event");
        self.event = Some(event);
    }

    pub(super) fn tell_release(&mut self, step: ReleaseStep) {
        let LifeStage::Releasing(releasing) = &mut self.stage else {
            return;
        };
        if !releasing.is_settled && releasing.round.silent().is_empty() {
            releasing.is_settled = true;
            self.ends = true;
        }
        if releasing.is_awaited && step != ReleaseStep::Wait {
            releasing.is_awaited = false;
            self.tell(Event::Released(step));
        }
    }

    pub(super) fn confirm(
        &mut self,
        token: Option<u64>,
        ttl: Duration,
        nodes: NodeSet,
        now: Duration,
    ) {
        let confirm = self.spec.access.confirm(token, ttl, self.spec.retention);
        self.lock(confirm, ttl, nodes, now);
    }

    /// Sends a request that may lock or extend the keys.
    pub(super) fn lock(&mut self, op: Op, ttl: Duration, nodes: NodeSet, now: Duration) {
        // Twice the ttl, because a request may be on its way for as long as a ttl. Never earlier than before, because no
        // request shortens the ttl that an earlier one set.
        self.gone_at = self.gone_at.max(now + 2 * ttl);
        self.may_hold = self.may_hold.union(nodes);
        self.number += 1;
        self.request = Some((op, nodes, false));
    }
}
