//! The service decides what each request needs; its future acquires the lock, calls the inner service and releases the lock.
//!
//! # Implementation details
//!
//! The future waits for the lock, then for the readiness of the inner service unless it was kept ready, for the
//! response, and for the release. If the response has a body, the body takes the lock over instead. A request that
//! passes without a lock waits for its response only.
//!
//! Three rules hold in every state:
//!
//! * The future owns everything that must end with the request. Dropping it drops the handler and releases
//!   the lock in the background; no other clean-up exists.
//! * The loss of the lock is checked, by its report and by the clock, before the handler starts or is polled, and
//!   before its response is passed on.
//! * The lock is released before the future ends, also with an error or a panic of the inner service. So a layer
//!   outside that calls again, such as `tower::retry`, does not meet the lock of its last call.

use std::fmt::Debug;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::thread;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::Full;
use pin_project::pin_project;
use tower::{BoxError, Service};

use crate::lock::{LockError, LockFuture, LockHandle, LockOptions};
use crate::middleware::body::{LockBody, declared_length};
use crate::middleware::calls::{CallToken, CallTracker};
use crate::middleware::config::{Config, NotLocked, OnLost, OnUnavailable, ReleaseAt};
use crate::middleware::held::{HeldShare, LockHandles};
use crate::middleware::rejection::Rejection;
use crate::middleware::response::RequestKind;
use crate::middleware::token_header;
use crate::node::telemetry;

/// Middleware that holds a lock while the inner service works on a request.
///
/// Created by [`RedlockLayer`](crate::RedlockLayer), which has an example.
#[derive(Clone)]
pub struct RedlockService<S> {
    pub(super) inner: S,
    pub(super) config: Arc<Config>,
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
        let config = &self.config;
        let (mut parts, body) = request.into_parts();
        if let Some(name) = &config.forward_token {
            // On every path: the inner service trusts this header.
            token_header::clear(&mut parts.headers, name);
        }
        let mut future = ResponseFuture {
            config: Arc::clone(config),
            method: parts.method.clone(),
            kind: RequestKind::of(&parts),
            // Before the key is read: extractors of axum copy the extensions.
            tracker: parts.extensions.remove().as_ref().map(CallToken::take_over),
            locking: None,
            waiting: None,
            is_ready: false,
            inner: None,
            held: None,
            ended: None,
        };
        future.locking = Some(match config.keys(&parts) {
            Ok(Ok(keys)) => {
                // The list itself is made when the lock is held, so that the extensions get all that they get at once.
                let handles = parts.extensions.get();
                let options = config.options(&parts);
                future.is_ready = options.wait.is_none_or(|wait| wait.is_zero());
                let locking = LockHandles::lock(handles, &config.redlock, keys, options.clone());
                Ok((locking, options))
            }
            Err(rejection) => Err(rejection),
            Ok(Err(reason)) => {
                if let Some(tracker) = &future.tracker {
                    tracker.pass_on(&mut parts.extensions);
                }
                parts.extensions.insert(reason);
                // The handler must not take the lock of an outer layer for this layer's.
                parts.extensions.remove::<LockHandle>();
                let request = Request::from_parts(parts, body);
                future.inner = Some(self.inner.call(request));
                return future;
            }
        });
        // Only the instance that was made ready may be called. Its clone is not ready.
        let clone = self.inner.clone();
        let mut inner = mem::replace(&mut self.inner, clone);
        if !future.is_ready {
            // The wait may be long: give up readiness, such as a permit, and ask for it again once the lock is held.
            inner = self.inner.clone();
        }
        future.waiting = Some((inner, Request::from_parts(parts, body)));
        future
    }
}

opaque_debug! { RedlockService<S> [inner = inner] where S: Debug }

