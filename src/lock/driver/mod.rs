//! The driver: joins a [lease](crate::protocol::lease) to the nodes, the clock, and the holders of its lock.
//!
//! # Implementation details
//!
//! One task owns a lock from its first request to its last answer. It makes attempts until a majority grants the lock,
//! each with a lease and an owner token of its own, and keeps those that were refused until their releases are answered.
//! What the lock needs next, the lease says.
//!
//! | file | step |
//! |---|---|
//! | `run` | the life of a lock from its order to its end |
//! | `attempt` | attempts, until one is granted |
//! | `hold` | what holders see of the lock and ask for; the release |
//! | `once` | what only an execution meets |
//! | `task` | passes votes and time to the lease, and sends its requests |
//! | `owned` | the lease with its owner |
//! | `reading` | reads that a lease asks for |
//!
//! # Invariants
//!
//! * Only the task sends the requests of its lock. On each node, the release therefore follows the acquisition, and
//!   a renewal never races with the release.
//! * A lease that is not releasing is released by the drop of the driver: when the task panics, or its runtime ends.
//! * The caller's future, the guards and the handles only share the lock. Dropping them does no I/O.

mod attempt;
mod hold;
mod once;
mod owned;
mod reading;
mod run;
mod task;

pub(crate) use run::acquire;
pub(crate) use task::Driver;
