//! One execution per idempotency key, and the recorded response for every duplicate.
//!
//! The layer follows the IETF draft *The Idempotency-Key HTTP Header Field*. It keeps each record on a majority of
//! independent nodes, so that the record survives the loss of a minority. A lock admits one of several simultaneous
//! duplicates.
//!
//! # How the layer serves a request
//!
//! 1. It reads the body, up to `max_request_body`, because the body is part of the fingerprint.
//! 2. It requests the key from every node. A node with a record of the key answers with the record, and the layer
//!    replays the recorded response. If another request is executing, the response is 409.
//! 3. Otherwise it calls the inner service, in a task of its own. A disconnect does not stop the task, and a retry
//!    gets the recorded response.
//! 4. It records the response on all nodes, and returns it once a majority has the record.

pub(crate) mod codec;
mod config;
pub(crate) mod fingerprint;
#[cfg(all(fuzzing, feature = "compression", feature = "encryption"))]
pub(crate) mod fuzzing;
pub(crate) mod header;
pub(crate) mod layer;
pub(crate) mod stored;
mod task;

#[cfg(feature = "encryption")]
pub use codec::RecordKeys;
pub use layer::IdempotencyService;
