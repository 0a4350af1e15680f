//! Refusals: what they are, and how they look over HTTP and gRPC.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body_util::Full;

use crate::lock::{LockError, LostReason};
use crate::middleware::grpc;
use crate::node::NodeFailure;
use crate::protocol::KeyError;

/// Why a request was not served, or not to its end.
///
/// Also put into the extensions of the response, so that an outer layer can tell the cases apart.
/// No response made from it names the holder, a node or the key.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rejection {
    /// Somebody else holds the lock.
    Contended {
        /// The status the layer is set to answer.
        status: StatusCode,
        /// When the lock expires unless its holder renews it, if that is known.
        retry_after: Option<Duration>,
    },
    /// No majority of the nodes could be reached, it came too late, too many calls wait, or the
    /// process is shutting down.
    Failed(LockError),
    /// The lock was lost while the handler ran, which was stopped.
    Lost(LostReason),
    /// The request does not name the resource.
    KeyMissing,
    /// The request names the resource in a way that cannot be used.
    KeyInvalid(KeyError),
    /// The body is larger than the service reads before it takes a lock.
    BodyTooLarge,
    /// The body broke off, or did not come in time.
    BodyUnreadable {
        /// Whether an error that ended it says of itself that it is a timeout, such as that of a layer
        /// further out.
        timed_out: bool,
    },
    /// The service is set up wrongly; no request can be served.
    Misconfigured(KeyError),
    /// Nobody said whose the idempotency key is; no request can be served.
    ScopeMissing,
    /// The idempotency key was used for another request.
    KeyReused,
    /// The request may have been executed, and nobody knows with what outcome.
    OutcomeUnknown,
    /// The request was executed, and its response was too large to be kept.
    ResultNotKept,
    /// The request was executed more than once, with outcomes that no majority of the nodes has.
    ConflictingOutcomes,
}

/// With status 423 for a lock that somebody else holds.
impl From<LockError> for Rejection {
    fn from(error: LockError) -> Self {
        Self::of(error, StatusCode::LOCKED)
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail())
    }
}

/// What kind of client a refusal goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RequestKind {
    /// A plain HTTP request.
    Http,
    /// A gRPC request, by its content type: it gets HTTP 200 with a `grpc-status`.
    Grpc,
}

/// Builds the response for a refusal. Closures of the same signature implement it.
///
/// ```
/// use bytes::Bytes;
/// use http::Response;
/// use http_body_util::Full;
/// use tower_redlock::{Rejection, RequestKind};
///
/// let plain = |rejection: &Rejection, _: &RequestKind| {
///     let mut response = Response::new(Full::new(Bytes::from_static(b"try again later\n")));
///     *response.status_mut() = rejection.status();
///     response
/// };
/// # let _: &dyn tower_redlock::RejectionResponse = &plain;
/// ```
pub trait RejectionResponse: Send + Sync + 'static {
    /// Returns the response for a refusal of a request of the given kind.
    fn response(&self, rejection: &Rejection, to: &RequestKind) -> Response<Full<Bytes>>;
}

impl<F> RejectionResponse for F
where
    F: Fn(&Rejection, &RequestKind) -> Response<Full<Bytes>> + Send + Sync + 'static,
{
    fn response(&self, rejection: &Rejection, to: &RequestKind) -> Response<Full<Bytes>> {
        self(rejection, to)
    }
}

