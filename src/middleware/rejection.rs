//! Refusals: why a request was not served, with their status, code and texts.

use std::time::Duration;

use http::StatusCode;
use thiserror::Error;

use crate::lock::{LockError, LockOptions, LostReason};
use crate::node::whole_seconds;
use crate::protocol::{Holder, KeyError};

/// Why a request was not served, or not to its end.
///
/// It is also an extension of the response, so that an outer layer can tell the cases apart, and the error with which a body
/// ends whose lock is lost while it is sent.
/// The default response does not show the holder, a node or the key. Nor does the text of a case, which is for the client; the
/// log has more for the operator.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Rejection {
    /// Another request holds the lock.
    #[error("another request holds the lock on this resource")]
    Contended {
        /// The status that the layer is configured to answer.
        status: StatusCode,
        /// When a retry makes sense, if it is not the default: the remaining ttl of a lock with
        /// [`hold_at_least`](crate::LockOptions::hold_at_least).
        retry_after: Option<Duration>,
        /// Who holds it, if that is known and the layer is told to
        /// [`expose_holder`](crate::RedlockLayer::expose_holder).
        holder: Option<Holder>,
    },
    /// So many requests hold a slot of the resource as there are; see
    /// [`max_concurrent`](crate::RedlockLayer::max_concurrent).
    #[error("too many requests use this resource at the moment")]
    TooManyConcurrent {
        /// When a retry makes sense, if known; as for [`Contended`](Self::Contended).
        retry_after: Option<Duration>,
    },
    /// No majority of the nodes could be reached or may vote, it answered too late, too many requests wait, or
    /// the process is shutting down.
    ///
    /// [`LockError::quarantined`] tells nodes that were started recently, `lock-quarantined`, from nodes that
    /// cannot be reached, `lock-unavailable`.
    #[error("{}", lock_detail(.0))]
    Failed(LockError),
    /// The lock was lost while the handler ran, and the handler was stopped.
    #[error("the lock was lost while the request was being served")]
    Lost(LostReason),
    /// The first request with the idempotency key still runs, or its outcome is not known yet.
    #[error(
        "the first request with this idempotency key still runs, or its outcome is not known yet"
    )]
    InProgress,
    /// The request does not name the resource.
    #[error("the request lacks a required key{}{}", if lacking.is_some() { ": " } else { "" }, lacking.as_deref().unwrap_or_default())]
    KeyMissing {
        /// What names it, such as ``header `x-tenant` ``. `None` if that
        /// is not known, or if only the service can set it.
        lacking: Option<String>,
    },
    /// The request names the resource by an unusable key.
    #[error("{}", key_detail(.0))]
    KeyInvalid(KeyError),
    /// The request body exceeds the limit for bodies that are read before the lock is taken.
    #[error("the request body is too large for this resource")]
    BodyTooLarge,
    /// The request body could not be read to its end.
    #[error("the request body {}", if *timed_out { "did not arrive in time" } else { "ended before it was complete" })]
    BodyUnreadable {
        /// Whether the error that ended it says that it is a timeout, such as the error of an outer layer.
        timed_out: bool,
    },
    /// The service is misconfigured and cannot serve any such request.
    #[error("the service is misconfigured")]
    Misconfigured(KeyError),
    /// The scope found no caller for the idempotency key; the service cannot serve any such request.
    #[error("the service is misconfigured")]
    ScopeMissing,
    /// The idempotency key was used for another request.
    #[error("the idempotency key was used for another request before")]
    KeyReused,
    /// The request may have been executed, and its outcome is unknown.
    #[error("the request may have been executed; its outcome is unknown")]
    OutcomeUnknown,
    /// The request was executed, and its response was too large to be kept.
    #[error("the request was executed; its response was not kept")]
    ResultNotKept,
    /// The request was executed more than once, and no majority of the nodes has one of the outcomes.
    #[error("the request was executed more than once, with different outcomes")]
    ConflictingOutcomes,
}

/// With status 423 for contention.
impl From<LockError> for Rejection {
    fn from(error: LockError) -> Self {
        Self::from_lock_error(error, &LockOptions::default(), StatusCode::LOCKED, false)
    }
}

