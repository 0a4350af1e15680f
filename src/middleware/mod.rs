//! A lock around a service: the layer, its service, future and body, key extractors, and refusals.
//!
//! The lock is acquired after the head of the request has arrived and before the inner service is called.
//! It is released when the response is complete. A request is refused without reading its body.
//!
//! # When the lock is released
//!
//! A client that reads each response to its end finds the lock free with its next request, on any server,
//! as long as a majority of the nodes answers within the node timeout:
//! the last piece of the response waits until a majority has confirmed the release. If no body is sent, the last
//! piece is the head. Else it is the trailers, the data frame that ends the body or completes its length, or the
//! end of the stream. Waiting for the end of the stream alone would be too late, because hyper ends a message at
//! its declared length without polling the body again.
//!
//! The last piece is sent separately, so the server should set `TCP_NODELAY`. Otherwise Nagle's algorithm
//! delays it until the client has acknowledged the earlier pieces.
//!
//! # Where to put the layer in a stack
//!
//! Outside of the lock: tracing, CORS (a browser cannot read a 423 without its headers), timeouts (they
//! end the request and its lock), authentication, compression, and layers that decode or read bodies
//! for keys. Inside: work that must not run concurrently. A layer inside that collects whole responses keeps the
//! lock until it has done so.
//!
//! hyper notices a disconnect when it reads from the connection. While another, pipelined request waits there
//! unread, hyper does not read: then a handler runs to completion under its lock.
//!
//! # Readiness
//!
//! The lock cannot be acquired in `poll_ready`, because its key depends on the request. While a
//! request *waits* for a lock, it holds no readiness of the inner service, such as a permit of a
//! concurrency limit or a slot of a buffer. It waits for readiness again once it has the lock.

#![cfg_attr(
    not(all(feature = "axum", feature = "client", feature = "idempotency")),
    allow(dead_code, unused_imports, reason = "floors above use the rest")
)]

pub(crate) mod body;
pub(crate) mod buffer;
pub(crate) mod buffered;
mod calls;
pub(crate) mod config;
pub(crate) mod held;
#[cfg(any(feature = "client", feature = "idempotency"))]
pub(crate) mod idempotency_key;
pub(crate) mod key;
pub(crate) mod layer;
#[cfg(feature = "utoipa")]
mod openapi;
pub(crate) mod rejection;
pub(crate) mod response;
#[cfg(feature = "axum")]
mod routed;
mod service;
pub(crate) mod token_header;
#[cfg(not(feature = "axum"))]
mod unrouted;

#[cfg(not(feature = "axum"))]
use unrouted as routed;

pub use body::LockBody;
pub use buffer::BufferBodyService;
pub use buffered::ReadBody;
#[cfg(feature = "utoipa")]
pub(crate) use openapi::{Responses, responses};
pub use service::{RedlockService, ResponseFuture};
pub(crate) use {
    body::declared_length,
    buffer::read,
    buffered::WholeBody,
    calls::{CallToken, CallTracker, HandlerState},
    config::{NotLocked, OnLost, has_method},
    held::{HeldShare, LockHandles},
    key::{KeyExtractor, present},
    rejection::Rejection,
    response::{LoggedMistakes, Refusals, RejectionResponse, RequestKind},
    routed::{matched_no_route, route_of},
};
