//! Executing once: a lock whose outcome is recorded, and replayed to later requests.
//!
//! Like the rounds of a lock, these rounds know no clock and send nothing. They add three rules:
//!
//! * A record counts when a majority of the nodes has it. If a round replayed the record of a minority, the
//!   next request could get another one, or execute again; so the round first writes it to a majority.
//! * A node stores a record once, and only if its writer was the last owner that was granted the key there.
//!   Elsewhere, the record could miss the node that grants the key to the next owner.
//! * A request that sees no record in a majority of grants may execute: it would have seen a record that a
//!   majority had.

use std::time::Duration;

use crate::protocol::message::Reply;
use crate::protocol::quorum::{NodeSet, Quorum, which};
use crate::protocol::record::{ExecutionId, Fingerprint, Record};
use crate::protocol::round::{AcquireRound, AcquireStep, Answer};

/// The reason for which a request is not executed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Decided {
    /// A majority has this record of an earlier execution. It is a head only if the record is large.
    Recorded(Record),
    /// The key was used for another request.
    OtherRequest,
    /// A minority has a record, and more nodes must answer before it is known whether that record counts.
    Undecided,
    /// There are several records, and none can reach a majority: the key was executed more than once.
    Conflicting,
    /// An earlier owner may have executed and left no record, or one that cannot reach a majority.
    Unknown,
}

impl Decided {
    /// Returns whether it stays, so that the next callers of the key need not ask the nodes.
    #[must_use]
    pub fn is_memorable(&self) -> bool {
        matches!(self, Self::Recorded(_))
    }

    /// Returns whether another attempt may find a record that can be replayed.
    #[must_use]
    pub fn may_change(&self) -> bool {
        *self == Self::Undecided
    }
}

/// The acquisition of a key, whose outcome may be recorded.
///
/// It is an [`AcquireRound`] until a node answers with a record; then it decides whether that counts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct OnceRound {
    acquiring: AcquireRound,
    /// Present if something is executed under the lock.
    records: Option<Box<Records>>,
}

/// What the nodes answer about the record of a key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Records {
    quorum: Quorum,
    fingerprint: Fingerprint,
    copies: Copies,
    /// The time until the first node with a record forgets it.
    expire_in: Duration,
    /// The nodes with an outstanding `RECORD`; `None` before a repair.
    repairers: Option<NodeSet>,
    held_for_other_request: NodeSet,
    intended: NodeSet,
}

/// The next step, after the answers so far.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum OnceStep {
    /// That of the lock. If it is granted, no node of the majority has a record: execute, unless another answer with a
    /// record arrives before that, or the validity is over. Until the execution begins, pass every further answer to the
    /// round.
    Acquire(AcquireStep),
    /// A minority has this record: send it as `RECORD` to the nodes of [`OnceRound::repairers`]. If it is not
    /// whole, first fetch the rest from a node that has it.
    Repair(Record),
    /// Nothing is to be executed. Final.
    Decided(Decided),
}

impl OnceStep {
    /// Undecided: wait for more answers.
    pub const WAIT: Self = Self::Acquire(AcquireStep::Wait);
}

impl OnceRound {
    /// Creates a round whose `ACQUIRE` was sent to every node; with the fingerprint of the request, if something is
    /// executed under the lock.
    #[must_use]
    pub fn new(quorum: Quorum, fingerprint: Option<Fingerprint>) -> Self {
        let records = fingerprint.map(|fingerprint| {
            Box::new(Records {
                quorum,
                fingerprint,
                copies: Copies::new(quorum),
                expire_in: Duration::MAX,
                repairers: None,
                held_for_other_request: NodeSet::default(),
                intended: NodeSet::default(),
            })
        });
        Self {
            acquiring: AcquireRound::new(quorum),
            records,
        }
    }

    /// Returns the part of the round that acquires the lock.
    #[must_use]
    pub fn acquiring(&self) -> &AcquireRound {
        &self.acquiring
    }

    /// Takes the answer of `node` to the `ACQUIRE`.
    pub fn on_acquire(&mut self, node: usize, answer: &Answer) -> OnceStep {
        let step = self.acquiring.on_acquire(node, answer);
        self.decide(step, node, answer)
    }

    /// Takes the answer of `node` to the `CONFIRM` of second phase `step`.
    pub fn on_confirm(&mut self, node: usize, step: u8, answer: &Answer) -> OnceStep {
        let step = self.acquiring.on_confirm(node, step, answer);
        // An answer to an earlier phase counts, too: a record stays.
        self.decide(step, node, answer)
    }

    /// Takes the answer of `node` to a `CONFIRM` that extends the granted lock before the execution
    /// begins. Only a record in it matters: the grant stands.
    pub fn on_extension(&mut self, node: usize, answer: &Answer) -> OnceStep {
        self.decide(AcquireStep::Wait, node, answer)
    }

