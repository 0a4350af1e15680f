//! The driver: joins a [lease](crate::protocol::lease) to the nodes, the clock, and the holders of its lock.
//!
//! # Implementation details
//!
//! One task owns a lock from its first request to its release. It makes attempts until a majority grants the lock, each
//! with a lease, a driver and an owner token of its own. What the lock needs next, the lease says. The drop of a driver
//! leaves the answers that are still to come to the [registry](crate::lock::registry).
//!
//! | file | what |
//! |---|---|
//! | `task` | the life of a lock: attempts until one is granted, the hold, the end |
//! | `lease` | the driver of one lease: passes answers and time to it, and sends its requests |
//! | `hold` | what holders ask for and are told; the release |
//!
//! # Invariants
//!
//! * Only the task sends the requests of its lock. On each node, the release therefore follows the acquisition, and
//!   a renewal never races with the release.
//! * A lease that is not releasing is released by the drop of its driver: when the task panics, or its runtime ends.
//! * The caller's future, the guards and the handles only share the lock. Dropping them does no I/O.

mod hold;
mod lease;
mod task;

pub(crate) use task::LockTask;

#[cfg(test)]
mod tests;
