//! The service decides what each request needs; its future acquires the lock, calls the inner service and releases the lock.
//!
//! # Implementation details
//!
//! The future goes through these states:
//!
//! `Locking → Readying → Running → Releasing`
//!
//! * `Readying` is over at once if the inner service was kept ready during `Locking`.
//! * `Releasing` is skipped if the response has a body: then the body takes the lock over.
//! * A refused request begins with `Releasing`. `Passing` stands alone: the request is served without a lock.
//!
//! Three rules hold in every state:
//!
//! * The state owns everything that must end with the request. Dropping the future drops the handler and releases
//!   the lock in the background; no other clean-up exists.
//! * The loss of the lock is checked before the handler is polled, and by the clock before the handler starts and
//!   before its response is passed on, because the report of the loss may be late.
//! * The lock is released before the future ends, also with an error or a panic of the inner service. So a layer
//!   outside that calls again, such as `tower::retry`, does not meet the lock of its last call.

use std::any::Any;
use std::fmt::Debug;
use std::future::Future;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::Full;
use pin_project::pin_project;
use tokio::sync::Mutex;
use tower::{BoxError, Service};

use crate::lock::{LockError, LockFuture, LockGuard, LockHandle, LockOptions, LostReason};
use crate::middleware::body::{LockBody, declared_length};
use crate::middleware::calls::{CallToken, CallTracker};
use crate::middleware::config::{Config, NotLocked, OnLost, ReleaseAt, Unprotected};
use crate::middleware::disconnect::SpawnHandler;
use crate::middleware::held::{HeldLock, LockHandles};
use crate::middleware::macros::{inner_accessors, opaque_debug};
use crate::middleware::rejection::Rejection;
use crate::middleware::response::RequestKind;
use crate::middleware::token_header;

/// Middleware that holds a lock while the inner service works on a request.
///
/// Created by [`RedlockLayer`](crate::RedlockLayer), which has an example.
#[derive(Clone)]
pub struct RedlockService<S> {
    inner: S,
    config: Arc<Config>,
}

impl<S> RedlockService<S> {
    pub(super) fn new(inner: S, config: Arc<Config>) -> Self {
        Self { inner, config }
    }

    inner_accessors!();
}

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for RedlockService<S>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    ResBody: Body<Data = Bytes, Error: Into<BoxError>>,
{
    type Response = Response<LockBody<ResBody>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, ReqBody>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let config = Arc::clone(&self.config);
        let (mut parts, body) = request.into_parts();
        if let Some(name) = &config.forward_token {
            // On every path: the inner service trusts this header.
            token_header::clear(&mut parts.headers, name);
        }
        let keys = match config.keys(&parts) {
            Ok(Ok(keys)) => keys,
            Ok(Err(reason)) => {
                parts.extensions.insert(reason);
                // The handler must not take the lock of an outer layer for this layer's.
                parts.extensions.remove::<LockHandle>();
                let inner = self.inner.call(Request::from_parts(parts, body));
                let state = State::Passing(inner);
                return ResponseFuture { state };
            }
            Err(rejection) => {
                let state = State::refused(config.refusals.refuse_request(rejection, &parts));
                return ResponseFuture { state };
            }
        };
        // From here on, this layer passes the request on or refuses it.
        let tracker = CallToken::take(&mut parts.extensions);
        let handles = LockHandles::from_extensions(&mut parts.extensions);
        let options = config.options(&parts);
        let lock = handles.lock(&config.redlock, keys, &options, config.waiters.as_ref());
        // Only the instance that was made ready may be called. Its clone is not ready.
        let clone = self.inner.clone();
        let mut inner = mem::replace(&mut self.inner, clone);
        let is_ready = !options.has_wait();
        if !is_ready {
            // The wait may be long: give up readiness, such as a permit, and ask for it again once the lock is held.
            inner = self.inner.clone();
        }
        let sent = SentRequest {
            method: parts.method.clone(),
            kind: RequestKind::of(&parts),
            tracker,
            is_not_started: config.runs_to_completion.then(Arc::default),
            config,
        };
        let call = Some(Call {
            inner,
            is_ready,
            options,
            request: Request::from_parts(parts, body),
            sent,
        });
        let state = State::Locking { lock, call };
        ResponseFuture { state }
    }
}

opaque_debug! { RedlockService<S> [inner = inner] where S: Debug }

/// Response future for [`RedlockService`](crate::middleware::RedlockService).
///
/// If it is dropped, the lock is released in the background.
#[pin_project]
pub struct ResponseFuture<S, ReqBody>
where
    S: Service<Request<ReqBody>>,
{
    #[pin]
    state: State<S, ReqBody, S::Future, S::Response, S::Error>,
}

