//! Execute once: a lock whose outcome is recorded and replayed, usable with no HTTP at all.
//!
//! # How it works
//!
//! An execution holds the lock of its key. When it ends, its outcome is recorded on a majority of the nodes,
//! which also frees the key. A later request for the key meets the record and replays the outcome. A record
//! that only a minority has is first written to a majority, so that all later requests are answered the same
//! (PROTOCOL, section 2.3). No step executes again what a majority has recorded.
//!
//! This floor adds to the lease of a plain lock:
//!
//! | file | adds |
//! |---|---|
//! | `round` | the records to the acquisition round |
//! | `attempt` | repair and replay to an attempt |
//! | `lifecycle` | the life of an execution: attempts, pending, executing, recorded |
//! | `pending` | the wait between grant and beginning, in which a record still decides |
//! | `recording` | the outcome is written to a majority |
//! | `replay` | the nodes that lack a record get it in the background |
//! | `fetch` | large records, read from one node for all that want them |
//! | `request`, `execution` | the internal face, which the HTTP layer uses too |
//! | `result`, `run` | the public face: [`Redlock::once`](crate::Redlock::once) |

mod attempt;
mod command;
mod error;
mod execution;
mod fetch;
mod lifecycle;
mod pending;
mod recording;
mod replay;
mod request;
mod result;
mod round;
mod run;
mod task;

#[cfg(feature = "idempotency")]
pub(crate) use command::Recorded;
pub use error::OnceError;
#[cfg(feature = "idempotency")]
pub(crate) use error::{BeginError, Denied};
#[cfg(feature = "idempotency")]
pub(crate) use execution::Execution;
pub use execution::ExecutionHandle;
#[cfg(feature = "idempotency")]
pub(crate) use fetch::is_undamaged;
pub use request::ExecuteOnce;
pub use run::Outcome;
#[cfg(feature = "idempotency")]
pub(crate) use run::run_to_end;
