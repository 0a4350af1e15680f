//! Metrics: `recorded`, or `nothing` without the feature `metrics`.
//!
//! Labels have few values: the literal label of a resource but never a key, outcomes, reasons, kinds of
//! requests, the addresses of nodes without credentials, and the names of groups if there are several.

#[cfg(not(feature = "metrics"))]
mod nothing;
#[cfg(feature = "metrics")]
mod recorded;

use std::sync::Arc;

#[cfg(all(not(feature = "metrics"), feature = "redis"))]
pub(crate) use self::nothing::Nothing as NodeCalls;
#[cfg(not(feature = "metrics"))]
pub(crate) use self::nothing::{Nothing as Counted, *};
#[cfg(feature = "metrics")]
pub use self::recorded::LATENCY_BUCKETS;
#[cfg(feature = "metrics")]
pub(crate) use self::recorded::*;

/// The label of locks without one.
pub(crate) const UNNAMED: &str = "unnamed";

/// The labels of a lock.
#[derive(Debug, Clone)]
pub(crate) struct LockLabels {
    pub(crate) resource: &'static str,
    /// The group of its key, if there are several.
    pub(crate) group: Option<Arc<str>>,
}
