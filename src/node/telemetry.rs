//! Metrics, by the names that dashboards use; without the feature `metrics` they are nothing.
//!
//! Labels have few values: the literal label of a resource and never a key, outcomes, reasons,
//! kinds of requests, and nodes by their addresses without credentials.

use std::time::Duration;

#[cfg(feature = "metrics")]
use metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

/// The label of locks that were given none.
pub(crate) const UNNAMED: &str = "unnamed";

/// Tells the recorder what the metrics are.
#[cfg(feature = "metrics")]
pub(crate) fn describe() {
    describe_counter!(
        ACQUIRE_TOTAL,
        Unit::Count,
        "Locks that were asked for, by what became of it"
    );
    describe_histogram!(
        ACQUIRE_SECONDS,
        Unit::Seconds,
        "How long it took until a lock was granted or refused, the waiting included"
    );
    describe_histogram!(
        WAIT_SECONDS,
        Unit::Seconds,
        "How long calls waited because somebody else held the lock"
    );
    describe_counter!(
        CONFLICTS_TOTAL,
        Unit::Count,
        "Idempotent requests that were executed twice"
    );
    describe_counter!(
        UNRECORDED_TOTAL,
        Unit::Count,
        "Idempotent requests whose outcome could not be recorded"
    );
    // There from the start: the first of them matters, and a rate is seen only from zero.
    counter!(CONFLICTS_TOTAL).increment(0);
    counter!(UNRECORDED_TOTAL).increment(0);
    describe_histogram!(HOLD_SECONDS, Unit::Seconds, "How long locks were held");
    describe_gauge!(HELD, Unit::Count, "Locks that this process holds");
    describe_gauge!(
        WAITERS,
        Unit::Count,
        "Calls of this process that wait for a lock"
    );
    describe_counter!(
        LOST_TOTAL,
        Unit::Count,
        "Locks that were lost while they were held"
    );
    describe_counter!(
        UNPROTECTED_TOTAL,
        Unit::Count,
        "Requests that were served without their lock because no quorum was reachable"
    );
    describe_gauge!(NODE_UP, Unit::Count, "Whether a node answers and may vote");
    describe_histogram!(
        NODE_CALL_SECONDS,
        Unit::Seconds,
        "How long a node took to answer"
    );
}

/// A lock was granted or refused.
#[cfg(feature = "metrics")]
pub(crate) fn acquired(
    resource: &'static str,
    outcome: &'static str,
    took: Duration,
    waited: Option<Duration>,
) {
    counter!(ACQUIRE_TOTAL, "resource" => resource, "outcome" => outcome).increment(1);
    histogram!(ACQUIRE_SECONDS, "resource" => resource, "outcome" => outcome).record(took);
    if let Some(waited) = waited {
        histogram!(WAIT_SECONDS, "resource" => resource).record(waited);
    }
}

/// A lock is not held any more.
#[cfg(feature = "metrics")]
pub(crate) fn held(resource: &'static str, held: Duration) {
    histogram!(HOLD_SECONDS, "resource" => resource).record(held);
}

/// A lock was lost while it was held.
#[cfg(feature = "metrics")]
pub(crate) fn lost(reason: &'static str) {
    counter!(LOST_TOTAL, "reason" => reason).increment(1);
}

/// A request is served without its lock.
#[cfg(feature = "metrics")]
pub(crate) fn unprotected(resource: &'static str) {
    counter!(UNPROTECTED_TOTAL, "resource" => resource).increment(1);
}

/// An idempotent request was executed twice.
#[cfg(feature = "metrics")]
pub(crate) fn conflict() {
    counter!(CONFLICTS_TOTAL).increment(1);
}

/// The outcome of an idempotent request could not be recorded.
#[cfg(feature = "metrics")]
pub(crate) fn unrecorded() {
    counter!(UNRECORDED_TOTAL).increment(1);
}

/// A node may vote from now on, or may not.
#[cfg(all(feature = "metrics", feature = "redis"))]
pub(crate) fn node_up(node: &std::sync::Arc<str>, up: bool) {
    gauge!(NODE_UP, "node" => std::sync::Arc::clone(node)).set(if up { 1.0 } else { 0.0 });
}

