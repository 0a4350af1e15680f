//! Refusals as responses of handlers and extractors.

use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::request::Parts;

use crate::lock::{LockError, LockOptions};
use crate::middleware::{
    CallToken, LoggedMistakes, Rejection, RejectionResponse, RequestKind, route_of,
};
use crate::protocol::KeyError;

/// What the refusal of an extractor needs of the request, which may be consumed before the refusal becomes a response.
pub(super) struct RequestContext {
    kind: RequestKind,
    /// How refusals look, if not as those of a layer.
    custom: Option<Arc<dyn RejectionResponse>>,
    /// Tells an idempotency layer outside whether the handler was called.
    pub(super) token: Option<CallToken>,
}

opaque_debug! { RequestContext }

impl RequestContext {
    pub(super) fn new(parts: &Parts) -> Self {
        Self {
            kind: RequestKind::of(parts),
            custom: parts.extensions.get().cloned(),
            token: CallToken::from_extensions(&parts.extensions),
        }
    }
}

/// Rejection of the extractors of this crate: the resource could not be locked, or no layer is there whose lock or key
/// could be extracted, which is 500 `misconfigured`, and is logged once for each route.
///
/// Its response is that of a layer, unless a [`RejectionResponse`] is in the extensions of the request.
#[derive(Debug, thiserror::Error)]
#[error("{rejection}")]
pub struct ExtractorRejection {
    pub(super) rejection: Rejection,
    pub(super) request: RequestContext,
}

impl ExtractorRejection {
    /// Creates the rejection of an extractor without its layer, because of which the handler has not got something, and logs
    /// the mistake.
    pub(crate) fn misplaced(parts: &Parts, mistake: &'static str, lacking: &str) -> Self {
        let handler = match route_of(parts) {
            Some(route) => format!("the handler of `{route}`"),
            None => "the handler".to_owned(),
        };
        let error = KeyError::misconfigured(format!("{handler} has no {lacking}"));
        if LOGGED.is_new(&error.to_string()) {
            tracing::error!(%error, "{mistake}");
        }
        Self {
            rejection: Rejection::Misconfigured(error),
            request: RequestContext::new(parts),
        }
    }

    /// Returns why the extractor refused the request.
    #[must_use]
    pub fn rejection(&self) -> &Rejection {
        &self.rejection
    }
}

impl IntoResponse for ExtractorRejection {
    fn into_response(self) -> Response {
        let request = self.request;
        if let Some(token) = &request.token {
            token.take_over();
        }
        let by = request.custom.as_deref();
        let by = by.unwrap_or(&Rejection::default_response);
        self.rejection.respond(by, request.kind).into_response()
    }
}

/// For the process, because no layer is there that could keep it.
static LOGGED: LoggedMistakes = LoggedMistakes::new();

/// The response of a [`RedlockLayer`](crate::RedlockLayer) with its default `rejection`, to an HTTP request. So a
/// handler that locks by itself passes the error on:
///
/// ```
/// use axum::extract::State;
/// use tower_redlock::{LockError, Redlock};
///
/// async fn rebuild(State(redlock): State<Redlock>) -> Result<&'static str, LockError> {
///     let _guard = redlock.try_lock("search-index").await?;
///     Ok("rebuilt")
/// }
/// ```
///
/// For a gRPC client, use [`Rejection::default_response`]. An [`IdempotencyLayer`](crate::IdempotencyLayer) outside
/// does not record the response, so the handler must not have had an effect.
impl IntoResponse for LockError {
    fn into_response(self) -> Response {
        into_rejection(&self, &LockOptions::default(), None).into_response()
    }
}

/// As for a [`LockError`].
impl IntoResponse for Rejection {
    fn into_response(self) -> Response {
        let response = self.respond(&Self::default_response, RequestKind::Http);
        response.into_response()
    }
}

/// Converts an error, and logs it if clients cannot correct it or the response does not show it; a mistake only once for each
/// place in the program, if that is known.
pub(super) fn into_rejection(
    error: &LockError,
    options: &LockOptions,
    place: Option<&str>,
) -> Rejection {
    let rejection = Rejection::from_lock_error(error.clone(), options, StatusCode::LOCKED, false);
    if matches!(rejection, Rejection::Misconfigured(_)) {
        if place.is_none_or(|place| LOGGED.is_new(place)) {
            tracing::error!(%error, "redlock handler cannot lock its resource because it is misconfigured");
        }
    } else if matches!(rejection, Rejection::KeyInvalid(_)) {
        tracing::debug!(%error, "redlock handler cannot lock its resource because the key is invalid");
    }
    rejection
}
