//! What is left to do with a record: to write it to a majority, and then to the rest.

use std::time::Duration;

use crate::protocol::once::{LookRound, OnceRound, RecordRound, RecordStep};
use crate::protocol::quorum::NodeSet;
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
    /// Returns the nodes that have not answered the request under way, and whether it may be decided before they have.
    pub(super) fn open_request(&self) -> (NodeSet, bool) {
        match &self.step {
            FinishStep::Writing { round, .. } => (round.silent(), round.step() == RecordStep::Wait),
            FinishStep::Looking { round, .. } => (round.silent(), true),
            FinishStep::Replaying(round) => (round.acquiring().unanswered(), false),
            FinishStep::ToppingUp(silent) => (*silent, false),
            FinishStep::ReadingLeader | FinishStep::Repairing | FinishStep::ReadingReplay(_) => {
                (NodeSet::default(), false)
            }
        }
    }
}
