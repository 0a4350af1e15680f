//! Rounds: the votes on the extension and the release of a lock, and on the record of an execution.
//!
//! They know no clock and send nothing, like the round that [acquires](crate::protocol::acquire).

use crate::protocol::message::{Answer, Reply};
use crate::protocol::quorum::{NodeSet, Quorum, which};
use crate::protocol::record::{ExecutionId, Record};

/// A vote of all nodes: whether they extend a held lock, by `CONFIRM` with its token, or keep a record, by `RECORD` of the
/// owner that executed.
///
/// Every extension has a round of its own: an answer to an older extension must not count for a
/// newer one, because it may confirm an older expiry.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct VoteRound {
    quorum: Quorum,
    sought: Sought,
    silent: NodeSet,
    /// The nodes that have answered what is sought.
    agreed: NodeSet,
    /// The nodes at which the lock no longer belongs to this owner.
    gone: NodeSet,
}

/// What a node answers that agrees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sought {
    /// To a `CONFIRM` with this token, exactly it; 0 without fencing.
    Token(u64),
    /// To a `RECORD`, the record of this execution.
    Record(ExecutionId),
}

/// The next step of a vote or a release, after the answers so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum VoteStep {
    /// Undecided, or decided before: wait for more answers.
    Wait,
    /// A majority has extended the lock to exactly the token; or has the record: respond, and send `TOPUP` to the nodes of
    /// [`VoteRound::without`]; or no longer holds the lock for this owner: other owners can acquire it.
    Agreed,
    /// A majority answered that the lock no longer belongs to this owner, or did not before its release. Final, and not of
    /// a record.
    Lost,
    /// Neither can happen any more: the old validity continues, or a [`LookRound`] follows, or the lock ends by its ttl.
    Missed {
        /// The number of nodes that answered, or have confirmed the release.
        reached: usize,
    },
}

impl VoteRound {
    /// Creates a round whose request was sent to every node.
    pub fn new(quorum: Quorum, sought: Sought) -> Self {
        Self {
            quorum,
            sought,
            silent: NodeSet::all(quorum),
            agreed: NodeSet::default(),
            gone: NodeSet::default(),
        }
    }

    /// Takes the answer of `node`.
    pub fn on_answer(&mut self, node: usize, answer: &Answer) -> VoteStep {
        if !self.silent.remove(node) {
            return VoteStep::Wait;
        }
        if let Answer::Replied(reply) = answer {
            match (self.sought, reply) {
                (Sought::Token(token), Reply::At(number)) if *number == token => {
                    self.agreed.insert(node)
                }
                // A record has replaced the lock.
                (Sought::Token(_), Reply::At(_) | Reply::Lost | Reply::Done { .. }) => {
                    self.gone.insert(node)
                }
                (Sought::Record(own), Reply::Done { record, .. }) if record.execution() == own => {
                    self.agreed.insert(node)
                }
                _ => {}
            }
        }
        self.step()
    }

    /// Returns the step after the answers so far.
    pub fn step(&self) -> VoteStep {
        let (agreed, gone) = (self.agreed.len(), self.gone.len());
        let majority = self.quorum.majority();
        if agreed >= majority {
            VoteStep::Agreed
        } else if gone >= majority {
            VoteStep::Lost
        } else if agreed.max(gone) + self.silent.len() < majority {
            VoteStep::Missed {
                reached: agreed + gone,
            }
        } else {
            VoteStep::Wait
        }
    }

    /// Returns the nodes that have not answered.
    pub fn silent(&self) -> NodeSet {
        self.silent
    }

    /// Returns the nodes that are not known to agree.
    pub fn without(&self) -> NodeSet {
        NodeSet::all(self.quorum).without(self.agreed)
    }
}

/// The release of a lock: `RELEASE` at every node that may hold it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ReleaseRound {
    quorum: Quorum,
    /// The nodes that have not answered.
    silent: NodeSet,
    /// The nodes that are silent or have failed.
    unreleased: NodeSet,
    /// The nodes that held nothing for this owner.
    gone: NodeSet,
}

impl ReleaseRound {
    /// Creates a round whose `RELEASE` was sent to these nodes. The others need none.
    pub fn new(quorum: Quorum, nodes: NodeSet) -> Self {
        Self {
            quorum,
            silent: nodes,
            unreleased: nodes,
            gone: NodeSet::default(),
        }
    }

    /// Takes the answer of `node`.
    pub fn on_release(&mut self, node: usize, answer: &Answer) {
        self.silent.remove(node);
        match answer {
            // Also after a failure: the release of an overdue node goes on.
            Answer::Replied(Reply::Released) => {
                self.unreleased.remove(node);
            }
            Answer::Replied(Reply::Lost) if self.unreleased.remove(node) => self.gone.insert(node),
            Answer::Replied(_) | Answer::Failed | Answer::NeverSent => {}
        }
    }

    /// Returns the step after the answers so far.
    pub fn step(&self) -> VoteStep {
        let majority = self.quorum.majority();
        let (reached, silent, gone) = (self.released(), self.silent.len(), self.gone.len());
        if gone >= majority {
            VoteStep::Lost
        } else if reached >= majority && gone + silent < majority {
            VoteStep::Agreed
        } else if reached + silent < majority {
            VoteStep::Missed { reached }
        } else {
            VoteStep::Wait
        }
    }

    /// Returns the nodes that may still hold the lock for this owner.
    pub fn unreleased(&self) -> NodeSet {
        self.unreleased
    }

    /// Returns the nodes that have not answered.
    pub fn silent(&self) -> NodeSet {
        self.silent
    }

    /// Returns the number of nodes that have confirmed the release.
    pub fn released(&self) -> usize {
        self.quorum.nodes() - self.unreleased.len()
    }
}

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
    pub fn is_memorable(&self) -> bool {
        matches!(self, Self::Recorded(_))
    }
}

/// The record, or the head of it, that each node has answered with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
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
    pub fn new(quorum: Quorum, own: ExecutionId) -> Self {
        Self {
            majority: quorum.majority(),
            own,
            silent: NodeSet::all(quorum),
            copies: Copies::new(quorum),
        }
    }

    /// Returns the nodes that have not answered.
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
