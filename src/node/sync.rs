//! What threads synchronise with: the types of std and tokio, or those that run threads in chosen orders.
//!
//! # Implementation details
//!
//! The unit tests named `schedules` run a few threads in many orders, which shuttle chooses: it switches between
//! threads at each use of a type of this module. Files that such a test covers therefore import these types from here.
//! `--cfg shuttle` enables the tests, and nothing else.
//!
//! Shuttle runs one thread at a time, so every thread sees the last value of an atomic, whatever its `Ordering`. The
//! reason for each ordering stands where it is used.

use std::sync::PoisonError;
#[cfg(not(all(test, shuttle)))]
pub(crate) use std::sync::{Mutex as StdMutex, MutexGuard, atomic};

#[cfg(not(all(test, shuttle)))]
pub(crate) use tokio::sync::{Notify, Semaphore};

#[cfg(test)]
#[cfg(shuttle)]
pub(crate) use crate::node::sync::tests::{MutexGuard, Notify, Semaphore, StdMutex, atomic};

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

#[cfg(test)]
pub(crate) mod tests;
