//! A cap on how many calls wait for locks at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::lock::error::LockError;

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
    pub(super) fn new(caps: Vec<Arc<Waiters>>) -> Self {
        Self { caps, taken: 0 }
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
