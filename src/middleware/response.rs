//! How refusals look: as HTTP or gRPC responses.

use std::collections::BTreeSet;
use std::sync::Arc;
#[cfg(feature = "grpc")]
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body_util::Full;
use serde_json::{Value, json};

use crate::middleware::calls::CallToken;
use crate::middleware::rejection::{Rejection, Row};
use crate::middleware::routed::route_of;
use crate::node::Mutex;
use crate::protocol::KeyError;

/// What kind of client a refusal is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
///
/// # Refusals of extractors
///
/// An extractor has no settings of its own. [`Locked`](crate::Locked), [`LockHandle`](crate::LockHandle),
/// [`FencingToken`](crate::FencingToken) and [`IdempotencyKey`](crate::IdempotencyKey) use the
/// `Arc<dyn RejectionResponse>` in the extensions of the request. The rejections of other extractors, such as that of the
/// `Path` in a `Locked<Path<T>>`, are not affected. A single handler can take `Result<Locked<T>, LockedRejection<_>>`
/// instead.
///
/// ```
/// use std::sync::Arc;
/// use axum::{Extension, Router};
/// use bytes::Bytes;
/// use http::header::{CONTENT_TYPE, RETRY_AFTER};
/// use http::{HeaderValue, Response};
/// use http_body_util::Full;
/// use tower_redlock::{Redlock, RedlockLayer, Rejection, RejectionResponse, RequestKind, key};
///
/// fn in_plain_words(rejection: &Rejection, to: &RequestKind) -> Response<Full<Bytes>> {
///     let mut response = rejection.default_response(to);
///     if let (Rejection::Contended { .. }, RequestKind::Http) = (rejection, to) {
///         *response.body_mut() = "This order is being changed. Try again.".into();
///         let text = HeaderValue::from_static("text/plain");
///         response.headers_mut().insert(CONTENT_TYPE, text);
///     }
///     response
/// }
///
/// let extractors: Arc<dyn RejectionResponse> = Arc::new(in_plain_words);
/// let redlock = Redlock::in_memory(3);
/// let app: Router = Router::new()
///     // .route(..)
///     .layer(RedlockLayer::new(redlock, ("order", key::path("id"))).rejection(in_plain_words))
///     .layer(Extension(extractors));
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

/// The places of the mistakes that were logged. Every similar request meets a mistake again.
#[derive(Debug)]
pub(crate) struct LoggedMistakes(Mutex<BTreeSet<String>>);

impl LoggedMistakes {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeSet::new()))
    }

    /// Returns whether a mistake is to be logged now, because none was logged at this place before.
    ///
    /// The place is a text of the program, such as a route, and never that of an error, which may name the request.
    pub(crate) fn is_new(&self, place: &str) -> bool {
        let mut logged = self.0.lock();
        let is_new = logged.len() < MAX_LOGGED && !logged.contains(place);
        is_new && logged.insert(place.to_owned())
    }
}

/// How many mistakes are logged.
const MAX_LOGGED: usize = 32;

/// Builds the refusals of one layer; clones belong to the same layer.
#[derive(Clone)]
pub(crate) struct Refusals {
    pub(crate) response: Arc<dyn RejectionResponse>,
    /// Mistakes that were logged.
    logged: Arc<LoggedMistakes>,
}

impl Refusals {
    pub(crate) fn new() -> Self {
        Self {
            response: Arc::new(Rejection::default_response),
            logged: Arc::new(LoggedMistakes::new()),
        }
    }

    /// Builds the response for a refusal, with the refusal in its extensions. The handler is not called then. Logs mistakes
    /// in the set-up, once for each route.
    pub(crate) fn refuse_request(&self, rejection: Rejection, of: &Parts) -> Response<Full<Bytes>> {
        CallToken::refuse_request(&of.extensions);
        self.log_mistake(&rejection, route_of(of));
        rejection.respond(&*self.response, RequestKind::of(of))
    }

