//! One execution per idempotency key, and the recorded response for every duplicate.
//!
//! The layer follows the IETF draft *The Idempotency-Key HTTP Header Field*. It keeps each record on a majority
//! of independent nodes, so that the record survives the loss of a minority, and a lock
//! admits one of several simultaneous duplicates.
//!
//! # How a request is served
//!
//! 1. Its body is read, up to `max_request_body`, because it is part of the fingerprint.
//! 2. Every node is asked for the key, and answers with the record if it has one: then the recorded
//!    response is replayed. If another request is executing, the answer is 409.
//! 3. Otherwise the inner service is called, in a task of its own: a disconnect does not stop
//!    it, and a retry gets the record.
//! 4. The response is recorded on all nodes, and returned once a majority has it.

mod answer;
mod body;
mod codec;
mod config;
#[cfg(feature = "axum")]
mod extract;
mod fingerprint;
mod header;
mod layer;
mod service;
mod stored;
mod task;

/// Scopes for [`IdempotencyLayer::new`]: which caller an idempotency key belongs to.
pub mod scope;

pub use body::{IdempotencyBody, IdempotencyRequestBody};
#[cfg(feature = "encryption")]
pub use codec::RecordKeys;
pub use config::OnUnrecorded;
#[cfg(feature = "axum")]
pub use extract::IdempotencyKeyRejection;
pub use header::{IdempotencyKey, ParseIdempotencyKeyError};
pub use layer::IdempotencyLayer;
pub use service::{IdempotencyService, ResponseFuture};

pub use crate::once::ExecutionHandle;
