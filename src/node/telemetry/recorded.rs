//! Metrics, recorded by the crate `metrics`.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::sync::Arc;
use std::time::Duration;

use metrics::{
    Label, SharedString, Unit, counter, describe_counter, describe_gauge, describe_histogram,
    gauge, histogram,
};
// Not those of `node::sync`, which may not outlive one order of threads.
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::node::telemetry::{LockLabels, UNNAMED};

/// The kinds of resources that have been registered, each with whether acquisitions of it may find a record.
static RESOURCES: Mutex<BTreeMap<&'static str, bool>> = Mutex::new(BTreeMap::new());
/// The groups that have been registered.
static GROUPS: Mutex<BTreeSet<Arc<str>>> = Mutex::new(BTreeSet::new());

/// Describes the metrics to the recorder, and registers those without a resource. The groups of a lock service have
/// names if there are several.
pub(crate) fn describe<'a>(groups: impl Iterator<Item = &'a Arc<str>>) {
    describe_all();
    // Present from the start: the first increment matters, and a rate is visible only from zero.
    counter!(CONFLICTS_TOTAL).increment(0);
    counter!(UNRECORDED_TOTAL).increment(0);
    for reason in LOST_REASONS {
        counter!(LOST_TOTAL, "reason" => reason).increment(0);
    }
    gauge!(HELD).increment(0.0);
    gauge!(WAITERS).increment(0.0);
    let added: Vec<_> = {
        let mut known = GROUPS.lock();
        let added = groups.filter(|group| known.insert(Arc::clone(group)));
        added.collect()
    };
    // Of a group and a resource that are registered at once, the one that comes last meets the other here.
    let resources = RESOURCES.lock().clone();
    for (resource, has_records) in resources {
        for group in &added {
            register_in(resource, has_records, Some(group));
        }
    }
    register(UNNAMED, false);
}

/// Registers the metrics of a kind of resource, so that they can be seen before anything has been counted.
pub(crate) fn register(resource: &'static str, has_records: bool) {
    counter!(UNPROTECTED_TOTAL, "resource" => resource).increment(0);
    *RESOURCES.lock().entry(resource).or_default() |= has_records;
    let groups = GROUPS.lock().clone();
    let groups = iter::once(None).chain(groups.iter().map(Some));
    groups.for_each(|group| register_in(resource, has_records, group));
}

fn register_in(resource: &'static str, has_records: bool, group: Option<&Arc<str>>) {
    let further = RECORD_OUTCOMES.iter().filter(|_| has_records);
    for outcome in OUTCOMES.iter().chain(further) {
        let labels = labels([("resource", resource), ("outcome", outcome)], group);
        counter!(ACQUIRE_TOTAL, labels).increment(0);
    }
    // A histogram is registered when it is looked up.
    let granted = labels([("resource", resource), ("outcome", "granted")], group);
    let _granted = histogram!(ACQUIRE_SECONDS, granted);
    let of_resource = labels([("resource", resource)], group);
    let _waited = histogram!(WAIT_SECONDS, of_resource.clone());
    let _held = histogram!(HOLD_SECONDS, of_resource);
}

