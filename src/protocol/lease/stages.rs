//! The stages of a lease, and what each remembers.

use std::time::Duration;

use crate::protocol::lease::io::{ACQUIRE, Loss, OnceSpec, OpenRequest};
use crate::protocol::message::Reply;
use crate::protocol::once::{LookRound, OnceRound, OnceStep, RecordRound, RecordStep};
use crate::protocol::quorum::{NodeSet, Quorum};
use crate::protocol::record::Record;
use crate::protocol::round::{Answer, ExtendRound, ReleaseRound};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum LifeStage {
    Acquiring(Acquiring),
    Holding(Holding),
    Recording(Box<Finish>),
    Releasing(Releasing),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Holding {
    pub(super) token: Option<u64>,
    pub(super) valid_until: Duration,
    pub(super) lost: Option<Loss>,
    pub(super) delivered_at: Option<Duration>,
    /// When to renew the lock next; `None` if it is not, or no longer, renewed.
    pub(super) renew_at: Option<Duration>,
    pub(super) extending: Option<Extending>,
    pub(super) purpose: Purpose,
}

/// What the lock is held for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(super) enum Purpose {
    #[default]
    Lock,
    /// An execution that has not begun.
    Pending(Box<Pending>),
    /// One that has.
    Execution,
}

/// An extension under way.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Extending {
    pub(super) round: ExtendRound,
    pub(super) number: u32,
    /// The time before its request.
    pub(super) began: Duration,
    pub(super) ttl: Duration,
    pub(super) token: Option<u64>,
    /// Whether a holder asked for it.
    pub(super) is_asked: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Releasing {
    pub(super) round: ReleaseRound,
    pub(super) number: u32,
    /// When the silent nodes count as failed.
    pub(super) due: Duration,
    /// Whether a holder waits for the outcome.
    pub(super) is_awaited: bool,
    pub(super) is_settled: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Acquiring {
    pub(super) round: OnceRound,
    /// The number of the current `CONFIRM`.
    pub(super) confirm: Option<u32>,
    /// The number of the `RECORD` of a repair.
    pub(super) repair: Option<u32>,
    /// Until when the nodes may answer the `ACQUIRE`.
    due: Duration,
    /// The nodes that are not connected yet, which may until these later times.
    connecting: Vec<(usize, Duration)>,
    /// The end of all phases together.
    pub(super) deadline: Duration,
}

impl Acquiring {
    /// Creates the attempt whose nodes have until `due` and their patience to answer.
    pub(super) fn new(
        quorum: Quorum,
        once: Option<OnceSpec>,
        due: Duration,
        patience: impl Fn(usize) -> Duration,
    ) -> Self {
        let nodes = (0..quorum.nodes()).map(|node| (node, due + patience(node)));
        let connecting: Vec<_> = nodes.filter(|(_, until)| *until > due).collect();
        let last = connecting.iter().map(|(_, until)| *until).max();
        Self {
            round: OnceRound::new(quorum, once.map(|once| once.fingerprint)),
            confirm: None,
            repair: None,
            due,
            connecting,
            deadline: last.unwrap_or(due),
        }
    }

    pub(super) fn on_answer(&mut self, node: usize, number: u32, answer: &Answer) -> OnceStep {
        if number == ACQUIRE {
            self.round.on_acquire(node, answer)
        } else if self.repair == Some(number) {
            self.round.on_record(node, answer)
        } else if self.confirm == Some(number) {
            let step = self.round.acquiring().step();
            self.round.on_confirm(node, step, answer)
        } else {
            OnceStep::WAIT
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

    /// Returns until when a node may answer the `ACQUIRE`.
    fn due(&self, node: usize) -> Duration {
        let mut connecting = self.connecting.iter();
        let connecting = connecting.find(|(number, _)| *number == node);
        connecting.map_or(self.due, |(_, until)| *until)
    }

    /// Returns until when the last node may answer the `ACQUIRE`.
    pub(super) fn last_due(&self) -> Duration {
        let connecting = self.connecting.iter().map(|(_, until)| *until);
        connecting.max().unwrap_or(self.due)
    }

    /// Returns when the next silent node is overdue.
    pub(super) fn next_due(&self) -> Option<Duration> {
        if self.is_reading() {
            return None;
        }
        match self.is_late_phase() {
            true => Some(self.deadline),
            false => self.round.silent().iter().map(|node| self.due(node)).min(),
        }
    }

    /// Returns the overdue nodes.
    pub(super) fn overdue(&self, now: Duration) -> NodeSet {
        let is_late = |node: &usize| match self.is_late_phase() {
            true => self.deadline <= now,
            false => self.due(*node) <= now,
        };
        self.round.silent().iter().filter(is_late).collect()
    }

    /// Returns whether a phase after the first is under way, which has what is left of the longest time of the first.
    fn is_late_phase(&self) -> bool {
        self.confirm.is_some() || self.repair.is_some()
    }
}

/// A granted execution that has not begun.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Pending {
    /// The granted attempt, which still takes answers.
    pub(super) acquiring: Acquiring,
    pub(super) granted_at: Duration,
    /// The step that follows from a record that arrived since the grant.
    pub(super) step: Option<OnceStep>,
    pub(super) asked_again: bool,
}

impl Pending {
    pub(super) fn new(acquiring: Acquiring, now: Duration) -> Self {
        Self {
            acquiring,
            granted_at: now,
            step: None,
            asked_again: false,
        }
    }

    /// Looks for a record in an answer.
    pub(super) fn on_answer(&mut self, node: usize, number: u32, answer: &Answer) {
        let step = if self.acquiring.counts(number) {
            self.acquiring.on_answer(node, number, answer)
        } else if matches!(answer, Answer::Replied(Reply::Done { .. })) {
            // The answer to an extension of the granted lock.
            self.acquiring.round.on_extension(node, answer)
        } else {
            return;
        };
        let is_decided = step != OnceStep::WAIT;
        if self.acquiring.round.is_recorded() && (self.step.is_none() || is_decided) {
            self.step = Some(step);
        }
    }
}

/// What is left to do with a record: to write it to a majority, and then to the rest.
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
        round: RecordRound,
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
    Replaying(OnceRound),
    /// The rest of the replayed record is being read for the nodes that lack it.
    ReadingReplay(NodeSet),
    /// `TOPUP` was sent to these nodes.
    ToppingUp(NodeSet),
}

impl Finish {
    pub(super) fn open_request(&self) -> OpenRequest {
        let (silent, is_undecided) = match &self.step {
            FinishStep::Writing { round, .. } => (round.silent(), round.step() == RecordStep::Wait),
            FinishStep::Looking { round, .. } => (round.silent(), true),
            FinishStep::Replaying(round) => (round.acquiring().unanswered(), false),
            FinishStep::ToppingUp(silent) => (*silent, false),
            FinishStep::ReadingLeader | FinishStep::Repairing | FinishStep::ReadingReplay(_) => {
                (NodeSet::default(), false)
            }
        };
        OpenRequest {
            number: self.number,
            silent,
            due: self.due,
            is_undecided,
        }
    }
}
