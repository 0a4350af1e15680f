//! One execution per idempotency key, and the recorded response for every duplicate.
//!
//! The layer follows the IETF draft *The Idempotency-Key HTTP Header Field*. What it adds is where
//! the record is kept: on a majority of independent nodes, so that it survives the loss of a minority,
//! under a lock that lets one of several simultaneous duplicates through.
//!
//! # What becomes of a request
//!
//! 1. Its body is read, up to `max_request_body`, because it is part of the fingerprint.
//! 2. Every node is asked for the key, and answers with a record if it has one: then the recorded
//!    response is replayed. If somebody else executes, the answer is 409.
//! 3. Otherwise the inner service is called, in a task of its own: a client that goes away does not stop
//!    it, and its retry gets the record.
//! 4. The response is recorded on all nodes, and answered once a majority has it.

mod body;
mod codec;
#[cfg(feature = "axum")]
mod extract;
mod fingerprint;
mod header;
mod layer;
mod service;
mod stored;

/// Whose idempotency keys are they? What [`IdempotencyLayer::new`] is told.
pub mod scope;

pub use body::{IdempotencyBody, IdempotencyRequestBody};
#[cfg(feature = "encryption")]
pub use codec::RecordKeys;
#[cfg(feature = "axum")]
pub use extract::IdempotencyKeyRejection;
pub use header::{IdempotencyKey, ParseIdempotencyKeyError};
pub use layer::{IdempotencyLayer, OnUnrecorded};
pub use service::{IdempotencyService, ResponseFuture};