impl Rejection {
    /// Returns the HTTP status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Contended { status, .. } => *status,
            Self::Failed(_) | Self::Lost(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::KeyMissing | Self::KeyInvalid(_) => StatusCode::BAD_REQUEST,
            Self::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyUnreadable { timed_out: false } => StatusCode::BAD_REQUEST,
            Self::BodyUnreadable { timed_out: true } => StatusCode::REQUEST_TIMEOUT,
            Self::Misconfigured(_) | Self::ScopeMissing => StatusCode::INTERNAL_SERVER_ERROR,
            Self::KeyReused => StatusCode::UNPROCESSABLE_ENTITY,
            Self::OutcomeUnknown | Self::ResultNotKept | Self::ConflictingOutcomes => {
                StatusCode::CONFLICT
            }
        }
    }

    /// Returns the stable, machine-readable name of the case.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Contended { .. } => "lock-contended",
            Self::Failed(LockError::Expired { .. }) => "lock-expired",
            Self::Failed(LockError::Overloaded { .. }) => "lock-overloaded",
            Self::Failed(LockError::Closed) => "shutting-down",
            Self::Failed(_) => "lock-unavailable",
            Self::Lost(_) => "lock-lost",
            Self::KeyMissing => "key-missing",
            Self::KeyInvalid(_) => "key-invalid",
            Self::BodyTooLarge => "body-too-large",
            Self::BodyUnreadable { .. } => "body-unreadable",
            Self::Misconfigured(_) => "misconfigured",
            Self::ScopeMissing => "scope-missing",
            Self::KeyReused => "idempotency-key-reused",
            Self::OutcomeUnknown => "outcome-unknown",
            Self::ResultNotKept => "result-not-kept",
            Self::ConflictingOutcomes => "conflicting-outcomes",
        }
    }

    /// Returns when trying again makes sense, if it does: whole seconds, rounded up, at least one.
    ///
    /// For a lock that somebody else holds this is what is left of its ttl, but at most a minute:
    /// most holders are done long before that, and the ttl may be another Redlock client's. Clients
    /// should add some randomness, lest all of them come back at once.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        let left = match self {
            Self::Contended { retry_after, .. } => retry_after.unwrap_or_default().min(LONGEST),
            Self::Failed(LockError::Unavailable {
                reached,
                needed,
                nodes,
            }) => until_majority(*reached, *needed, nodes),
            Self::Failed(_) => Duration::ZERO,
            Self::Lost(_)
            | Self::KeyMissing
            | Self::KeyInvalid(_)
            | Self::BodyTooLarge
            | Self::BodyUnreadable { .. }
            | Self::Misconfigured(_)
            | Self::ScopeMissing
            | Self::KeyReused
            | Self::OutcomeUnknown
            | Self::ResultNotKept
            | Self::ConflictingOutcomes => return None,
        };
        let seconds = left.as_secs() + u64::from(left.subsec_nanos() > 0);
        Some(Duration::from_secs(seconds.max(1)))
    }

    /// The refusal that an error of the lock is, with a status for contention.
    pub(crate) fn of(error: LockError, contended: StatusCode) -> Self {
        match error {
            LockError::Contended { retry_after } => Self::Contended {
                status: contended,
                retry_after,
            },
            LockError::Key(error) => Self::of_key(error),
            // Layers check their ttl at start-up; what is left is a Redlock with another maximum.
            LockError::TtlTooLong { .. } | LockError::TtlTooShort { .. } => {
                Self::Misconfigured(KeyError::misconfigured("the ttl of the lock is wrong"))
            }
            error => Self::Failed(error),
        }
    }

    pub(crate) fn of_key(error: KeyError) -> Self {
        match error {
            KeyError::Misconfigured(_) => Self::Misconfigured(error),
            KeyError::Empty | KeyError::None => Self::KeyMissing,
            error => Self::KeyInvalid(error),
        }
    }

    /// What the client is told, which is nothing about how the service is made. What the operator has to
    /// know besides is in the log.
    fn detail(&self) -> String {
        match self {
            Self::Contended { .. } => "another request holds the lock on this resource".into(),
            Self::Failed(LockError::Expired { .. }) => {
                "the lock was granted too late to be of use".into()
            }
            Self::Failed(LockError::Overloaded { .. }) => {
                "too many requests wait for locks already".into()
            }
            Self::Failed(LockError::Closed) => "the service is shutting down".into(),
            Self::Failed(_) => {
                "the lock service cannot be reached; nobody is known to hold the lock".into()
            }
            Self::Lost(_) => "the lock was lost while the request was being served".into(),
            Self::KeyMissing => "the request lacks the key that it is to be served under".into(),
            Self::KeyInvalid(error) => key_detail(error),
            Self::BodyTooLarge => "the body is larger than this resource takes".into(),
            Self::BodyUnreadable { timed_out: false } => "the body broke off".into(),
            Self::BodyUnreadable { timed_out: true } => "the body did not come in time".into(),
            Self::Misconfigured(_) | Self::ScopeMissing => "the service is set up wrongly".into(),
            Self::KeyReused => "the idempotency key was used for another request before".into(),
            Self::OutcomeUnknown => {
                "the request may have been executed, with an outcome that is not known".into()
            }
            Self::ResultNotKept => {
                "the request has been executed; its response was not kept".into()
            }
            Self::ConflictingOutcomes => {
                "the request was executed more than once, with different outcomes".into()
            }
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Contended { .. } => "Resource is locked",
            Self::Failed(LockError::Closed) => "Service is shutting down",
            Self::Failed(_) => "Lock not available",
            Self::Lost(_) => "Lock lost",
            Self::KeyMissing | Self::KeyInvalid(_) => "Key missing or invalid",
            Self::BodyTooLarge => "Body too large",
            Self::BodyUnreadable { .. } => "Body not readable",
            Self::Misconfigured(_) | Self::ScopeMissing => "Service misconfigured",
            Self::KeyReused => "Idempotency key reused",
            Self::OutcomeUnknown => "Outcome unknown",
            Self::ResultNotKept => "Response not kept",
            Self::ConflictingOutcomes => "Conflicting outcomes",
        }
    }
}

