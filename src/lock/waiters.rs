//! A cap on how many calls wait for locks at once.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::Instant;

use crate::lock::error::LockError;
use crate::node::telemetry::Counted;

/// Counts the calls that wait, over a whole [`Redlock`](crate::Redlock) or one layer.
#[derive(Debug)]
pub(crate) struct Waiters {
    waiting: AtomicUsize,
    max: usize,
}

/// The places that one call has taken, once it has begun to wait.
#[derive(Debug)]
pub(super) struct Waiting {
    caps: Vec<Arc<Waiters>>,
    taken: usize,
    waited: Waited,
    /// While it waits.
    counted: Option<Counted>,
}

/// Since when a call has waited, if it has; clones are the same.
#[derive(Debug, Clone, Default)]
pub(super) struct Waited(Arc<OnceLock<Instant>>);

impl Waited {
    /// Returns for how long the call has waited; `None` if it never began to.
    pub(super) fn so_far(&self) -> Option<Duration> {
        self.0.get().map(Instant::elapsed)
    }
}

impl Waiters {
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self {
            waiting: AtomicUsize::new(0),
            max,
        })
    }
}

impl Waiting {
    pub(super) fn new(caps: Vec<Arc<Waiters>>, waited: Waited) -> Self {
        Self {
            caps,
            taken: 0,
            waited,
            counted: None,
        }
    }

    /// Begins to wait; does nothing if this call waits already.
    pub(super) fn begin(&mut self) -> Result<(), LockError> {
        while let Some(cap) = self.caps.get(self.taken) {
            if cap.waiting.fetch_add(1, Ordering::AcqRel) >= cap.max {
                cap.waiting.fetch_sub(1, Ordering::AcqRel);
                return Err(LockError::Overloaded { max: cap.max });
            }
            self.taken += 1;
        }
        self.waited.0.get_or_init(Instant::now);
        self.counted.get_or_insert_with(Counted::waiter);
        Ok(())
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        for cap in &self.caps[..self.taken] {
            cap.waiting.fetch_sub(1, Ordering::AcqRel);
        }
    }
}
