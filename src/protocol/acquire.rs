//! The acquisition: a state machine that takes the votes of the nodes, and returns decisions.
//!
//! The round knows no clock and sends nothing. It takes each answer and returns the next step. Its driver sends the
//! requests, and reports a node that stays silent for too long as [`Answer::Failed`].
//!
//! # Executing once
//!
//! The outcome of what is executed under a lock is recorded, and replayed to later requests. This adds three rules:
//!
//! * A record counts when a majority of the nodes has it. If a round replayed the record of a minority, the
//!   next request could get another one, or execute again; so the round first writes it to a majority.
//! * A node stores a record once, and only if its writer was the last owner that was granted the key there.
//!   Elsewhere, the record could miss the node that grants the key to the next owner.
//! * A request that sees no record in a majority of grants may execute: it would have seen a record that a
//!   majority had.

use std::time::Duration;

use crate::protocol::holder::Holder;
use crate::protocol::message::{Answer, Reply};
use crate::protocol::quorum::{NodeSet, Quorum};
use crate::protocol::record::{Fingerprint, Record};
use crate::protocol::round::{Copies, Decided};

/// The number of nodes for which a round needs no list.
const FEW: usize = 5;

/// The number of second phases before an attempt is given up.
const MAX_STEPS: u8 = 3;

/// The acquisition of a lock: `ACQUIRE` at all nodes, and `CONFIRM` where the numbers differ. If something is executed under
/// the lock, a node may answer with a record; then the rules above decide whether that counts.
///
/// The rule that makes tokens unique is the *exact acknowledgement*: a token is `t` if and only if
/// a majority of the nodes answered exactly `t`. If a round counted "at least `t`", an early
/// majority and a later grant could get the same number.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AcquireRound {
    quorum: Quorum,
    /// The nodes that have not answered the `ACQUIRE`, those that granted it, and those that other owners hold. The rest has
    /// failed.
    unanswered: NodeSet,
    granted: NodeSet,
    refused: NodeSet,
    /// The numbers in the grants, by node, and those of nodes behind the first few. Zero without one.
    numbers: [u64; FEW],
    further_numbers: Box<[u64]>,
    /// What came with the refusals, in ascending order: which node sent it does not matter.
    held: Vec<NodeRefusal>,
    /// Whether readers hold the lock at some node.
    is_shared: bool,
    /// The highest number in any answer.
    highest: u64,
    /// 0 during `ACQUIRE`, then the number of the current second phase.
    step: u8,
    /// The token that the current second phase tries to establish.
    target: u64,
    /// The nodes that have not answered its `CONFIRM`.
    unconfirmed: NodeSet,
    /// The nodes that answered exactly the target.
    exact: NodeSet,
    /// The nodes that gave no vote.
    failed: NodeSet,
    /// The nodes that lost the key, in any phase while it was the current one.
    lost: NodeSet,
    /// Present if something is executed under the lock.
    records: Option<Box<Records>>,
}

/// What the refusal of a node tells: the time until the lock is free, the longest if that is unknown; the free slots and who
/// holds it, if the node named them.
type NodeRefusal = (Duration, Option<u64>, Option<Holder>);

/// The next step, after the answers so far.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum AcquireStep {
    /// Undecided: wait for more answers.
    Wait,
    /// Granted: a majority answered exactly this number, which is the token. Final for a lock. If something is to be
    /// executed, no node of the majority has a record: execute, unless another answer with a record arrives before that, or
    /// the validity is over. Until the execution begins, pass every further answer to the round.
    Granted(u64),
    /// Send `CONFIRM` with this token to the nodes of [`AcquireRound::unconfirmed`].
    Confirm(u64),
    /// This round cannot acquire the lock. Final.
    Refused(Refusal),
    /// A minority has this record: send it as `RECORD` to the nodes of [`AcquireRound::repairers`]. If it is not whole,
    /// first fetch the rest from a node that has it.
    Repair(Record),
    /// Nothing is to be executed. Final.
    Decided(Decided),
}

