//! The service.

use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower::{BoxError, Service};

use crate::middleware::body::LockBody;
use crate::middleware::buffer::body::BufferedRequestBody;
use crate::middleware::buffer::config::Config;
use crate::middleware::buffer::future::{BufferBodyFuture, UnreadCall};
use crate::middleware::calls::CallToken;
use crate::middleware::macros::inner_accessors;
use crate::middleware::rejection::Rejection;

/// Middleware that reads a request's body before it passes the request on.
///
/// Created by [`BufferBodyLayer`](crate::BufferBodyLayer), which has an example.
#[derive(Debug, Clone)]
pub struct BufferBodyService<S> {
    inner: S,
    config: Arc<Config>,
}

impl<S> BufferBodyService<S> {
    pub(super) fn new(inner: S, config: Arc<Config>) -> Self {
        Self { inner, config }
    }

    inner_accessors!();
}

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for BufferBodyService<S>
where
    S: Service<Request<BufferedRequestBody>, Response = Response<ResBody>> + Clone,
    ReqBody: Body<Data = Bytes, Error: Into<BoxError>>,
    ResBody: Body<Data = Bytes, Error: Into<BoxError>>,
{
    type Response = Response<LockBody<ResBody>>;
    type Error = S::Error;
    type Future = BufferBodyFuture<S, ReqBody>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (parts, body) = request.into_parts();
        if body.size_hint().lower() > self.config.limit as u64 {
            CallToken::refuse_request(&parts.extensions);
            let refusals = &self.config.refusals;
            let refusal = refusals.refuse_request(Rejection::BodyTooLarge, &parts);
            return BufferBodyFuture::refused(refusal);
        }
        let clone = self.inner.clone();
        // Only the instance that was made ready may be called. Its clone is not ready.
        let mut inner = mem::replace(&mut self.inner, clone);
        let is_ready = body.is_end_stream();
        if !is_ready {
            // The upload may be slow: give up readiness, such as a permit, and ask for it again once the body
            // is complete.
            inner = self.inner.clone();
        }
        let call = UnreadCall {
            parts: Some(parts),
            inner,
            is_ready,
            config: Arc::clone(&self.config),
        };
        BufferBodyFuture::reading(body, call)
    }
}
