//! The errors of executions, internal and public.

use crate::lock::LockError;
use crate::node::telemetry;
use crate::protocol::lease::Decided;

/// Returns the name of an outcome in spans and metrics.
pub(super) fn name_of(decided: &Decided) -> &'static str {
    match decided {
        Decided::Recorded(_) => "replayed",
        Decided::OtherRequest => "other_request",
        Decided::Undecided => "undecided",
        Decided::Conflicting => "conflicting",
        Decided::Unknown => "unknown",
    }
}

/// Counts and logs outcomes of which none is the answer to this caller.
pub(crate) fn report_conflict() {
    telemetry::conflict();
    tracing::error!("work was executed more than once, with different outcomes");
}

/// Error of [`ExecuteOnce::run`](crate::ExecuteOnce::run).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OnceError<E, T = ()> {
    /// The work returned this error. Nothing is recorded, and the key is released. The next call executes; with
    /// [`at_most_once`](crate::ExecuteOnce::at_most_once) it gets [`Unknown`](Self::Unknown).
    #[error(transparent)]
    Work(E),
    /// The lock of the key was not acquired, or expired before the work began. Nothing was executed.
    #[error(transparent)]
    Lock(LockError),
    /// The key was used with another fingerprint. Nothing was executed.
    #[error("the key was used with another fingerprint; use a new key")]
    OtherRequest,
    /// The work may have been executed, with an unknown outcome: an earlier execution ended without a record
    /// (with [`at_most_once`](crate::ExecuteOnce::at_most_once)), or this one was stopped at
    /// [`max_hold`](crate::ExecuteOnce::max_hold) or by the shutdown of its runtime.
    #[error(
        "the work may have been executed, with an unknown outcome; check its effect before a retry"
    )]
    Unknown,
    /// The work was executed, but its outcome can be read only when more nodes answer. Call again.
    #[error("the work was executed, but too few nodes answered to know its outcome; call again")]
    Undecided,
    /// The work was executed more than once, and no majority of the nodes has one of the outcomes.
    #[error("the work was executed more than once, with different outcomes; check its effects")]
    Conflicting,
    /// The work was executed, but its result was not kept: it is over
    /// [`max_result`](crate::ExecuteOnce::max_result), cannot be encoded or decoded, or is damaged on all nodes.
    #[error(
        "the work was executed, but its result was not kept: it is over max_result, or is no JSON of this type; raise max_result or see the log"
    )]
    NotKept,
    /// The work returned this result, but no majority of the nodes recorded it. Once the key has expired, a later
    /// call may execute again.
    #[error(
        "the work was executed, but no majority of the nodes recorded its result; a later call may execute it again"
    )]
    Unrecorded(T),
}
