//! The status of a server, as its lane reports it to callers, logs and metrics.

use std::sync::Arc;

use tokio::time::Instant;

use crate::node::redis::reachability::{Reachability, time_until};
use crate::node::redis::shared::Shared;
use crate::node::telemetry;

/// The status of a server, as its lane reports it.
pub(super) struct ServerStatus {
    shared: Arc<Shared>,
    /// The end of the quarantine, as far as it is known; the server is asked again then.
    quarantined_until: Option<Instant>,
}

impl ServerStatus {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Self {
            shared: Arc::clone(shared),
            quarantined_until: None,
        }
    }

    pub(super) fn quarantined_until(&self) -> Option<Instant> {
        self.quarantined_until
    }

    pub(super) fn is_down(&self) -> bool {
        let reachability = &self.shared.reachability;
        !reachability.is_open() && reachability.down_since().is_some()
    }

    /// Sets the metric.
    fn report(&self, is_up: bool) {
        let group = self.shared.reachability.group();
        telemetry::node_up(&self.shared.name, group, is_up);
    }

    /// Reports that the server answers again, with the quarantine that it had.
    pub(super) fn set_answering(&self) {
        if let Some(since) = self.shared.reachability.down_since() {
            let node = &*self.shared.name;
            tracing::warn!(node, down_for = ?since.elapsed(), "redlock node is up again");
        }
        self.report(self.quarantined_until.is_none());
        self.shared.reachability.set(match self.quarantined_until {
            Some(until) => Reachability::Quarantined { until },
            None => Reachability::Up,
        });
    }

    /// Reports that the server answers and may vote.
    pub(super) fn set_up(&mut self) {
        if self.quarantined_until.take().is_some() {
            let node = &*self.shared.name;
            tracing::warn!(node, "redlock node votes again");
        }
        self.set_answering();
    }

    /// Reports that the server answers and must not vote until this instant.
    pub(super) fn set_quarantined(&mut self, until: Instant) {
        if self.quarantined_until.replace(until).is_none() {
            let node = &*self.shared.name;
            match self.shared.duplicate() {
                Some(why) => tracing::warn!(node, %why, "redlock node gives no votes"),
                None => tracing::warn!(
                    node,
                    seconds_left = time_until(until).as_secs() + 1,
                    "redlock node was started or flushed recently and is quarantined; see restart_guard"
                ),
            }
        }
        self.report(false);
        self.shared
            .reachability
            .set(Reachability::Quarantined { until });
    }

    /// Reports that the server does not answer.
    pub(super) fn set_down(&self, why: &Arc<str>) {
        self.report(false);
        let reachability = &self.shared.reachability;
        let known = reachability.down_since();
        reachability.set(Reachability::Down {
            why: Arc::clone(why),
            since: known.unwrap_or_else(Instant::now),
        });
        if known.is_none() {
            let (node, effect) = (&*self.shared.name, reachability.effect());
            tracing::warn!(node, %why, "redlock node is down; {effect}");
        }
    }
}
