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

use crate::protocol::message::Reply;
use crate::protocol::quorum::{NodeSet, Quorum, which};
use crate::protocol::record::{ExecutionId, Fingerprint, Record};
use crate::protocol::round::{AcquireRound, AcquireStep, Answer, Refusal};

/// The acquisition of a key whose outcome is recorded.
///
/// It works like [`AcquireRound`] until a node answers with a record; then it decides whether that counts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct OnceRound {
    quorum: Quorum,
    fingerprint: Fingerprint,
    acquiring: AcquireRound,
    nodes: Vec<NodeAnswers>,
    is_repairing: bool,
}

/// The state of one node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct NodeAnswers {
    record: Option<Record>,
    /// Whether it answered the `ACQUIRE` or failed.
    has_answered: bool,
    /// Whether a `RECORD` to it is outstanding.
    is_repairing: bool,
    is_held_for_another_request: bool,
    has_intent: bool,
}

/// The next step, after the answers so far.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum OnceStep {
    /// Undecided: wait for more answers.
    Wait,
    /// Send `CONFIRM` with this token to the nodes of [`OnceRound::unconfirmed`].
    Confirm(u64),
    /// A majority granted the key with this token and none of them has a record: execute, unless another
    /// answer with a record arrives before that, or the validity is over. Final otherwise.
    ///
    /// Until the execution begins, pass every further answer to the round.
    Execute(u64),
    /// A minority has this record: send it as `RECORD` to the nodes of [`OnceRound::repairers`]. If it is not
    /// whole, first fetch the rest from a node that has it.
    Repair(Record),
    /// A majority has this record. Final.
    Replay(Record),
    /// The key was used for another request. Final.
    OtherRequest,
    /// A minority has a record, and no more nodes can store it now. Final.
    Undecided,
    /// There are several records, and none can reach a majority: the request was executed more than
    /// once. Final.
    Conflicting,
    /// An earlier owner may have executed and left no record, or one that cannot reach a majority. Final.
    Unknown,
    /// This round cannot acquire the key, and saw no record. Final.
    Refused(Refusal),
}

impl OnceRound {
    /// Creates a round whose `ACQUIRE` was sent to every node.
    #[must_use]
    pub fn new(quorum: Quorum, fingerprint: Fingerprint) -> Self {
        Self {
            quorum,
            fingerprint,
            acquiring: AcquireRound::new(quorum),
            nodes: vec![NodeAnswers::default(); quorum.nodes()],
            is_repairing: false,
        }
    }

    /// Returns the part of the round that acquires the lock.
    #[must_use]
    pub fn acquiring(&self) -> &AcquireRound {
        &self.acquiring
    }

    /// Returns the number of the current second phase; 0 before the first.
    #[must_use]
    pub fn step(&self) -> u8 {
        self.acquiring.step()
    }

    /// Takes the answer of `node` to the `ACQUIRE`.
    pub fn on_acquire(&mut self, node: usize, answer: &Answer) -> OnceStep {
        self.nodes[node].has_answered = true;
        self.note(node, answer);
        let step = self.acquiring.on_acquire(node, answer);
        self.decide(step)
    }

    /// Takes the answer of `node` to the `CONFIRM` of second phase `step`.
    pub fn on_confirm(&mut self, node: usize, step: u8, answer: &Answer) -> OnceStep {
        // An answer to an earlier phase counts, too: a record stays.
        self.note(node, answer);
        let step = self.acquiring.on_confirm(node, step, answer);
        self.decide(step)
    }

    /// Takes the answer of `node` to a `CONFIRM` that extends the granted lock before the execution
    /// begins. Only a record in it matters: the grant stands.
    pub fn on_extension(&mut self, node: usize, answer: &Answer) -> OnceStep {
        self.note(node, answer);
        self.decide(AcquireStep::Wait)
    }

    /// Takes the answer of `node` to the `RECORD` of a repair.
    pub fn on_record(&mut self, node: usize, answer: &Answer) -> OnceStep {
        self.note(node, answer);
        self.nodes[node].is_repairing = false;
        self.decide(AcquireStep::Wait)
    }

    /// Returns the targets of the `CONFIRM` of the current step.
    #[must_use]
    pub fn unconfirmed(&self) -> NodeSet {
        self.acquiring.unconfirmed()
    }

    /// Returns the targets of the `RECORD` of a repair.
    pub fn repairers(&self) -> impl Iterator<Item = usize> + '_ {
        self.which(|node| node.is_repairing)
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

