//! Execute once: work under a lock whose outcome is recorded and replayed. Independent of HTTP.
//!
//! # How it works
//!
//! An execution holds the lock of its key. When it ends, its outcome is recorded on a majority of the nodes, which
//! also frees the key. A later request for the key meets the record and replays the outcome. A record that only a
//! minority has is written to a majority first, so that all later requests get the same outcome. No request
//! executes again after a majority has recorded an outcome. [`protocol::acquire`](crate::protocol::acquire) has the rules.
//!
//! The life of an execution is that of a [lease](crate::protocol::lease), which one driver runs for all locks. This floor
//! adds:
//!
//! | file | adds |
//! |---|---|
//! | `fetch` | the read of a large record, from one node for all interested callers |
//! | `request`, `execution`, `error` | the internal API, which the HTTP layer uses too; in one group of nodes, or in two |
//! | `run` | the public API: [`Redlock::once`](crate::Redlock::once) |
//! | `inspect`, `leader` | what the nodes know of a key, and a revocation; who leads |

mod error;
mod execution;
mod fetch;
mod inspect;
mod leader;
mod list;
mod request;
pub(crate) mod run;

pub use error::OnceError;
pub use execution::ExecutionHandle;
pub use inspect::{InspectedKey, Inspection, NodeInspection, Revoked};
pub use leader::{Leader, LeaderWatch};
pub use list::{ListCursor, LockPage};
pub use request::ExecuteOnce;
pub use run::Outcome;
#[cfg(feature = "idempotency")]
pub(crate) use {
    error::report_conflict,
    execution::{Execution, run_to_end},
    fetch::MAX_BODY,
    request::DAY,
    run::{RETENTION, bound},
};