    /// Takes the answer of `node` to the `RECORD` of a repair.
    pub fn on_record(&mut self, node: usize, answer: &Answer) -> OnceStep {
        let records = self.records.as_mut();
        if let Some(repairers) = records.and_then(|records| records.repairers.as_mut()) {
            repairers.remove(node);
        }
        self.decide(AcquireStep::Wait, node, answer)
    }

    /// Ends a repair: a record that cannot be read cannot be written either.
    pub fn on_unreadable(&mut self) -> OnceStep {
        match &mut self.records {
            Some(records) => {
                records.repairers = Some(NodeSet::default());
                records.decide(AcquireStep::Wait, &self.acquiring)
            }
            None => OnceStep::WAIT,
        }
    }

    /// Returns the targets of the `RECORD` of a repair that have not answered it.
    #[must_use]
    pub fn repairers(&self) -> NodeSet {
        let repairers = self.records.as_ref().and_then(|records| records.repairers);
        repairers.unwrap_or_default()
    }

    /// Returns the record with the most copies, if there is one, and the nodes that are not known to have any.
    #[must_use]
    pub fn record(&self) -> Option<(&Record, NodeSet)> {
        let copies = &self.records.as_ref()?.copies;
        Some((copies.leading(Record::execution)?, copies.without()))
    }

    /// Returns whether some node has a record.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        self.record().is_some()
    }

    /// Returns the time until the first node with a record forgets it.
    #[must_use]
    pub fn expires_in(&self) -> Duration {
        let records = self.records.as_ref();
        records.map_or(Duration::MAX, |records| records.expire_in)
    }

    /// Returns the nodes with a relevant outstanding answer.
    #[must_use]
    pub fn silent(&self) -> NodeSet {
        match &self.records {
            Some(records) if records.repairers.is_some() => self.repairers(),
            Some(_) if self.is_recorded() => self.acquiring.unanswered(),
            _ => self.acquiring.silent(),
        }
    }

    fn decide(&mut self, step: AcquireStep, node: usize, answer: &Answer) -> OnceStep {
        let Some(records) = &mut self.records else {
            return OnceStep::Acquire(step);
        };
        if let Answer::Replied(reply) = answer {
            records.note(node, reply);
        }
        records.decide(step, &self.acquiring)
    }
}

impl Records {
    fn note(&mut self, node: usize, reply: &Reply) {
        match reply {
            Reply::Done { record, expires_in } => {
                self.expire_in = self.expire_in.min(*expires_in);
                self.copies.note(node, record);
            }
            Reply::Held {
                fingerprint: Some(held_for),
                ..
            } if *held_for != self.fingerprint => {
                self.held_for_other_request.insert(node);
            }
            Reply::Intended => {
                self.intended.insert(node);
            }
            _ => {}
        }
    }

    fn decide(&mut self, step: AcquireStep, acquiring: &AcquireRound) -> OnceStep {
        let Some(best) = self.copies.leading(Record::execution).cloned() else {
            return self.as_lock(step);
        };
        let majority = self.quorum.majority();
        let copies = self.copies.of(best.execution()).len();
        let is_of_other_request = best.fingerprint() != self.fingerprint;
        let decided = if copies >= majority {
            Decided::Recorded(best)
        } else {
            let awaited = self.repairers.unwrap_or_else(|| acquiring.unanswered());
            if !awaited.is_empty() {
                return OnceStep::WAIT;
            }
            let without = self.copies.without();
            if self.repairers.is_none() {
                // Only these take it from this owner.
                let recorded = NodeSet::all(self.quorum).without(without);
                let granted = acquiring.granted().without(recorded);
                let completes = copies + granted.len() >= majority;
                self.repairers = Some(if completes {
                    granted
                } else {
                    NodeSet::default()
                });
                if completes {
                    return OnceStep::Repair(best);
                }
            }
            if copies + without.len() < majority {
                Decided::Conflicting
            } else if copies + without.without(self.intended).len() < majority {
                // The others have the intent of an unrecorded execution, and will never grant a repair.
                Decided::Unknown
            } else {
                Decided::Undecided
            }
        };
        OnceStep::Decided(match is_of_other_request {
            true => Decided::OtherRequest,
            false => decided,
        })
    }

    /// Without a record, the step is that of a lock's acquisition.
    fn as_lock(&self, step: AcquireStep) -> OnceStep {
        let (majority, nodes) = (self.quorum.majority(), self.quorum.nodes());
        match step {
            AcquireStep::Refused(_) if nodes - self.intended.len() < majority => {
                OnceStep::Decided(Decided::Unknown)
            }
            AcquireStep::Refused(_) if self.held_for_other_request.len() >= majority => {
                OnceStep::Decided(Decided::OtherRequest)
            }
            step => OnceStep::Acquire(step),
        }
    }
}

/// The record, or the head of it, that each node has answered with.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Copies(Vec<Option<Record>>);

