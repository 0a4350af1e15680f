//! The states of the model of layouts in change, and its events.

use crate::layouts::bounds::{CLIENTS, GROUPS};
use crate::space::{self, Call, Told};

/// The requests of one client to one node. There are three second phases.
pub(crate) const ACQUIRE: usize = 0;
pub(crate) const CONFIRM: usize = 1;
pub(crate) const RAISE: usize = 4;
pub(crate) const EXTEND: usize = 5;
pub(crate) const RELEASE: usize = 6;
pub(crate) const CALLS: usize = 7;

/// The present layout ended so long ago that clients of the next one may begin.
pub(crate) const LONG_AGO: u8 = u8::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State<const NODES: usize> {
    pub(crate) now: u8,
    /// Those of the present group, and then those of the next one.
    pub(crate) nodes: [Column; NODES],
    pub(crate) clients: [Client; CLIENTS],
    /// Since when no client of the present layout begins any more; 0 if they still do.
    pub(crate) ended: u8,
    pub(crate) extensions: u8,
    pub(crate) repeats: u8,
    /// The highest token that a holder had in each group.
    pub(crate) highest: [u8; GROUPS],
    /// A holder had no higher token than one before it: in a group of its own, or in any.
    pub(crate) is_behind_its_group: bool,
    pub(crate) is_behind_any: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Column {
    pub(crate) store: u32,
    pub(crate) calls: [[Call; CALLS]; CLIENTS],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Client {
    pub(crate) stage: Stage,
    /// Its lock in each group.
    pub(crate) leases: [Lease; GROUPS],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Stage {
    #[default]
    Idle,
    Locking,
    Holding,
    /// Its lock is no more to be relied on, or would not be if it still came.
    Late,
    /// It has released, or given up.
    Gone,
    /// It has given up because its second group refused it.
    Refused,
}

/// The lock of a client in one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Lease {
    pub(crate) phase: Phase,
    pub(crate) began: u8,
    /// The round that is under way.
    pub(crate) round: u32,
    pub(crate) token: u8,
    /// The tick at which it is no more to be relied on.
    pub(crate) until: u8,
    /// What its requests say: `ACQUIRE`, the second phases, an extension, the raise.
    pub(crate) proposal: u8,
    pub(crate) targets: [u8; RAISE - CONFIRM],
    pub(crate) extended: u8,
    pub(crate) raised: u8,
    /// When the extension or the raise began.
    pub(crate) extended_at: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Phase {
    #[default]
    None,
    Acquiring,
    Had,
    Extending,
    Raising,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    Tick,
    /// No client of the present layout begins any more.
    EndOld,
    Begin {
        client: usize,
        group: usize,
        /// By how much its clock is ahead.
        ahead: u8,
    },
    /// Sends an `ACQUIRE` again.
    Repeat {
        client: usize,
        node: usize,
    },
    Run {
        client: usize,
        node: usize,
        call: usize,
    },
    Decide {
        client: usize,
        group: usize,
        told: Vec<Told>,
        step: space::Step,
    },
    Raise {
        client: usize,
        group: usize,
        token: u8,
    },
    Extend {
        client: usize,
        group: usize,
    },
    Release {
        client: usize,
        is_refused: bool,
    },
}

impl Lease {
    /// Whether the client has the lock in this group, as long as it is valid.
    pub(crate) fn is_had(&self) -> bool {
        matches!(self.phase, Phase::Had | Phase::Extending | Phase::Raising)
    }

    pub(crate) fn is_in_round(&self) -> bool {
        matches!(
            self.phase,
            Phase::Acquiring | Phase::Extending | Phase::Raising
        )
    }
}

/// Whether a node may still carry out a request.
pub(crate) fn may_run(call: Call) -> bool {
    matches!(call, Call::Sent | Call::Deaf)
}
