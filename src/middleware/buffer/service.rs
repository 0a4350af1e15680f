//! The service that reads bodies first.

use std::mem;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower::{BoxError, Service};

use crate::middleware::body::LockBody;
use crate::middleware::buffer::body::BufferedRequestBody;
use crate::middleware::buffer::future::BufferBodyFuture;
use crate::middleware::passage::Passage;
use crate::middleware::rejection::RequestKind;

/// Middleware that reads a request's body before it hands the request on.
///
/// Made by [`BufferBodyLayer`](crate::BufferBodyLayer); see there for an example.
#[derive(Debug, Clone)]
pub struct BufferBodyService<S> {
    inner: S,
    limit: usize,
}

impl<S> BufferBodyService<S> {
    pub(super) fn new(inner: S, limit: usize) -> Self {
        Self { inner, limit }
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

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for BufferBodyService<S>
where
    S: Service<Request<BufferedRequestBody>, Response = Response<ResBody>> + Clone,
    ReqBody: Body<Data = Bytes>,
    ReqBody::Error: Into<BoxError>,
    ResBody: Body<Data = Bytes>,
    ResBody::Error: Into<BoxError>,
{
    type Response = Response<LockBody<ResBody>>;
    type Error = S::Error;
    type Future = BufferBodyFuture<S, ReqBody>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (parts, body) = request.into_parts();
        if body.size_hint().lower() > self.limit as u64 {
            Passage::refuse(&parts.extensions);
            return BufferBodyFuture::too_large(RequestKind::of(&parts));
        }
        let clone = self.inner.clone();
        // The instance that was made ready is the one that must be called; its clone is not ready.
        let ready = mem::replace(&mut self.inner, clone);
        if body.is_end_stream() {
            return BufferBodyFuture::reading(body, self.limit, parts, ready, true);
        }
        // An upload may be slow: what readiness holds back from others is given back, and asked for
        // again once the body is there.
        drop(ready);
        BufferBodyFuture::reading(body, self.limit, parts, self.inner.clone(), false)
    }
}
