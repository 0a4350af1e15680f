//! Execute once: work under a lock whose outcome is recorded and replayed. Independent of HTTP.
//!
//! # How it works
//!
//! An execution holds the lock of its key. When it ends, its outcome is recorded on a majority of the nodes, which
//! also frees the key. A later request for the key meets the record and replays the outcome. A record that only a
//! minority has is written to a majority first, so that all later requests get the same outcome. No request
//! executes again after a majority has recorded an outcome. [`protocol::once`](crate::protocol::once) has the rules.
//!
//! This floor adds to the lease of a plain lock:
//!
//! | file | adds |
//! |---|---|
//! | `round` | the records to the acquisition round |
//! | `attempt` | repair and replay to an attempt |
//! | `lifecycle` | the life of an execution: attempts, pending, executing, recorded |
//! | `pending` | the wait between the grant and the beginning, in which a record still decides |
//! | `recording` | the write of the outcome to a majority |
//! | `replay` | the write of a replayed record to the nodes that lack it |
//! | `fetch` | the read of a large record, from one node for all interested callers |
//! | `limits` | the range of retentions and sizes |
//! | `task`, `command` | the state that all steps share, and the commands of the execution |
//! | `request`, `acquisition`, `execution`, `error` | the internal API, which the HTTP layer uses too; in one group of nodes, or in two |
//! | `run`, `result` | the public API: [`Redlock::once`](crate::Redlock::once) |

mod acquisition;
mod attempt;
mod command;
mod error;
mod execution;
mod fetch;
#[cfg(fuzzing)]
pub(crate) mod fuzzing;
mod inspect;
mod lifecycle;
mod limits;
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
pub use inspect::{InspectedKey, Inspection, NodeInspection, Revoked};
#[cfg(feature = "idempotency")]
pub(crate) use limits::{DAY, bound_body, bound_retention};
pub use request::ExecuteOnce;
pub use run::Outcome;
#[cfg(feature = "idempotency")]
pub(crate) use run::run_to_end;
