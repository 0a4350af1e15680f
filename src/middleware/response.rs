//! How refusals look: as HTTP or gRPC responses.

use std::sync::{Arc, Once};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderValue, Response};
use http_body_util::Full;

use crate::middleware::grpc;
use crate::middleware::logged::LoggedMistakes;
use crate::middleware::macros::opaque_debug;
use crate::middleware::rejection::{Rejection, insert_retry_after};
use crate::middleware::routed::route_of;
use crate::protocol::KeyError;

/// What kind of client a refusal is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RequestKind {
    /// A plain HTTP request.
    Http,
    /// A gRPC request, by its content type: it gets HTTP 200 with a `grpc-status`.
    Grpc,
}

/// Builds the response for a refusal. Closures with the same signature implement it.
///
/// One that changes a few cases, or adds something to all, begins with [`Rejection::default_response`]:
///
/// ```
/// use http::{HeaderValue, StatusCode, header};
/// use tower_redlock::{Redlock, RedlockLayer, Rejection, RequestKind, key};
///
/// let not_found_without_key = |rejection: &Rejection, to: &RequestKind| {
///     let mut response = rejection.default_response(to);
///     if matches!((rejection, to), (Rejection::KeyMissing { .. }, RequestKind::Http)) {
///         *response.status_mut() = StatusCode::NOT_FOUND;
///     }
///     // A page that a user sees, also for all other cases.
///     let link = HeaderValue::from_static("<https://example.com/errors>; rel=help");
///     response.headers_mut().insert(header::LINK, link);
///     response
/// };
/// let layer = RedlockLayer::new(Redlock::in_memory(3), ("upload", key::header("x-upload-id")))
///     .rejection(not_found_without_key);
/// # let _: RedlockLayer = layer;
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not build responses for refusals",
    label = "this is not a `RejectionResponse`",
    note = "use a function, or a closure with the types of its arguments: `|rejection: &Rejection, to: &RequestKind| ..`; it returns a `Response<Full<Bytes>>`, such as `rejection.default_response(to)`"
)]
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

/// Builds the refusals of one layer; clones belong to the same layer.
#[derive(Clone)]
pub(crate) struct Refusals {
    response: Arc<dyn RejectionResponse>,
    /// Mistakes that were logged.
    logged: Arc<LoggedMistakes>,
    /// Whether it was logged that requests lack what they must have.
    lacking: Arc<Once>,
}

impl Refusals {
    pub(crate) fn new() -> Self {
        Self {
            response: Arc::new(Rejection::default_response),
            logged: Arc::new(LoggedMistakes::new()),
            lacking: Arc::new(Once::new()),
        }
    }

    /// Sets how refusals look.
    pub(crate) fn set_response(&mut self, response: impl RejectionResponse) {
        self.response = Arc::new(response);
    }

    /// Builds the response for a refusal, with the refusal in its extensions. Logs mistakes in the set-up, once for each
    /// route.
    pub(crate) fn refuse_request(&self, rejection: Rejection, of: &Parts) -> Response<Full<Bytes>> {
        self.log_mistake(&rejection, route_of(of).as_deref());
        self.response_to(rejection, RequestKind::of(of))
    }

    /// Does the same for a request whose head is gone.
    pub(crate) fn refuse(&self, rejection: Rejection, to: RequestKind) -> Response<Full<Bytes>> {
        self.log_mistake(&rejection, None);
        self.response_to(rejection, to)
    }

    fn response_to(&self, rejection: Rejection, to: RequestKind) -> Response<Full<Bytes>> {
        let mut response = self.response.response(&rejection, &to);
        response.extensions_mut().insert(rejection);
        response
    }

    /// Logs a refusal because of a mistake in the set-up, or of a key that another set-up would accept.
    ///
    /// The response does not name the remedy.
    fn log_mistake(&self, rejection: &Rejection, route: Option<&str>) {
        match rejection {
            Rejection::Misconfigured(error) => {
                self.log_misconfigured(route.unwrap_or_default(), &error.to_string());
            }
            Rejection::KeyInvalid(error) => self.log_limit(error),
            _ => {}
        }
    }

    /// Logs, once for each place, a mistake because of which no such request can be served.
    pub(crate) fn log_misconfigured(&self, place: &str, mistake: &str) {
        if self.logged.is_new(place) {
            tracing::error!(error = %mistake, "redlock layer refuses requests because it is misconfigured");
        }
    }

    /// Logs, once, that a request lacked what it must have. The response does not name it.
    ///
    /// Clients choose how often that happens, so the text is only built to be logged.
    pub(crate) fn log_lacking(&self, lacking: impl FnOnce() -> String) {
        self.lacking.call_once(|| {
            tracing::warn!("redlock layer refuses requests: {}", lacking());
        });
    }

    /// Logs a key that another set-up would accept.
    fn log_limit(&self, error: &KeyError) {
        // Without the numbers, which clients choose.
        let limit = match error {
            KeyError::TooLong { .. } => "a key is too long",
            KeyError::TooMany { .. } => "too many keys",
            KeyError::Reserved => "a key is reserved",
            _ => return,
        };
        if self.logged.is_new(limit) {
            tracing::warn!(%error, "redlock layer refuses a key");
        }
    }
}

impl Rejection {
    /// Builds the response that layers and extractors send unless their `rejection` is set: problem+json (RFC 9457),
    /// or a gRPC status.
    ///
    /// A function that is set as `rejection` calls it for the cases that it leaves as they are; see
    /// [`RejectionResponse`].
    #[must_use]
    pub fn default_response(&self, to: &RequestKind) -> Response<Full<Bytes>> {
        match to {
            RequestKind::Http => problem_json(self),
            RequestKind::Grpc => grpc::status(self),
        }
    }
}

opaque_debug! { Refusals }

impl RequestKind {
    /// Returns the kind of a request, by its content type.
    #[must_use]
    pub fn of(parts: &Parts) -> Self {
        if is_grpc(parts) {
            Self::Grpc
        } else {
            Self::Http
        }
    }
}

/// Returns whether a request is a gRPC call, by its content type.
fn is_grpc(parts: &Parts) -> bool {
    let content_type = parts.headers.get(CONTENT_TYPE);
    content_type.is_some_and(|value| {
        // Media types are case-insensitive (RFC 9110, section 8.3.1).
        let split = value.as_bytes().split_at_checked(GRPC.len());
        split.is_some_and(|(essence, rest)| {
            essence.eq_ignore_ascii_case(GRPC)
                && matches!(rest, [] | [b'+' | b';' | b' ' | b'\t', ..])
        })
    })
}

/// Builds `application/problem+json` (RFC 9457) with a stable `code` member.
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

const GRPC: &[u8] = b"application/grpc";

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    #[test]
    fn grpc_requests_are_recognized_by_content_type() {
        let is_call = |content_type: &'static str| {
            let request = Request::post("/").header(CONTENT_TYPE, content_type);
            is_grpc(&request.body(()).unwrap().into_parts().0)
        };
        for grpc in [
            "application/grpc",
            "application/grpc+proto",
            "application/grpc;a=b",
            "application/grpc ; a=b",
            "Application/gRPC+proto",
        ] {
            assert!(is_call(grpc), "{grpc}");
        }
        for http in [
            "application/json",
            "application/grpcx",
            "application/grpc-web",
        ] {
            assert!(!is_call(http), "{http}");
        }
    }

    #[test]
    fn details_are_escaped() {
        assert_eq!(escape_json("a\"\\\n"), "a\\\"\\\\\\u000a");
    }
}
