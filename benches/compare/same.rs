//! What all participants have in common.

#![allow(
    clippy::disallowed_types,
    reason = "proposals come from the wall clock, as in this crate"
)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// Returns the wall clock in microseconds; each call returns a new value.
pub(crate) fn next_proposal() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let now = micros_since_epoch();
    let next = |last: u64| Some(now.max(last + 1));
    let last = LAST.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
    now.max(last.unwrap_or_default() + 1)
}

/// Returns the wall clock, which the processes of one machine share.
pub(crate) fn micros_since_epoch() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_micros()).unwrap_or(u64::MAX)
}

pub(crate) fn millis() -> u64 {
    u64::try_from(TTL.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) const ACQUIRE_FENCED: &str = include_str!("../../src/node/redis/scripts/acquire.lua");
pub(crate) const RELEASE_FENCED: &str = concat!(
    include_str!("../../src/node/redis/scripts/notify.lua"),
    include_str!("../../src/node/redis/scripts/release.lua")
);

/// The default of `Redlock::builder`.
pub(crate) const RETENTION_MS: u64 = 3_600_000;

/// The default of `Redlock::builder`.
pub(crate) const TTL: Duration = Duration::from_secs(10);

pub(crate) const NODES: usize = 5;