impl Rejection {
    /// Returns the HTTP status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Contended { status, .. } => *status,
            _ => StatusCode::from_u16(self.row().0).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
        }
    }

    /// Returns the stable, machine-readable name of the case.
    #[must_use]
    pub fn code(&self) -> &'static str {
        self.row().2
    }

    /// Returns when a retry makes sense, if it does: whole seconds, rounded up, at least one.
    ///
    /// For contention it is one second, or the remaining ttl of a lock with
    /// [`hold_at_least`](crate::LockOptions::hold_at_least), at most a minute. After a restart of nodes it is the rest of
    /// their quarantine. Clients should add jitter, so that they do not all retry at once.
    ///
    /// # Design
    ///
    /// The holder renews its lock as long as the handler runs, so the remaining ttl does not say when that ends: the
    /// ttl is chosen for crashes, and most handlers need less than a second. Only a lock that stays taken is not
    /// renewed. A retry that comes too early costs little: the process that holds a lock refuses it without asking a
    /// node. A [`rejection`](crate::RedlockLayer::rejection) can set another header.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        let (.., true) = self.row() else {
            return None;
        };
        let left = match self {
            Self::Contended { retry_after, .. } | Self::TooManyConcurrent { retry_after } => {
                let retry_after = retry_after.unwrap_or(DEFAULT_RETRY_AFTER);
                retry_after.min(MAX_RETRY_AFTER)
            }
            Self::Failed(error) => error.quarantined().unwrap_or_default(),
            _ => Duration::ZERO,
        };
        Some(Duration::from_secs(whole_seconds(left).max(1)))
    }

    /// Converts an error of a lock with these options, with the status for contention, who holds the lock if clients may know
    /// it, and when to retry after it: after the remaining ttl if the lock stays taken, because then it is not renewed.
    pub(crate) fn from_lock_error(
        error: LockError,
        options: &LockOptions,
        status: StatusCode,
        exposes_holder: bool,
    ) -> Self {
        match error {
            LockError::Contended {
                retry_after,
                holder,
            } => {
                let retry_after = retry_after.filter(|_| options.hold_at_least.is_some());
                match options.is_slot() {
                    true => Self::TooManyConcurrent { retry_after },
                    false => Self::Contended {
                        status,
                        retry_after,
                        holder: holder.filter(|_| exposes_holder),
                    },
                }
            }
            LockError::Key(error) => Self::from_key_error(error),
            // Layers check their ttl when they are built; this one is of an extractor, or of a single request.
            LockError::TtlTooLong { .. }
            | LockError::TtlTooShort { .. }
            | LockError::InvalidSlots { .. }
            | LockError::HeldShared => {
                Self::Misconfigured(KeyError::misconfigured(error.to_string()))
            }
            error => Self::Failed(error),
        }
    }

    /// Converts an error of a key extractor.
    pub(crate) fn from_key_error(error: KeyError) -> Self {
        match error {
            KeyError::Misconfigured(_) => Self::Misconfigured(error),
            KeyError::Empty | KeyError::None => Self::key_missing(None),
            error => Self::KeyInvalid(error),
        }
    }

    /// Returns the refusal of a request that lacks a key from this source.
    pub(crate) fn key_missing(source: Option<String>) -> Self {
        // The name of a type is not for clients.
        let lacking = source.filter(|source| !source.contains("extension `"));
        Self::KeyMissing { lacking }
    }
}

/// The HTTP status, the gRPC status, the name of the case, the text for people that names it, and whether a retry makes
/// sense.
///
/// The gRPC statuses: 1 CANCELLED, 3 INVALID_ARGUMENT, 4 DEADLINE_EXCEEDED, 6 ALREADY_EXISTS, 8 RESOURCE_EXHAUSTED,
/// 9 FAILED_PRECONDITION, 10 ABORTED, 13 INTERNAL and 14 UNAVAILABLE.
pub(crate) type Row = (u16, u16, &'static str, &'static str, bool);

