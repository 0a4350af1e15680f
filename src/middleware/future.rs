//! The response future: lock, call, release; it owns what must end with the request.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::Full;
use pin_project::pin_project;
use tower::{BoxError, Service};

use crate::lock::{LockError, LockFuture, LockGuard, LockHandle, Lost, LostReason};
use crate::middleware::body::{Hold, LockBody, Releasing, declared_length};
use crate::middleware::disconnect::Outlive;
use crate::middleware::held::LockHandles;
use crate::middleware::layer::{Config, NotLocked, OnLost, OnUnavailable, ReleaseAt, Unprotected};
use crate::middleware::passage::Taken;
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
    state: State<S, ReqBody, S::Future, S::Response, S::Error>,
}

/// # States
///
/// `Locking → Readying → Running → Releasing`, where `Readying` is over at once if the inner
/// service was kept ready, and `Releasing` is skipped if the body takes the lock over. An error or a
/// panic of the inner service waits in `Releasing` too. `Refused` and `Passing` stand by themselves.
#[pin_project(project = StateProjection)]
enum State<S, ReqBody, F, R, E> {
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
        /// `None` if there is nothing to wait for.
        releasing: Option<Releasing>,
        outcome: Option<Outcome<R, E>>,
    },
}

/// How the inner service ended.
enum Outcome<R, E> {
    Response(R),
    Error(E),
    /// In a mutex, which makes it `Sync`.
    Panic(Mutex<Box<dyn Any + Send>>),
}

/// A call that waits for its lock.
struct Call<S, ReqBody> {
    inner: S,
    is_ready: bool,
    request: Request<ReqBody>,
    /// For an idempotency layer outside.
    passage: Option<Taken>,
    config: Arc<Config>,
}

