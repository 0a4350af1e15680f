//! Counts the executions of a handler.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts executions; clones share the count.
#[derive(Debug, Clone, Default)]
pub struct Executed(Arc<AtomicUsize>);

impl Executed {
    /// Returns the number of executions so far.
    pub fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    /// Counts one execution and returns its number, from 1 on.
    pub fn one_more(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }
}