impl Copies {
    fn new(quorum: Quorum) -> Self {
        Self(vec![None; quorum.nodes()])
    }

    /// Keeps the first of a node: it stores one record, and if it forgot that it lost its memory.
    fn note(&mut self, node: usize, record: &Record) {
        self.0[node].get_or_insert_with(|| record.clone());
    }

    /// Returns the nodes that have the record of an execution.
    fn of(&self, execution: ExecutionId) -> NodeSet {
        let has_it = |record: &Record| record.execution() == execution;
        which(&self.0, |copy| copy.as_ref().is_some_and(has_it)).collect()
    }

    /// Returns the nodes that are not known to have a record.
    fn without(&self) -> NodeSet {
        which(&self.0, Option::is_none).collect()
    }

    /// Returns the record with the most copies; among equals, the one that is preferred. Of its copies, a whole one: it
    /// needs no fetch.
    fn leading<P: Ord>(&self, preference: impl Fn(&Record) -> P) -> Option<&Record> {
        let records = self.0.iter().flatten();
        records.max_by_key(|record| {
            let copies = self.of(record.execution()).len();
            (copies, preference(record), record.is_whole())
        })
    }
}

/// The recording of an outcome: `RECORD` at all nodes, by the owner that executed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RecordRound {
    quorum: Quorum,
    execution: ExecutionId,
    silent: NodeSet,
    recorded: NodeSet,
}

/// The next step of a recording, after the answers so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RecordStep {
    /// Undecided: wait for more answers.
    Wait,
    /// A majority has the record: respond, and send `TOPUP` to the nodes of [`RecordRound::without`].
    Recorded,
    /// This round cannot reach a majority: start a [`LookRound`].
    Missed,
}

impl RecordRound {
    /// Creates a round whose `RECORD` was sent to every node.
    #[must_use]
    pub fn new(quorum: Quorum, execution: ExecutionId) -> Self {
        Self {
            quorum,
            execution,
            silent: NodeSet::all(quorum),
            recorded: NodeSet::default(),
        }
    }

    /// Takes the answer of `node`.
    pub fn on_record(&mut self, node: usize, answer: &Answer) -> RecordStep {
        if self.silent.remove(node)
            && let Answer::Replied(Reply::Done { record, .. }) = answer
            && record.execution() == self.execution
        {
            self.recorded.insert(node);
        }
        self.step()
    }

    /// Returns the step after the answers so far.
    #[must_use]
    pub fn step(&self) -> RecordStep {
        let (majority, recorded) = (self.quorum.majority(), self.recorded.len());
        if recorded >= majority {
            RecordStep::Recorded
        } else if recorded + self.silent.len() < majority {
            RecordStep::Missed
        } else {
            RecordStep::Wait
        }
    }

    /// Returns the nodes that have not answered.
    #[must_use]
    pub fn silent(&self) -> NodeSet {
        self.silent
    }

    /// Returns the nodes that are not known to have the record.
    #[must_use]
    pub fn without(&self) -> NodeSet {
        NodeSet::all(self.quorum).without(self.recorded)
    }
}

/// The search for a record at all nodes, by an owner that executed and could not record.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LookRound {
    majority: usize,
    own: ExecutionId,
    silent: NodeSet,
    copies: Copies,
}

/// The next step of a search, after the answers so far.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LookStep {
    /// Undecided: wait for more answers.
    Wait,
    /// A majority has this record: respond with it, even if another owner executed. Final.
    Found(Record),
    /// Only minorities have records, and most nodes have this one; among equals, it is the own one. Send it as `RECORD`
    /// under the old owner value first, because its grants may still stand. Only if that misses the majority, acquire
    /// once with a fresh owner value to repair the record, and never execute. Final.
    Minority(Record),
    /// No node that answered has a record: respond with the own outcome as not recorded. Final.
    Nothing,
}

impl LookRound {
    /// Creates a round whose `LOOK` was sent to every node.
    #[must_use]
    pub fn new(quorum: Quorum, own: ExecutionId) -> Self {
        Self {
            majority: quorum.majority(),
            own,
            silent: NodeSet::all(quorum),
            copies: Copies::new(quorum),
        }
    }

    /// Returns the nodes that have not answered.
    #[must_use]
    pub fn silent(&self) -> NodeSet {
        self.silent
    }

    /// Takes the answer of `node`.
    pub fn on_look(&mut self, node: usize, answer: &Answer) -> LookStep {
        if self.silent.remove(node)
            && let Answer::Replied(Reply::Done { record, .. }) = answer
        {
            self.copies.note(node, record);
        }
        let leading = self.copies.leading(|record| record.execution() == self.own);
        match leading.cloned() {
            Some(record) if self.copies.of(record.execution()).len() >= self.majority => {
                LookStep::Found(record)
            }
            _ if !self.silent.is_empty() => LookStep::Wait,
            Some(record) => LookStep::Minority(record),
            None => LookStep::Nothing,
        }
    }
}