/// What is remembered of the request once it has been handed on.
struct Sent {
    method: Method,
    kind: RequestKind,
    passage: Option<Taken>,
    /// Where the handler runs in a task of its own: whether that found the lock lost before it began.
    not_begun: Option<Arc<AtomicBool>>,
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
        passage: Option<Taken>,
        config: Arc<Config>,
    ) -> Self {
        let call = Some(Call {
            inner,
            is_ready,
            request,
            passage,
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
                    let mut failed = None;
                    // A lock that is lost meanwhile needs no readiness any more.
                    let mut lost_now = poll_lost(lost, context);
                    if lost_now.is_none()
                        && let Some(call) = call
                        && !call.is_ready
                    {
                        // The lock is given back before an error or a panic goes on.
                        let polling = AssertUnwindSafe(|| call.inner.poll_ready(context));
                        failed = match catch_unwind(polling) {
                            Ok(polled) => ready!(polled).err().map(Outcome::Error),
                            Err(panic) => Some(Outcome::Panic(Mutex::new(panic))),
                        };
                    }
                    // No handler begins without its lock, whatever it is to do when it loses it. By the
                    // clock, too: the timer is late if this thread was busy.
                    lost_now = lost_now.or_else(|| over(guard.as_ref()));
                    let (guard, lost, call) = (guard.take(), lost.take(), take(call));
                    match (failed, lost_now) {
                        (Some(failed), _) => releasing(guard, failed, &call.config),
                        (None, Some(reason)) => {
                            state.set(State::Refused(None));
                            return Poll::Ready(Ok(call.reject(Rejection::Lost(reason))));
                        }
                        (None, None) => call.run(guard, lost),
                    }
                }
                StateProjection::Running {
                    inner,
                    guard,
                    lost,
                    sent,
                } => {
                    // First: once the lock is lost, the handler must not be polled again.
                    let mut stopped = poll_lost(lost, context);
                    let mut polled = Poll::Pending;
                    if stopped.is_none() {
                        // The lock is given back before the panic goes on, like before an error.
                        let polling = AssertUnwindSafe(|| inner.poll(context));
                        polled = match catch_unwind(polling) {
                            Ok(polled) => polled.map(|outcome| match outcome {
                                Ok(response) => Outcome::Response(response),
                                Err(error) => Outcome::Error(error),
                            }),
                            Err(panic) => Poll::Ready(Outcome::Panic(Mutex::new(panic))),
                        };
                        // The timer is late if the handler kept the thread busy, or the process was
                        // stopped: the clock is asked before the response is passed on.
                        if lost.is_some() && matches!(polled, Poll::Ready(Outcome::Response(_))) {
                            stopped = over(guard.as_ref());
                        }
                        if sent.did_not_begin() {
                            stopped = Some(LostReason::Expired);
                        }
                    }
                    if let Some(reason) = stopped {
                        let refusal = sent.refuse_lost(reason);
                        // Drops the handler now, not with this future.
                        state.set(State::Refused(None));
                        return Poll::Ready(Ok(refused(refusal)));
                    }
                    let config = &sent.config;
                    match (ready!(polled), guard.take()) {
                        (Outcome::Response(response), None) => {
                            return Poll::Ready(Ok(response.map(LockBody::unlocked)));
                        }
                        (Outcome::Response(mut response), Some(guard)) => {
                            if let (Some(name), Some(value)) =
                                (&config.expose_token, token_of(&guard))
                            {
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
                            releasing(Some(guard), Outcome::Response(response), config)
                        }
                        (outcome, guard) => releasing(guard, outcome, config),
                    }
                }
                StateProjection::Releasing { releasing, outcome } => {
                    if let Some(releasing) = releasing {
                        ready!(Pin::new(releasing).poll(context));
                    }
                    return match take(outcome) {
                        Outcome::Response(response) => {
                            Poll::Ready(Ok(response.map(LockBody::unlocked)))
                        }
                        Outcome::Error(error) => Poll::Ready(Err(error)),
                        Outcome::Panic(panic) => resume_unwind(
                            panic.into_inner().unwrap_or_else(PoisonError::into_inner),
                        ),
                    };
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
    ) -> State<S, ReqBody, S::Future, S::Response, S::Error> {
        let Self {
            mut inner,
            request,
            passage,
            config,
            ..
        } = self;
        let (mut parts, body) = request.into_parts();
        if let Some(passage) = &passage {
            passage.pass(&mut parts.extensions);
        }
        let mut not_begun = None;
        if let Some(guard) = &guard {
            LockHandles::of(&mut parts.extensions).add(&guard.handle(), config.on_lost);
            parts.extensions.insert(guard.handle());
            if config.runs_to_completion {
                let outlive = Outlive {
                    lock: guard.handle(),
                    abort_if_lost: config.on_lost == OnLost::Abort,
                    not_begun: Arc::default(),
                };
                not_begun = Some(Arc::clone(&outlive.not_begun));
                parts.extensions.insert(outlive);
            }
            if let (Some(name), Some(value)) = (&config.forward_token, token_of(guard)) {
                parts.headers.insert(name, value);
            }
        }
        let sent = Sent {
            method: parts.method.clone(),
            kind: RequestKind::of(&parts),
            passage,
            not_begun,
            config,
        };
        let request = Request::from_parts(parts, body);
        match catch_unwind(AssertUnwindSafe(|| inner.call(request))) {
            Ok(inner) => State::Running {
                lost: lost.filter(|_| sent.config.on_lost == OnLost::Abort),
                inner,
                guard,
                sent,
            },
            Err(panic) => {
                let outcome = Outcome::Panic(Mutex::new(panic));
                releasing(guard, outcome, &sent.config)
            }
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

impl Sent {
    /// Whether the handler found its lock lost before it was first polled, in a task of its own.
    fn did_not_begin(&self) -> bool {
        let not_begun = self.not_begun.as_ref();
        not_begun.is_some_and(|not_begun| not_begun.load(Ordering::Acquire))
    }

    /// Refuses a request whose handler is stopped, or never began.
    fn refuse_lost(&self, reason: LostReason) -> Response<Full<Bytes>> {
        if let Some(passage) = &self.passage {
            passage.stop();
        }
        let rejection = Rejection::Lost(reason);
        self.config.refusals.refuse(rejection, self.kind)
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

/// Looks whether the lock is lost, as far as its lease task has said.
fn poll_lost(lost: &mut Option<Lost>, context: &mut Context<'_>) -> Option<LostReason> {
    match Pin::new(lost.as_mut()?).poll(context) {
        Poll::Ready(reason) => Some(reason),
        Poll::Pending => None,
    }
}

/// Looks by the clock whether the validity of the lock is over.
fn over(guard: Option<&LockGuard>) -> Option<LostReason> {
    guard
        .filter(|guard| !guard.is_valid())
        .map(|_| LostReason::Expired)
}

/// Gives the lock back before the request ends with this outcome, so that its client does not meet its own
/// lock with the next request.
fn releasing<S, ReqBody, F, R, E>(
    guard: Option<LockGuard>,
    outcome: Outcome<R, E>,
    config: &Config,
) -> State<S, ReqBody, F, R, E> {
    State::Releasing {
        // Otherwise it is dropped, and given back in the background.
        releasing: guard.filter(|_| config.await_release).map(Releasing::new),
        outcome: Some(outcome),
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
