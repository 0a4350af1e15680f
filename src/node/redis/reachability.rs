//! The reachability of a server: whether a request submitted now has a chance.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::node::Mutex;

/// The reachability of a server, as its lane last observed it.
#[derive(Debug, Clone)]
pub(super) enum Reachability {
    /// Nothing yet: requests wait for the first connection.
    Untried,
    /// The server answers.
    Up,
    /// The server answers but was restarted or flushed recently: only releases and records are sent.
    Quarantined { until: Instant },
    /// The server does not answer: only releases are sent.
    Down { why: Arc<str>, since: Instant },
}

/// The current reachability. The lane writes it; every submitted request reads it, nearly always from the
/// atomics alone.
#[derive(Debug)]
pub(super) struct CurrentReachability {
    value: Mutex<Reachability>,
    /// Whether requests are sent at once: `Untried` or `Up`.
    is_open: AtomicBool,
    /// Whether it is not `Untried`.
    is_tried: AtomicBool,
}

impl CurrentReachability {
    pub(super) fn new() -> Self {
        Self {
            value: Mutex::new(Reachability::Untried),
            is_open: AtomicBool::new(true),
            is_tried: AtomicBool::new(false),
        }
    }

    pub(super) fn set(&self, reachability: Reachability) {
        let is_tried = !matches!(reachability, Reachability::Untried);
        let mut value = self.value.lock();
        self.is_open
            .store(reachability.is_open(), Ordering::Release);
        self.is_tried.store(is_tried, Ordering::Release);
        *value = reachability;
    }

    pub(super) fn get(&self) -> Reachability {
        self.value.lock().clone()
    }

    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    pub(super) fn is_tried(&self) -> bool {
        self.is_tried.load(Ordering::Acquire)
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
