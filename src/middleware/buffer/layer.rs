//! The layer that reads bodies first.

use bytes::Bytes;
use tower::Layer;

use crate::middleware::buffer::service::BufferBodyService;

/// Layer that applies the [`BufferBodyService`] middleware: reads each request's body before the
/// inner service sees the request, so that a lock around that is not held for a slow upload, and a
/// key can be taken from the body.
///
/// Put it outside of the [`RedlockLayer`](crate::RedlockLayer), so that it is reached first. The
/// bytes are put into the request's extensions as a [`BufferedBody`]; the inner service reads the
/// same bytes, and the same trailers, from the request. Bodies over the limit are refused with 413
/// `body-too-large`, at once if they declare their length.
///
/// ```
/// use axum::{Router, routing::post};
/// use tower_redlock::{BufferBodyLayer, Redlock, RedlockLayer, key};
///
/// # async fn upload() {}
/// let redlock = Redlock::in_memory(3);
/// let locked = (
///     BufferBodyLayer::new(64 * 1024),
///     RedlockLayer::new(redlock, ("invoice", key::form_field("invoice"))),
/// );
/// let app: Router = Router::new().route("/invoices", post(upload).layer(locked));
/// ```
///
/// A body is read whole even if the lock turns out to be held: without this layer such a request is
/// refused before its body is read.
#[derive(Debug, Clone, Copy)]
#[must_use = "a layer does nothing until it is applied"]
pub struct BufferBodyLayer {
    limit: usize,
}

/// Extension of a request whose body was read by a [`BufferBodyLayer`]: the bytes of the body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BufferedBody(pub Bytes);

impl BufferBodyLayer {
    /// Makes a layer that reads bodies of at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { limit }
    }
}

impl<S> Layer<S> for BufferBodyLayer {
    type Service = BufferBodyService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        BufferBodyService::new(inner, self.limit)
    }
}
