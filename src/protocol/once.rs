//! Executing once: a lock whose outcome is recorded, and replayed to whoever asks again.
//!
//! Like the rounds of a lock, these know no clock and send nothing. What they add to them, and why:
//!
//! * A record counts when a majority of the nodes has it. Replaying what a minority has could answer
//!   differently to the next who asks, or let it execute again; so it is first written to a majority.
//! * A record is written once, and only where the writer was the last to be granted the key. A record
//!   that is written anywhere else could miss the node that grants the key to the next.
//! * Whoever sees no record in a majority of grants may execute: a record that a majority had would
//!   have been seen.

use crate::protocol::message::Reply;
use crate::protocol::quorum::Quorum;
use crate::protocol::record::{ExecutionId, Fingerprint, Record};
use crate::protocol::round::{AcquireRound, AcquireStep, Answer, Refusal};

/// The acquisition of a key whose outcome is recorded.
///
/// It is [`AcquireRound`] until a node answers with a record; then it finds out whether that counts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct OnceRound {
    quorum: Quorum,
    asked_for: Fingerprint,
    acquiring: AcquireRound,
    nodes: Vec<Node>,
    repairing: bool,
}

/// What is known of one node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Node {
    record: Option<Record>,
    /// Whether it answered the `ACQUIRE`, or was given up.
    answered: bool,
    /// Whether it was sent a record and has not answered.
    repairing: bool,
    held_for_another_request: bool,
    intended: bool,
}

/// What follows from the answers so far.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum OnceStep {
    /// Nothing is decided; wait for more answers.
    Wait,
    /// Send `CONFIRM` with this token to the nodes of [`OnceRound::unconfirmed`].
    Confirm(u64),
    /// A majority granted the key with this token and none of them has a record: execute, unless one
    /// more answer with a record comes before that, or the validity is over. Final otherwise.
    ///
    /// Until the execution begins, every answer that comes in has to be given to the round.
    Execute(u64),
    /// A minority has this record: send it as `RECORD` to the nodes of [`OnceRound::repairers`], after
    /// looking at one that has it for what is missing if it is not whole.
    Repair(Record),
    /// A majority has this record. Final.
    Replay(Record),
    /// The key was used for another request. Final.
    OtherRequest,
    /// A minority has a record, and it cannot be written to more nodes now. Final.
    Undecided,
    /// There are several records, none of which a majority will ever have: it was executed more than
    /// once. Final.
    Conflicting,
    /// Somebody may have executed and left no record, or one that a majority cannot be given. Final.
    Unknown,
    /// The key cannot be had in this round, and no record was seen. Final.
    Refused(Refusal),
}

impl OnceRound {
    /// A round in which every node has just been sent `ACQUIRE`.
    #[must_use]
    pub fn new(quorum: Quorum, asked_for: Fingerprint) -> Self {
        Self {
            quorum,
            asked_for,
            acquiring: AcquireRound::new(quorum),
            nodes: vec![Node::default(); quorum.nodes()],
            repairing: false,
        }
    }

    /// Returns the part of the round that acquires the lock.
    #[must_use]
    pub fn acquiring(&self) -> &AcquireRound {
        &self.acquiring
    }

    /// Returns the number of the second phase that is under way; 0 while there is none.
    #[must_use]
    pub fn step(&self) -> u8 {
        self.acquiring.step()
    }

    /// Takes the answer of `node` to the `ACQUIRE`.
    pub fn on_acquire(&mut self, node: usize, answer: &Answer) -> OnceStep {
        self.nodes[node].answered = true;
        self.note(node, answer);
        let step = self.acquiring.on_acquire(node, answer);
        self.decide(step)
    }

    /// Takes the answer of `node` to the `CONFIRM` of second phase `step`.
    pub fn on_confirm(&mut self, node: usize, step: u8, answer: &Answer) -> OnceStep {
        // Also of an earlier phase: a record stays.
        self.note(node, answer);
        let step = self.acquiring.on_confirm(node, step, answer);
        self.decide(step)
    }

