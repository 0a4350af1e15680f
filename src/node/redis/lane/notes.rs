//! What a lane notes about its server, for requests, logs and metrics.

use std::sync::Arc;

use tokio::time::Instant;

use crate::node::redis::Reachability;
use crate::node::redis::lane::Lane;
use crate::node::telemetry;

impl Lane {
    pub(super) fn note_up(&self) {
        if let Reachability::Down { since, .. } = &*self.shared.reachability() {
            let node = &*self.shared.name;
            tracing::info!(node, down_for = ?since.elapsed(), "redlock node is up again");
        }
        telemetry::node_up(&self.shared.name, self.quarantined_until.is_none());
        self.shared.set_reachability(match self.quarantined_until {
            Some(until) => Reachability::Quarantined { until },
            None => Reachability::Up,
        });
    }

    pub(super) fn note_quarantined(&mut self, until: Instant) {
        let known = self.quarantined_until.replace(until).is_some();
        if !known {
            let left = until.saturating_duration_since(Instant::now());
            tracing::warn!(
                node = &*self.shared.name,
                seconds_left = left.as_secs() + 1,
                "redlock node has not had its memory for long enough to vote; see restart_guard"
            );
        }
        telemetry::node_up(&self.shared.name, false);
        self.shared
            .set_reachability(Reachability::Quarantined { until });
    }

    pub(super) fn note_down(&self, why: &Arc<str>) {
        telemetry::node_up(&self.shared.name, false);
        let known = match &*self.shared.reachability() {
            Reachability::Down { since, .. } => Some(*since),
            _ => None,
        };
        let since = match known {
            Some(since) => since,
            None => {
                let node = &*self.shared.name;
                tracing::warn!(node, %why, "redlock node is down; locks go on without its vote");
                Instant::now()
            }
        };
        self.shared.set_reachability(Reachability::Down {
            why: Arc::clone(why),
            since,
        });
    }
}
