//! The cap on the number of calls that wait for locks at once.

use std::sync::{Arc, OnceLock};

use tokio::time::Instant;

use crate::lock::error::LockError;
use crate::node::sync::atomic::{AtomicUsize, Ordering};
use crate::node::telemetry::Counted;

/// Counts and limits the waiting calls of a whole [`Redlock`](crate::Redlock) or of one layer.
#[derive(Debug)]
pub(crate) struct WaiterCap {
    waiting: AtomicUsize,
    max: usize,
}

/// The wait of one call for other holders: until when, and the slots that it occupies under its caps. Dropping it frees
/// them.
#[derive(Debug)]
pub(crate) struct Wait {
    /// Not after the request, if the call does not wait.
    pub(crate) deadline: Instant,
    caps: Vec<Arc<WaiterCap>>,
    occupied: usize,
    /// When the call began to wait, for its span.
    waits_since: Arc<OnceLock<Instant>>,
    /// Counts the call in the metrics while it waits.
    counted: Option<Counted>,
}

impl WaiterCap {
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self {
            waiting: AtomicUsize::new(0),
            max,
        })
    }
}

impl Wait {
    pub(crate) fn new(
        deadline: Instant,
        caps: impl IntoIterator<Item = Arc<WaiterCap>>,
        waits_since: &Arc<OnceLock<Instant>>,
    ) -> Self {
        Self {
            deadline,
            caps: caps.into_iter().collect(),
            occupied: 0,
            waits_since: Arc::clone(waits_since),
            counted: None,
        }
    }

    /// Occupies a slot under each cap, unless the call waits already.
    ///
    /// # Errors
    ///
    /// Returns [`LockError::Overloaded`] if no slot is free.
    pub(crate) fn occupy(&mut self) -> Result<(), LockError> {
        while let Some(cap) = self.caps.get(self.occupied) {
            // Relaxed here and below: the count is all that is shared, and one atomic add decides. A caller that is one too many
            // counts itself for a moment, so another may be refused beside it; never is one admitted too many.
            if cap.waiting.fetch_add(1, Ordering::Relaxed) >= cap.max {
                cap.waiting.fetch_sub(1, Ordering::Relaxed);
                return Err(LockError::Overloaded { max: cap.max });
            }
            self.occupied += 1;
        }
        self.waits_since.get_or_init(Instant::now);
        self.counted.get_or_insert_with(Counted::waiter);
        Ok(())
    }

    /// Frees the slots, because the call waits no longer.
    pub(crate) fn end(&mut self) {
        for cap in self.caps.drain(..).take(self.occupied) {
            cap.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        (self.occupied, self.counted) = (0, None);
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests;