    /// Takes the answer of `node` to a `CONFIRM` that extends the granted lock before the execution has
    /// begun. Only a record matters in it: the grant stands.
    pub fn on_extension(&mut self, node: usize, answer: &Answer) -> OnceStep {
        self.note(node, answer);
        self.decide(AcquireStep::Wait)
    }

    /// Takes the answer of `node` to the `RECORD` of a repair.
    pub fn on_record(&mut self, node: usize, answer: &Answer) -> OnceStep {
        self.note(node, answer);
        self.nodes[node].repairing = false;
        self.decide(AcquireStep::Wait)
    }

    /// Returns the nodes that the `CONFIRM` of the current step goes to.
    pub fn unconfirmed(&self) -> impl Iterator<Item = usize> + '_ {
        self.acquiring.unconfirmed()
    }

    /// Returns the nodes that a record is to be written to.
    pub fn repairers(&self) -> impl Iterator<Item = usize> + '_ {
        self.which(|node| node.repairing)
    }

    /// Returns the nodes that have the record of an execution.
    pub fn holders(&self, execution: ExecutionId) -> impl Iterator<Item = usize> + '_ {
        self.which(move |node| node.has(execution))
    }

    /// Returns the record with the most copies, if there is one.
    #[must_use]
    pub fn record(&self) -> Option<Record> {
        self.best()
    }

    /// Returns the nodes that are not known to have a record.
    pub fn without_record(&self) -> impl Iterator<Item = usize> + '_ {
        self.which(|node| node.record.is_none())
    }

    /// Returns whether some node has a record.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        self.nodes.iter().any(|node| node.record.is_some())
    }

    /// Returns the nodes from which an answer is outstanding that would matter.
    pub fn silent(&self) -> impl Iterator<Item = usize> + '_ {
        let (repairing, recorded) = (self.repairing, self.is_recorded());
        let of_lock = (!repairing && !recorded).then(|| self.acquiring.silent());
        let of_record = self.which(move |node| match repairing {
            true => node.repairing,
            false => recorded && !node.answered,
        });
        of_lock.into_iter().flatten().chain(of_record)
    }

    /// Returns the nodes whose answer to the `ACQUIRE` is outstanding.
    pub fn unanswered(&self) -> impl Iterator<Item = usize> + '_ {
        self.which(|node| !node.answered)
    }

    /// Returns how many nodes have answered exactly `token` so far.
    #[must_use]
    pub fn acknowledged(&self, token: u64) -> usize {
        self.acquiring.acknowledged(token)
    }

    /// Returns whether `node` certainly does not hold the lock for this attempt.
    #[must_use]
    pub fn is_refused_by(&self, node: usize) -> bool {
        self.acquiring.is_refused_by(node)
    }

    fn note(&mut self, node: usize, answer: &Answer) {
        let Answer::Replied(reply) = answer else {
            return;
        };
        let node = &mut self.nodes[node];
        match reply {
            // The first: a record is written once, and a node that forgot it lost its memory.
            Reply::Done { record, .. } if node.record.is_none() => {
                node.record = Some(record.clone());
            }
            Reply::Held { fingerprint, .. } => {
                let other = fingerprint.is_some_and(|held_for| held_for != self.asked_for);
                node.held_for_another_request = other;
            }
            Reply::Intended => node.intended = true,
            _ => {}
        }
    }

    fn decide(&mut self, step: AcquireStep) -> OnceStep {
        let Some(best) = self.best() else {
            return self.as_lock(step);
        };
        let copies = self.holders(best.execution()).count();
        let step = if copies >= self.quorum.majority() {
            OnceStep::Replay(best)
        } else if self.repairing {
            if self.repairers().next().is_some() {
                return OnceStep::Wait;
            }
            self.beyond_repair()
        } else {
            if self.unanswered().next().is_some() {
                return OnceStep::Wait;
            }
            return self.repair(best, copies);
        };
        self.for_whoever_asked(step)
    }

    /// Without a record this is the acquisition of a lock.
    fn as_lock(&self, step: AcquireStep) -> OnceStep {
        match step {
            AcquireStep::Wait => OnceStep::Wait,
            AcquireStep::Confirm(token) => OnceStep::Confirm(token),
            AcquireStep::Granted(token) => OnceStep::Execute(token),
            AcquireStep::Refused(refusal) => {
                let (majority, nodes) = (self.quorum.majority(), self.quorum.nodes());
                let intended = self.which(|node| node.intended).count();
                let others = self.which(|node| node.held_for_another_request).count();
                if nodes - intended < majority {
                    OnceStep::Unknown
                } else if others >= majority {
                    OnceStep::OtherRequest
                } else {
                    OnceStep::Refused(refusal)
                }
            }
        }
    }

    /// Writes the record to the nodes that granted the key to this attempt, if that helps.
    fn repair(&mut self, record: Record, copies: usize) -> OnceStep {
        self.repairing = true;
        let granted: Vec<usize> = self
            .which(|node| node.record.is_none())
            .filter(|node| self.acquiring.is_granted_by(*node))
            .collect();
        if copies + granted.len() < self.quorum.majority() {
            let step = self.beyond_repair();
            return self.for_whoever_asked(step);
        }
        for node in granted {
            self.nodes[node].repairing = true;
        }
        OnceStep::Repair(record)
    }

    fn beyond_repair(&self) -> OnceStep {
        let without = self.which(|node| node.record.is_none()).count();
        // Of an execution that took none of its intents back: no repair will ever be granted there.
        let closed = self
            .which(|node| node.record.is_none() && node.intended)
            .count();
        let most = self
            .best()
            .map(|best| self.holders(best.execution()).count());
        let most = most.unwrap_or(0);
        if most + without < self.quorum.majority() {
            OnceStep::Conflicting
        } else if most + without - closed < self.quorum.majority() {
            OnceStep::Unknown
        } else {
            OnceStep::Undecided
        }
    }

    fn for_whoever_asked(&self, step: OnceStep) -> OnceStep {
        match self.best() {
            Some(record) if record.fingerprint() != self.asked_for => OnceStep::OtherRequest,
            _ => step,
        }
    }

    /// Returns the record with the most copies; of two with as many, everybody takes the same.
    fn best(&self) -> Option<Record> {
        let records = self.nodes.iter().filter_map(|node| node.record.as_ref());
        let best = records.max_by_key(|record| {
            let execution = record.execution();
            // Whole rather than not: then nobody need look for the rest.
            (
                self.holders(execution).count(),
                execution,
                record.is_whole(),
            )
        });
        best.cloned()
    }

    fn which(&self, matches: impl Fn(&Node) -> bool) -> impl Iterator<Item = usize> {
        self.nodes
            .iter()
            .enumerate()
            .filter(move |(_, node)| matches(node))
            .map(|(index, _)| index)
    }
}

