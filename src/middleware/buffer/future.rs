//! The response future: read the body, then call.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::io;
use std::iter;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use http_body_util::combinators::Collect;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use pin_project::pin_project;
use tower::{BoxError, Service};

use crate::middleware::body::LockBody;
use crate::middleware::buffer::body::BufferedRequestBody;
use crate::middleware::buffer::layer::BufferedBody;
use crate::middleware::future::take;
use crate::middleware::passage::Passage;
use crate::middleware::rejection::{Rejection, RequestKind, refusal};

/// Response future for [`BufferBodyService`](crate::middleware::BufferBodyService).
#[pin_project]
pub struct BufferBodyFuture<S, ReqBody>
where
    S: Service<Request<BufferedRequestBody>>,
    ReqBody: Body,
    ReqBody::Error: Into<BoxError>,
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
    ReqBody: Body,
    ReqBody::Error: Into<BoxError>,
{
    Refused(Option<(Rejection, RequestKind)>),
    Reading {
        #[pin]
        body: Collect<Limited<ReqBody>>,
        call: Option<Call<S>>,
    },
    Readying {
        request: Option<Request<BufferedRequestBody>>,
        call: Option<Call<S>>,
    },
    Running(#[pin] F),
}

/// A call that waits for its body.
struct Call<S> {
    parts: Option<Parts>,
    inner: S,
    is_ready: bool,
}

impl<S, ReqBody> BufferBodyFuture<S, ReqBody>
where
    S: Service<Request<BufferedRequestBody>>,
    ReqBody: Body,
    ReqBody::Error: Into<BoxError>,
{
    pub(super) fn too_large(kind: RequestKind) -> Self {
        Self {
            state: State::Refused(Some((Rejection::BodyTooLarge, kind))),
        }
    }

    pub(super) fn reading(
        body: ReqBody,
        limit: usize,
        parts: Parts,
        inner: S,
        is_ready: bool,
    ) -> Self {
        let call = Call {
            parts: Some(parts),
            inner,
            is_ready,
        };
        Self {
            state: State::Reading {
                body: Limited::new(body, limit).collect(),
                call: Some(call),
            },
        }
    }
}

impl<S, ReqBody, ResBody> Future for BufferBodyFuture<S, ReqBody>
where
    S: Service<Request<BufferedRequestBody>, Response = Response<ResBody>>,
    ReqBody: Body<Data = Bytes>,
    ReqBody::Error: Into<BoxError>,
    ResBody: Body<Data = Bytes>,
    ResBody::Error: Into<BoxError>,
{
    type Output = Result<Response<LockBody<ResBody>>, S::Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProjection::Refused(refused) => {
                    let (rejection, kind) = take(refused);
                    let response = refusal(rejection, kind);
                    return Poll::Ready(Ok(response.map(LockBody::refusal)));
                }
                StateProjection::Reading { body, call } => {
                    let read = ready!(body.poll(context));
                    let mut call = take(call);
                    let mut parts = take(&mut call.parts);
                    match read {
                        Ok(collected) => {
                            let trailers = collected.trailers().cloned();
                            let bytes = collected.to_bytes();
                            parts.extensions.insert(BufferedBody(bytes.clone()));
                            let body = BufferedRequestBody::new(bytes, trailers);
                            State::Readying {
                                request: Some(Request::from_parts(parts, body)),
                                call: Some(call),
                            }
                        }
                        Err(error) => {
                            Passage::refuse(&parts.extensions);
                            let rejection = unread(&*error);
                            State::Refused(Some((rejection, RequestKind::of(&parts))))
                        }
                    }
                }
                StateProjection::Readying { request, call } => {
                    if let Some(call) = call
                        && !call.is_ready
                    {
                        ready!(call.inner.poll_ready(context))?;
                    }
                    State::Running(take(call).inner.call(take(request)))
                }
                StateProjection::Running(inner) => {
                    let response = ready!(inner.poll(context))?;
                    return Poll::Ready(Ok(response.map(LockBody::unlocked)));
                }
            };
            state.set(next);
        }
    }
}

impl<S, ReqBody> fmt::Debug for BufferBodyFuture<S, ReqBody>
where
    S: Service<Request<BufferedRequestBody>>,
    ReqBody: Body,
    ReqBody::Error: Into<BoxError>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferBodyFuture").finish_non_exhaustive()
    }
}

/// The refusal of a request whose body could not be read.
pub(crate) fn unread(error: &(dyn Error + 'static)) -> Rejection {
    if is_over_a_limit(error) {
        return Rejection::BodyTooLarge;
    }
    tracing::debug!(error, "the body of a request could not be read");
    let timed_out = causes(error).any(is_timeout);
    Rejection::BodyUnreadable { timed_out }
}

/// Whether a body is over the limit, or over that of a layer further out, whose error is wrapped.
fn is_over_a_limit(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|error| error.is::<LengthLimitError>())
}

/// Whether an error says of itself that it is a timeout.
///
/// The layers that time bodies have error types of their own, which this crate does not know: tower-http's
/// says "data was not received within the designated timeout". The words are those of layers and of the
/// connection, never of the client; the most that they can do is to make a 400 a 408.
fn is_timeout(error: &(dyn Error + 'static)) -> bool {
    let of_io = error.downcast_ref::<io::Error>();
    if of_io.is_some_and(|error| error.kind() == io::ErrorKind::TimedOut) {
        return true;
    }
    let said = error.to_string().to_ascii_lowercase();
    ["timeout", "timed out", "deadline"]
        .iter()
        .any(|word| said.contains(word))
}

fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    iter::successors(Some(error), |error| (*error).source())
}