/// Makes a list of the rows beside the function that finds the row of a case, so that the list lacks no case.
macro_rules! table {
    ($($case:pat $(if $condition:expr)? => $row:expr,)*) => {
        impl Rejection {
            pub(super) fn row(&self) -> Row {
                match self {
                    $($case $(if $condition)? => $row,)*
                }
            }
        }

        #[cfg(feature = "utoipa")]
        pub(super) const ROWS: &[Row] = &[$($row),*];
    };
}

table! {
    // Unless the layer has another status.
    Self::Contended { .. } => (423, 10, "lock-contended", "Resource is locked", true),
    Self::TooManyConcurrent { .. } => (429, 8, "too-many-concurrent", "Too many concurrent requests", true),
    Self::Failed(LockError::Expired { .. }) => (503, 14, "lock-expired", "Lock unavailable", true),
    Self::Failed(LockError::Overloaded { .. }) => (503, 14, "lock-overloaded", "Lock unavailable", true),
    Self::Failed(LockError::Closed) => (503, 14, "shutting-down", "Service is shutting down", true),
    Self::Failed(error) if error.quarantined().is_some() =>
        (503, 14, "lock-quarantined", "Lock service started recently", true),
    Self::Failed(_) => (503, 14, "lock-unavailable", "Lock unavailable", true),
    Self::Lost(_) => (503, 10, "lock-lost", "Lock lost", false),
    Self::InProgress => (409, 10, "request-in-progress", "Request in progress", true),
    Self::KeyMissing { .. } => (400, 3, "key-missing", "Key missing or invalid", false),
    Self::KeyInvalid(_) => (400, 3, "key-invalid", "Key missing or invalid", false),
    Self::BodyTooLarge => (413, 8, "body-too-large", "Body too large", false),
    // The client cancelled its request body.
    Self::BodyUnreadable { timed_out: false } => (400, 1, "body-unreadable", "Body unreadable", false),
    Self::BodyUnreadable { timed_out: true } => (408, 4, "body-unreadable", "Body unreadable", false),
    Self::Misconfigured(_) => (500, 13, "misconfigured", "Service misconfigured", false),
    Self::ScopeMissing => (500, 13, "scope-missing", "Service misconfigured", false),
    Self::KeyReused => (422, 3, "idempotency-key-reused", "Idempotency key reused", false),
    Self::OutcomeUnknown => (409, 9, "outcome-unknown", "Outcome unknown", false),
    // Not ABORTED, after which clients call again.
    Self::ResultNotKept => (409, 6, "result-not-kept", "Response not kept", false),
    Self::ConflictingOutcomes => (409, 9, "conflicting-outcomes", "Conflicting outcomes", false),
}

/// Returns the text for the client about an error of the lock that is not its own.
fn lock_detail(error: &LockError) -> String {
    match error {
        LockError::Expired { .. } => "the lock was granted too late to be used".into(),
        LockError::Overloaded { .. } => "too many requests are waiting for locks".into(),
        LockError::Closed => "the service is shutting down".into(),
        error => match error.quarantined() {
            Some(left) => format!(
                "the lock service started recently and grants no locks for another {} s",
                whole_seconds(left).max(1)
            ),
            None => "the lock service is unreachable; whether the lock is held is unknown".into(),
        },
    }
}

/// Returns the text for the client about its key. `Display` of the error is for operators.
fn key_detail(error: &KeyError) -> String {
    match error {
        KeyError::Malformed(why) => format!("the key is malformed: {why}"),
        KeyError::TooLong { .. } => "the key is too long".into(),
        KeyError::TooMany { count, max } => {
            format!("the request names {count} resources; at most {max} are allowed")
        }
        KeyError::Reserved => "the key is reserved".into(),
        KeyError::Empty | KeyError::None => "the key is empty".into(),
        KeyError::Misconfigured(_) => "the key is unusable".into(),
    }
}

/// `Retry-After` for contention; [`Rejection::retry_after`] has the reasons.
const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(1);

