//! What is told of one lock: its span and its metrics, from the first question to the release.

use std::time::Duration;

use tokio::time::Instant;
use tracing::field::{self, Empty};
use tracing::{Span, info_span};

use crate::lock::error::LockError;
use crate::lock::guard::LockGuard;
use crate::lock::once::{Execution, NotGranted};
use crate::node::telemetry::{self, Counted};
use crate::protocol::LockKeys;

/// A lock that is being asked for. Dropped without an outcome, it was abandoned.
#[derive(Debug)]
pub(super) struct Asking {
    span: Span,
    label: &'static str,
    asked: Instant,
    told: bool,
}

impl Asking {
    pub(super) fn new(label: Option<&'static str>, nodes: usize, key: Option<&LockKeys>) -> Self {
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
            asked: Instant::now(),
            told: false,
        }
    }

    pub(super) fn span(&self) -> &Span {
        &self.span
    }

    pub(super) fn label(&self) -> &'static str {
        self.label
    }

    /// Tells how it ended, and how long it had waited for others, if it had.
    pub(super) fn tell(mut self, outcome: &Result<LockGuard, LockError>, waited: Option<Duration>) {
        self.told = true;
        let name = match outcome {
            Ok(guard) => {
                self.tell_token(guard);
                "granted"
            }
            Err(error) => error.outcome(),
        };
        self.record(name, waited);
    }

    /// Tells how it ended for a key that keeps records.
    pub(super) fn tell_once(
        mut self,
        outcome: &Result<Execution, NotGranted>,
        waited: Option<Duration>,
    ) {
        self.told = true;
        let name = match outcome {
            Ok(execution) => {
                self.tell_token(execution.guard());
                "granted"
            }
            Err(reason) => reason.outcome(),
        };
        self.record(name, waited);
    }

    fn tell_token(&self, guard: &LockGuard) {
        if let Some(token) = guard.fencing_token() {
            self.span.record("fencing_token", field::display(token));
        }
    }

    fn record(&self, outcome: &'static str, waited: Option<Duration>) {
        self.span.record("outcome", outcome);
        self.span
            .record("wait_ms", millis(waited.unwrap_or_default()));
        telemetry::acquired(self.label, outcome, self.asked.elapsed(), waited);
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if !self.told {
            self.record("abandoned", None);
        }
    }
}

/// A lock that is held, as long as this lives.
#[derive(Debug)]
pub(super) struct HeldRecord {
    label: &'static str,
    since: Instant,
    _counted: Counted,
}

impl HeldRecord {
    pub(super) fn new(label: &'static str) -> Self {
        Self {
            label,
            since: Instant::now(),
            _counted: Counted::held(),
        }
    }
}

impl Drop for HeldRecord {
    fn drop(&mut self) {
        let held = self.since.elapsed();
        Span::current().record("hold_ms", millis(held));
        telemetry::held(self.label, held);
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