/// The two reasons of a failed acquisition, which must never be mistaken for each other.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// A majority of the nodes answered, and other owners hold too many of them.
    Contended(Contention),
    /// A majority of the nodes cannot be reached; nothing is known about the lock.
    Unavailable {
        /// The nodes that gave a vote, for this attempt or for another owner.
        voted: NodeSet,
        /// The nodes that had not answered the `ACQUIRE` when the others decided.
        unanswered: NodeSet,
    },
}

/// What an attempt has learned of the other owners.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Contention {
    /// The time until enough nodes are free, if they reported it and the holders do not renew.
    pub expires_in: Option<Duration>,
    /// Whether perhaps no contender has won, because some node granted the lock to this attempt. Then even a caller that
    /// does not wait should retry at once.
    pub is_split: bool,
    /// Whether readers hold it at some node, so that a caller that waits should keep new ones out.
    pub is_shared: bool,
    /// Who holds it, if more than half of the nodes that refused name the same holder.
    pub holder: Option<Holder>,
    /// The slots to ask for next, because they may be free, one bit for each.
    pub free: u64,
}

impl AcquireRound {
    /// Creates a round whose `ACQUIRE` was sent to every node.
    #[inline]
    pub fn new(quorum: Quorum) -> Self {
        Self {
            quorum,
            unanswered: NodeSet::all(quorum),
            granted: NodeSet::default(),
            refused: NodeSet::default(),
            numbers: [0; FEW],
            further_numbers: vec![0; quorum.nodes().saturating_sub(FEW)].into(),
            held: Vec::new(),
            is_shared: false,
            highest: 0,
            step: 0,
            target: 0,
            unconfirmed: NodeSet::default(),
            exact: NodeSet::default(),
            failed: NodeSet::default(),
            lost: NodeSet::default(),
            records: None,
        }
    }

    /// The same, of a request with this fingerprint that is executed under the lock.
    pub fn of_execution(quorum: Quorum, fingerprint: Fingerprint) -> Self {
        let mut round = Self::new(quorum);
        round.records = Some(Box::new(Records {
            fingerprint,
            copies: Copies::new(quorum),
            ..Records::default()
        }));
        round
    }

    /// Takes the answer of `node` to the `ACQUIRE`.
    #[inline]
    pub fn on_acquire(&mut self, node: usize, answer: &Answer) -> AcquireStep {
        if !self.unanswered.remove(node) {
            return self.with_records(AcquireStep::Wait, node, answer);
        }
        let refusal = match *answer {
            Answer::Replied(Reply::Granted(number)) => {
                self.highest = self.highest.max(number);
                self.granted.insert(node);
                match self.numbers.get_mut(node) {
                    Some(place) => *place = number,
                    None => self.further_numbers[node - FEW] = number,
                }
                None
            }
            Answer::Replied(Reply::Held {
                expires_in,
                ref shown,
            }) => {
                let holder = shown.as_ref().and_then(|shown| shown.holder.clone());
                Some((expires_in, None, holder))
            }
            Answer::Replied(Reply::HeldShared { expires_in }) => {
                self.is_shared = true;
                Some((expires_in, None, None))
            }
            Answer::Replied(Reply::HeldSlot { expires_in, free }) => {
                Some((expires_in, Some(free), None))
            }
            // No grant either.
            Answer::Replied(Reply::Done { .. } | Reply::Intended) => Some((None, None, None)),
            Answer::Replied(_) | Answer::Failed | Answer::NeverSent => None,
        };
        if let Some((expires_in, free, holder)) = refusal {
            self.refused.insert(node);
            let refusal = (expires_in.unwrap_or(Duration::MAX), free, holder);
            let place = self.held.partition_point(|before| *before < refusal);
            self.held.insert(place, refusal);
        }
        let step = self.decide();
        self.with_records(step, node, answer)
    }

    /// Returns the number in the grant of a node that granted it.
    fn number(&self, node: usize) -> u64 {
        let few = self.numbers.get(node).copied();
        few.unwrap_or_else(|| self.further_numbers[node - FEW])
    }