    /// Does the same for a request whose head is gone.
    pub(crate) fn refuse(&self, rejection: Rejection, to: RequestKind) -> Response<Full<Bytes>> {
        self.log_mistake(&rejection, None);
        rejection.respond(&*self.response, to)
    }

    /// Logs a refusal because of a mistake in the set-up, or of a key that another set-up would accept.
    ///
    /// The response does not name the remedy.
    fn log_mistake(&self, rejection: &Rejection, route: Option<&str>) {
        let (error, limit) = match rejection {
            Rejection::Misconfigured(error) => {
                return self.log_misconfigured(route.unwrap_or_default(), &error.to_string());
            }
            // Without the numbers, which clients choose.
            Rejection::KeyInvalid(error @ KeyError::TooLong { .. }) => (error, "a key is too long"),
            Rejection::KeyInvalid(error @ KeyError::TooMany { .. }) => (error, "too many keys"),
            Rejection::KeyInvalid(error @ KeyError::Reserved) => (error, "a key is reserved"),
            _ => return,
        };
        if self.logged.is_new(limit) {
            tracing::warn!(%error, "redlock layer refuses a key");
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
        if self.logged.is_new("lacking") {
            tracing::warn!("redlock layer refuses requests: {}", lacking());
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
        let holder = match self {
            Self::Contended {
                holder: Some(holder),
                ..
            } => {
                let holder = json!({ "label": holder.label(), "note": holder.note() });
                format!(r#","holder":{holder}"#)
            }
            _ => String::new(),
        };
        let texts = (&*self.to_string(), &*holder);
        let mut response = coded_response(self.status(), self.row(), texts, *to);
        if let Some(retry_after) = self.retry_after() {
            let headers = response.headers_mut();
            headers.insert(RETRY_AFTER, retry_after.as_secs().into());
            #[cfg(feature = "grpc")]
            if *to == RequestKind::Grpc {
                headers.insert(
                    "grpc-status-details-bin",
                    retry_info(self.row(), retry_after),
                );
            }
        }
        response.map(Full::new)
    }

    /// Builds the response for a refusal, with the refusal in its extensions.
    pub(crate) fn respond(
        self,
        by: &dyn RejectionResponse,
        to: RequestKind,
    ) -> Response<Full<Bytes>> {
        let mut response = by.response(&self, &to);
        response.extensions_mut().insert(self);
        response
    }
}

opaque_debug! { Refusals }

impl RequestKind {
    /// Returns the kind of a request, by its content type.
    pub(crate) fn of(parts: &Parts) -> Self {
        // With the encoding of its messages, such as `+proto`.
        let kind = media_type(&parts.headers).split('+').next();
        match kind.is_some_and(|kind| kind.eq_ignore_ascii_case("application/grpc")) {
            true => Self::Grpc,
            false => Self::Http,
        }
    }
}

/// Returns the media type of a body without its parameters; empty if there is none. Media types are case-insensitive
/// (RFC 9110, section 8.3.1).
pub(crate) fn media_type(headers: &HeaderMap) -> &str {
    let Some(value) = headers.get(CONTENT_TYPE) else {
        return "";
    };
    let mut parts = value.as_bytes().split(|byte| *byte == b';');
    let text = str::from_utf8(parts.next().unwrap_or_default());
    text.unwrap_or_default().trim_ascii()
}

/// Builds the response of a row: `application/problem+json` (RFC 9457) with the detail and other members, or a
/// "trailers-only" response of gRPC, with everything in the head.
pub(crate) fn coded_response(
    status: StatusCode,
    (_, grpc_status, code, title, _): Row,
    (detail, others): (&str, &str),
    to: RequestKind,
) -> Response<Bytes> {
    let mut response = Response::<Bytes>::default();
    let content_type = match to {
        RequestKind::Http => {
            *response.status_mut() = status;
            let (status, detail) = (status.as_u16(), Value::from(detail));
            let body = format!(
                r#"{{"type":"tag:tower-redlock,2026:{code}","title":"{title}","status":{status},"detail":{detail},"code":"{code}"{others}}}"#
            );
            *response.body_mut() = body.into();
            "application/problem+json"
        }
        RequestKind::Grpc => {
            let headers = response.headers_mut();
            headers.insert("grpc-status", grpc_status.into());
            headers.insert("grpc-message", HeaderValue::from_static(code));
            "application/grpc"
        }
    };
    let content_type = HeaderValue::from_static(content_type);
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

/// Returns the details of a `google.rpc.Status` with a `RetryInfo`, which some clients obey without further code.
#[cfg(feature = "grpc")]
fn retry_info((_, status, code, ..): Row, retry_after: Duration) -> HeaderValue {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD_NO_PAD;
    use prost::Message;

    let retry_info = RetryInfo {
        retry_delay: retry_after.try_into().ok(),
    };
    let status = RpcStatus {
        code: status.into(),
        message: code.into(),
        details: vec![prost_types::Any {
            type_url: "type.googleapis.com/google.rpc.RetryInfo".into(),
            value: retry_info.encode_to_vec(),
        }],
    };
    // "Implementations must emit un-padded values": gRPC over HTTP2, on binary headers.
    let details = STANDARD_NO_PAD.encode(status.encode_to_vec());
    HeaderValue::try_from(details).expect("base64 is visible ASCII")
}

/// `google.rpc.Status`; `grpc-status-details-bin` is its encoding.
#[cfg(feature = "grpc")]
#[derive(Clone, PartialEq, prost::Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<prost_types::Any>,
}

/// `google.rpc.RetryInfo`.
#[cfg(feature = "grpc")]
#[derive(Clone, PartialEq, prost::Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<prost_types::Duration>,
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use http::Request;
    use http_body::Body;
    use http_body_util::BodyExt;

    use super::*;
    #[cfg(feature = "grpc")]
    use crate::lock::LockError;

    #[test]
    fn grpc_requests_are_recognized_by_content_type() {
        let is_call = |content_type: &'static str| {
            let request = Request::post("/").header(CONTENT_TYPE, content_type);
            RequestKind::of(&request.body(()).unwrap().into_parts().0) == RequestKind::Grpc
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
        let lacking = Some("a\"\\\n".into());
        let rejection = Rejection::KeyMissing { lacking };
        let response = rejection.default_response(&RequestKind::Http);
        let body = response.into_body().collect().now_or_never();
        let body: Value = serde_json::from_slice(&body.unwrap().unwrap().to_bytes()).unwrap();
        assert_eq!(body["detail"], "the request lacks a required key: a\"\\\n");
    }

    #[test]
    fn grpc_refusals_have_their_status_in_the_head_and_no_body() {
        let contended = Rejection::Contended {
            status: StatusCode::LOCKED,
            retry_after: None,
            holder: None,
        };
        let response = contended.default_response(&RequestKind::Grpc);
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["grpc-status"], "10");
        assert_eq!(response.body().size_hint().exact(), Some(0));
    }

    #[cfg(feature = "grpc")]
    #[test]
    fn details_are_not_padded() {
        // Codes of 13, 14 and 16 letters: at least one of the encodings would need padding.
        let contended = Rejection::Contended {
            status: StatusCode::LOCKED,
            retry_after: None,
            holder: None,
        };
        let unavailable = LockError::Unavailable {
            reached: 0,
            needed: 2,
            voted: Vec::new(),
            nodes: Vec::new(),
        };
        let closed = Rejection::Failed(LockError::Closed);
        for rejection in [contended, Rejection::Failed(unavailable), closed] {
            let response = rejection.default_response(&RequestKind::Grpc);
            let details = response.headers()["grpc-status-details-bin"].as_bytes();
            assert!(details.len() > 60, "{rejection:?}");
            assert!(!details.contains(&b'='), "{rejection:?}");
        }
    }
}
