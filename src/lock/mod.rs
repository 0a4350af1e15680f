//! The lock as an async API, usable with no HTTP at all.
//!
//! # One lease, one task
//!
//! One task, the lease task, owns each lock from its first request to its last. It sends the requests to the
//! nodes, hands out the [`LockGuard`] when a majority has granted the lock, renews the lock, and releases it.
//! Guards hold shares of the lease. A caller that waits for a lock, or holds one, may therefore be dropped at any
//! point: the lease task sees that its shares are gone and releases every node that may hold the key. No caller
//! has clean-up code.
//!
//! # Map, from the ground up
//!
//! * `access`, `error`, `lost`, `time`: how keys are held, errors, the loss of a lock, timers; `span`: telemetry; `registry`: the lease tasks;
//! * `queue`: waiting callers of this process, waiting processes beside it, and the cap on waiting calls;
//! * `cluster`: the nodes of a group and the settings; `layout`: the groups; `core`: the state that all clones of a
//!   [`Redlock`] share;
//! * `lease`: the life of a lock, from its order to its end; `acquisition`: locks in several groups;
//! * `uuid`: keys from UUIDs;
//! * `guard`, `options`, `request`, `health`, `redlock`, `node_group`, `builder`, `config`, `shutdown`: the public face.

mod acquisition;
mod builder;
mod cluster;
#[cfg(feature = "redis")]
mod config;
mod core;
mod error;
mod guard;
mod health;
mod layout;
mod lead;
mod lease;
mod local_wait;
mod lost;
mod node_group;
mod options;
mod queue;
mod redlock;
mod registry;
mod request;
mod shutdown;
mod slots;
mod span;
mod time;
#[cfg(feature = "uuid")]
mod uuid;

pub use builder::{RedlockBuilder, RestartGuard};
#[cfg(feature = "redis")]
pub use config::RedlockConfig;
pub use error::{BuildError, ExtendError, LockError, ReleaseError};
pub use guard::{AlreadyReleased, LockGuard, LockHandle, Released};
pub use health::{GroupHealth, Health, NodeHealth, Readiness};
pub use lead::Lead;
pub use lost::{Lost, LostReason};
pub use node_group::NodeGroup;
pub use options::LockOptions;
pub use redlock::Redlock;
pub use registry::{Drained, Unconfirmed};
pub use request::{LockFuture, LockRequest};
pub use shutdown::{Served, Stopping};

pub(crate) use self::core::Core;
pub(crate) use cluster::{Asked, Cluster};
pub(crate) use guard::RequestShare;
pub(crate) use layout::Group;
pub(crate) use lease::{
    AcquireError, Attempt, Backoff, Cleanup, Concluded, Disposal, Earlier, Failures, GrantedLock,
    Handoff, HoldingLock, Inline, LeaseTask, Progress, Round, Terms,
};
pub(crate) use local_wait::LocalWait;
pub(crate) use options::option_setters;
pub(crate) use queue::{HeldLease, Permit, Waited, WaiterCap, WaiterSlots};
pub(crate) use registry::DrainStage;
pub(crate) use slots::first_slots;
pub(crate) use span::LockSpan;
pub(crate) use time::{after, whole_millis};
