//! Why a request is not executed, or its outcome not known.

use std::fmt;

use crate::lock::{LockError, LostReason};
use crate::protocol::Record;

/// Why a key was not granted for an execution.
#[derive(Debug, Clone)]
pub(crate) enum Denied {
    /// The lock was not acquired.
    Lock(LockError),
    /// A majority of the nodes has the record of an earlier execution; its head alone, if it is large.
    Recorded(Record),
    /// The key was used for another request.
    OtherRequest,
    /// There is a record, but whether it counts is known only when more nodes answer.
    Undecided,
    /// The key was executed more than once, with outcomes that no majority agrees on.
    Conflicting,
    /// The key may have been executed, with an unknown outcome.
    Unknown,
}

/// Why a granted execution must not begin.
#[derive(Debug, Clone)]
pub(crate) enum BeginError {
    /// The lock is lost.
    Lost(LostReason),
    /// The record of another execution arrived after the grant, and decides.
    Denied(Denied),
}

impl Denied {
    /// Returns the name of the case in spans and metrics.
    pub(super) fn outcome(&self) -> &'static str {
        match self {
            Self::Lock(error) => error.outcome(),
            Self::Recorded(_) => "replayed",
            Self::OtherRequest => "other_request",
            Self::Undecided => "undecided",
            Self::Conflicting => "conflicting",
            Self::Unknown => "unknown",
        }
    }
}

impl From<LockError> for Denied {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

/// Why [`ExecuteOnce::run`](crate::ExecuteOnce::run) has no outcome of the work.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnceError<E, T = ()> {
    /// The work returned this error. Nothing is recorded and the key is released: the next call executes, or
    /// gets [`Unknown`](Self::Unknown) with [`at_most_once`](crate::ExecuteOnce::at_most_once).
    Work(E),
    /// The lock of the key was not acquired, or expired before the work began. Nothing was executed.
    Lock(LockError),
    /// The key was used with another fingerprint. Nothing was executed.
    OtherRequest,
    /// The work may have been executed, with an unknown outcome: an earlier execution ended without a record
    /// (with [`at_most_once`](crate::ExecuteOnce::at_most_once)), or this one was stopped at
    /// [`max_hold`](crate::ExecuteOnce::max_hold) or by the shutdown of its runtime.
    Unknown,
    /// The work was executed, but its outcome can be read only when more nodes answer. Call again.
    Undecided,
    /// The work was executed more than once, with outcomes that no majority of the nodes agrees on.
    Conflicting,
    /// The work was executed, but its result was not kept: it is over
    /// [`max_result`](crate::ExecuteOnce::max_result), cannot be encoded or decoded, or is damaged on all nodes.
    NotKept,
    /// The work returned this result, but no majority of the nodes recorded it: a later call may execute
    /// again, once the key has expired.
    Unrecorded(T),
}

impl<E: fmt::Display, T> fmt::Display for OnceError<E, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Work(error) => error.fmt(f),
            Self::Lock(error) => error.fmt(f),
            Self::OtherRequest => {
                f.write_str("the key was used with another fingerprint; use a new key")
            }
            Self::Unknown => f.write_str(
                "the work may have been executed, with an unknown outcome; check its effect before a retry",
            ),
            Self::Undecided => f.write_str(
                "the work was executed, but too few nodes answered to tell its outcome; call again",
            ),
            Self::Conflicting => f.write_str(
                "the work was executed more than once, with different outcomes; check its effects",
            ),
            Self::NotKept => {
                f.write_str("the work was executed, but its result was not kept; raise max_result")
            }
            Self::Unrecorded(_) => f.write_str(
                "the work was executed, but no majority of the nodes recorded its result; a later call may execute it again",
            ),
        }
    }
}

impl<E, T> std::error::Error for OnceError<E, T>
where
    E: std::error::Error + 'static,
    T: fmt::Debug,
{
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Work(error) => error.source(),
            Self::Lock(error) => error.source(),
            _ => None,
        }
    }
}
