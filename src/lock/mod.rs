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
//! * `error`, `lost`, `time`: errors, the loss of a lock, timers; `span`: telemetry; `registry`: the lease tasks;
//! * `queue`: waiting callers of this process, waiting processes beside it, and the cap on waiting calls;
//! * `settings`: all settings; `cluster`: the nodes of a group; `layout`: the groups; `core`: the state that all clones of a
//!   [`Redlock`] share;
//! * `spec`, `state`: what a lock is, and what its holders see of it; `backoff`: the waits between attempts, with
//!   `announcement`, which keeps new readers out meanwhile; `local_wait`: callers that
//!   meet a busy key of their process;
//! * `driver`: the life of a lock, from its request to its end, with the state machine in
//!   [`protocol::lease`](crate::protocol::lease); `acquisition`: locks in several groups;
//! * `uuid`: keys from UUIDs;
//! * `guard`, `options`, `request`, `health`, `redlock`, `node_group`, `builder`, `config`, `shutdown`: the public face.

mod acquisition;
mod announcement;
mod backoff;
mod builder;
mod cluster;
#[cfg(feature = "redis")]
mod config;
mod core;
mod driver;
mod error;
mod guard;
mod health;
mod layout;
mod lead;
mod local_wait;
mod lost;
mod node_group;
mod options;
mod queue;
mod redlock;
mod registry;
mod request;
mod settings;
mod shutdown;
mod slots;
mod span;
mod spec;
mod state;
mod time;
#[cfg(feature = "test-util")]
mod traces;
#[cfg(feature = "uuid")]
mod uuid;

pub use builder::RedlockBuilder;
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
pub use settings::RestartGuard;
pub use shutdown::{Served, Stopping};
#[cfg(feature = "test-util")]
pub use traces::Traces;

pub(crate) use self::core::Core;
pub(crate) use backoff::AcquireError;
pub(crate) use cluster::{Asked, Cluster};
pub(crate) use driver::LockTask;
pub(crate) use guard::RequestShare;
pub(crate) use layout::{Group, ReadReceiver};
pub(crate) use options::option_setters;
pub(crate) use queue::{Wait, WaiterCap};
pub(crate) use slots::first_slots;
pub(crate) use span::LockSpan;
pub(crate) use spec::{LockSpec, Reader};
pub(crate) use state::LockState;
pub(crate) use time::{after, whole_millis};
