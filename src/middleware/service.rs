//! The service: decides what each request needs, and leaves the rest to its future.

use std::fmt::Debug;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower::{BoxError, Service};

use crate::lock::LockHandle;
use crate::middleware::body::LockBody;
use crate::middleware::calls::CallToken;
use crate::middleware::config::Config;
use crate::middleware::future::{Call, ResponseFuture, SentRequest};
use crate::middleware::held::LockHandles;
use crate::middleware::macros::{inner_accessors, opaque_debug};
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
        match config.keys(&parts) {
            Err(rejection) => {
                let refusal = config.refusals.refuse_request(rejection, &parts);
                ResponseFuture::refused(refusal)
            }
            Ok(Err(reason)) => {
                parts.extensions.insert(reason);
                // The handler must not take the lock of an outer layer for this layer's.
                parts.extensions.remove::<LockHandle>();
                let request = Request::from_parts(parts, body);
                ResponseFuture::passing(self.inner.call(request))
            }
            Ok(Ok(keys)) => {
                // From here on, this layer passes the request on or refuses it.
                let tracker = CallToken::take(&mut parts.extensions);
                let handles = LockHandles::from_extensions(&mut parts.extensions);
                let waiters = config.waiters.as_ref();
                let options = config.options(&parts);
                let lock = handles.lock(&config.redlock, keys, &options, waiters);
                // Only the instance that was made ready may be called. Its clone is not ready.
                let clone = self.inner.clone();
                let mut inner = mem::replace(&mut self.inner, clone);
                let is_ready = !options.has_wait();
                if !is_ready {
                    // The wait may be long: give up readiness, such as a permit, and ask for it again
                    // once the lock is held.
                    inner = self.inner.clone();
                }
                let sent = SentRequest {
                    method: parts.method.clone(),
                    kind: RequestKind::of(&parts),
                    tracker,
                    is_not_started: config.runs_to_completion.then(Arc::default),
                    config,
                };
                let call = Call {
                    inner,
                    is_ready,
                    options,
                    request: Request::from_parts(parts, body),
                    sent,
                };
                ResponseFuture::locking(lock, call)
            }
        }
    }
}

opaque_debug! { RedlockService<S> [inner = inner] where S: Debug }