    /// Takes the answer of `node` to the `CONFIRM` of the current second phase.
    pub fn on_confirm(&mut self, node: usize, answer: &Answer) -> AcquireStep {
        if !self.unconfirmed.remove(node) {
            return self.with_records(AcquireStep::Wait, node, answer);
        }
        match *answer {
            Answer::Replied(Reply::At(number)) if number == self.target => self.exact.insert(node),
            // A node that executed the request answers with the target or a higher number.
            Answer::Replied(Reply::At(number)) if number > self.target => {
                self.highest = self.highest.max(number);
            }
            Answer::Replied(Reply::Lost) => self.lost.insert(node),
            Answer::Replied(_) | Answer::Failed | Answer::NeverSent => self.failed.insert(node),
        }
        let step = self.decide();
        self.with_records(step, node, answer)
    }

    /// Takes the answer of `node` to another `CONFIRM`: that of an earlier second phase, or one that extends the granted lock
    /// before the execution begins. Only a record in it matters, which stays.
    pub fn on_other(&mut self, node: usize, answer: &Answer) -> AcquireStep {
        self.with_records(AcquireStep::Wait, node, answer)
    }

    /// Takes the answer of `node` to the `RECORD` of a repair.
    pub fn on_record(&mut self, node: usize, answer: &Answer) -> AcquireStep {
        let records = self.records.as_mut();
        if let Some(repairers) = records.and_then(|records| records.repairers.as_mut()) {
            repairers.remove(node);
        }
        self.with_records(AcquireStep::Wait, node, answer)
    }

    /// Ends a repair: a record that cannot be read cannot be written either.
    pub fn on_unreadable(&mut self) -> AcquireStep {
        if let Some(records) = &mut self.records {
            records.repairers = Some(NodeSet::default());
        }
        self.by_records(AcquireStep::Wait)
    }

    /// Returns the targets of the `RECORD` of a repair that have not answered it.
    pub fn repairers(&self) -> NodeSet {
        let repairers = self.records.as_ref().and_then(|records| records.repairers);
        repairers.unwrap_or_default()
    }

    /// Returns the record with the most copies, if there is one, and the nodes that are not known to have any.
    pub fn record(&self) -> Option<(&Record, NodeSet)> {
        let copies = &self.records.as_ref()?.copies;
        Some((copies.leading(Record::execution)?, copies.without()))
    }

    /// Returns whether some node has a record.
    pub fn is_recorded(&self) -> bool {
        self.record().is_some()
    }

    /// Returns the time until the first node with a record forgets it.
    pub fn expires_in(&self) -> Duration {
        let records = self.records.as_ref();
        let expire_in = records.and_then(|records| records.expire_in);
        expire_in.unwrap_or(Duration::MAX)
    }

    /// Returns the targets of the `CONFIRM` of the current step: all nodes that did not answer
    /// exactly the target, including silent nodes, without nodes that refused or failed.
    pub fn unconfirmed(&self) -> NodeSet {
        self.unconfirmed
    }

    /// Returns the nodes that have answered exactly `token` so far.
    pub fn acknowledged(&self, token: u64) -> NodeSet {
        let granted = self.granted.without(self.lost).iter();
        let granted: NodeSet = granted.filter(|node| self.number(*node) == token).collect();
        match token == self.target {
            true => granted.union(self.exact),
            false => granted,
        }
    }

    /// Returns the nodes with a relevant outstanding answer.
    pub fn silent(&self) -> NodeSet {
        let repairers = self.records.as_ref().and_then(|records| records.repairers);
        if let Some(repairers) = repairers {
            return repairers;
        }
        if self.step == 0 || self.is_recorded() {
            return self.unanswered;
        }
        // The round does not wait for the others.
        let asked = self.granted.union(self.unanswered);
        self.unconfirmed.intersection(asked)
    }

    /// Returns the nodes that have not answered the `ACQUIRE`.
    pub fn unanswered(&self) -> NodeSet {
        self.unanswered
    }