/// How long a node took to answer requests, by their kind.
///
/// What the recorder has for each is kept for a while, because to ask it for every answer costs as much as
/// to read the answer. Not for ever: a recorder may be installed later.
#[cfg(all(feature = "metrics", feature = "redis"))]
pub(crate) struct NodeCalls {
    node: std::sync::Arc<str>,
    known: Vec<(&'static str, metrics::Histogram)>,
    known_until: tokio::time::Instant,
}

#[cfg(all(feature = "metrics", feature = "redis"))]
impl NodeCalls {
    pub(crate) fn of(node: &std::sync::Arc<str>) -> Self {
        Self {
            node: std::sync::Arc::clone(node),
            known: Vec::new(),
            known_until: tokio::time::Instant::now(),
        }
    }

    /// Begins a series of answers that came at `now`.
    pub(crate) fn at(&mut self, now: tokio::time::Instant) -> &mut Self {
        if self.known_until <= now {
            self.known.clear();
            self.known_until = now + Duration::from_millis(100);
        }
        self
    }

    pub(crate) fn took(&mut self, op: &'static str, took: Duration) {
        let known = self.known.iter().find(|(name, _)| std::ptr::eq(*name, op));
        if let Some((_, histogram)) = known {
            return histogram.record(took);
        }
        let node = std::sync::Arc::clone(&self.node);
        let histogram = histogram!(NODE_CALL_SECONDS, "node" => node, "op" => op);
        histogram.record(took);
        self.known.push((op, histogram));
    }
}

/// Counts itself in a gauge for as long as it lives.
#[derive(Debug)]
pub(crate) struct Counted(#[cfg(feature = "metrics")] &'static str);

impl Counted {
    pub(crate) fn held() -> Self {
        Self::new(HELD)
    }

    pub(crate) fn waiter() -> Self {
        Self::new(WAITERS)
    }

    #[cfg(feature = "metrics")]
    fn new(name: &'static str) -> Self {
        gauge!(name).increment(1.0);
        Self(name)
    }

    #[cfg(not(feature = "metrics"))]
    fn new(_: &'static str) -> Self {
        Self()
    }
}

#[cfg(feature = "metrics")]
impl Drop for Counted {
    fn drop(&mut self) {
        gauge!(self.0).decrement(1.0);
    }
}

#[cfg(not(feature = "metrics"))]
mod nothing {
    use super::Duration;

    pub(crate) fn describe() {}

    pub(crate) fn acquired(_: &'static str, _: &'static str, _: Duration, _: Option<Duration>) {}

    pub(crate) fn held(_: &'static str, _: Duration) {}

    pub(crate) fn lost(_: &'static str) {}

    pub(crate) fn unprotected(_: &'static str) {}

    pub(crate) fn conflict() {}

    pub(crate) fn unrecorded() {}

    #[cfg(feature = "redis")]
    pub(crate) fn node_up(_: &std::sync::Arc<str>, _: bool) {}

    #[cfg(feature = "redis")]
    pub(crate) struct NodeCalls;

    #[cfg(feature = "redis")]
    #[allow(clippy::unused_self, reason = "it is used with the feature")]
    impl NodeCalls {
        pub(crate) fn of(_: &std::sync::Arc<str>) -> Self {
            Self
        }

        pub(crate) fn at(&mut self, _: tokio::time::Instant) -> &mut Self {
            self
        }

        pub(crate) fn took(&mut self, _: &'static str, _: Duration) {}
    }
}

#[cfg(not(feature = "metrics"))]
pub(crate) use nothing::*;

#[cfg(feature = "metrics")]
const ACQUIRE_TOTAL: &str = "redlock_acquire_total";
#[cfg(feature = "metrics")]
const CONFLICTS_TOTAL: &str = "redlock_conflicts_total";
#[cfg(feature = "metrics")]
const UNRECORDED_TOTAL: &str = "redlock_unrecorded_total";
#[cfg(feature = "metrics")]
const ACQUIRE_SECONDS: &str = "redlock_acquire_seconds";
#[cfg(feature = "metrics")]
const WAIT_SECONDS: &str = "redlock_wait_seconds";
#[cfg(feature = "metrics")]
const HOLD_SECONDS: &str = "redlock_hold_seconds";
const HELD: &str = "redlock_held";
const WAITERS: &str = "redlock_waiters";
#[cfg(feature = "metrics")]
const LOST_TOTAL: &str = "redlock_lost_total";
#[cfg(feature = "metrics")]
const UNPROTECTED_TOTAL: &str = "redlock_unprotected_total";
#[cfg(feature = "metrics")]
const NODE_UP: &str = "redlock_node_up";
#[cfg(feature = "metrics")]
const NODE_CALL_SECONDS: &str = "redlock_node_call_seconds";
