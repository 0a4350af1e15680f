//! Refusals as responses of handlers.

use axum::response::{IntoResponse, Response};

use crate::lock::LockError;
use crate::middleware::{Rejection, RequestKind, refusal};

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
        into_rejection(&self).into_response()
    }
}

/// As for a [`LockError`].
impl IntoResponse for Rejection {
    fn into_response(self) -> Response {
        refusal(self, RequestKind::Http).into_response()
    }
}

/// Converts an error, and logs it if clients cannot correct it or the response does not show it.
pub(super) fn into_rejection(error: &LockError) -> Rejection {
    let rejection = Rejection::from(error.clone());
    if matches!(rejection, Rejection::Misconfigured(_)) {
        tracing::error!(%error, "redlock handler cannot lock its resource because it is misconfigured");
    } else if matches!(rejection, Rejection::KeyInvalid(_)) {
        tracing::debug!(%error, "redlock handler cannot lock its resource because the key is invalid");
    }
    rejection
}