    /// Returns the nodes that cannot hold the lock for this attempt: they answered the only `ACQUIRE` of this
    /// attempt with another holder.
    pub fn refused(&self) -> NodeSet {
        self.refused
    }

    /// Returns the silent nodes that would break a tie: a majority has voted, for this attempt and for others, and none of them
    /// has a majority without these nodes.
    #[must_use]
    pub fn tie_breakers(&self) -> NodeSet {
        let voted = self.granted.union(self.refused).len();
        let is_tie = self.step == 0
            && !self.refused.is_empty()
            && !self.granted.is_empty()
            && !self.is_recorded()
            && voted >= self.quorum.majority();
        match is_tie {
            true => self.unanswered,
            false => NodeSet::default(),
        }
    }

    /// Looks for a record in an answer, of which the step of the lock is this one.
    #[inline]
    fn with_records(&mut self, step: AcquireStep, node: usize, answer: &Answer) -> AcquireStep {
        let Some(records) = &mut self.records else {
            return step;
        };
        if let Answer::Replied(reply) = answer {
            records.note(node, reply);
        }
        self.by_records(step)
    }

    /// Returns the next step, if that of the lock is this one.
    fn by_records(&mut self, step: AcquireStep) -> AcquireStep {
        let Some(records) = &mut self.records else {
            return step;
        };
        let Some(best) = records.copies.leading(Record::execution).cloned() else {
            return records.as_lock(step, self.quorum);
        };
        let majority = self.quorum.majority();
        let copies = records.copies.of(best.execution()).len();
        let is_of_other_request = best.fingerprint() != records.fingerprint;
        let decided = if copies >= majority {
            Decided::Recorded(best)
        } else {
            let awaited = records.repairers.unwrap_or(self.unanswered);
            if !awaited.is_empty() {
                return AcquireStep::Wait;
            }
            let without = records.copies.without();
            if records.repairers.is_none() {
                // Only these take it from this owner.
                let granted = self.granted.intersection(without);
                if copies + granted.len() >= majority {
                    records.repairers = Some(granted);
                    return AcquireStep::Repair(best);
                }
                records.repairers = Some(NodeSet::default());
            }
            if copies + without.len() < majority {
                Decided::Conflicting
            } else if copies + without.without(records.intended).len() < majority {
                // The others have the intent of an unrecorded execution, and will never grant a repair.
                Decided::Unknown
            } else {
                Decided::Undecided
            }
        };
        AcquireStep::Decided(match is_of_other_request {
            true => Decided::OtherRequest,
            false => decided,
        })
    }

    fn decide(&mut self) -> AcquireStep {
        let majority = self.quorum.majority();
        let granted = self.granted;
        // The nodes that may yet acknowledge a number for this attempt.
        let candidates = granted.union(self.unanswered);
        let candidates = candidates.without(self.lost.union(self.failed));
        if self.step == 0 {
            if granted.len() < majority {
                return self.refuse_if_impossible(candidates.len());
            }
            let mut numbers = granted.iter().map(|node| self.number(node));
            let agreed = numbers.find(|number| self.acknowledged(*number).len() >= majority);
            return match agreed {
                Some(token) => AcquireStep::Granted(token),
                None => self.start_step(),
            };
        }
        let exact = self.acknowledged(self.target);
        if exact.len() >= majority {
            return AcquireStep::Granted(self.target);
        }
        if exact.union(self.silent()).len() >= majority {
            return AcquireStep::Wait;
        }
        // No majority can answer this target any more; a higher one may succeed.
        let possible = match self.step < MAX_STEPS {
            true => candidates.len(),
            false => 0,
        };
        if possible >= majority && self.highest > self.target {
            return self.start_step();
        }
        self.refuse_if_impossible(possible)
    }

    fn start_step(&mut self) -> AcquireStep {
        self.step += 1;
        self.target = self.highest;
        (self.exact, self.failed) = Default::default();
        let acknowledged = self.acknowledged(self.target);
        let asked = self.granted.union(self.unanswered);
        self.unconfirmed = asked.without(acknowledged.union(self.lost));
        AcquireStep::Confirm(self.target)
    }

