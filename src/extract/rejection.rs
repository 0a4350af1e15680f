//! Refusals as responses of handlers and extractors.

use std::sync::Arc;

use axum::Extension;
use axum::middleware::AddExtension;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::request::Parts;
use tower::Layer;

use crate::lock::{LockError, LockOptions};
use crate::middleware::macros::opaque_debug;
use crate::middleware::{LoggedMistakes, Rejection, RejectionResponse, RequestKind, route_of};
use crate::protocol::KeyError;

/// Layer that sets how the refusals of this crate's extractors look, for all handlers inside: those of
/// [`Locked`](crate::Locked), [`LockHandle`](crate::LockHandle), [`FencingToken`](crate::FencingToken),
/// [`IdempotencyKey`](crate::IdempotencyKey) and [`ExecutionHandle`](crate::ExecutionHandle).
///
/// Without it, they are those of a layer with its default `rejection`. The rejections of other extractors, such as that
/// of the `Path` in a `Locked<Path<T>>`, are not affected. One function serves the layers and the extractors:
///
/// ```
/// use axum::Router;
/// use bytes::Bytes;
/// use http::header::CONTENT_TYPE;
/// use http::{HeaderValue, Response};
/// use http_body_util::Full;
/// use tower_redlock::{ExtractorRejectionLayer, Redlock, RedlockLayer, Rejection, RequestKind, key};
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
/// let redlock = Redlock::in_memory(3);
/// let app: Router = Router::new()
///     // .route(..)
///     .layer(RedlockLayer::new(redlock, ("order", key::path("id"))).rejection(in_plain_words))
///     .layer(ExtractorRejectionLayer::new(in_plain_words));
/// ```
///
/// # Design
///
/// An extractor has no settings of its own, so a layer passes this one through the extensions of the request, as
/// `DefaultBodyLimit` does in axum. A single handler can take `Result<Locked<T>, LockedRejection<_>>` instead.
#[derive(Clone)]
#[must_use = "a layer does nothing until it is applied"]
pub struct ExtractorRejectionLayer(Arc<dyn RejectionResponse>);

impl ExtractorRejectionLayer {
    /// Creates a layer with the function that builds the responses.
    pub fn new(rejection: impl RejectionResponse) -> Self {
        Self(Arc::new(rejection))
    }
}

impl<S> Layer<S> for ExtractorRejectionLayer {
    type Service = AddExtension<S, Self>;

    fn layer(&self, inner: S) -> Self::Service {
        Extension(self.clone()).layer(inner)
    }
}

opaque_debug! { ExtractorRejectionLayer }

/// How the refusal of an extractor looks. Read from the request, which may be consumed before the refusal becomes a
/// response.
#[derive(Debug, Clone)]
pub(super) struct RefusalFormat {
    to: RequestKind,
    custom: Option<ExtractorRejectionLayer>,
}

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
            Some(ExtractorRejectionLayer(custom)) => custom.response(&rejection, &self.to),
            None => rejection.default_response(&self.to),
        };
        response.extensions_mut().insert(rejection);
        response.into_response()
    }
}

/// Rejection of an extractor for what a layer puts into the extensions: the router is misconfigured.
#[derive(Debug, Clone)]
pub(crate) struct Misplaced {
    text: String,
    format: RefusalFormat,
}

impl Misplaced {
    /// Creates the rejection with a text about this route, if an axum router has matched one.
    pub(crate) fn new(parts: &Parts, text: impl FnOnce(Option<&str>) -> String) -> Self {
        Self {
            text: text(route_of(parts).as_deref()),
            format: RefusalFormat::from_parts(parts),
        }
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Builds the response, and logs the text once.
    pub(crate) fn refuse(self, mistake: &str) -> Response {
        let is_new = LOGGED.is_new(&self.text);
        let error = KeyError::misconfigured(self.text);
        if is_new {
            tracing::error!(%error, "{mistake}");
        }
        self.format.refuse(Rejection::Misconfigured(error))
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
    let rejection = Rejection::from_lock_error(error.clone(), options, StatusCode::LOCKED, None);
    if matches!(rejection, Rejection::Misconfigured(_)) {
        if place.is_none_or(|place| LOGGED.is_new(place)) {
            tracing::error!(%error, "redlock handler cannot lock its resource because it is misconfigured");
        }
    } else if matches!(rejection, Rejection::KeyInvalid(_)) {
        tracing::debug!(%error, "redlock handler cannot lock its resource because the key is invalid");
    }
    rejection
}
