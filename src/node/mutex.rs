//! A mutex that ignores poisoning.

use std::sync::PoisonError;

use crate::node::sync::{MutexGuard, StdMutex};

/// A [`std::sync::Mutex`] whose [`lock`](Self::lock) cannot fail.
///
/// A poisoned mutex says that a thread panicked while it held the lock. Every critical section of this crate
/// leaves the data consistent at each point where it could panic, so the next caller goes on with the data as
/// they are. tokio wraps its own mutex in the same way.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(StdMutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(StdMutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