    /// Refuses as soon as success is impossible *and* the reason is known.
    fn refuse_if_impossible(&self, possible: usize) -> AcquireStep {
        let majority = self.quorum.majority();
        if possible >= majority {
            return AcquireStep::Wait;
        }
        let (granted, unanswered) = (self.granted, self.unanswered);
        let voted = granted.union(self.refused);
        if voted.len() >= majority {
            AcquireStep::Refused(Refusal::Contended(Contention {
                expires_in: self.free_in(),
                is_split: !granted.is_empty(),
                is_shared: self.is_shared,
                holder: self.holder().cloned(),
                free: self.free_slots(),
            }))
        } else if voted.len() + unanswered.len() < majority {
            AcquireStep::Refused(Refusal::Unavailable { voted, unanswered })
        } else {
            AcquireStep::Wait
        }
    }

    /// Returns the holder that more than half of the nodes name that refused. Where callers compete, or one has died, nodes
    /// name different ones.
    fn holder(&self) -> Option<&Holder> {
        let mut named = self.held.iter().filter_map(|(.., holder)| holder.as_ref());
        let all = named.clone();
        named.find(|holder| {
            let naming_it = all.clone().filter(|named| named == holder);
            2 * naming_it.count() > self.refused.len()
        })
    }

    /// Returns the slots that are free at most of the nodes that told of slots. If they agree on none, because callers compete
    /// for slots and each has some nodes, returns those that are free at any.
    fn free_slots(&self) -> u64 {
        let named = || self.held.iter().filter_map(|(_, free, _)| *free);
        let is_free = |slot: &u32| {
            let naming_it = named().filter(|free| free >> slot & 1 == 1);
            2 * naming_it.count() > named().count()
        };
        let agreed = (0..u64::BITS).filter(is_free);
        match agreed.fold(0, |free, slot| free | 1 << slot) {
            0 => named().fold(0, |free, slots| free | slots),
            agreed => agreed,
        }
    }

    /// Returns the time until a majority is free, if the holders do not renew.
    fn free_in(&self) -> Option<Duration> {
        let others = self.quorum.nodes() - self.held.len();
        let needed = self.quorum.majority().saturating_sub(others).max(1);
        // A key that never expires comes last, not first.
        let (left, ..) = self.held.get(needed - 1)?;
        Some(*left).filter(|left| *left < Duration::MAX)
    }
}

/// What the nodes answer about the record of a key.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Records {
    fingerprint: Fingerprint,
    copies: Copies,
    /// The time until the first node with a record forgets it.
    expire_in: Option<Duration>,
    /// The nodes with an outstanding `RECORD`; `None` before a repair.
    repairers: Option<NodeSet>,
    held_for_other_request: NodeSet,
    intended: NodeSet,
}

impl Records {
    /// Looks for a record in the reply of a node.
    fn note(&mut self, node: usize, reply: &Reply) {
        match reply {
            Reply::Done { record, expires_in } => {
                let least = self.expire_in.unwrap_or(Duration::MAX);
                self.expire_in = Some(least.min(*expires_in));
                self.copies.note(node, record);
            }
            Reply::Held { shown, .. } => {
                let held_for = shown.as_ref().and_then(|shown| shown.fingerprint);
                if held_for.is_some_and(|held_for| held_for != self.fingerprint) {
                    self.held_for_other_request.insert(node);
                }
            }
            Reply::Intended => self.intended.insert(node),
            _ => {}
        }
    }

    /// Without a record, the step is that of a lock's acquisition.
    fn as_lock(&self, step: AcquireStep, quorum: Quorum) -> AcquireStep {
        let (majority, nodes) = (quorum.majority(), quorum.nodes());
        match step {
            AcquireStep::Refused(_) if nodes - self.intended.len() < majority => {
                AcquireStep::Decided(Decided::Unknown)
            }
            AcquireStep::Refused(_) if self.held_for_other_request.len() >= majority => {
                AcquireStep::Decided(Decided::OtherRequest)
            }
            step => step,
        }
    }
}
