//! The service: reads the request, and replays its response or starts its execution.

use std::fmt::Debug;
use std::future::{pending, ready};
use std::sync::Arc;

use bytes::Bytes;
use futures_util::TryFutureExt;
use http::{Request, Response};
use http_body::Body;
use tower::{BoxError, Service, ServiceExt};

use crate::idempotency::config::{ActiveExecutions, Config};
use crate::idempotency::task::{ExecutionTask, Responder};
use crate::middleware::{
    CallToken, CallTracker, LockBody, LockHandles, ReadBody, RequestKind, matched_no_route, read,
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
    boxed_service!(Response<LockBody<ResBody>>);

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        // Before the key is read: extractors of axum copy the extensions. Until the execution starts, each early return is a
        // refusal for an idempotency layer outside.
        let outer_calls = CallToken::take(&mut parts.extensions);
        let (key, resource) = match self.config.keyed(&parts) {
            Ok(Some(keyed)) => keyed,
            Ok(None) => {
                if let Some(outer_calls) = outer_calls {
                    outer_calls.pass_on(&mut parts.extensions);
                }
                let body = ReadBody::unread(body);
                let inner = self.inner.call(Request::from_parts(parts, body));
                return Box::pin(inner.map_ok(|response| response.map(LockBody::unlocked)));
            }
            Err(rejection) => {
                let refusal = self.config.refusals.refuse_request(rejection, &parts);
                return Box::pin(ready(Ok(refusal.map(LockBody::in_memory))));
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
            outer_calls,
        };
        // Dropped before the execution starts, this gives the key back. After that, the execution continues without it.
        Box::pin(async move {
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
        })
    }
}

opaque_debug! { IdempotencyService<S> [inner = inner] where S: Debug }
