//! Deadlines in real time, which a paused tokio clock neither stops nor skips.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "the harness waits for other processes, on threads that have nothing else to do"
)]

use std::time::{Duration, Instant};

/// How long a polling loop rests between two looks.
pub(crate) const POLL: Duration = Duration::from_millis(5);

/// A point in real time until which something must have happened.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(Instant);

impl Deadline {
    /// Returns the deadline that ends `timeout` from now.
    pub fn after(timeout: Duration) -> Self {
        Self(Instant::now() + timeout)
    }

    /// Returns what is left, or zero.
    pub fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    /// Returns whether nothing is left.
    pub fn is_over(self) -> bool {
        self.left().is_zero()
    }

    /// Blocks for one poll interval, and returns false once the deadline is over.
    pub fn pause(self) -> bool {
        if self.is_over() {
            return false;
        }
        std::thread::sleep(POLL);
        true
    }
}
