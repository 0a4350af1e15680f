//! The service: decides what each request needs, and leaves the rest to its future.

use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower::{BoxError, Service};

use crate::lock::LockHandle;
use crate::middleware::body::LockBody;
use crate::middleware::future::ResponseFuture;
use crate::middleware::held::LockHandles;
use crate::middleware::layer::Config;
use crate::middleware::passage::Passage;
use crate::middleware::rejection::RequestKind;
use crate::middleware::token_header;

/// Middleware that holds a lock while the inner service works on a request.
///
/// Made by [`RedlockLayer`](crate::RedlockLayer); see there for an example.
#[derive(Clone)]
pub struct RedlockService<S> {
    inner: S,
    config: Arc<Config>,
}

impl<S> RedlockService<S> {
    pub(super) fn new(inner: S, config: Arc<Config>) -> Self {
        Self { inner, config }
    }

    /// Returns a reference to the inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// Returns a mutable reference to the inner service.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Returns the inner service.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for RedlockService<S>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    ResBody: Body<Data = Bytes>,
    ResBody::Error: Into<BoxError>,
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
            // Whatever becomes of the request: behind the layer this header is ours.
            token_header::clear(&mut parts.headers, name);
        }
        match config.keys(&parts) {
            Err(rejection) => {
                Passage::refuse(&parts.extensions);
                let refusal = config.refusals.refuse(rejection, RequestKind::of(&parts));
                ResponseFuture::refused(refusal)
            }
            Ok(Err(passed)) => {
                parts.extensions.insert(passed);
                // Another layer's lock must not be taken for the one that is not there.
                parts.extensions.remove::<LockHandle>();
                let request = Request::from_parts(parts, body);
                ResponseFuture::passing(self.inner.call(request))
            }
            Ok(Ok(keys)) => {
                // From here on it is this layer that passes the request on, or refuses it.
                let passage = Passage::take(&mut parts.extensions);
                let held = LockHandles::of(&mut parts.extensions);
                let lock = config.lock(keys, &held);
                // The instance that was made ready is the one that must be called; its clone is
                // not ready.
                let clone = self.inner.clone();
                let ready = mem::replace(&mut self.inner, clone);
                let (inner, is_ready) = if config.wait.is_zero() {
                    (ready, true)
                } else {
                    // A wait may be long: what readiness holds back from others is given back, and
                    // asked for again once the lock is there.
                    drop(ready);
                    (self.inner.clone(), false)
                };
                let request = Request::from_parts(parts, body);
                ResponseFuture::locking(lock, inner, is_ready, request, passage, config)
            }
        }
    }
}

impl<S: std::fmt::Debug> std::fmt::Debug for RedlockService<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedlockService")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}