    /// Returns the nodes with a relevant outstanding answer.
    pub fn silent(&self) -> impl Iterator<Item = usize> + '_ {
        let (is_repairing, is_recorded) = (self.is_repairing, self.is_recorded());
        let of_lock = (!is_repairing && !is_recorded).then(|| self.acquiring.silent().iter());
        let of_record = self.which(move |node| match is_repairing {
            true => node.is_repairing,
            false => is_recorded && !node.has_answered,
        });
        of_lock.into_iter().flatten().chain(of_record)
    }

    /// Returns the nodes whose answer to the `ACQUIRE` is outstanding.
    pub fn unanswered(&self) -> impl Iterator<Item = usize> + '_ {
        self.which(|node| !node.has_answered)
    }

    /// Returns the nodes that have answered exactly `token` so far.
    #[must_use]
    pub fn acknowledged(&self, token: u64) -> NodeSet {
        self.acquiring.acknowledged(token)
    }

    fn note(&mut self, node: usize, answer: &Answer) {
        let Answer::Replied(reply) = answer else {
            return;
        };
        let node = &mut self.nodes[node];
        match reply {
            // Keep the first: a node stores one record, and a node that forgot it lost its memory.
            Reply::Done { record, .. } if node.record.is_none() => {
                node.record = Some(record.clone());
            }
            Reply::Held { fingerprint, .. } => {
                let other = fingerprint.is_some_and(|held_for| held_for != self.fingerprint);
                node.is_held_for_another_request = other;
            }
            Reply::Intended => node.has_intent = true,
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
        } else if self.is_repairing {
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
        self.or_other_request(step)
    }

    /// Without a record, the step is that of a lock's acquisition.
    fn as_lock(&self, step: AcquireStep) -> OnceStep {
        match step {
            AcquireStep::Wait => OnceStep::Wait,
            AcquireStep::Confirm(token) => OnceStep::Confirm(token),
            AcquireStep::Granted(token) => OnceStep::Execute(token),
            AcquireStep::Refused(refusal) => {
                let (majority, nodes) = (self.quorum.majority(), self.quorum.nodes());
                let intended = self.which(|node| node.has_intent).count();
                let others = self.which(|node| node.is_held_for_another_request).count();
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

    /// Writes the record to the nodes that granted this attempt the key, if they complete a majority.
    fn repair(&mut self, record: Record, copies: usize) -> OnceStep {
        self.is_repairing = true;
        let granted: Vec<usize> = self
            .which(|node| node.record.is_none())
            .filter(|node| self.acquiring.granted().contains(*node))
            .collect();
        if copies + granted.len() < self.quorum.majority() {
            let step = self.beyond_repair();
            return self.or_other_request(step);
        }
        for node in granted {
            self.nodes[node].is_repairing = true;
        }
        OnceStep::Repair(record)
    }

    fn beyond_repair(&self) -> OnceStep {
        let without = self.which(|node| node.record.is_none()).count();
        // These nodes have the intent of an unrecorded execution, and will never grant a repair.
        let closed = self
            .which(|node| node.record.is_none() && node.has_intent)
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

    fn or_other_request(&self, step: OnceStep) -> OnceStep {
        match self.best() {
            Some(record) if record.fingerprint() != self.fingerprint => OnceStep::OtherRequest,
            _ => step,
        }
    }

    /// Returns the record with the most copies; among equals, all clients choose the same.
    fn best(&self) -> Option<Record> {
        let records = self.nodes.iter().filter_map(|node| node.record.as_ref());
        let best = records.max_by_key(|record| {
            let execution = record.execution();
            // Prefer a whole record: it needs no fetch.
            (
                self.holders(execution).count(),
                execution,
                record.is_whole(),
            )
        });
        best.cloned()
    }

    fn which(&self, matches: impl Fn(&NodeAnswers) -> bool) -> impl Iterator<Item = usize> {
        which(&self.nodes, matches)
    }
}

impl NodeAnswers {
    fn has(&self, execution: ExecutionId) -> bool {
        let record = self.record.as_ref();
        record.is_some_and(|record| record.execution() == execution)
    }
}

/// The recording of an outcome: `RECORD` at all nodes, by the owner that executed.
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
        which(&self.nodes, move |node| matches(*node))
    }
}

/// The search for a record at all nodes, by an owner that executed and could not record.
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

/// The next step of a search, after the answers so far.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LookStep {
    /// Undecided: wait for more answers.
    Wait,
    /// A majority has this record: respond with it, even if another owner executed. Final.
    Found(Record),
    /// A minority has a record: send [`LookRound::leading`] as `RECORD` under the old owner value first,
    /// because its grants may still stand. Only if that misses the majority, acquire once with a fresh owner
    /// value to repair the record, and never execute. Final.
    Minority,
    /// No node that answered has a record: respond with the own outcome as not recorded. Final.
    Nothing,
}

impl LookRound {
    /// Creates a round whose `LOOK` was sent to every node.
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

    /// Returns the record that most nodes have; among equals, that of the `own` execution.
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
        which(&self.nodes, |node| *node == Looking::Silent)
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
