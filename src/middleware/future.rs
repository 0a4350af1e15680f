//! The response future: lock, call, release; it owns what must end with the request.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::Full;
use pin_project::pin_project;
use tower::{BoxError, Service};

use crate::lock::{LockError, LockFuture, LockGuard, LockHandle, Lost};
use crate::middleware::body::{Hold, LockBody, Releasing, declared_length};
use crate::middleware::disconnect::Outlive;
use crate::middleware::held::LockHandles;
use crate::middleware::layer::{Config, NotLocked, OnLost, OnUnavailable, ReleaseAt, Unprotected};
use crate::middleware::rejection::{Rejection, RequestKind};
use crate::node::telemetry;

/// Response future for [`RedlockService`](crate::middleware::RedlockService).
///
/// Dropped at any point, it gives up the lock in the background.
#[pin_project]
pub struct ResponseFuture<S, ReqBody>
where
    S: Service<Request<ReqBody>>,
{
    #[pin]
    state: State<S, ReqBody, S::Future, S::Response>,
}

/// # States
///
/// `Locking → Readying → Running → Releasing`, where `Readying` is over at once if the inner
/// service was kept ready, and `Releasing` is skipped if the body takes the lock over. `Refused`
/// and `Passing` stand by themselves.
#[pin_project(project = StateProjection)]
enum State<S, ReqBody, F, R> {
    Refused(Option<Response<Full<Bytes>>>),
    Passing(#[pin] F),
    Locking {
        lock: LockFuture,
        call: Option<Call<S, ReqBody>>,
    },
    Readying {
        guard: Option<LockGuard>,
        lost: Option<Lost>,
        call: Option<Call<S, ReqBody>>,
    },
    Running {
        #[pin]
        inner: F,
        guard: Option<LockGuard>,
        lost: Option<Lost>,
        sent: Sent,
    },
    Releasing {
        releasing: Releasing,
        response: Option<R>,
    },
}

/// A call that waits for its lock.
struct Call<S, ReqBody> {
    inner: S,
    is_ready: bool,
    request: Request<ReqBody>,
    config: Arc<Config>,
}

/// What is remembered of the request once it has been handed on.
struct Sent {
    method: Method,
    kind: RequestKind,
    config: Arc<Config>,
}

impl<S, ReqBody> ResponseFuture<S, ReqBody>
where
    S: Service<Request<ReqBody>>,
{
    pub(super) fn refused(refusal: Response<Full<Bytes>>) -> Self {
        let state = State::Refused(Some(refusal));
        Self { state }
    }

    pub(super) fn passing(inner: S::Future) -> Self {
        let state = State::Passing(inner);
        Self { state }
    }

    pub(super) fn locking(
        lock: LockFuture,
        inner: S,
        is_ready: bool,
        request: Request<ReqBody>,
        config: Arc<Config>,
    ) -> Self {
        let call = Some(Call {
            inner,
            is_ready,
            request,
            config,
        });
        let state = State::Locking { lock, call };
        Self { state }
    }
}

impl<S, ReqBody, ResBody> Future for ResponseFuture<S, ReqBody>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>>,
    ResBody: Body<Data = Bytes>,
    ResBody::Error: Into<BoxError>,
{
    type Output = Result<Response<LockBody<ResBody>>, S::Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProjection::Refused(refusal) => {
                    return Poll::Ready(Ok(refused(take(refusal))));
                }
                StateProjection::Passing(inner) => {
                    let response = ready!(inner.poll(context))?;
                    return Poll::Ready(Ok(response.map(LockBody::unlocked)));
                }
                StateProjection::Locking { lock, call } => {
                    let outcome = ready!(Pin::new(lock).poll(context));
                    let mut call = take(call);
                    let guard = match outcome {
                        Ok(guard) => Some(guard),
                        Err(error) if call.config.proceeds_despite(&error) => {
                            let extensions = call.request.extensions_mut();
                            extensions.insert(Unprotected);
                            extensions.insert(NotLocked::Unavailable);
                            // Another layer's lock must not be taken for the one that is not there.
                            extensions.remove::<LockHandle>();
                            None
                        }
                        Err(error) => return Poll::Ready(Ok(call.refuse(error))),
                    };
                    State::Readying {
                        lost: guard.as_ref().map(LockGuard::lost),
                        guard,
                        call: Some(call),
                    }
                }
                StateProjection::Readying { guard, lost, call } => {
                    // No handler begins without its lock, whatever it is to do when it loses it.
                    if let Some(lost) = lost
                        && let Poll::Ready(reason) = Pin::new(lost).poll(context)
                    {
                        let refusal = take(call).reject(Rejection::Lost(reason));
                        state.set(State::Refused(None));
                        return Poll::Ready(Ok(refusal));
                    }
                    if let Some(call) = call
                        && !call.is_ready
                    {
                        // An error drops the guard, and with it the lock.
                        ready!(call.inner.poll_ready(context))?;
                    }
                    take(call).run(guard.take(), lost.take())
                }
                StateProjection::Running {
                    inner,
                    guard,
                    lost,
                    sent,
                } => {
                    // First: once the lock is lost, the handler must not be polled again.
                    if let Some(lost) = lost
                        && let Poll::Ready(reason) = Pin::new(lost).poll(context)
                    {
                        let rejection = Rejection::Lost(reason);
                        let refusal = sent.config.refusals.refuse(rejection, sent.kind);
                        // Drops the handler now, not with this future.
                        state.set(State::Refused(None));
                        return Poll::Ready(Ok(refused(refusal)));
                    }
                    let mut response = ready!(inner.poll(context))?;
                    let Some(guard) = guard.take() else {
                        return Poll::Ready(Ok(response.map(LockBody::unlocked)));
                    };
                    let config = &sent.config;
                    if let (Some(name), Some(value)) = (&config.expose_token, token_of(&guard)) {
                        response.headers_mut().insert(name, value);
                    }
                    let at_head = config.release_at == ReleaseAt::ResponseHead;
                    if !at_head && has_body(&response, &sent.method) {
                        let abort = config.on_lost == OnLost::Abort;
                        let hold = Hold::new(guard, abort, config.await_release);
                        let (parts, body) = response.into_parts();
                        let body = LockBody::locked(body, &parts.headers, hold);
                        return Poll::Ready(Ok(Response::from_parts(parts, body)));
                    }
                    if !config.await_release {
                        drop(guard);
                        return Poll::Ready(Ok(response.map(LockBody::unlocked)));
                    }
                    State::Releasing {
                        releasing: Releasing::new(guard),
                        response: Some(response),
                    }
                }
                StateProjection::Releasing {
                    releasing,
                    response,
                } => {
                    ready!(Pin::new(releasing).poll(context));
                    return Poll::Ready(Ok(take(response).map(LockBody::unlocked)));
                }
            };
            state.set(next);
        }
    }
}

