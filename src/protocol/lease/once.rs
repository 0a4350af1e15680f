//! What goes into a lease and comes out of it if something is executed under the lock.

use std::time::Duration;

use crate::protocol::once::Decided;
use crate::protocol::record::{Fingerprint, Record};
use crate::protocol::token::OwnerToken;

/// What a caller that executes asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OnceSpec {
    /// Identifies the request: another request with the same key is refused.
    pub fingerprint: Fingerprint,
    /// Whether it executes if it is granted the key. Otherwise it only finds, and repairs, the record of another.
    pub executes: bool,
}

/// What happened to an execution.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum OnceInput {
    /// The caller asks to begin. To be repeated after an extension that this asked for.
    Begin,
    /// The outcome is to be recorded.
    Record {
        /// The outcome.
        record: Record,
        /// How long to keep it.
        retention: Duration,
    },
    /// The record of an [`Event::Unread`](crate::protocol::lease::Event::Unread) was read; `None` if it cannot be.
    Read(Option<Record>),
    /// What another lease, of a new owner that does not execute, has found.
    Repaired(Decided),
}

/// What the driver tells an execution.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum OnceEvent {
    /// It may begin.
    Begun,
    /// Nothing is to be executed.
    Decided(Decided),
    /// How the recording went.
    Recorded {
        /// Whose outcome counts.
        outcome: Recorded,
        /// The record that a majority has.
        record: Option<Record>,
    },
    /// A minority has a record that this owner cannot repair: another lease is to do it, and [`OnceInput::Repaired`]
    /// follows.
    Unrepaired,
}

/// The outcome of a recording.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Recorded {
    /// A majority of the nodes has the record.
    Yes,
    /// A majority has the record of another execution.
    Another(Record),
    /// No majority of the nodes could be reached, or none of them has a record.
    No,
}

/// What nodes keep under a key: a record, or its head while the rest is to be read from a node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Stored(pub Record);

/// What a caller that executed says about its work when it goes without a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Effect {
    /// Nothing: it may have had an effect.
    #[default]
    Unknown,
    /// It was not begun.
    NotBegun,
    /// It had no effect.
    WithoutEffect,
}

impl OnceSpec {
    /// Returns an owner value of these random bits.
    #[must_use]
    pub fn owner(&self, random: [u8; 16]) -> OwnerToken {
        OwnerToken::with_fingerprint(random, self.fingerprint)
    }
}

impl OnceEvent {
    /// Returns what this tells the next callers of the key: that a majority has a record.
    #[must_use]
    pub fn memo(&self) -> Option<Decided> {
        match self {
            Self::Decided(decided) if decided.is_memorable() => Some(decided.clone()),
            Self::Recorded {
                outcome: Recorded::Yes,
                record,
            } => record.clone().map(Decided::Recorded),
            _ => None,
        }
    }
}

impl Recorded {
    /// Returns whether both say that the outcome of the same execution counts.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Yes, Self::Yes) => true,
            (Self::Another(one), Self::Another(other)) => one.execution() == other.execution(),
            _ => false,
        }
    }
}