impl Node {
    fn has(&self, execution: ExecutionId) -> bool {
        let record = self.record.as_ref();
        record.is_some_and(|record| record.execution() == execution)
    }
}

/// The recording of an outcome: `RECORD` at all nodes, from whoever executed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RecordRound {
    quorum: Quorum,
    execution: ExecutionId,
    nodes: Vec<Recording>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Recording {
    Silent,
    Recorded,
    Failed,
}

/// What follows from the answers to a recording so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RecordStep {
    /// Nothing is decided; wait for more answers.
    Wait,
    /// A majority has the record: answer, and send `TOPUP` to the nodes of [`RecordRound::without`].
    Recorded,
    /// A majority will not have it by this round: look at all nodes what they have.
    Missed,
}

impl RecordRound {
    /// A round in which every node has just been sent `RECORD`.
    #[must_use]
    pub fn new(quorum: Quorum, execution: ExecutionId) -> Self {
        Self {
            quorum,
            execution,
            nodes: vec![Recording::Silent; quorum.nodes()],
        }
    }

    /// Takes the answer of `node`.
    pub fn on_record(&mut self, node: usize, answer: &Answer) -> RecordStep {
        if self.nodes[node] == Recording::Silent {
            self.nodes[node] = match answer {
                Answer::Replied(Reply::Done { record, .. })
                    if record.execution() == self.execution =>
                {
                    Recording::Recorded
                }
                Answer::Replied(_) | Answer::Failed => Recording::Failed,
            };
        }
        let (majority, recorded) = (self.quorum.majority(), self.count(Recording::Recorded));
        if recorded >= majority {
            RecordStep::Recorded
        } else if recorded + self.count(Recording::Silent) < majority {
            RecordStep::Missed
        } else {
            RecordStep::Wait
        }
    }