impl<S, ReqBody> Call<S, ReqBody>
where
    S: Service<Request<ReqBody>>,
{
    /// Hands the request on, with the lock if there is one.
    fn run(
        self,
        guard: Option<LockGuard>,
        lost: Option<Lost>,
    ) -> State<S, ReqBody, S::Future, S::Response> {
        let Self {
            mut inner,
            request,
            config,
            ..
        } = self;
        let (mut parts, body) = request.into_parts();
        if let Some(guard) = &guard {
            LockHandles::of(&mut parts.extensions).add(&guard.handle());
            parts.extensions.insert(guard.handle());
            if config.runs_to_completion {
                parts.extensions.insert(Outlive {
                    lock: guard.handle(),
                    abort_if_lost: config.on_lost == OnLost::Abort,
                });
            }
            if let (Some(name), Some(value)) = (&config.forward_token, token_of(guard)) {
                parts.headers.insert(name, value);
            }
        }
        let sent = Sent {
            method: parts.method.clone(),
            kind: RequestKind::of(&parts),
            config,
        };
        State::Running {
            lost: lost.filter(|_| sent.config.on_lost == OnLost::Abort),
            inner: inner.call(Request::from_parts(parts, body)),
            guard,
            sent,
        }
    }
}

impl<S, ReqBody> Call<S, ReqBody> {
    fn refuse<B>(self, error: LockError) -> Response<LockBody<B>> {
        let rejection = Rejection::of(error, self.config.contended_status);
        self.reject(rejection)
    }

    fn reject<B>(self, rejection: Rejection) -> Response<LockBody<B>> {
        let (parts, _) = self.request.into_parts();
        refused(
            self.config
                .refusals
                .refuse(rejection, RequestKind::of(&parts)),
        )
    }
}

impl Config {
    fn proceeds_despite(&self, error: &LockError) -> bool {
        let proceeds = self.on_unavailable == OnUnavailable::Proceed
            && matches!(error, LockError::Unavailable { .. });
        if proceeds {
            tracing::warn!(%error, "redlock request served WITHOUT its lock");
            telemetry::unprotected(self.label.unwrap_or(telemetry::UNNAMED));
        }
        proceeds
    }
}

impl<S, ReqBody> fmt::Debug for ResponseFuture<S, ReqBody>
where
    S: Service<Request<ReqBody>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

fn refused<B>(refusal: Response<Full<Bytes>>) -> Response<LockBody<B>> {
    refusal.map(LockBody::refusal)
}

fn token_of(guard: &LockGuard) -> Option<HeaderValue> {
    let token = guard.fencing_token()?;
    Some(token.as_u64().into())
}

/// Whether anything of the body will be sent, so that there is a last piece to hold back
/// (RFC 9110, section 6.4.1).
fn has_body<B: Body>(response: &Response<B>, method: &Method) -> bool {
    let status = response.status();
    let forbidden = status.is_informational()
        || status == StatusCode::NO_CONTENT
        || status == StatusCode::NOT_MODIFIED
        || *method == Method::HEAD
        || (*method == Method::CONNECT && status.is_success());
    let body = response.body();
    let is_empty = body.is_end_stream()
        || body.size_hint().exact() == Some(0)
        || declared_length(response.headers()) == Some(0);
    !forbidden && !is_empty
}

/// Takes what a state holds until the one transition that needs it.
pub(super) fn take<T>(slot: &mut Option<T>) -> T {
    slot.take()
        .expect("a future is not polled after it is done")
}
