//! Reads the body of a request before its lock is taken: the layer, its service and future.
//!
//! # Implementation details
//!
//! A request without a body calls the inner service at once, while it is ready. A request that is refused, or whose inner
//! service breaks before it is ready, takes back its [`CallToken`], because the handler is not called.

use std::error::Error;
use std::io;
use std::iter;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use http_body_util::combinators::Collect;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use pin_project::pin_project;
use tower::{BoxError, Layer, Service};

use crate::middleware::body::LockBody;
use crate::middleware::buffered::{BufferedBody, BufferedFor, WholeBody};
use crate::middleware::calls::CallToken;
use crate::middleware::rejection::Rejection;
use crate::middleware::response::{Refusals, RejectionResponse};
use crate::middleware::service::{POLLED_AGAIN, take};

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
    S: Service<Request<WholeBody>, Response = Response<ResBody>> + Clone,
    ReqBody: Body<Data = Bytes, Error: Into<BoxError>>,
    ResBody: Body<Data = Bytes, Error: Into<BoxError>>,
{
    type Response = Response<LockBody<ResBody>>;
    type Error = S::Error;
    type Future = BufferBodyFuture<S, ReqBody>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (parts, body) = request.into_parts();
        let BufferBodyLayer { limit, refusals } = &self.settings;
        let mut future = BufferBodyFuture {
            refusal: None,
            reading: None,
            waiting: None,
            inner: None,
        };
        if body.size_hint().lower() > *limit as u64 {
            let rejection = Rejection::BodyTooLarge;
            future.refusal = Some(refusals.refuse_request(rejection, &parts));
        } else if body.is_end_stream() {
            let request = buffered(parts, WholeBody::default());
            future.inner = Some(self.inner.call(request));
        } else {
            // The upload may be slow: give up readiness, such as a permit, and ask for it again once the body is complete.
            self.inner = self.inner.clone();
            future.reading = Some(Limited::new(body, *limit).collect());
            let request = Request::from_parts(parts, WholeBody::default());
            future.waiting = Some((self.clone(), request));
        }
        future
    }
}

/// Response future for [`BufferBodyService`](crate::middleware::BufferBodyService).
#[pin_project]
#[expect(unnameable_types, reason = "the service has it as its `Future`")]
pub struct BufferBodyFuture<S, ReqBody>
where
    S: Service<Request<WholeBody>>,
    ReqBody: Body<Error: Into<BoxError>>,
{
    refusal: Option<Response<Full<Bytes>>>,
    #[pin]
    reading: Option<Collect<Limited<ReqBody>>>,
    /// Until the inner service is called. The request has its body once that is read.
    waiting: Option<(BufferBodyService<S>, Request<WholeBody>)>,
    #[pin]
    inner: Option<S::Future>,
}

impl<S, ReqBody, ResBody> Future for BufferBodyFuture<S, ReqBody>
where
    S: Service<Request<WholeBody>, Response = Response<ResBody>>,
    ReqBody: Body<Data = Bytes, Error: Into<BoxError>>,
    ResBody: Body<Data = Bytes, Error: Into<BoxError>>,
{
    type Output = Result<Response<LockBody<ResBody>>, S::Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if let Some(reading) = this.reading.as_mut().as_pin_mut() {
            let read = ready!(reading.poll(context));
            this.reading.set(None);
            let (service, request) = take(this.waiting);
            let (parts, _) = request.into_parts();
            match read.map(WholeBody::collected) {
                Ok(body) => *this.waiting = Some((service, buffered(parts, body))),
                Err(error) => {
                    let refusals = &service.settings.refusals;
                    *this.refusal = Some(refusals.refuse_request(read_error(&*error), &parts));
                }
            }
        }
        if let Some(refusal) = this.refusal.take() {
            return Poll::Ready(Ok(refusal.map(LockBody::refusal)));
        }
        if let Some((service, request)) = this.waiting {
            if let Err(error) = ready!(service.inner.poll_ready(context)) {
                CallToken::refuse_request(request.extensions());
                return Poll::Ready(Err(error));
            }
            let (mut service, request) = take(this.waiting);
            this.inner.set(Some(service.inner.call(request)));
        }
        let inner = this.inner.as_pin_mut().expect(POLLED_AGAIN);
        let response = ready!(inner.poll(context))?;
        Poll::Ready(Ok(response.map(LockBody::unlocked)))
    }
}

opaque_debug! {
    BufferBodyFuture<S, ReqBody>
    where
        S: Service<Request<WholeBody>>,
        ReqBody: Body<Error: Into<BoxError>>,
}

/// Returns the request for the inner service, with the bytes of its body for key extractors.
fn buffered(mut parts: Parts, body: WholeBody) -> Request<WholeBody> {
    let of = BufferedFor::new(&parts);
    parts.extensions.insert(of);
    parts.extensions.insert(BufferedBody(body.bytes.clone()));
    Request::from_parts(parts, body)
}

/// Returns the refusal for a request whose body could not be read.
pub(crate) fn read_error(error: &(dyn Error + 'static)) -> Rejection {
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
    ["timeout", "timed out", "deadline"]
        .iter()
        .any(|word| text.contains(word))
}

fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    iter::successors(Some(error), |error| (*error).source())
}