/// Response future for [`RedlockService`](crate::middleware::RedlockService).
///
/// If it is dropped, the lock is released in the background.
#[pin_project(project = ResponseFutureProjection)]
pub struct ResponseFuture<S, ReqBody>
where
    S: Service<Request<ReqBody>>,
{
    config: Arc<Config>,
    method: Method,
    kind: RequestKind,
    /// Of an idempotency layer outside.
    tracker: Option<Arc<CallTracker>>,
    /// Until the lock is acquired, with the options of its request; or why it is not requested.
    locking: Option<Result<(LockFuture, LockOptions), Rejection>>,
    /// Until the inner service is called.
    waiting: Option<(S, Request<ReqBody>)>,
    /// Whether the inner service was made ready before the wait.
    is_ready: bool,
    #[pin]
    inner: Option<S::Future>,
    held: Option<HeldShare>,
    /// How the inner service ended, `Err` for a panic, until the lock is released.
    ended: Option<thread::Result<Result<S::Response, S::Error>>>,
}

impl<S, ReqBody, ResBody> Future for ResponseFuture<S, ReqBody>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>>,
    ResBody: Body<Data = Bytes, Error: Into<BoxError>>,
{
    type Output = Result<Response<LockBody<ResBody>>, S::Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if this.ended.is_none() {
            let served = match catch_unwind(AssertUnwindSafe(|| this.serve(context))) {
                Ok(served) => Ok(ready!(served)),
                Err(panic) => Err(panic),
            };
            // The handler ends before the lock is released.
            this.inner.set(None);
            let releases_at_end = this.config.release_at == ReleaseAt::BodyEnd;
            *this.ended = Some(match served {
                Ok(Err(rejection)) => {
                    let refusal = this.refuse(rejection);
                    return Poll::Ready(Ok(refusal.map(LockBody::boxed)));
                }
                Ok(Ok(Ok(response))) if this.held.is_some() && releases_at_end => {
                    let declared = declared_length(response.headers());
                    let has_body = has_body(&response, declared, this.method);
                    if let Some(held) = this.held.take_if(|_| has_body) {
                        return Poll::Ready(Ok(LockBody::hold(response, declared, held)));
                    }
                    Ok(Ok(response))
                }
                Ok(Ok(outcome)) => Ok(outcome),
                Err(panic) => Err(panic),
            });
        }
        if let Some(held) = this.held {
            ready!(held.poll_release(context));
        }
        // Without a wait, the lock is released in the background.
        *this.held = None;
        match take(this.ended) {
            Ok(outcome) => Poll::Ready(outcome.map(|response| response.map(LockBody::unlocked))),
            Err(panic) => resume_unwind(panic),
        }
    }
}

