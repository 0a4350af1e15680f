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

use crate::protocol::message::{Answer, Reply};
use crate::protocol::quorum::{NodeSet, Quorum, which};
use crate::protocol::record::{ExecutionId, Record};

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

/// The record, or the head of it, that each node has answered with.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Copies(Vec<Option<Record>>);

impl Copies {
    pub(super) fn new(quorum: Quorum) -> Self {
        Self(vec![None; quorum.nodes()])
    }

    /// Keeps the first of a node: it stores one record, and if it forgot that it lost its memory.
    pub(super) fn note(&mut self, node: usize, record: &Record) {
        self.0[node].get_or_insert_with(|| record.clone());
    }

    /// Returns the nodes that have the record of an execution.
    pub(super) fn of(&self, execution: ExecutionId) -> NodeSet {
        let has_it = |record: &Record| record.execution() == execution;
        which(&self.0, |copy| copy.as_ref().is_some_and(has_it)).collect()
    }

    /// Returns the nodes that are not known to have a record.
    pub(super) fn without(&self) -> NodeSet {
        which(&self.0, Option::is_none).collect()
    }

    /// Returns the record with the most copies; among equals, the one that is preferred. Of its copies, a whole one: it
    /// needs no fetch.
    pub(super) fn leading<P: Ord>(&self, preference: impl Fn(&Record) -> P) -> Option<&Record> {
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
