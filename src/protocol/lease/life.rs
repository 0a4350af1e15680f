//! The stages of a life, and its steps: what an input leads to.

use std::time::Duration;

use crate::protocol::acquire::{AcquireRound, AcquireStep};
use crate::protocol::lease::io::{ACQUIRE, Effect, Event, LeaseRequest, LeaseSpec, LostReason};
use crate::protocol::message::{Answer, Op};
use crate::protocol::quorum::{NodeSet, Quorum};
use crate::protocol::record::Record;
use crate::protocol::round::{Decided, LookRound, ReleaseRound, Sought, VoteRound, VoteStep};
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
    /// When every node has certainly forgotten what was asked for so far.
    pub(super) gone_at: Duration,
    /// The last request, until the driver has taken it.
    pub(super) request: Option<LeaseRequest>,
    /// What the driver has not taken yet. No input leads to more than one event before the end.
    pub(super) event: Option<Event>,
    /// What is to be read, after the event.
    pub(super) unread: Option<Record>,
    /// Whether the end is still to be told.
    pub(super) ends: bool,
    /// Whether something may have been executed under the lock.
    pub(super) is_begun: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum LifeStage {
    Acquiring(Acquiring),
    Holding(Holding),
    Recording(Box<Finish>),
    Releasing {
        round: ReleaseRound,
        /// When the silent nodes count as failed.
        due: Duration,
        /// Whether a holder waits for the outcome.
        is_awaited: bool,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Holding {
    pub(super) token: Option<u64>,
    pub(super) valid_until: Duration,
    pub(super) lost: Option<LostReason>,
    pub(super) delivered_at: Option<Duration>,
    /// When to renew the lock next; `None` if it is not, or no longer, renewed.
    pub(super) renew_at: Option<Duration>,
    /// The extension under way, whose request is the last one.
    pub(super) extending: Option<Extending>,
    /// Present as long as an execution has not begun.
    pub(super) pending: Option<Box<Pending>>,
}

/// An extension under way.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Extending {
    pub(super) round: VoteRound,
    /// The time before its request.
    pub(super) began: Duration,
    ttl: Duration,
    token: Option<u64>,
    /// Whether a holder asked for it.
    is_asked: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Acquiring {
    pub(super) round: AcquireRound,
    /// The number of the current `CONFIRM`.
    pub(super) confirm: Option<u32>,
    /// The number of the `RECORD` of a repair.
    pub(super) repair: Option<u32>,
    /// Until when the nodes may answer the `ACQUIRE`.
    pub(super) due: Duration,
    /// The nodes that are not connected yet, which may until these later times.
    pub(super) connecting: Box<[(usize, Duration)]>,
    /// The end of all phases together.
    pub(super) deadline: Duration,
}

/// A granted execution that has not begun.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Pending {
    /// The granted attempt, which still takes answers.
    pub(super) acquiring: Acquiring,
    /// When it was granted; `None` once the nodes have been asked again.
    pub(super) granted_at: Option<Duration>,
    /// The step that follows from a record that arrived since the grant.
    pub(super) step: Option<AcquireStep>,
}

impl Pending {
    /// Looks for a record in an answer.
    pub(super) fn on_answer(&mut self, node: usize, number: u32, answer: &Answer) {
        let step = self.acquiring.on_answer(node, number, answer);
        let is_decided = step != AcquireStep::Wait;
        if self.acquiring.round.is_recorded() && (self.step.is_none() || is_decided) {
            self.step = Some(step);
        }
    }
}

impl Acquiring {
    pub(super) fn on_answer(&mut self, node: usize, number: u32, answer: &Answer) -> AcquireStep {
        if number == ACQUIRE {
            self.round.on_acquire(node, answer)
        } else if self.repair == Some(number) {
            self.round.on_record(node, answer)
        } else if self.confirm == Some(number) {
            self.round.on_confirm(node, answer)
        } else {
            self.round.on_other(node, answer)
        }
    }

    /// Returns whether answers to this request count.
    pub(super) fn counts(&self, number: u32) -> bool {
        number == ACQUIRE || self.confirm == Some(number) || self.repair == Some(number)
    }

    /// Returns the number of the request that the silent nodes have not answered.
    pub(super) fn silence(&self) -> u32 {
        // With a record, the answers to the `ACQUIRE` matter even in the second phase.
        let confirm = self.confirm.filter(|_| !self.round.is_recorded());
        self.repair.or(confirm).unwrap_or(ACQUIRE)
    }

    /// Returns whether the rest of the record to repair is being read, for which the attempt waits.
    pub(super) fn is_reading(&self) -> bool {
        self.repair.is_none() && !self.round.repairers().is_empty()
    }

    /// Returns until when a silent node may answer. A phase after the first has what is left of the longest time of the
    /// first.
    pub(super) fn due(&self, node: usize) -> Duration {
        if self.confirm.is_some() || self.repair.is_some() {
            return self.deadline;
        }
        let mut connecting = self.connecting.iter();
        let connecting = connecting.find(|(number, _)| *number == node);
        connecting.map_or(self.due, |(_, until)| *until)
    }

    /// Returns until when the last node may answer the `ACQUIRE`.
    pub(super) fn last_due(&self) -> Duration {
        let connecting = self.connecting.iter().map(|(_, until)| *until);
        connecting.max().unwrap_or(self.due)
    }
}

impl Lease {
    pub(super) fn refuse(&mut self, event: Event, now: Duration) {
        if let LifeStage::Acquiring(acquiring) = &self.stage {
            // They refused the only `ACQUIRE` of this owner.
            let refused = acquiring.round.refused();
            self.may_hold = self.may_hold.without(refused);
        }
        self.tell(event);
        self.release(false, None, now);
    }

    pub(super) fn on_granted(&mut self, number: u64, now: Duration) {
        let LifeStage::Acquiring(acquiring) = &self.stage else {
            return;
        };
        // It was to find a record only.
        if self.spec.once.is_some_and(|once| !once.executes) {
            return self.refuse(Event::Decided(Decided::Undecided), now);
        }
        let acknowledged = acquiring.round.acknowledged(number).len();
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
            pending: self.spec.once.map(|_| {
                Box::new(Pending {
                    acquiring: acquiring.clone(),
                    granted_at: Some(now),
                    step: None,
                })
            }),
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
            round: VoteRound::new(self.quorum, Sought::Token(token.unwrap_or(0))),
            began: now,
            ttl,
            token,
            is_asked,
        });
        self.confirm(token, ttl, NodeSet::all(self.quorum), now);
    }

    pub(super) fn on_extend_step(&mut self, step: VoteStep, now: Duration) {
        if step == VoteStep::Wait {
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
            VoteStep::Wait => {}
            VoteStep::Lost => self.lose(LostReason::Gone),
            VoteStep::Agreed => {
                let lifetime = validity::lifetime(extending.ttl).unwrap_or_default();
                // A shorter ttl does not take anything back.
                holding.valid_until = holding.valid_until.max(extending.began + lifetime);
                if extending.is_asked {
                    self.spec.ttl = extending.ttl;
                    holding.token = extending.token;
                }
                let next = extending.began + self.spec.ttl / 3;
                holding.renew_at = holding.renew_at.map(|_| next);
                let extended = Event::Extended {
                    valid_until: holding.valid_until,
                    token: holding.token,
                    is_asked: extending.is_asked,
                };
                self.tell(extended);
            }
            VoteStep::Missed { reached } => {
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
                true => LostReason::MaxHold,
                false => LostReason::Expired,
            });
        }
    }

    /// A lost lock is no longer renewed. Its keys are released when the last holder is gone.
    pub(super) fn lose(&mut self, loss: LostReason) {
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
        let is_granted = match self.stage {
            LifeStage::Acquiring(_) => false,
            // Or a repair. A recording goes on without its holder.
            LifeStage::Recording(_) => self.is_begun,
            LifeStage::Holding(_) | LifeStage::Releasing { .. } => true,
        };
        if !is_granted {
            // Publishes: an earlier release may not have been published, because this caller waited.
            return self.release(true, None, now);
        }
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
        self.stage = LifeStage::Releasing {
            round,
            due: now + self.spec.node_timeout,
            is_awaited: held.is_some(),
        };
        let release = match self.is_begun {
            true => Op::ReleaseExecuted,
            false => self.spec.access.release(held.unwrap_or_default()),
        };
        self.ask(release, self.may_hold, publishes);
        self.ends = self.may_hold.is_empty();
        self.tell_release();
    }

    /// Leaves the keys on the nodes until their ttl.
    pub(super) fn leave(&mut self) {
        let mut round = ReleaseRound::new(self.quorum, self.may_hold);
        for node in self.may_hold.iter() {
            round.on_release(node, &Answer::Failed);
        }
        self.stage = LifeStage::Releasing {
            round,
            due: Duration::ZERO,
            is_awaited: false,
        };
        // Answers to older requests do not count.
        self.number += 1;
        self.ends = true;
    }

    pub(super) fn tell(&mut self, event: Event) {
        debug_assert!(self.event.is_none(), "the driver takes each event");
        self.event = Some(event);
    }

    pub(super) fn tell_release(&mut self) {
        if let LifeStage::Releasing {
            round,
            is_awaited: is_awaited @ true,
            ..
        } = &mut self.stage
        {
            let step = round.step();
            *is_awaited = step == VoteStep::Wait;
            if !*is_awaited {
                self.tell(Event::Released(step));
            }
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
    #[inline]
    pub(super) fn lock(&mut self, op: Op, ttl: Duration, nodes: NodeSet, now: Duration) {
        // Twice the ttl, because a request may be on its way for as long as a ttl. Never earlier than before, because no
        // request shortens the ttl that an earlier one set.
        self.gone_at = self.gone_at.max(now + 2 * ttl);
        self.may_hold = self.may_hold.union(nodes);
        self.ask(op, nodes, false);
    }

    /// Asks these nodes, if there are any. Answers to all earlier requests are older from now on.
    pub(super) fn ask(&mut self, op: Op, nodes: NodeSet, publishes: bool) {
        self.number += 1;
        if !nodes.is_empty() {
            self.request = Some(LeaseRequest {
                number: self.number,
                op,
                nodes,
                publishes,
            });
        }
    }
}

/// What is left to do with a record.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Finish {
    pub(super) step: FinishStep,
    /// The number of the request under way.
    pub(super) number: u32,
    /// When the silent nodes count as failed.
    pub(super) due: Duration,
    /// Until when the record is kept.
    pub(super) until: Duration,
    /// The outcome of this execution; `None` for a replay.
    pub(super) own: Option<Record>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum FinishStep {
    /// `RECORD` was sent to all nodes.
    Writing {
        record: Record,
        round: VoteRound,
        /// Whether the nodes have been asked for their records before.
        is_repair: bool,
    },
    /// `LOOK` was sent to all nodes.
    Looking {
        round: LookRound,
        /// Whether a node has answered that it has the own record. It counts although it may not be reached any more.
        is_stored: bool,
    },
    /// The rest of the leading record is being read.
    ReadingLeader,
    /// Another lease repairs.
    Repairing,
    /// A replay waits for the nodes that had not answered when it was decided.
    Replaying(AcquireRound),
    /// The rest of the replayed record is being read for the nodes that lack it.
    ReadingReplay(NodeSet),
    /// `TOPUP` was sent to these nodes.
    ToppingUp(NodeSet),
}

impl Finish {
    /// Returns the nodes that have not answered the request under way, and whether it may be decided before they have.
    pub(super) fn open_request(&self) -> (NodeSet, bool) {
        match &self.step {
            FinishStep::Writing { round, .. } => (round.silent(), round.step() == VoteStep::Wait),
            FinishStep::Looking { round, .. } => (round.silent(), true),
            FinishStep::Replaying(round) => (round.unanswered(), false),
            FinishStep::ToppingUp(silent) => (*silent, false),
            FinishStep::ReadingLeader | FinishStep::Repairing | FinishStep::ReadingReplay(_) => {
                (NodeSet::default(), false)
            }
        }
    }
}
