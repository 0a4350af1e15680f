//! The layer.

use std::sync::Arc;

use tower::Layer;

use crate::middleware::buffer::config::Config;
use crate::middleware::buffer::service::BufferBodyService;
use crate::middleware::macros::layer_setters;
use crate::middleware::response::Refusals;
use crate::middleware::response::RejectionResponse;

/// Layer that applies the [`BufferBodyService`] middleware: reads each request's body before the
/// inner service sees the request. So a lock further in is not held during a slow upload, and a
/// key can be taken from the body.
///
/// Put it outside of the [`RedlockLayer`](crate::RedlockLayer), so that the request reaches it first. The
/// bytes are an extension of the request, [`BufferedBody`](crate::BufferedBody); the inner service reads the
/// same bytes and trailers from the request. A body over the limit is refused with 413
/// `body-too-large`, at once if it declares its length.
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
/// The whole body is read even if the lock is held. Without this layer, such a request is refused before its
/// body is read.
#[derive(Debug, Clone)]
#[must_use = "a layer does nothing until it is applied"]
pub struct BufferBodyLayer {
    config: Config,
}

impl BufferBodyLayer {
    /// Creates a layer that reads bodies of at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        let refusals = Refusals::new();
        Self {
            config: Config { limit, refusals },
        }
    }

    layer_setters! {
        /// Sets how refusals look. Default: problem+json (RFC 9457), or a gRPC status.
        rejection;
    }
}

impl<S> Layer<S> for BufferBodyLayer {
    type Service = BufferBodyService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        BufferBodyService::new(inner, Arc::new(self.config.clone()))
    }
}
