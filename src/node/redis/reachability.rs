//! The reachability of a server: whether a request submitted now has a chance, and what callers, logs and metrics are
//! told about it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::Instant;

use crate::node::traits::NodeState;
use crate::node::{Mutex, Peers, telemetry};

/// The reachability of a server. Its lane reports it; every submitted request reads it, nearly always from the atomics
/// alone.
#[derive(Debug)]
pub(super) struct Reachability {
    name: Arc<str>,
    known: Mutex<Observation>,
    /// Whether requests are sent at once: the server answers and may vote, or has not been tried.
    is_open: AtomicBool,
    /// Whether anything is known. Before, requests wait for the first connection.
    is_tried: AtomicBool,
    /// Set before the first request.
    peers: OnceLock<Arc<Peers>>,
}

/// What the lane last observed.
#[derive(Debug, Default)]
struct Observation {
    /// The error of a server that does not answer, and since when it does not: only releases are sent.
    down: Option<(Arc<str>, Instant)>,
    /// The end of the quarantine, as far as it is known, of a server that was started or flushed recently: only
    /// releases and records are sent. The server is asked again then. Kept while it does not answer.
    quarantined_until: Option<Instant>,
    /// When the lane asks the server again, if it is down or quarantined.
    asked_at: Option<Instant>,
}

impl Reachability {
    pub(super) fn new(name: &Arc<str>) -> Self {
        Self {
            name: Arc::clone(name),
            known: Mutex::default(),
            is_open: AtomicBool::new(true),
            is_tried: AtomicBool::new(false),
            peers: OnceLock::new(),
        }
    }

    /// Counts this server among the nodes of its group.
    pub(super) fn join(&self, peers: &Arc<Peers>) {
        self.peers.get_or_init(|| Arc::clone(peers));
    }

    /// Returns the name of its group, if that is one of several.
    pub(super) fn group(&self) -> Option<&Arc<str>> {
        self.peers.get()?.group()
    }

    /// Forgets what is known, because no lane observes the server any more.
    pub(super) fn reset(&self) {
        self.set(false, |known| *known = Observation::default());
    }

    /// Reports that the server answers again, with the quarantine that it had.
    pub(super) fn set_answering(&self) {
        let down = self.set(true, |known| known.down.take());
        if let Some((_, since)) = down {
            let node = &*self.name;
            tracing::warn!(node, down_for = ?since.elapsed(), "redlock node is up again");
        }
        telemetry::node_up(&self.name, self.group(), self.is_open());
    }

    /// Reports that the server answers and may vote.
    pub(super) fn set_up(&self) {
        let until = self.known.lock().quarantined_until.take();
        if until.is_some() {
            tracing::warn!(node = &*self.name, "redlock node votes again");
        }
        self.set_answering();
    }

    /// Reports that the server answers and must not vote until this instant, because it is a `duplicate` of another
    /// node if there is such a reason.
    pub(super) fn set_quarantined(&self, until: Instant, duplicate: Option<&str>) {
        let before = self.set(true, |known| {
            known.down = None;
            known.quarantined_until.replace(until)
        });
        telemetry::node_up(&self.name, self.group(), false);
        let node = &*self.name;
        match duplicate {
            _ if before.is_some() => {}
            Some(why) => tracing::warn!(node, %why, "redlock node gives no votes"),
            None => tracing::warn!(
                node,
                seconds_left = time_until(until).as_secs() + 1,
                "redlock node was started or flushed recently and is quarantined; see restart_guard"
            ),
        }
    }

    /// Reports that the server does not answer.
    pub(super) fn set_down(&self, why: &Arc<str>) {
        let was_down = self.set(true, |known| {
            let before = known.down.take();
            let since = before
                .as_ref()
                .map_or_else(Instant::now, |(_, since)| *since);
            known.down = Some((Arc::clone(why), since));
            before.is_some()
        });
        telemetry::node_up(&self.name, self.group(), false);
        if !was_down {
            let (node, effect) = (&*self.name, self.effect());
            tracing::warn!(node, %why, "redlock node is down; {effect}");
        }
    }

    /// Notes when the lane asks the server again, or when an attempt to do so ends.
    pub(super) fn set_asked_at(&self, at: Option<Instant>) {
        self.known.lock().asked_at = at;
    }

    /// Returns whether the lane should have asked the server again before, for longer than a running lane may be late.
    pub(super) fn is_out_of_date(&self, late: Duration) -> bool {
        let asked_at = self.known.lock().asked_at;
        asked_at.is_some_and(|at| at + late < Instant::now())
    }

    pub(super) fn state(&self) -> NodeState {
        if self.is_open() {
            return NodeState::Up;
        }
        let known = self.known.lock();
        match (&known.down, known.quarantined_until) {
            (Some((why, since)), _) => NodeState::Unreachable {
                why: Arc::clone(why),
                since: since.elapsed(),
            },
            (None, Some(until)) => NodeState::Quarantined {
                left: time_until(until),
            },
            (None, None) => NodeState::Up,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    pub(super) fn is_tried(&self) -> bool {
        self.is_tried.load(Ordering::Relaxed)
    }

    pub(super) fn is_down(&self) -> bool {
        !self.is_open() && self.known.lock().down.is_some()
    }

    /// Returns when a quarantined server is asked again.
    pub(super) fn quarantined_until(&self) -> Option<Instant> {
        // The usual case takes no lock.
        let known = (!self.is_open()).then(|| self.known.lock())?;
        known.quarantined_until
    }

    fn set<T>(&self, is_tried: bool, change: impl FnOnce(&mut Observation) -> T) -> T {
        let mut known = self.known.lock();
        let changed = change(&mut known);
        let is_open = known.down.is_none() && known.quarantined_until.is_none();
        // Relaxed, and so are the other uses: the lock orders the writers. Readers that need only this one answer take no lock,
        // and read nothing else that depends on it; a stale one costs a request that fails, or one that a lane refuses
        // although its server is back.
        let was_open = self.is_open.swap(is_open, Ordering::Relaxed);
        if let Some(peers) = self.peers.get().filter(|_| is_open != was_open) {
            peers.count(is_open);
        }
        self.is_tried.store(is_tried, Ordering::Relaxed);
        changed
    }

    /// Returns what a server that does not vote means for locks.
    fn effect(&self) -> String {
        let peers = self.peers.get();
        peers.map(|peers| peers.effect()).unwrap_or_default()
    }
}

fn time_until(instant: Instant) -> Duration {
    instant.saturating_duration_since(Instant::now())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Quorum;

    #[tokio::test]
    async fn a_server_that_stays_down_or_up_is_counted_once() {
        let peers = Arc::new(Peers::new(Quorum::new(3).unwrap(), None));
        let server = Reachability::new(&"n".into());
        server.join(&peers);
        let now = Instant::now();
        let up = || server.set_up();
        let down = || server.set_down(&"Connection refused".into());
        let quarantined = || server.set_quarantined(now, None);
        let steps: [(&dyn Fn(), usize); 7] = [
            (&up, 3),
            (&down, 2),
            (&down, 2),
            (&quarantined, 2),
            (&up, 3),
            (&up, 3),
            (&down, 2),
        ];
        for (report, voting) in steps {
            report();
            let effect = server.effect();
            assert!(
                effect.contains(&format!("({voting} of 3 vote)")),
                "{effect}"
            );
        }
    }
}