/// Longest `Retry-After` for contention; another Redlock client may have chosen the ttl.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::NodeFailure;

    fn contended(retry_after: Option<Duration>) -> Rejection {
        let status = StatusCode::LOCKED;
        Rejection::Contended {
            status,
            retry_after,
            holder: None,
        }
    }

    #[test]
    fn retry_after_is_whole_seconds_rounded_up_and_at_least_one() {
        let seconds = |ms| {
            let left = contended(Some(Duration::from_millis(ms)));
            left.retry_after().unwrap().as_secs()
        };
        assert_eq!([0, 1, 1_000, 1_001, 9_999].map(seconds), [1, 1, 1, 2, 10]);
        assert_eq!([60_000, 60_001, 3_600_000].map(seconds), [60; 3]);
        assert_eq!(contended(None).retry_after(), Some(Duration::from_secs(1)));
    }

    // Rules: lock-quarantined
    #[test]
    fn retry_after_of_a_quarantined_cluster_is_when_a_majority_may_vote() {
        let quarantined = |seconds| NodeFailure::Quarantined {
            node: "n".into(),
            left: Duration::from_secs(seconds),
        };
        let rejection = Rejection::Failed(LockError::Unavailable {
            reached: 0,
            needed: 2,
            voted: Vec::new(),
            nodes: vec![quarantined(30), quarantined(7), quarantined(5)],
        });
        assert_eq!(rejection.retry_after(), Some(Duration::from_secs(7)));
        assert_eq!(rejection.code(), "lock-quarantined");
        assert_eq!(rejection.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(rejection.row().3, "Lock service started recently");
        assert_eq!(
            rejection.to_string(),
            "the lock service started recently and grants no locks for another 7 s"
        );
    }

    #[test]
    fn each_case_has_its_code_and_says_whether_a_retry_makes_sense() {
        let hour = Duration::from_secs(3_600);
        let expired = LockError::Expired {
            ttl: hour,
            elapsed: hour,
        };
        let too_many = Rejection::TooManyConcurrent {
            retry_after: Some(hour),
        };
        for (rejection, status, code, seconds) in [
            (contended(Some(hour)), 423, "lock-contended", Some(60)),
            (too_many, 429, "too-many-concurrent", Some(60)),
            (expired.into(), 503, "lock-expired", Some(1)),
            (LockError::Closed.into(), 503, "shutting-down", Some(1)),
            (Rejection::Lost(LostReason::Expired), 503, "lock-lost", None),
            (Rejection::OutcomeUnknown, 409, "outcome-unknown", None),
            (Rejection::ResultNotKept, 409, "result-not-kept", None),
            (Rejection::KeyReused, 422, "idempotency-key-reused", None),
        ] {
            let retry = rejection.retry_after().map(|after| after.as_secs());
            let said = (rejection.status().as_u16(), rejection.code(), retry);
            assert_eq!(said, (status, code, seconds));
        }
    }

    /// Also not through `Display`, which a service may use in its own responses.
    #[test]
    fn no_detail_shows_advice_for_operators_or_a_node() {
        let quarantined = NodeFailure::Quarantined {
            node: "redis-7".into(),
            left: Duration::from_secs(1),
        };
        let keys = [
            KeyError::Empty,
            KeyError::None,
            KeyError::TooLong { len: 513, max: 512 },
            KeyError::TooMany { count: 33, max: 32 },
            KeyError::Reserved,
            KeyError::misconfigured("no BufferBodyLayer"),
        ];
        let second = Duration::from_secs(1);
        let locks = [
            LockError::Unavailable {
                reached: 0,
                needed: 2,
                voted: Vec::new(),
                nodes: vec![quarantined],
            },
            LockError::TtlTooLong {
                asked: second,
                max: second,
            },
            LockError::TtlTooShort { asked: second },
            LockError::Closed,
        ];
        let keys = keys.into_iter();
        let rejections = keys.clone().map(Rejection::KeyInvalid);
        let rejections = rejections.chain(keys.map(Rejection::from_key_error));
        let rejections = rejections.chain(locks.into_iter().map(Rejection::from));
        for rejection in rejections.chain([Rejection::ScopeMissing]) {
            let detail = rejection.to_string();
            for advice in [
                "namespace",
                "Layer",
                "set a",
                "ttl",
                "coarser",
                "lock_all",
                "redis",
                "name the",
            ] {
                assert!(!detail.contains(advice), "{detail}");
            }
        }
    }
}
