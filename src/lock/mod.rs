//! The lock as an async API, usable with no HTTP at all.
//!
//! # One lease, one task
//!
//! Every lock is owned from its first request to its last by one small task, the lease task. It asks
//! the nodes, hands the [`LockGuard`] out at the moment the round is decided, renews, and releases.
//! Guards only hold shares of it. Its first attempt is made by whoever asks; it is spawned when that
//! is decided, or has to wait for others, or is dropped. Whoever waits for a lock, or holds one, may therefore be dropped at any
//! point: the lease task sees its shares gone and releases every node that may hold the key, and
//! there is no clean-up code on any path of the caller.

mod builder;
mod claim;
mod error;
mod front;
mod guard;
mod handle;
mod health;
mod lease;
mod lost;
mod once;
mod options;
mod record;
mod redlock;
mod registry;
mod request;
mod rest;
mod settings;
mod task;
mod waiters;

pub use builder::{BuildError, RedlockBuilder, RestartGuard};
pub use error::{ExtendError, LockError, ReleaseError};
pub use guard::{LockGuard, Released};
pub use handle::{AlreadyReleased, LockHandle};
pub use health::{Health, NodeHealth, Readiness};
pub use lost::{Lost, LostReason};
#[cfg(feature = "idempotency")]
pub(crate) use once::{Execution, NotBegun, NotGranted, Once, Recorded};
pub use options::LockOptions;
pub use redlock::Redlock;
pub use registry::{Drained, Unconfirmed};
pub use request::{LockFuture, LockRequest};
#[cfg(feature = "idempotency")]
pub(crate) use rest::is_undamaged;
#[cfg(feature = "idempotency")]
pub(crate) use settings::after;
pub(crate) use waiters::Waiters;
