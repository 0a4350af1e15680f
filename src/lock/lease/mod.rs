//! The lease of one lock: acquire, hold and renew, release.
//!
//! # The life of a lock
//!
//! A *lease task* owns a lock from its first `ACQUIRE` to its last `RELEASE`. [`acquire`](run::acquire) is
//! that life as one sequential function: the permit comes from the queue, attempts follow until a majority of
//! the nodes grants the lock, it is held and renewed while it has shares, and it is released.
//!
//! | file | step |
//! |---|---|
//! | `run` | the life of a lock from its order to its end |
//! | `acquire` | attempts, and the waits between them |
//! | `attempt` | one attempt: its requests, votes and decision |
//! | `hold` | renewal, extension, loss |
//! | `release` | the release and its confirmation |
//! | `cleanup` | releases what an attempt may hold, however it ends |
//! | `shared` | what the task shares with the guards |
//! | `task` | what every step knows |
//! | `handoff` | the first attempt is polled by the caller, the rest is spawned |
//!
//! # Invariants
//!
//! * Every node that may hold a key has a [`Cleanup`] that releases it, from before the first request is
//!   sent. It is disarmed only by the release itself, or when the keys must stay until their ttl.
//! * All requests of a lock go out from its task, so that on each node the release follows the acquisition,
//!   and renewal never races with release.
//! * The caller's future, the guards and handles only share the lease. Dropping them does no I/O.

mod acquire;
mod attempt;
mod cleanup;
mod handoff;
mod hold;
mod release;
mod run;
mod shared;
mod task;

pub(crate) use acquire::Backoff;
pub(crate) use attempt::{AcquireError, Attempt, Concluded, GrantedLock, Progress, Round};
pub(crate) use cleanup::Cleanup;
pub(crate) use handoff::{Handoff, Inline};
pub(crate) use hold::Holding;
pub(crate) use run::acquire;
pub(crate) use shared::{Disposal, Lease, Share};
pub(crate) use task::{Failures, LeaseTask};
