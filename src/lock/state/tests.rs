//! Tests of the state of a lock.

#[cfg(shuttle)]
mod schedules;
