//! The lock as an async API, usable with no HTTP at all.
//!
//! # One lease, one task
//!
//! One task, the lease task, owns each lock from its first request to its last, and rests while there is nothing to do. It
//! sends the requests to the nodes, hands out the [`LockGuard`] when a majority has granted the lock, renews the lock, and
//! releases it.
//! Guards hold shares of the lease. A caller that waits for a lock, or holds one, may therefore be dropped at any
//! point: the lease task sees that its shares are gone and releases every node that may hold the key. No caller
//! has clean-up code.
//!
//! # Map, from the ground up
//!
//! * `error`: errors, and the loss of a lock; `span`: telemetry; `registry`: the lease tasks; `rest`: those that
//!   have nothing to do;
//! * `settings`: all settings; `cluster`: the nodes of a group; `layout`: the groups, and the state that all clones of a
//!   [`Redlock`] share;
//! * `state`: what a lock is, and what its holders see of it; `traces`: what happened to it, for tests;
//! * `queue`: waiting callers of this process, waiting processes beside it, and the cap on waiting calls; `local_wait`:
//!   callers that meet a busy key of their process; `backoff`: the waits between attempts; `slots`: which slots are free;
//! * `driver`: the life of a lock, from its request to its end, with the state machine in
//!   [`protocol::lease`](crate::protocol::lease); `acquisition`: requests for locks, in one group or several;
//! * `uuid`: keys from UUIDs;
//! * `guard`, `options`, `lead`, `health`, `redlock`, `node_group`, `builder`, `config`, `shutdown`: the public face.

mod acquisition;
mod backoff;
mod builder;
mod cluster;
#[cfg(feature = "redis")]
pub(crate) mod config;
mod driver;
mod error;
mod guard;
mod health;
mod layout;
mod lead;
mod local_wait;
mod node_group;
mod options;
mod queue;
mod redlock;
mod registry;
mod rest;
mod settings;
mod shutdown;
mod slots;
mod span;
mod state;
#[cfg(feature = "test-util")]
pub(crate) mod traces;
#[cfg(feature = "uuid")]
mod uuid;

pub use acquisition::{LockFuture, LockRequest};
pub use builder::RedlockBuilder;
#[cfg(feature = "redis")]
pub use config::RedlockConfig;
pub use error::{BuildError, ExtendError, LockError, Lost, LostReason, ReleaseError};
pub use guard::{AlreadyReleased, LockGuard, LockHandle, Released};
pub use health::{GroupHealth, Health, NodeHealth, Readiness};
pub use lead::Lead;
pub use node_group::NodeGroup;
pub use options::LockOptions;
pub use redlock::Redlock;
pub use registry::{Drained, HeldLock, Unconfirmed};
pub use settings::RestartGuard;

pub(crate) use cluster::Cluster;
pub(crate) use driver::LockTask;
pub(crate) use error::Denied;
pub(crate) use guard::RequestShare;
pub(crate) use layout::{Core, Group, ReadReceiver};
pub(crate) use options::option_setters;
pub(crate) use queue::{Wait, WaiterCap};
pub(crate) use registry::DrainStage;
pub(crate) use rest::Left;
pub(crate) use slots::first_slots;
pub(crate) use span::LockSpan;
pub(crate) use state::{LockSpec, Reading, Releasing};
