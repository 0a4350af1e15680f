//! Short names for durations.

use std::time::Duration;

/// Returns a duration of `millis` milliseconds.
pub const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Returns a duration of `secs` seconds.
pub const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}
