//! The lease of one lock: acquire, hold and renew, release.
//!
//! # The life of a lock
//!
//! A *lease task* owns a lock from its first `ACQUIRE` to its last `RELEASE`. [`run`] has that life as one
//! sequential function: it makes attempts until a majority of the nodes grants the lock, holds and renews the lock
//! while it has shares, and releases it. The caller brings the permit of the queue.
//!
//! | file | step |
//! |---|---|
//! | `run` | the life of a lock from its order to its end |
//! | `acquire` | attempts, and the waits between them |
//! | `announce` | keeps new readers out while the caller waits |
//! | `attempt` | one attempt: its requests, votes and decision |
//! | `hold` | renewal, extension, loss |
//! | `release` | the release and its confirmation |
//! | `cleanup` | the release of an attempt that fails, is dropped or panics |
//! | `shared` | the state that the task shares with the guards |
//! | `task` | the state that all steps share |
//! | `handoff` | the task, polled by the caller first and spawned later |
//!
//! # Invariants
//!
//! * A [`Cleanup`] covers every node that may hold a key, from before the first request is sent. Only the release
//!   itself disarms it, or the decision that the keys stay until their ttl.
//! * Only the task sends the requests of its lock. On each node, the release therefore follows the acquisition, and
//!   a renewal never races with the release.
//! * The caller's future, the guards and the handles only share the lease. Dropping them does no I/O.

mod acquire;
mod announce;
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
pub(crate) use hold::HoldingLock;
pub(crate) use run::acquire;
pub(crate) use shared::{Disposal, LockState, Share};
pub(crate) use task::{Earlier, Failures, LeaseTask, Terms};
