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

/// How the refusal of an extractor looks. Read from the request, which may be consumed before the refusal becomes a
/// response.
#[derive(Clone)]
pub(super) struct RefusalFormat {
    to: RequestKind,
    custom: Option<Arc<dyn RejectionResponse>>,
}

opaque_debug! { RefusalFormat }

impl RefusalFormat {
    pub(super) fn from_parts(parts: &Parts) -> Self {
        Self {
            to: RequestKind::of(parts),
            custom: parts.extensions.get().cloned(),
        }
    }

    /// Builds the response for a refusal, with the refusal in its extensions.
    pub(super) fn refuse(&self, rejection: Rejection) -> Response {
        let mut response = match &self.custom {
            Some(custom) => custom.response(&rejection, &self.to),
            None => rejection.default_response(&self.to),
        };
        response.extensions_mut().insert(rejection);
        response.into_response()
    }
}

/// Rejection of the extractors of this crate: the resource could not be locked, or no layer is there whose lock or key
/// could be extracted, which is 500 `misconfigured`, and is logged once for each route.
///
/// Its response is that of a layer, unless a [`RejectionResponse`] is in the extensions of the request.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{rejection}")]
pub struct ExtractorRejection {
    rejection: Rejection,
    format: RefusalFormat,
    /// Tells an idempotency layer outside that the handler was not called.
    token: Option<Arc<CallToken>>,
    /// What the log says of an extractor without its layer.
    mistake: Option<&'static str>,
}

impl ExtractorRejection {
    /// Creates the rejection of a lock.
    pub(super) fn of_lock(
        rejection: Rejection,
        format: RefusalFormat,
        token: Option<Arc<CallToken>>,
    ) -> Self {
        Self {
            rejection,
            format,
            token,
            mistake: None,
        }
    }

    /// Creates the rejection of an extractor without its layer, with a text about this route, if an axum router has matched
    /// one.
    pub(crate) fn misplaced(
        parts: &Parts,
        mistake: &'static str,
        text: impl FnOnce(Option<&str>) -> String,
    ) -> Self {
        let error = KeyError::misconfigured(text(route_of(parts).as_deref()));
        Self {
            rejection: Rejection::Misconfigured(error),
            format: RefusalFormat::from_parts(parts),
            token: None,
            mistake: Some(mistake),
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
        if let Some(token) = &self.token {
            token.take_over();
        }
        if let (Some(mistake), Rejection::Misconfigured(error)) = (self.mistake, &self.rejection)
            && LOGGED.is_new(&error.to_string())
        {
            tracing::error!(%error, "{mistake}");
        }
        self.format.refuse(self.rejection)
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
        let format = RefusalFormat {
            to: RequestKind::Http,
            custom: None,
        };
        format.refuse(self)
    }
}

/// Converts an error, and logs it if clients cannot correct it or the response does not show it; a mistake only once for each
/// place in the program, if that is known.
pub(super) fn into_rejection(
    error: &LockError,
    options: &LockOptions,
    place: Option<&str>,
) -> Rejection {
    let rejection = Rejection::from_lock_error(error.clone(), options, StatusCode::LOCKED);
    if matches!(rejection, Rejection::Misconfigured(_)) {
        if place.is_none_or(|place| LOGGED.is_new(place)) {
            tracing::error!(%error, "redlock handler cannot lock its resource because it is misconfigured");
        }
    } else if matches!(rejection, Rejection::KeyInvalid(_)) {
        tracing::debug!(%error, "redlock handler cannot lock its resource because the key is invalid");
    }
    rejection
}