/// Returns labels, with that of the group if there is one.
fn labels<const N: usize>(
    labels: [(&'static str, impl Into<SharedString>); N],
    group: Option<&Arc<str>>,
) -> Vec<Label> {
    let labels = labels.map(|(name, value)| Label::new(name, value));
    let group = group.map(|group| Label::new("group", Arc::clone(group)));
    labels.into_iter().chain(group).collect()
}

/// Counts an acquisition that was granted or refused.
pub(crate) fn acquired(
    of: &LockLabels,
    outcome: &'static str,
    began: Instant,
    waited: Option<Duration>,
) {
    let group = of.group.as_ref();
    let with_outcome = labels([("resource", of.resource), ("outcome", outcome)], group);
    counter!(ACQUIRE_TOTAL, with_outcome.clone()).increment(1);
    histogram!(ACQUIRE_SECONDS, with_outcome).record(began.elapsed());
    if let Some(waited) = waited {
        histogram!(WAIT_SECONDS, labels([("resource", of.resource)], group)).record(waited);
    }
}

/// Records how long a lock was held.
pub(crate) fn held(of: &LockLabels, since: Instant) {
    let labels = labels([("resource", of.resource)], of.group.as_ref());
    histogram!(HOLD_SECONDS, labels).record(since.elapsed());
}

/// Counts a lock that was lost while held.
pub(crate) fn lost(reason: &'static str) {
    counter!(LOST_TOTAL, "reason" => reason).increment(1);
}

/// Counts a request that is served without its lock.
pub(crate) fn unprotected(resource: &'static str) {
    counter!(UNPROTECTED_TOTAL, "resource" => resource).increment(1);
}

/// Counts an idempotent request that was executed twice.
pub(crate) fn conflict() {
    counter!(CONFLICTS_TOTAL).increment(1);
}

/// Counts an idempotent request whose outcome could not be recorded.
pub(crate) fn unrecorded() {
    counter!(UNRECORDED_TOTAL).increment(1);
}

/// Sets whether a node answers and may vote.
#[cfg(feature = "redis")]
pub(crate) fn node_up(node: &Arc<str>, group: Option<&Arc<str>>, up: bool) {
    let labels = labels([("node", Arc::clone(node))], group);
    gauge!(NODE_UP, labels).set(if up { 1.0 } else { 0.0 });
}

/// The times that a node took to answer requests, by kind of request.
///
/// The recorder's histograms are cached, because looking one up for every reply costs as much as reading the
/// reply. They expire, because a recorder may be installed later.
#[cfg(feature = "redis")]
pub(crate) struct NodeCalls {
    labels: Vec<Label>,
    cached: Vec<(&'static str, metrics::Histogram)>,
    cached_until: Instant,
}

#[cfg(feature = "redis")]
impl NodeCalls {
    pub(crate) fn new(node: &Arc<str>, group: Option<&Arc<str>>) -> Self {
        Self {
            labels: labels([("node", Arc::clone(node))], group),
            cached: Vec::new(),
            cached_until: Instant::now(),
        }
    }

    /// Records that a request of this kind, which was answered at `now`, took so long.
    pub(crate) fn record(&mut self, op: &'static str, took: Duration, now: Instant) {
        if self.cached_until <= now {
            self.cached.clear();
            self.cached_until = now + Duration::from_millis(100);
        }
        let cached = self.cached.iter().find(|(name, _)| std::ptr::eq(*name, op));
        if let Some((_, histogram)) = cached {
            return histogram.record(took);
        }
        let mut labels = self.labels.clone();
        labels.push(Label::from_static_parts("op", op));
        let histogram = histogram!(NODE_CALL_SECONDS, labels);
        histogram.record(took);
        self.cached.push((op, histogram));
    }
}

/// Counts itself in a gauge while it lives.
#[derive(Debug)]
pub(crate) struct Counted(&'static str);

impl Counted {
    pub(crate) fn held() -> Self {
        Self::new(HELD)
    }

    pub(crate) fn waiter() -> Self {
        Self::new(WAITERS)
    }

    fn new(name: &'static str) -> Self {
        gauge!(name).increment(1.0);
        Self(name)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        gauge!(self.0).decrement(1.0);
    }
}

/// Recommended buckets for the histograms of this crate, in seconds: from the answer of a nearby node to a lock that is
/// held for a minute.
///
/// An exporter for Prometheus needs them, because it otherwise makes summaries, which cannot be added up over
/// servers and which the Grafana dashboard of this crate does not draw. With `metrics-exporter-prometheus`, call
/// `set_buckets_for_metric(Matcher::Prefix("redlock_".into()), LATENCY_BUCKETS)` on the builder; the example `metrics`
/// does.
pub const LATENCY_BUCKETS: &[f64] = &[
    0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    10.0, 30.0, 60.0,
];

/// The outcomes of acquisitions.
const OUTCOMES: [&str; 9] = [
    "granted",
    "contended",
    "unavailable",
    "quarantined",
    "expired",
    "overloaded",
    "invalid",
    "closed",
    "abandoned",
];

/// The further outcomes of acquisitions that may find a record.
const RECORD_OUTCOMES: [&str; 5] = [
    "replayed",
    "other_request",
    "undecided",
    "conflicting",
    "unknown",
];

/// The reasons for which locks are lost.
const LOST_REASONS: [&str; 4] = ["gone", "expired", "max_hold", "revoked"];

/// Defines the names of all metrics, and the function that describes them to the recorder.
macro_rules! metrics {
    ($($describe:ident in $unit:ident {$($name:ident = $text:literal: $what:literal;)+})+) => {
        $($(const $name: &str = $text;)+)+

        fn describe_all() {
            $($($describe!($name, Unit::$unit, $what);)+)+
        }
    };
}

metrics! {
    describe_counter in Count {
        ACQUIRE_TOTAL = "redlock_acquire_total": "Lock acquisitions by outcome";
        CONFLICTS_TOTAL = "redlock_conflicts_total": "Idempotent requests that were executed twice";
        UNRECORDED_TOTAL = "redlock_unrecorded_total":
            "Idempotent requests whose outcome could not be recorded";
        LOST_TOTAL = "redlock_lost_total": "Locks lost while held";
        UNPROTECTED_TOTAL = "redlock_unprotected_total":
            "Requests served without their lock because no quorum was reachable";
    }
    describe_gauge in Count {
        HELD = "redlock_held": "Locks that this process holds";
        WAITERS = "redlock_waiters": "Acquisitions of this process that wait for a lock";
        NODE_UP = "redlock_node_up": "1 if the node answers and may vote, else 0";
    }
    describe_histogram in Seconds {
        ACQUIRE_SECONDS = "redlock_acquire_seconds":
            "Time until a lock was granted or refused, including the time spent waiting";
        WAIT_SECONDS = "redlock_wait_seconds": "Time that acquisitions waited for another holder";
        HOLD_SECONDS = "redlock_hold_seconds": "Time that locks were held";
        NODE_CALL_SECONDS = "redlock_node_call_seconds": "Time that a node took to answer";
    }
}
