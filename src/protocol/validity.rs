//! The validity of a lock: `ttl - elapsed - drift`, in whole nanoseconds.

use std::time::Duration;

/// Returns the tolerated drift of clocks over one ttl: `ttl / 100 + 2 ms`, as in the Redlock description.
///
/// The two milliseconds cover the precision of Redis expiry, the hundredth covers clocks of different
/// rates.
#[must_use]
pub fn drift(ttl: Duration) -> Duration {
    ttl / 100 + Duration::from_millis(2)
}

/// Returns the validity of a lock *from before the first request was sent*, or `None`
/// if the drift exceeds the ttl.
#[must_use]
pub fn lifetime(ttl: Duration) -> Option<Duration> {
    ttl.checked_sub(drift(ttl)).filter(|left| !left.is_zero())
}

/// Returns the remaining validity when the last counted answer arrived `elapsed` after the
/// first request was sent, or `None` if the majority answered too late.
#[must_use]
pub fn remaining(ttl: Duration, elapsed: Duration) -> Option<Duration> {
    lifetime(ttl)?
        .checked_sub(elapsed)
        .filter(|left| !left.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn validity_is_ttl_less_elapsed_less_drift() {
        assert_eq!(drift(ms(10_000)), ms(102));
        assert_eq!(remaining(ms(10_000), ms(100)), Some(ms(9_798)));
        assert_eq!(remaining(ms(10_000), ms(9_897)), Some(ms(1)));
        assert_eq!(remaining(ms(10_000), ms(9_898)), None);
        assert_eq!(remaining(ms(10_000), Duration::MAX), None);
    }

    #[test]
    fn drift_leaves_no_validity_for_a_short_ttl() {
        assert_eq!(lifetime(ms(2)), None);
        assert!(lifetime(ms(3)).is_some());
    }
}
