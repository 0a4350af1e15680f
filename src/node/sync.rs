//! What threads synchronise with: the types of parking_lot, std and tokio, or those that run threads in chosen orders.
//!
//! # Implementation details
//!
//! The unit tests named `schedules` run a few threads in many orders, which shuttle chooses: it switches between
//! threads at each use of a type of this module. Files that such a test covers therefore import these types from here.
//! `--cfg shuttle` enables the tests, and nothing else.
//!
//! Shuttle runs one thread at a time, so every thread sees the last value of an atomic, whatever its `Ordering`. The
//! reason for each ordering stands where it is used.
//!
//! A mutex does not tell whether a thread panicked while it held the lock. Every critical section of this crate leaves the
//! data consistent at each point where it could panic, so the next caller goes on with the data as they are.

#[cfg(not(all(test, shuttle)))]
pub(crate) use std::sync::atomic;

#[cfg(not(all(test, shuttle)))]
pub(crate) use parking_lot::{Mutex, MutexGuard};
#[cfg(not(all(test, shuttle)))]
pub(crate) use tokio::sync::{Notify, Semaphore};

#[cfg(all(test, shuttle))]
pub(crate) use crate::node::sync::tests::{Mutex, MutexGuard, Notify, Semaphore, atomic};

#[cfg(test)]
pub(crate) mod tests;