    /// Returns the nodes that have not answered.
    pub fn silent(&self) -> impl Iterator<Item = usize> + '_ {
        self.which(|node| node == Recording::Silent)
    }

    /// Returns the nodes that are not known to have the record.
    pub fn without(&self) -> impl Iterator<Item = usize> + '_ {
        self.which(|node| node != Recording::Recorded)
    }

    fn count(&self, state: Recording) -> usize {
        self.which(|node| node == state).count()
    }

    fn which(&self, matches: impl Fn(Recording) -> bool) -> impl Iterator<Item = usize> {
        self.nodes
            .iter()
            .enumerate()
            .filter(move |(_, node)| matches(**node))
            .map(|(index, _)| index)
    }
}

/// A look at all nodes for a record, by whoever executed and could not record.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LookRound {
    quorum: Quorum,
    nodes: Vec<Looking>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Looking {
    Silent,
    Without,
    With(Record),
}

/// What follows from the answers to a look so far.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LookStep {
    /// Nothing is decided; wait for more answers.
    Wait,
    /// A majority has this record: answer it, whoever executed. Final.
    Found(Record),
    /// A minority has a record: send [`LookRound::leading`] as `RECORD` with the same owner, whose lock may
    /// still be there. If that is missed, acquire once more, with a new owner, to repair it, and execute in
    /// no case. Final.
    Minority,
    /// No node that answered has a record: answer the own outcome as not recorded. Final.
    Nothing,
}

impl LookRound {
    /// A round in which every node has just been sent `LOOK`.
    #[must_use]
    pub fn new(quorum: Quorum) -> Self {
        let nodes = vec![Looking::Silent; quorum.nodes()];
        Self { quorum, nodes }
    }

    /// Takes the answer of `node`.
    pub fn on_look(&mut self, node: usize, answer: &Answer) -> LookStep {
        if self.nodes[node] == Looking::Silent {
            self.nodes[node] = match answer {
                Answer::Replied(Reply::Done { record, .. }) => Looking::With(record.clone()),
                Answer::Replied(_) | Answer::Failed => Looking::Without,
            };
        }
        let records = || self.nodes.iter().filter_map(Looking::record);
        for record in records() {
            let same = records().filter(|other| other.execution() == record.execution());
            if same.count() >= self.quorum.majority() {
                return LookStep::Found(record.clone());
            }
        }
        if self.silent().next().is_some() {
            LookStep::Wait
        } else if records().next().is_some() {
            LookStep::Minority
        } else {
            LookStep::Nothing
        }
    }

    /// Returns the record that most nodes have, and of several that of the `own` execution.
    #[must_use]
    pub fn leading(&self, own: ExecutionId) -> Option<&Record> {
        let records = || self.nodes.iter().filter_map(Looking::record);
        records().max_by_key(|record| {
            let id = record.execution();
            let copies = records().filter(|other| other.execution() == id).count();
            (copies, id == own)
        })
    }

    /// Returns the nodes that have not answered.
    pub fn silent(&self) -> impl Iterator<Item = usize> + '_ {
        self.nodes
            .iter()
            .enumerate()
            .filter(|(_, node)| **node == Looking::Silent)
            .map(|(index, _)| index)
    }
}

impl Looking {
    fn record(&self) -> Option<&Record> {
        match self {
            Self::With(record) => Some(record),
            Self::Silent | Self::Without => None,
        }
    }
}
