//! A lock around a service: the layer, its service, future and body, keys, and refusals.
//!
//! The lock is taken after the request's head has arrived and before the inner service is called,
//! and released when the response is done. A request that is refused is answered without reading
//! its body.
//!
//! # When the lock is released
//!
//! A client that reads each response to its end finds the lock free with its next request, also if
//! that goes to another server, as long as a majority of the nodes answers within the node timeout:
//! the last piece of the response is held back until a majority has confirmed the release. That is
//! the head when no body will be sent, else the trailers, the data frame with which the body
//! reports its end or reaches its length, or the end of the stream. hyper ends a message at its
//! declared length without polling on, so waiting for the end of the stream would be too late.
//!
//! The last piece goes out apart from what is before it, so the server should set `TCP_NODELAY`:
//! otherwise Nagle's algorithm holds it back until the client has acknowledged the rest.
//!
//! # Where it stands in a stack
//!
//! Outside of the lock: tracing, CORS (a browser cannot read a 423 without its headers), timeouts (they
//! end the request and its lock), authentication, compression, and what decodes or reads bodies
//! for keys. Inside: what must not be done by two at once, and no layer that collects whole
//! responses, or the lock is held until it has.
//!
//! hyper notices that a client has gone away when it reads from the connection, which it does not while
//! a further, pipelined request waits there unread: a handler then runs to its end under its lock.
//!
//! # Readiness
//!
//! The key is known only with the request, so the lock cannot be taken in `poll_ready`. While a
//! request *waits* for a lock it holds no readiness of the inner service (no permit of a
//! concurrency limit, no slot of a buffer); it asks for it again once it has the lock.

mod body;
mod buffer;
mod disconnect;
mod future;
mod grpc;
mod held;
pub(crate) mod key;
mod layer;
mod passage;
mod refusals;
mod rejection;
mod routed;
mod service;
mod token_header;

pub use body::{LockBody, LockLostError};
pub use buffer::{
    BufferBodyFuture, BufferBodyLayer, BufferBodyService, BufferedBody, BufferedRequestBody,
};
pub use disconnect::{
    CancelOnDisconnect, RunToCompletion, RunToCompletionFuture, RunToCompletionService,
};
pub use future::ResponseFuture;
pub use held::LockHandles;
pub use key::{IntoKeys, KeyExtractor};
#[cfg(feature = "axum")]
pub(crate) use layer::NotLocked;
pub use layer::{OnLost, OnMissingKey, OnUnavailable, RedlockLayer, ReleaseAt, Unprotected};
#[cfg(any(feature = "axum", feature = "idempotency"))]
pub(crate) use passage::Passage;
pub use rejection::{Rejection, RejectionResponse, RequestKind};
#[cfg(feature = "axum")]
pub(crate) use rejection::{escape_json, refusal};
pub use service::RedlockService;
#[cfg(feature = "idempotency")]
pub(crate) use {
    buffer::unread,
    held::HeldLock,
    key::present,
    layer::are_meant,
    passage::{Passages, Reached, Taken},
    refusals::Refusals,
    routed::matched_no_route,
};