impl<S, ReqBody, ResBody> ResponseFutureProjection<'_, S, ReqBody>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>>,
{
    /// Serves the request until the inner service has ended, or the layer refuses the request.
    fn serve(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Result<S::Response, S::Error>, Rejection>> {
        if let Some(Err(rejection)) = self.locking.take_if(|locking| locking.is_err()) {
            return Poll::Ready(Err(rejection));
        }
        if let Some(Ok((locking, options))) = self.locking {
            let locked = ready!(Pin::new(locking).poll(context));
            *self.held = match locked {
                Ok(guard) => {
                    let (on_lost, awaits) = (self.config.on_lost, self.config.await_release);
                    Some(HeldShare::new(guard, on_lost, awaits))
                }
                Err(error @ LockError::Unavailable { .. })
                    if self.config.on_unavailable == OnUnavailable::Proceed =>
                {
                    tracing::warn!(%error, "redlock request served WITHOUT its lock");
                    telemetry::unprotected(options.label.unwrap_or(telemetry::UNNAMED));
                    None
                }
                Err(error) => return Poll::Ready(Err(self.config.refusal(error, options))),
            };
            *self.locking = None;
        }
        // First: once the lock is lost, the handler must not be polled again.
        self.check_lock()?;
        let Poll::Ready(mut outcome) = self.poll_inner(context)? else {
            return match self.guard().and_then(|held| held.check_lost(context)) {
                Some(reason) => Poll::Ready(Err(Rejection::Lost(reason))),
                None => Poll::Pending,
            };
        };
        if let Ok(response) = &mut outcome {
            self.check_lock()?;
            if let Some(name) = &self.config.expose_token
                && let Some(held) = &self.held
                && let Some(token) = held.handle.fencing_token()
            {
                response.headers_mut().insert(name, token.as_u64().into());
            }
        }
        Poll::Ready(Ok(outcome))
    }

    /// Returns the lock whose loss ends the request. No handler starts without its lock, also with `OnLost::Notify`.
    fn guard(&mut self) -> Option<&mut HeldShare> {
        let is_starting = self.waiting.is_some();
        let held = self.held.as_mut();
        held.filter(|held| is_starting || held.on_lost == OnLost::Abort)
    }

    fn check_lock(&mut self) -> Result<(), Rejection> {
        let lost = self.guard().and_then(|held| held.lost_reason());
        lost.map_or(Ok(()), |reason| Err(Rejection::Lost(reason)))
    }

    /// Polls the inner service, which it calls first when that is ready.
    fn poll_inner(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Result<S::Response, S::Error>, Rejection>> {
        if let Some((service, _)) = self.waiting {
            if !*self.is_ready {
                if let Err(error) = ready!(service.poll_ready(context)) {
                    return Poll::Ready(Ok(Err(error)));
                }
                // It may have blocked the thread.
                self.check_lock()?;
            }
            let (mut service, mut request) = take(self.waiting);
            self.prepare(&mut request);
            self.inner.set(Some(service.call(request)));
        }
        let inner = self.inner.as_mut().as_pin_mut();
        inner.expect(POLLED_AGAIN).poll(context).map(Ok)
    }

    /// Prepares the head of the request for the inner service, with the lock if there is one.
    fn prepare(&self, request: &mut Request<ReqBody>) {
        let extensions = request.extensions_mut();
        if let Some(tracker) = &self.tracker {
            tracker.pass_on(extensions);
        }
        let handles = LockHandles::from_extensions(extensions);
        let (config, Some(held)) = (&self.config, &self.held) else {
            extensions.insert(NotLocked::UNAVAILABLE);
            // The handler must not take the lock of an outer layer for this layer's.
            extensions.remove::<LockHandle>();
            return;
        };
        let handle = &held.handle;
        handles.add(handle, config.on_lost);
        extensions.insert(handle.clone());
        if let Some(name) = &config.forward_token
            && let Some(token) = handle.fencing_token()
        {
            request.headers_mut().insert(name, token.as_u64().into());
        }
    }

    /// Refuses the request. The lock ends before this future is dropped.
    fn refuse(&mut self, rejection: Rejection) -> Response<Full<Bytes>> {
        *self.held = None;
        let refusals = &self.config.refusals;
        if let Some((_, request)) = self.waiting.take() {
            return refusals.refuse_request(rejection, &request.into_parts().0);
        }
        if let Some(tracker) = self.tracker
            // A layer inside that still waited has taken the call back.
            && tracker.has_calls()
        {
            tracker.mark_stopped();
        }
        refusals.refuse(rejection, *self.kind)
    }
}

impl<S: Service<Request<ReqBody>>, ReqBody> ResponseFuture<S, ReqBody> {
    /// Returns whether a handler runs under the lock.
    pub(super) fn is_handling(&self) -> bool {
        self.inner.is_some() && self.held.is_some()
    }
}

opaque_debug! {
    ResponseFuture<S, ReqBody>
    where
        S: Service<Request<ReqBody>>,
}

/// Returns whether any frame of the body will be sent, which can wait for the release
/// (RFC 9110, section 6.4.1).
fn has_body<B: Body>(response: &Response<B>, declared: Option<u64>, method: &Method) -> bool {
    let status = response.status();
    let is_forbidden = status.is_informational()
        || status == StatusCode::NO_CONTENT
        || status == StatusCode::NOT_MODIFIED
        || *method == Method::HEAD
        || (*method == Method::CONNECT && status.is_success());
    let body = response.body();
    let is_empty =
        body.is_end_stream() || body.size_hint().exact() == Some(0) || declared == Some(0);
    !is_forbidden && !is_empty
}

/// Takes a value that a future keeps for its only transition.
fn take<T>(slot: &mut Option<T>) -> T {
    slot.take().expect(POLLED_AGAIN)
}

const POLLED_AGAIN: &str = "a future is not polled after it is ready";
