//! The span and the metrics of one lock, from its request to its release.

use std::time::Duration;

use tokio::time::Instant;
use tracing::field::{self, Empty};
use tracing::{Span, info_span};

use crate::node::telemetry::{self, Counted};
use crate::protocol::{FencingToken, LockKeys};

/// The span of a lock that is being acquired. A span that is dropped unfinished reports `abandoned`.
#[derive(Debug)]
pub(crate) struct LockSpan {
    span: Span,
    label: &'static str,
    began: Instant,
    is_finished: bool,
}

impl LockSpan {
    /// Opens the span, with its key only if `key` is given.
    pub(crate) fn new(label: Option<&'static str>, nodes: usize, key: Option<&LockKeys>) -> Self {
        let label = label.unwrap_or(telemetry::UNNAMED);
        let span = info_span!(
            "redlock.lock",
            resource = label,
            key = key.map(field::debug),
            outcome = Empty,
            quorum.granted = Empty,
            quorum.nodes = nodes,
            wait_ms = Empty,
            hold_ms = Empty,
            fencing_token = Empty,
        );
        Self {
            span,
            label,
            began: Instant::now(),
            is_finished: false,
        }
    }

    /// Returns when the lock was requested.
    pub(crate) fn began(&self) -> Instant {
        self.began
    }

    pub(crate) fn span(&self) -> &Span {
        &self.span
    }

    /// Returns the label of the lock in spans and metrics.
    pub(crate) fn label(&self) -> &'static str {
        self.label
    }

    /// Finishes with a granted lock, and the time that its caller waited, if it did.
    pub(crate) fn granted(self, token: Option<FencingToken>, waited: Option<Duration>) {
        if let Some(token) = token {
            self.span.record("fencing_token", field::display(token));
        }
        self.finish("granted", waited);
    }

    /// Finishes with an outcome other than a granted lock.
    pub(crate) fn refused(self, outcome: &'static str, waited: Option<Duration>) {
        self.finish(outcome, waited);
    }

    fn finish(mut self, outcome: &'static str, waited: Option<Duration>) {
        self.is_finished = true;
        self.report(outcome, waited);
    }

    fn report(&self, outcome: &'static str, waited: Option<Duration>) {
        self.span.record("outcome", outcome);
        self.span
            .record("wait_ms", millis(waited.unwrap_or_default()));
        telemetry::acquired(self.label, outcome, self.began, waited);
    }
}

impl Drop for LockSpan {
    fn drop(&mut self) {
        if !self.is_finished {
            self.report("abandoned", None);
        }
    }
}

/// Counts a lock as held while this value lives, and reports the time to the current span.
#[derive(Debug)]
pub(crate) struct HeldSpan {
    label: &'static str,
    since: Instant,
    _counted: Counted,
}

impl HeldSpan {
    pub(crate) fn new(label: &'static str) -> Self {
        Self {
            label,
            since: Instant::now(),
            _counted: Counted::held(),
        }
    }
}

impl Drop for HeldSpan {
    fn drop(&mut self) {
        let span = Span::current();
        if !span.is_disabled() {
            span.record("hold_ms", millis(self.since.elapsed()));
        }
        telemetry::held(self.label, self.since);
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
