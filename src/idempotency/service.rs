//! The service: reads the request, and replays its response or starts its execution.

use std::fmt::Debug;
use std::future::{pending, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::TryFutureExt;
use futures_util::future::{Either, MapOk};
use http::{Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Limited};
use pin_project::pin_project;
use tower::{BoxError, Service, ServiceExt};

use crate::idempotency::body::IdempotencyBody;
use crate::idempotency::config::{ActiveExecutions, Config};
use crate::idempotency::task::{ExecutionTask, Responder};
use crate::middleware::{
    CallToken, CallTracker, LockHandles, ReadBody, Rejection, RequestKind, matched_no_route,
    read_error,
};
use crate::once::run_to_end;
use crate::protocol::lease::Effect;

/// Middleware that executes a request once per idempotency key, and replays its response.
///
/// Created by [`IdempotencyLayer`](crate::IdempotencyLayer), which has an example.
#[derive(Clone)]
pub struct IdempotencyService<S> {
    pub(super) inner: S,
    pub(super) config: Arc<Config>,
}

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for IdempotencyService<S>
where
    S: Service<Request<ReadBody<ReqBody>>, Response = Response<ResBody>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    ReqBody: Body<Data = Bytes, Error: Into<BoxError> + Send> + Send + 'static,
    ResBody: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<IdempotencyBody<ResBody>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, ResBody, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        let keyed = CallToken::hidden(&mut parts, |parts| self.config.keyed(parts));
        let (key, resource) = match keyed {
            Ok(Some(keyed)) => keyed,
            Ok(None) => {
                let body = ReadBody::unread(body);
                let inner = self.inner.call(Request::from_parts(parts, body));
                let pass_on = |response: Response<_>| response.map(IdempotencyBody::streaming);
                let state = Either::Right(inner.map_ok(pass_on as _));
                return ResponseFuture { state };
            }
            Err(rejection) => {
                let refusal = self.config.refusals.refuse_request(rejection, &parts);
                let refusal = refusal.map(IdempotencyBody::in_memory);
                let state = Either::Left(Box::pin(ready(Ok(refusal))) as Serving<_, _>);
                return ResponseFuture { state };
            }
        };
        // Reading the body and asking the nodes may take long: give up readiness, such as a permit, and ask for it again
        // before the inner service is called.
        self.inner = self.inner.clone();
        let mut inner = self.inner.clone();
        let mut responder = Responder {
            config: Arc::clone(&self.config),
            once: self.config.once(resource),
            kind: RequestKind::of(&parts),
            outer_calls: None,
        };
        // Dropped before the execution starts, this gives the key back. After that, the execution continues without it.
        let serving = async move {
            // Until the execution starts, each early return is a refusal for an idempotency layer outside.
            responder.outer_calls = CallToken::take(&mut parts.extensions);
            let body = match read(body, responder.config.max_request_body).await {
                Ok(body) => body,
                Err(rejection) => return Ok(responder.refuse(rejection)),
            };
            let fingerprint = (responder.config.fingerprint)(&parts, &body.bytes);
            responder.once = responder.once.fingerprint(fingerprint);
            let execution = match responder.once.acquire().await {
                Ok(execution) => execution,
                Err(denied) => return Ok(responder.denied(denied).await),
            };
            if let Err(error) = inner.ready().await {
                // Before the error is returned: a retry must not meet the lock of the request that it repeats.
                execution.release(Effect::NotBegun).await;
                return Err(error);
            }
            let handle = execution.handle();
            let active: &mut ActiveExecutions = parts.extensions.get_or_insert_default();
            let is_answered = active.push(handle.clone(), &responder.config);
            parts.extensions.insert(handle);
            parts.extensions.insert(key);
            // Before the token is put in, which would count as copied.
            let matched_no_route = matched_no_route(&parts);
            let calls = Arc::<CallTracker>::default();
            calls.pass_on(&mut parts.extensions);
            let held = parts.extensions.get::<LockHandles>();
            let held = held.map(LockHandles::share).unwrap_or_default();
            let request = Request::from_parts(parts, body);
            let task = ExecutionTask {
                execution,
                held,
                calls,
                matched_no_route,
                is_answered,
                responder,
            };
            match run_to_end(task.run(inner, request)).await {
                Some(answered) => answered,
                // The runtime is shutting down, and this future with it.
                None => pending().await,
            }
        };
        let state = Either::Left(Box::pin(serving) as Serving<_, _>);
        ResponseFuture { state }
    }
}

opaque_debug! { IdempotencyService<S> [inner = inner] where S: Debug }

/// Response future of [`IdempotencyService`].
///
/// # Design
///
/// It boxes the serving of a request, unlike the future of the lock layer. The execution runs in a task of its
/// own, so the bounds of a box are required already.
#[pin_project]
pub struct ResponseFuture<F, B, E> {
    #[pin]
    state: Either<Serving<B, E>, Passing<F, B>>,
}

type Serving<B, E> = Pin<Box<dyn Future<Output = Result<Response<IdempotencyBody<B>>, E>> + Send>>;

/// The future of the inner service, if the request passes through.
type Passing<F, B> = MapOk<F, fn(Response<B>) -> Response<IdempotencyBody<B>>>;

impl<F, B, E> Future for ResponseFuture<F, B, E>
where
    F: Future<Output = Result<Response<B>, E>>,
{
    type Output = Result<Response<IdempotencyBody<B>>, E>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.project().state.poll(context)
    }
}

opaque_debug! { ResponseFuture<F, B, E> }

/// Reads the body of a request, which is part of its fingerprint.
async fn read<B>(body: B, limit: usize) -> Result<ReadBody<B>, Rejection>
where
    B: Body<Data = Bytes, Error: Into<BoxError>>,
{
    if body.size_hint().lower() > limit as u64 {
        return Err(Rejection::BodyTooLarge);
    }
    let collected = Limited::new(body, limit).collect().await;
    let collected = collected.map_err(|error| read_error(&*error))?;
    Ok(ReadBody::collected(collected))
}
