//! Lock servers: one node, one command.
//!
//! A [`Node`] takes a [`Job`] and answers it with one vote. Submitting a job never waits and never fails, so a
//! lease can submit a request or a release from anywhere, also from a destructor, and the node may queue and
//! batch jobs as it sees fit.
//!
//! The files of this module know no Redis, on which `redis` builds; but a packet keeps its command as it goes over the
//! wire.

mod embedded;
mod failure;
mod home;
#[cfg_attr(
    not(feature = "redis"),
    expect(dead_code, reason = "embedded nodes answer at once")
)]
mod job;
#[cfg_attr(
    not(feature = "redis"),
    expect(dead_code, reason = "nodes of this process are always up")
)]
mod peers;
#[cfg(feature = "redis")]
pub(crate) mod redis;
mod release_signal;
#[cfg(feature = "test-util")]
pub(crate) mod scripted;
#[cfg(feature = "unstable-protocol")]
pub(crate) mod sim;
#[cfg(feature = "unstable-protocol")]
pub(crate) mod sim_env;
pub(crate) mod sync;
mod system;
pub(crate) mod telemetry;
mod traits;

pub(crate) use embedded::EmbeddedNode;
pub use failure::NodeFailure;
pub(crate) use failure::whole_seconds;
pub(crate) use home::Home;
pub(crate) use job::{Job, LATE, Packet, Vote, VoteReceiver};
pub(crate) use peers::Peers;
#[cfg(feature = "redis")]
pub use redis::{Credentials, CredentialsProvider};
pub(crate) use release_signal::{ReleaseSubscription, ReleaseWatch};
#[cfg(test)]
pub(crate) use release_signal::{Subscriber, Subscription};
pub(crate) use sync::Mutex;
pub(crate) use system::{NEVER, after, next_proposal, random_u64, sha256, unguessable, wall_clock};
#[cfg(feature = "metrics")]
pub use telemetry::LATENCY_BUCKETS;
pub(crate) use traits::Node;
pub use traits::NodeState;
