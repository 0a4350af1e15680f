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

#[cfg(not(all(test, shuttle)))]
pub(crate) use std::sync::{Mutex as StdMutex, MutexGuard, atomic};

#[cfg(not(all(test, shuttle)))]
pub(crate) use tokio::sync::{Notify, Semaphore};

#[cfg(test)]
#[cfg(shuttle)]
pub(crate) use crate::node::sync::tests::{MutexGuard, Notify, Semaphore, StdMutex, atomic};

#[cfg(test)]
pub(crate) mod tests;
