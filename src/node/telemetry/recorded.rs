//! Metrics, recorded by the crate `metrics`.

use std::sync::Arc;
use std::time::Duration;

use metrics::{
    Label, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};
use tokio::time::Instant;

use crate::node::Mutex;
use crate::node::telemetry::{LockLabels, UNNAMED};

/// The labels that have been registered.
struct Registered {
    resources: Vec<&'static str>,
    groups: Vec<Arc<str>>,
}

static REGISTERED: Mutex<Registered> = Mutex::new(Registered {
    resources: Vec::new(),
    groups: Vec::new(),
});

/// Describes the metrics to the recorder, and registers those without a resource. The groups of a lock service have
/// names if there are several.
pub(crate) fn describe<'a>(groups: impl Iterator<Item = &'a Arc<str>>) {
    for (name, what) in COUNTERS {
        describe_counter!(name, Unit::Count, what);
    }
    for (name, what) in GAUGES {
        describe_gauge!(name, Unit::Count, what);
    }
    for (name, what) in HISTOGRAMS {
        describe_histogram!(name, Unit::Seconds, what);
    }
    // Present from the start: the first increment matters, and a rate is visible only from zero.
    counter!(CONFLICTS_TOTAL).increment(0);
    counter!(UNRECORDED_TOTAL).increment(0);
    for reason in LOST_REASONS {
        counter!(LOST_TOTAL, "reason" => reason).increment(0);
    }
    gauge!(HELD).increment(0.0);
    gauge!(WAITERS).increment(0.0);
    let mut added = Vec::new();
    let resources = {
        let registered = &mut *REGISTERED.lock();
        for group in groups.filter(|group| !registered.groups.contains(group)) {
            added.push(Arc::clone(group));
        }
        registered.groups.extend(added.iter().map(Arc::clone));
        registered.resources.clone()
    };
    for resource in resources {
        added
            .iter()
            .for_each(|group| register_in(resource, Some(group)));
    }
    register(UNNAMED);
}

/// Registers the metrics of a kind of resource, so that they can be seen before anything has been counted.
pub(crate) fn register(resource: &'static str) {
    counter!(UNPROTECTED_TOTAL, "resource" => resource).increment(0);
    let groups = {
        let registered = &mut *REGISTERED.lock();
        if !registered.resources.contains(&resource) {
            registered.resources.push(resource);
        }
        registered.groups.clone()
    };
    register_in(resource, None);
    groups
        .iter()
        .for_each(|group| register_in(resource, Some(group)));
}

fn register_in(resource: &'static str, group: Option<&Arc<str>>) {
    for outcome in OUTCOMES {
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
    labels: [(&'static str, &'static str); N],
    group: Option<&Arc<str>>,
) -> Vec<Label> {
    let labels = labels.map(|(name, value)| Label::from_static_parts(name, value));
    let group = group.map(|group| Label::new("group", Arc::clone(group)));
    labels.into_iter().chain(group).collect()
}

/// Registers the metrics of a kind of resource whose outcomes are recorded.
#[cfg(feature = "idempotency")]
pub(crate) fn register_with_records(resource: &'static str) {
    register(resource);
    let groups = REGISTERED.lock().groups.clone();
    for group in std::iter::once(None).chain(groups.iter().map(Some)) {
        for outcome in RECORD_OUTCOMES {
            let labels = labels([("resource", resource), ("outcome", outcome)], group);
            counter!(ACQUIRE_TOTAL, labels).increment(0);
        }
    }
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
    let labels = node_labels(node, group);
    gauge!(NODE_UP, labels).set(if up { 1.0 } else { 0.0 });
}

/// Returns the labels of a node, with that of its group if that is one of several.
#[cfg(feature = "redis")]
fn node_labels(node: &Arc<str>, group: Option<&Arc<str>>) -> Vec<Label> {
    let mut labels = labels([], group);
    labels.insert(0, Label::new("node", Arc::clone(node)));
    labels
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
            labels: node_labels(node, group),
            cached: Vec::new(),
            cached_until: Instant::now(),
        }
    }

    /// Begins a series of replies that arrived at `now`.
    pub(crate) fn at(&mut self, now: Instant) -> &mut Self {
        if self.cached_until <= now {
            self.cached.clear();
            self.cached_until = now + Duration::from_millis(100);
        }
        self
    }

    /// Records that a request of this kind took so long.
    pub(crate) fn record(&mut self, op: &'static str, took: Duration) {
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
#[cfg(feature = "idempotency")]
const RECORD_OUTCOMES: [&str; 5] = [
    "replayed",
    "other_request",
    "undecided",
    "conflicting",
    "unknown",
];

/// The reasons for which locks are lost.
const LOST_REASONS: [&str; 4] = ["gone", "expired", "max_hold", "revoked"];

const ACQUIRE_TOTAL: &str = "redlock_acquire_total";
const CONFLICTS_TOTAL: &str = "redlock_conflicts_total";
const UNRECORDED_TOTAL: &str = "redlock_unrecorded_total";
const ACQUIRE_SECONDS: &str = "redlock_acquire_seconds";
const WAIT_SECONDS: &str = "redlock_wait_seconds";
const HOLD_SECONDS: &str = "redlock_hold_seconds";
const HELD: &str = "redlock_held";
const WAITERS: &str = "redlock_waiters";
const LOST_TOTAL: &str = "redlock_lost_total";
const UNPROTECTED_TOTAL: &str = "redlock_unprotected_total";
const NODE_UP: &str = "redlock_node_up";
const NODE_CALL_SECONDS: &str = "redlock_node_call_seconds";

/// The counters, each with its description.
const COUNTERS: [(&str, &str); 5] = [
    (ACQUIRE_TOTAL, "Lock acquisitions by outcome"),
    (
        CONFLICTS_TOTAL,
        "Idempotent requests that were executed twice",
    ),
    (
        UNRECORDED_TOTAL,
        "Idempotent requests whose outcome could not be recorded",
    ),
    (LOST_TOTAL, "Locks lost while held"),
    (
        UNPROTECTED_TOTAL,
        "Requests served without their lock because no quorum was reachable",
    ),
];

/// The gauges, each with its description.
const GAUGES: [(&str, &str); 3] = [
    (HELD, "Locks that this process holds"),
    (WAITERS, "Acquisitions of this process that wait for a lock"),
    (NODE_UP, "1 if the node answers and may vote, else 0"),
];

/// The histograms, each with its description.
const HISTOGRAMS: [(&str, &str); 4] = [
    (
        ACQUIRE_SECONDS,
        "Time until a lock was granted or refused, including the time spent waiting",
    ),
    (
        WAIT_SECONDS,
        "Time that acquisitions waited for another holder",
    ),
    (HOLD_SECONDS, "Time that locks were held"),
    (NODE_CALL_SECONDS, "Time that a node took to answer"),
];
