//! The life of an execution's lock, in steps that `once` drives.
//!
//! # Invariants
//!
//! * A [`Cleanup`] covers every node that may hold a key, from before the first request is sent. Only the release
//!   itself disarms it, or the decision that the keys stay until their ttl.
//! * Only the task sends the requests of its lock. On each node, the release therefore follows the acquisition, and
//!   a renewal never races with the release.
//! * The caller's future, the guards and the handles only share the lease. Dropping them does no I/O.

mod attempt;
mod cleanup;
mod hold;
mod release;
mod task;

pub(crate) use attempt::{Attempt, Concluded, GrantedLock, Progress, Round};
pub(crate) use cleanup::Cleanup;
pub(crate) use hold::HoldingLock;
pub(crate) use task::LeaseTask;