#[pin_project(project = StateProjection)]
enum State<S, ReqBody, F, R, E> {
    Passing(#[pin] F),
    Locking {
        lock: LockFuture,
        call: Option<Call<S, ReqBody>>,
    },
    Readying {
        /// `None` if the request is served without its lock.
        held: Option<HeldLock>,
        call: Option<Call<S, ReqBody>>,
    },
    Running {
        #[pin]
        inner: F,
        held: Option<HeldLock>,
        sent: SentRequest,
    },
    Releasing {
        /// `None` if nothing delays the completion.
        release: Option<Pin<Box<dyn Future<Output = ()> + Send + Sync>>>,
        completion: Option<Completion<R, E>>,
    },
}

/// How the inner service completed, or a refusal.
enum Completion<R, E> {
    Refused(Response<Full<Bytes>>),
    Ended(Result<R, E>),
    Panic(Panic),
}

/// The mutex makes the payload `Sync`; it is never locked.
type Panic = Mutex<Box<dyn Any + Send>>;

/// A call of the inner service that waits for its lock.
struct Call<S, ReqBody> {
    inner: S,
    /// Whether `inner` was made ready before the wait.
    is_ready: bool,
    options: LockOptions,
    request: Request<ReqBody>,
    sent: SentRequest,
}

/// What is kept of a request after it was passed on.
struct SentRequest {
    method: Method,
    kind: RequestKind,
    /// Of an idempotency layer outside.
    tracker: Option<Arc<CallTracker>>,
    /// For a handler in a task of its own: set if it found its lock lost and did not start.
    is_not_started: Option<Arc<AtomicBool>>,
    config: Arc<Config>,
}

impl<S, ReqBody, ResBody> Future for ResponseFuture<S, ReqBody>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>>,
    ResBody: Body<Data = Bytes, Error: Into<BoxError>>,
{
    type Output = Result<Response<LockBody<ResBody>>, S::Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProjection::Passing(inner) => {
                    let response = ready!(inner.poll(context))?;
                    return Poll::Ready(Ok(response.map(LockBody::unlocked)));
                }
                StateProjection::Locking { lock, call } => {
                    let locked = ready!(Pin::new(lock).poll(context));
                    take(call).locked(locked)
                }
                StateProjection::Readying { held, call } => {
                    let mut failed = None;
                    let mut lost = held.as_mut().and_then(|held| held.check_lost(context));
                    // Without its lock, the request needs no readiness.
                    if lost.is_none()
                        && let Some(call) = call
                        && !call.is_ready
                    {
                        failed = match catch(|| call.inner.poll_ready(context)) {
                            Ok(polled) => ready!(polled).err().map(|e| Completion::Ended(Err(e))),
                            Err(panic) => Some(Completion::Panic(panic)),
                        };
                    }
                    // Also with `OnLost::Notify`: no handler starts without its lock.
                    lost = lost.or_else(|| held.as_ref()?.check_expired());
                    let (held, call) = (held.take(), take(call));
                    match (failed, lost) {
                        (Some(failed), _) => State::releasing(held, failed, &call.sent.config),
                        (None, Some(reason)) => call.reject(Rejection::Lost(reason)),
                        (None, None) => call.start(held),
                    }
                }
                StateProjection::Running { inner, held, sent } => {
                    let config = &sent.config;
                    let mut aborting = held.as_mut().filter(|held| held.on_lost == OnLost::Abort);
                    // First: once the lock is lost, the handler must not be polled again.
                    let mut lost = aborting.as_mut().and_then(|held| held.check_lost(context));
                    let mut polled = Poll::Pending;
                    if lost.is_none() {
                        polled = match catch(|| inner.poll(context)) {
                            Ok(polled) => polled.map(Completion::Ended),
                            Err(panic) => Poll::Ready(Completion::Panic(panic)),
                        };
                        if matches!(polled, Poll::Ready(Completion::Ended(Ok(_)))) {
                            lost = aborting.and_then(|held| held.check_expired());
                        }
                        if sent.is_not_started() {
                            lost = Some(LostReason::Expired);
                        }
                    }
                    match lost {
                        // Drops the handler and the lock before this future is dropped.
                        Some(reason) => State::refused(sent.refuse_lost(reason)),
                        None => match (ready!(polled), held.take()) {
                            (Completion::Ended(Ok(mut response)), Some(held)) => {
                                if let Some(name) = &config.expose_token
                                    && let Some(token) = token_of(held.handle())
                                {
                                    response.headers_mut().insert(name, token);
                                }
                                let is_at_end = config.release_at == ReleaseAt::BodyEnd;
                                if is_at_end && has_body(&response, &sent.method) {
                                    let response =
                                        LockBody::hold(response, held, config.await_release);
                                    return Poll::Ready(Ok(response));
                                }
                                State::releasing(
                                    Some(held),
                                    Completion::Ended(Ok(response)),
                                    config,
                                )
                            }
                            (completion, held) => State::releasing(held, completion, config),
                        },
                    }
                }
                StateProjection::Releasing {
                    release,
                    completion,
                } => {
                    if let Some(release) = release {
                        ready!(release.as_mut().poll(context));
                    }
                    return match take(completion) {
                        Completion::Refused(refusal) => {
                            Poll::Ready(Ok(refusal.map(LockBody::refusal)))
                        }
                        Completion::Ended(outcome) => {
                            Poll::Ready(outcome.map(|response| response.map(LockBody::unlocked)))
                        }
                        Completion::Panic(panic) => resume_unwind(panic.into_inner()),
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
    /// Goes on with the lock, or without it, if the request is served all the same.
    fn locked(
        mut self,
        locked: Result<LockGuard, LockError>,
    ) -> State<S, ReqBody, S::Future, S::Response, S::Error> {
        let config = &self.sent.config;
        let held = match locked {
            Ok(guard) => Some(HeldLock::new(guard, config.on_lost)),
            Err(error) if config.is_served_without_lock(&error, &self.options) => {
                let extensions = self.request.extensions_mut();
                extensions.insert(Unprotected);
                extensions.insert(NotLocked::Unavailable);
                // The handler must not take the lock of an outer layer for this layer's.
                extensions.remove::<LockHandle>();
                None
            }
            Err(error) => {
                let (status, retry_after) = (config.contended_status, config.retry_after);
                let options = &self.options;
                let rejection = Rejection::from_lock_error(error, options, status, retry_after);
                return self.reject(rejection);
            }
        };
        let call = Some(self);
        State::Readying { held, call }
    }

    fn reject<F, R, E>(self, rejection: Rejection) -> State<S, ReqBody, F, R, E> {
        let (parts, _) = self.request.into_parts();
        State::refused(self.sent.config.refusals.refuse_request(rejection, &parts))
    }

    /// Calls the inner service, with the lock if there is one.
    fn start(self, held: Option<HeldLock>) -> State<S, ReqBody, S::Future, S::Response, S::Error> {
        let (mut inner, sent) = (self.inner, self.sent);
        let (mut parts, body) = self.request.into_parts();
        let config = &sent.config;
        if let Some(tracker) = &sent.tracker {
            tracker.pass_on(&mut parts.extensions);
        }
        if let Some(handle) = held.as_ref().map(HeldLock::handle) {
            let handles = LockHandles::from_extensions(&mut parts.extensions);
            handles.add(handle, config.on_lost);
            parts.extensions.insert(handle.clone());
            if let Some(is_not_started) = &sent.is_not_started {
                parts.extensions.insert(SpawnHandler {
                    lock: handle.clone(),
                    on_lost: config.on_lost,
                    is_not_started: Arc::clone(is_not_started),
                });
            }
            if let Some(name) = &config.forward_token
                && let Some(token) = token_of(handle)
            {
                parts.headers.insert(name, token);
            }
        }
        let request = Request::from_parts(parts, body);
        match catch(|| inner.call(request)) {
            Ok(inner) => State::Running { inner, held, sent },
            Err(panic) => State::releasing(held, Completion::Panic(panic), &sent.config),
        }
    }
}

impl SentRequest {
    fn is_not_started(&self) -> bool {
        let is_not_started = self.is_not_started.as_ref();
        is_not_started.is_some_and(|is_not_started| is_not_started.load(Ordering::Relaxed))
    }

    /// Refuses a request whose handler was stopped or did not start.
    fn refuse_lost(&self, reason: LostReason) -> Response<Full<Bytes>> {
        if let Some(tracker) = &self.tracker {
            tracker.mark_stopped();
        }
        let rejection = Rejection::Lost(reason);
        self.config.refusals.refuse(rejection, self.kind)
    }
}

impl<S, ReqBody, F, R, E> State<S, ReqBody, F, R, E> {
    fn refused(refusal: Response<Full<Bytes>>) -> Self {
        Self::Releasing {
            release: None,
            completion: Some(Completion::Refused(refusal)),
        }
    }

    /// Releases the lock before the future ends with a completion.
    fn releasing(held: Option<HeldLock>, completion: Completion<R, E>, config: &Config) -> Self {
        Self::Releasing {
            // A lock that is not awaited is dropped here and released in the background.
            release: held.filter(|_| config.await_release).map(HeldLock::release),
            completion: Some(completion),
        }
    }
}

opaque_debug! {
    ResponseFuture<S, ReqBody>
    where
        S: Service<Request<ReqBody>>,
}

/// Runs a part of the inner service. A panic is returned, so that the lock is released first.
fn catch<T>(run: impl FnOnce() -> T) -> Result<T, Panic> {
    catch_unwind(AssertUnwindSafe(run)).map_err(Mutex::new)
}

fn token_of(handle: &LockHandle) -> Option<HeaderValue> {
    let token = handle.fencing_token()?;
    Some(token.as_u64().into())
}

/// Returns whether any frame of the body will be sent, which can wait for the release
/// (RFC 9110, section 6.4.1).
fn has_body<B: Body>(response: &Response<B>, method: &Method) -> bool {
    let status = response.status();
    let is_forbidden = status.is_informational()
        || status == StatusCode::NO_CONTENT
        || status == StatusCode::NOT_MODIFIED
        || *method == Method::HEAD
        || (*method == Method::CONNECT && status.is_success());
    let body = response.body();
    let is_empty = body.is_end_stream()
        || body.size_hint().exact() == Some(0)
        || declared_length(response.headers()) == Some(0);
    !is_forbidden && !is_empty
}

/// Takes a value that a state keeps for its only transition.
pub(super) fn take<T>(slot: &mut Option<T>) -> T {
    slot.take()
        .expect("a future is not polled after it is ready")
}
