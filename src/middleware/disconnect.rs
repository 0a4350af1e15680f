//! What happens to a request whose client disconnects: it is dropped, or its handler runs to completion.
//!
//! # Implementation details
//!
//! With [`RunToCompletion`], the future of the layer goes on in a task if it is dropped while its handler runs. It ends
//! there as it would have ended here: with the response, or with the lock.

use std::future::pending;
use std::pin::Pin;

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tokio::runtime::Handle;
use tower::{BoxError, Service};
use tracing::{Instrument, Span};

use crate::lock::Left;
use crate::middleware::body::LockBody;
use crate::middleware::service::{RedlockService, ResponseFuture};

/// Drop the handler when the client disconnects, at any `await`, and release the lock, as hyper
/// does without a lock. The default of [`RedlockLayer`](crate::RedlockLayer).
#[derive(Debug, Clone)]
pub struct CancelOnDisconnect;

/// Let a handler that has started run to completion under its lock when the client disconnects.
///
/// From then on, the handler runs in a task of its own, in the span of the request. When it completes, the lock is
/// released and the response dropped. With [`OnLost::Abort`](crate::OnLost::Abort) the handler ends with the lock, so
/// `max_hold` bounds it. A client whose request was aborted may meet its own lock with its next request.
#[derive(Debug, Clone, Copy)]
pub struct RunToCompletion;

/// [`RedlockService`] that lets handlers run to completion.
#[derive(Debug, Clone)]
#[expect(
    unnameable_types,
    reason = "it differs from a `RedlockService` in the bounds only"
)]
pub struct RunToCompletionService<S> {
    pub(super) inner: RedlockService<S>,
}

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for RunToCompletionService<S>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    ReqBody: Send + 'static,
    ResBody: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    boxed_service!(Response<LockBody<ResBody>>);

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (runtime, span) = (Handle::try_current().ok(), Span::current());
        let go_on = move |running: Pin<Box<ResponseFuture<S, ReqBody>>>| {
            if let Some(runtime) = &runtime
                && running.is_handling()
            {
                runtime.spawn(running.instrument(span.clone()));
            }
        };
        let mut left = Left(Some(Box::pin(self.inner.call(request))), go_on);
        Box::pin(async move {
            match &mut left.0 {
                Some(running) => running.await,
                // It is there until the drop.
                None => pending().await,
            }
        })
    }
}
