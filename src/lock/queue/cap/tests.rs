//! Tests of the caps.

#[cfg(shuttle)]
mod schedules;
