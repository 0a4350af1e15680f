//! The response future: reads the body, then calls the inner service.
//!
//! # Implementation details
//!
//! The future goes through `Reading → Readying → Running`, or ends in `Refused`. `Readying` is over at once for a
//! request without a body, for which the inner service was kept ready. A request that is refused, or whose inner service
//! breaks before it is ready, takes back its [`CallToken`], because the handler is not called.

use std::error::Error;
use std::future::Future;
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
use tower::{BoxError, Service};

use crate::middleware::body::LockBody;
use crate::middleware::buffer::body::{BufferedBody, BufferedFor, BufferedRequestBody};
use crate::middleware::buffer::config::Config;
use crate::middleware::calls::CallToken;
use crate::middleware::future::take;
use crate::middleware::macros::opaque_debug;
use crate::middleware::rejection::Rejection;

/// Response future for [`BufferBodyService`](crate::middleware::BufferBodyService).
#[pin_project]
pub struct BufferBodyFuture<S, ReqBody>
where
    S: Service<Request<BufferedRequestBody>>,
    ReqBody: Body<Error: Into<BoxError>>,
{
    #[pin]
    state: State<S, ReqBody, S::Future>,
}

#[pin_project(project = StateProjection)]
#[allow(
    clippy::large_enum_variant,
    reason = "a future is in its largest states most of the time"
)]
enum State<S, ReqBody, F>
where
    ReqBody: Body<Error: Into<BoxError>>,
{
    Refused(Option<Response<Full<Bytes>>>),
    Reading {
        #[pin]
        body: Collect<Limited<ReqBody>>,
        call: Option<UnreadCall<S>>,
    },
    Readying {
        request: Option<Request<BufferedRequestBody>>,
        call: Option<UnreadCall<S>>,
    },
    Running(#[pin] F),
}

/// A call of the inner service that waits for its request body.
pub(super) struct UnreadCall<S> {
    pub(super) parts: Option<Parts>,
    pub(super) inner: S,
    pub(super) is_ready: bool,
    pub(super) config: Arc<Config>,
}

impl<S, ReqBody> BufferBodyFuture<S, ReqBody>
where
    S: Service<Request<BufferedRequestBody>>,
    ReqBody: Body<Error: Into<BoxError>>,
{
    pub(super) fn refused(refusal: Response<Full<Bytes>>) -> Self {
        let state = State::Refused(Some(refusal));
        Self { state }
    }

    pub(super) fn reading(body: ReqBody, call: UnreadCall<S>) -> Self {
        let body = Limited::new(body, call.config.limit).collect();
        let call = Some(call);
        let state = State::Reading { body, call };
        Self { state }
    }
}

impl<S, ReqBody, ResBody> Future for BufferBodyFuture<S, ReqBody>
where
    S: Service<Request<BufferedRequestBody>, Response = Response<ResBody>>,
    ReqBody: Body<Data = Bytes, Error: Into<BoxError>>,
    ResBody: Body<Data = Bytes, Error: Into<BoxError>>,
{
    type Output = Result<Response<LockBody<ResBody>>, S::Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let next = match this.state.as_mut().project() {
                StateProjection::Refused(refusal) => {
                    return Poll::Ready(Ok(take(refusal).map(LockBody::refusal)));
                }
                StateProjection::Reading { body, call } => {
                    let read = ready!(body.poll(context));
                    let mut call = take(call);
                    let mut parts = take(&mut call.parts);
                    match read {
                        Ok(collected) => {
                            let trailers = collected.trailers().cloned();
                            let bytes = collected.to_bytes();
                            let of = BufferedFor::new(&parts);
                            parts.extensions.insert(of);
                            parts.extensions.insert(BufferedBody(bytes.clone()));
                            let body = BufferedRequestBody::new(bytes, trailers);
                            State::Readying {
                                request: Some(Request::from_parts(parts, body)),
                                call: Some(call),
                            }
                        }
                        Err(error) => {
                            CallToken::refuse_request(&parts.extensions);
                            let refusals = &call.config.refusals;
                            let rejection = read_error(&*error);
                            let refusal = refusals.refuse_request(rejection, &parts);
                            State::Refused(Some(refusal))
                        }
                    }
                }
                StateProjection::Readying { request, call } => {
                    if let Some(call) = call
                        && !call.is_ready
                        && let Err(error) = ready!(call.inner.poll_ready(context))
                    {
                        CallToken::refuse_request(take(request).extensions());
                        return Poll::Ready(Err(error));
                    }
                    State::Running(take(call).inner.call(take(request)))
                }
                StateProjection::Running(inner) => {
                    let response = ready!(inner.poll(context))?;
                    return Poll::Ready(Ok(response.map(LockBody::unlocked)));
                }
            };
            this.state.set(next);
        }
    }
}

opaque_debug! {
    BufferBodyFuture<S, ReqBody>
    where
        S: Service<Request<BufferedRequestBody>>,
        ReqBody: Body<Error: Into<BoxError>>,
}

/// Returns the refusal for a request whose body could not be read.
pub(crate) fn read_error(error: &(dyn Error + 'static)) -> Rejection {
    if is_over_limit(error) {
        return Rejection::BodyTooLarge;
    }
    tracing::debug!(error, "redlock layer could not read the body of a request");
    let timed_out = causes(error).any(is_timeout);
    Rejection::BodyUnreadable { timed_out }
}

/// Returns whether a body exceeds the limit, or that of an outer layer, whose error is wrapped.
fn is_over_limit(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|error| error.is::<LengthLimitError>())
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
