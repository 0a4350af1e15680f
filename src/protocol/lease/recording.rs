//! What is left to do with a record: to write it to a majority, and then to the rest.

use std::time::Duration;

use crate::protocol::lease::io::Awaited;
use crate::protocol::lease::once::{OnceEvent, Recorded};
use crate::protocol::once::{LookRound, OnceRound, RecordRound};
use crate::protocol::quorum::{NodeSet, Quorum};
use crate::protocol::record::Record;

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
        round: RecordRound,
        is_decided: bool,
        /// Whether the nodes have been asked for their records before.
        is_repair: bool,
    },
    /// `LOOK` was sent to all nodes.
    Looking(LookRound),
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
    pub(super) fn silent(&self) -> NodeSet {
        match &self.step {
            FinishStep::Writing { round, .. } => round.silent().collect(),
            FinishStep::Looking(round) => round.silent().collect(),
            FinishStep::Replaying(round) => round.unanswered().collect(),
            FinishStep::ToppingUp(silent) => *silent,
            FinishStep::ReadingLeader | FinishStep::Repairing | FinishStep::ReadingReplay(_) => {
                NodeSet::default()
            }
        }
    }

    pub(super) fn overdue(&self, now: Duration) -> NodeSet {
        let silent = (self.due <= now).then(|| self.silent());
        silent.unwrap_or_default()
    }

    pub(super) fn poll_timeout(&self) -> Option<Duration> {
        (!self.silent().is_empty()).then_some(self.due)
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    pub(super) fn awaited(&self, quorum: Quorum) -> Option<Awaited> {
        let (number, silent) = (self.number, self.silent().len());
        let is_undecided = match &self.step {
            FinishStep::Writing { is_decided, .. } => !is_decided,
            FinishStep::Looking(_) => true,
            _ => false,
        };
        let answers = match is_undecided {
            true => (quorum.decisive() + silent).saturating_sub(quorum.nodes()),
            false => silent,
        };
        (silent > 0).then_some(Awaited { number, answers })
    }

    /// Returns how the recording went if a majority has this record.
    pub(super) fn found(&self, record: Record) -> OnceEvent {
        let own = self.own.as_ref().map(Record::execution);
        let outcome = match own == Some(record.execution()) {
            true => Recorded::Yes,
            false => Recorded::Another(record.clone()),
        };
        let record = Some(record);
        OnceEvent::Recorded { outcome, record }
    }
}