impl RequestKind {
    /// Tells by the content type.
    #[must_use]
    pub fn of(parts: &Parts) -> Self {
        if grpc::is_call(parts) {
            Self::Grpc
        } else {
            Self::Http
        }
    }
}

/// Builds the default response for a refusal, with the refusal in its extensions.
pub(crate) fn refusal(rejection: Rejection, to: RequestKind) -> Response<Full<Bytes>> {
    let mut response = default_response(&rejection, &to);
    response.extensions_mut().insert(rejection);
    response
}

/// The default: `application/problem+json` (RFC 9457) with a stable `code` member, or a gRPC
/// status in the head.
#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "the signature of `RejectionResponse`"
)]
pub(crate) fn default_response(rejection: &Rejection, to: &RequestKind) -> Response<Full<Bytes>> {
    match to {
        RequestKind::Http => problem_json(rejection),
        RequestKind::Grpc => grpc::status(rejection),
    }
}

fn problem_json(rejection: &Rejection) -> Response<Full<Bytes>> {
    let (code, status) = (rejection.code(), rejection.status());
    let body = format!(
        r#"{{"type":"tag:tower-redlock,2026:{code}","title":"{}","status":{},"detail":"{}","code":"{code}"}}"#,
        rejection.title(),
        status.as_u16(),
        escape_json(&rejection.detail()),
    );
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    let content_type = HeaderValue::from_static("application/problem+json");
    headers.insert(CONTENT_TYPE, content_type);
    insert_retry_after(headers, rejection);
    response
}

/// What a client is told of its key; `Display` of the error is for those who set the service up.
fn key_detail(error: &KeyError) -> String {
    match error {
        KeyError::Malformed(why) => format!("the key is malformed: {why}"),
        KeyError::TooLong { .. } => "the key is too long".into(),
        KeyError::TooMany { count, max } => {
            format!("the request names {count} resources, and {max} are allowed")
        }
        KeyError::Reserved => "the key has a form that is reserved".into(),
        KeyError::Empty | KeyError::None => "the key is empty".into(),
        KeyError::Misconfigured(_) => "the key cannot be used".into(),
    }
}

/// Returns when enough quarantined nodes may vote again; zero if nobody knows.
fn until_majority(reached: usize, needed: usize, nodes: &[NodeFailure]) -> Duration {
    let mut left: Vec<Duration> = nodes
        .iter()
        .filter_map(|node| match node {
            NodeFailure::Quarantined { left, .. } => Some(*left),
            _ => None,
        })
        .collect();
    left.sort_unstable();
    let missing = needed.saturating_sub(reached).max(1);
    left.get(missing - 1).copied().unwrap_or_default()
}

pub(super) fn insert_retry_after(headers: &mut HeaderMap, rejection: &Rejection) {
    if let Some(retry_after) = rejection.retry_after() {
        headers.insert(RETRY_AFTER, retry_after.as_secs().into());
    }
}

/// Escapes a text for a JSON string.
pub(crate) fn escape_json(text: &str) -> String {
    text.chars().fold(String::new(), |mut escaped, c| {
        match c {
            '"' | '\\' => escaped.extend(['\\', c]),
            c if c < ' ' => escaped.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => escaped.push(c),
        }
        escaped
    })
}

/// The longest that the holder of a lock is left alone.
const LONGEST: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    fn contended(retry_after: Option<Duration>) -> Rejection {
        let status = StatusCode::LOCKED;
        Rejection::Contended {
            status,
            retry_after,
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

    #[test]
    fn a_quarantined_cluster_says_when_a_majority_may_vote() {
        let quarantined = |seconds| NodeFailure::Quarantined {
            node: "n".into(),
            left: Duration::from_secs(seconds),
        };
        let rejection = Rejection::Failed(LockError::Unavailable {
            reached: 0,
            needed: 2,
            nodes: vec![quarantined(30), quarantined(7), quarantined(5)],
        });
        assert_eq!(rejection.retry_after(), Some(Duration::from_secs(7)));
    }

    /// Also through `Display`, which a service's own responses may be made of.
    #[test]
    fn no_detail_gives_advice_to_operators_or_names_a_node() {
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
        let told = keys.clone().map(Rejection::KeyInvalid);
        let told = told.chain(keys.map(Rejection::of_key));
        let told = told.chain(locks.into_iter().map(Rejection::from));
        for rejection in told.chain([Rejection::ScopeMissing]) {
            let told = rejection.to_string();
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
                assert!(!told.contains(advice), "{told}");
            }
        }
    }

    #[test]
    fn details_are_escaped() {
        assert_eq!(escape_json("a\"\\\n"), "a\\\"\\\\\\u000a");
    }
}
