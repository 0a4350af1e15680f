//! Reads the body of a request before its lock is taken: the layer and its service.
//!
//! # Implementation details
//!
//! A request without a body calls the inner service at once, while it is ready. A request that is refused, or whose inner
//! service breaks before it is ready, takes back its [`CallToken`], because the handler is not called.

use std::error::Error;
use std::future::poll_fn;
use std::io;
use std::iter;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::TryFutureExt;
use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tower::{BoxError, Layer, Service};

use crate::middleware::body::LockBody;
use crate::middleware::buffered::{BufferedBody, BufferedFor, ReadBody, WholeBody};
use crate::middleware::calls::CallToken;
use crate::middleware::rejection::Rejection;
use crate::middleware::response::{Refusals, RejectionResponse};

/// Layer that applies the [`BufferBodyService`] middleware: reads each request's body before the
/// inner service sees the request. So a lock further in is not held during a slow upload, and a
/// key can be taken from the body.
///
/// Put it outside of the [`RedlockLayer`](crate::RedlockLayer), so that the request reaches it first. The
/// bytes are an extension of the request, [`BufferedBody`](crate::BufferedBody); the inner service reads the
/// same bytes and trailers from the request. A body over the limit is refused with 413
/// `body-too-large`, at once if it declares its length.
///
/// ```
/// use axum::{Router, routing::post};
/// use tower_redlock::{BufferBodyLayer, Redlock, RedlockLayer, key};
///
/// # async fn upload() {}
/// let redlock = Redlock::in_memory(3);
/// let locked = (
///     BufferBodyLayer::new(64 * 1024),
///     RedlockLayer::new(redlock, ("invoice", key::form_field("invoice"))),
/// );
/// let app: Router = Router::new().route("/invoices", post(upload).layer(locked));
/// ```
///
/// The whole body is read even if the lock is held. Without this layer, such a request is refused before its
/// body is read.
#[derive(Debug, Clone)]
#[must_use = "a layer does nothing until it is applied"]
pub struct BufferBodyLayer {
    limit: usize,
    refusals: Refusals,
}

impl BufferBodyLayer {
    /// Creates a layer that reads bodies of at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        let refusals = Refusals::new();
        Self { limit, refusals }
    }

    /// Sets how refusals look. Default: problem+json (RFC 9457), or a gRPC status.
    pub fn rejection(mut self, rejection: impl RejectionResponse) -> Self {
        self.refusals.response = Arc::new(rejection);
        self
    }
}

impl<S> Layer<S> for BufferBodyLayer {
    type Service = BufferBodyService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        let settings = self.clone();
        BufferBodyService { inner, settings }
    }
}

/// Middleware that reads a request's body before it passes the request on, as a `ReadBody<Empty<Bytes>>`.
///
/// Created by [`BufferBodyLayer`](crate::BufferBodyLayer), which has an example.
#[derive(Debug, Clone)]
pub struct BufferBodyService<S> {
    inner: S,
    settings: BufferBodyLayer,
}

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for BufferBodyService<S>
where
    S: Service<Request<WholeBody>, Response = Response<ResBody>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    ReqBody: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    ResBody: Body<Data = Bytes, Error: Into<BoxError>>,
{
    boxed_service!(Response<LockBody<ResBody>>);

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (parts, body) = request.into_parts();
        let answered = |response: Response<_>| response.map(LockBody::unlocked);
        if body.is_end_stream() {
            let request = buffered(parts, WholeBody::default());
            return Box::pin(self.inner.call(request).map_ok(answered));
        }
        // The upload may be slow: give up readiness, such as a permit, and ask for it again once the body is complete.
        self.inner = self.inner.clone();
        let (mut inner, settings) = (self.inner.clone(), self.settings.clone());
        Box::pin(async move {
            let request = match read(body, settings.limit).await {
                Ok(body) => buffered(parts, body),
                Err(rejection) => {
                    let refusal = settings.refusals.refuse_request(rejection, &parts);
                    return Ok(refusal.map(LockBody::boxed));
                }
            };
            if let Err(error) = poll_fn(|context| inner.poll_ready(context)).await {
                CallToken::refuse_request(request.extensions());
                return Err(error);
            }
            inner.call(request).await.map(answered)
        })
    }
}

/// Reads the body of a request.
///
/// # Errors
///
/// Returns the refusal of a request whose body is longer, at once if it says so, or cannot be read.
pub(crate) async fn read<B, R>(body: B, limit: usize) -> Result<ReadBody<R>, Rejection>
where
    B: Body<Data = Bytes, Error: Into<BoxError>>,
    R: Body<Data = Bytes>,
{
    if body.size_hint().lower() > limit as u64 {
        return Err(Rejection::BodyTooLarge);
    }
    let collected = Limited::new(body, limit).collect().await;
    let collected = collected.map_err(|error| read_error(&*error))?;
    Ok(ReadBody::collected(collected))
}

/// Returns the request for the inner service, with the bytes of its body for key extractors.
fn buffered(mut parts: Parts, body: WholeBody) -> Request<WholeBody> {
    let of = BufferedFor::new(&parts);
    parts.extensions.insert(of);
    parts.extensions.insert(BufferedBody(body.bytes.clone()));
    Request::from_parts(parts, body)
}

/// Returns the refusal for a request whose body could not be read.
fn read_error(error: &(dyn Error + 'static)) -> Rejection {
    // Also beyond the limit of an outer layer, whose error is wrapped.
    if causes(error).any(|error| error.is::<LengthLimitError>()) {
        return Rejection::BodyTooLarge;
    }
    tracing::debug!(error, "redlock layer could not read the body of a request");
    let timed_out = causes(error).any(is_timeout);
    Rejection::BodyUnreadable { timed_out }
}

/// Returns whether an error says that it is a timeout.
///
/// Layers that time bodies have error types of their own, which this crate does not know. tower-http's error
/// says "data was not received within the designated timeout". The texts come from layers and from the
/// connection, never from the client; at worst, one turns a 400 into a 408.
fn is_timeout(error: &(dyn Error + 'static)) -> bool {
    let io_error = error.downcast_ref::<io::Error>();
    if io_error.is_some_and(|error| error.kind() == io::ErrorKind::TimedOut) {
        return true;
    }
    let text = error.to_string().to_ascii_lowercase();
    let words = ["timeout", "timed out", "deadline"];
    words.iter().any(|word| text.contains(word))
}

fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    iter::successors(Some(error), |error| (*error).source())
}
