//! The reachability of a server: whether a request submitted now has a chance.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::Instant;

use crate::node::{Mutex, Peers};

/// The reachability of a server, as its lane last observed it.
#[derive(Debug, Clone)]
pub(super) enum Reachability {
    /// Nothing yet: requests wait for the first connection.
    Untried,
    /// The server answers.
    Up,
    /// The server answers but was started or flushed recently: only releases and records are sent.
    Quarantined { until: Instant },
    /// The server does not answer: only releases are sent.
    Down { why: Arc<str>, since: Instant },
}

/// The current reachability. The lane writes it; every submitted request reads it, nearly always from the
/// atomics alone.
#[derive(Debug)]
pub(super) struct CurrentReachability {
    value: Mutex<Reachability>,
    /// When the lane asks the server again, if it is down or quarantined.
    asked_at: Mutex<Option<Instant>>,
    /// Whether requests are sent at once: `Untried` or `Up`.
    is_open: AtomicBool,
    /// Whether it is not `Untried`.
    is_tried: AtomicBool,
    /// Set before the first request.
    peers: OnceLock<Arc<Peers>>,
}

impl CurrentReachability {
    pub(super) fn new() -> Self {
        Self {
            value: Mutex::new(Reachability::Untried),
            asked_at: Mutex::default(),
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

    /// Returns what a server that does not vote means for locks, once it has been set.
    pub(super) fn effect(&self) -> String {
        self.peers
            .get()
            .map(|peers| peers.effect())
            .unwrap_or_default()
    }

    pub(super) fn set(&self, reachability: Reachability) {
        let is_tried = !matches!(reachability, Reachability::Untried);
        let mut value = self.value.lock();
        let is_open = reachability.is_open();
        // Relaxed, and so are the other uses: the lock orders the writers. Readers that need only this one answer take no lock,
        // and read nothing else that depends on it; a stale one costs a request that fails, or one that a lane refuses
        // although its server is back.
        let was_open = self.is_open.swap(is_open, Ordering::Relaxed);
        if let Some(peers) = self.peers.get().filter(|_| is_open != was_open) {
            peers.count(is_open);
        }
        self.is_tried.store(is_tried, Ordering::Relaxed);
        *value = reachability;
    }

    /// Notes when the lane asks the server again, or when an attempt to do so ends.
    pub(super) fn set_asked_at(&self, at: Option<Instant>) {
        *self.asked_at.lock() = at;
    }

    /// Returns whether the lane should have asked the server again before, for longer than a running lane may be late.
    pub(super) fn is_out_of_date(&self, late: Duration) -> bool {
        let asked_at = *self.asked_at.lock();
        asked_at.is_some_and(|at| at + late < Instant::now())
    }

    pub(super) fn get(&self) -> Reachability {
        self.value.lock().clone()
    }

    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    pub(super) fn is_tried(&self) -> bool {
        self.is_tried.load(Ordering::Relaxed)
    }

    /// Returns since when the server has been down, if it is.
    pub(super) fn down_since(&self) -> Option<Instant> {
        match &*self.value.lock() {
            Reachability::Down { since, .. } => Some(*since),
            _ => None,
        }
    }
}

impl Reachability {
    fn is_open(&self) -> bool {
        matches!(self, Self::Untried | Self::Up)
    }
}

/// Returns the time left until an instant.
pub(super) fn time_until(instant: Instant) -> Duration {
    instant.saturating_duration_since(Instant::now())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Quorum;

    #[tokio::test]
    async fn a_server_that_stays_down_or_up_is_counted_once() {
        let peers = Arc::new(Peers::new(Quorum::new(3).unwrap(), None));
        let server = CurrentReachability::new();
        server.join(&peers);
        let (why, since) = ("Connection refused".into(), Instant::now());
        let down = Reachability::Down { why, since };
        let quarantined = Reachability::Quarantined { until: since };
        for (reachability, voting) in [
            (Reachability::Up, 3),
            (down.clone(), 2),
            (down.clone(), 2),
            (quarantined, 2),
            (Reachability::Up, 3),
            (Reachability::Up, 3),
            (down, 2),
        ] {
            server.set(reachability);
            let effect = server.effect();
            assert!(
                effect.contains(&format!("({voting} of 3 vote)")),
                "{effect}"
            );
        }
    }
}
