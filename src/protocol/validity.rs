//! The validity of a lock: `ttl - elapsed - drift`, in whole nanoseconds.

use std::time::Duration;

/// The precision of Redis expiry.
const DRIFT: Duration = Duration::from_millis(2);

/// Returns the tolerated drift of clocks over one ttl: `ttl / 100 + 2 ms`, as in the Redlock description.
///
/// The two milliseconds cover the precision of Redis expiry, the hundredth covers clocks of different
/// rates.
pub fn drift(ttl: Duration) -> Duration {
    ttl / 100 + DRIFT
}

/// Returns the validity of a lock *from before the first request was sent*, or `None`
/// if the drift exceeds the ttl.
pub fn lifetime(ttl: Duration) -> Option<Duration> {
    ttl.checked_sub(drift(ttl)).filter(|left| !left.is_zero())
}

/// Returns the remaining validity when the last counted answer arrived `elapsed` after the
/// first request was sent, or `None` if the majority answered too late.
pub fn remaining(ttl: Duration, elapsed: Duration) -> Option<Duration> {
    lifetime(ttl)?
        .checked_sub(elapsed)
        .filter(|left| !left.is_zero())
}

/// Returns the shortest ttl, in whole milliseconds, with at least this [`lifetime`].
pub fn ttl_for(lifetime: Duration) -> Duration {
    let nanos = lifetime.saturating_add(DRIFT).as_nanos() * 100;
    let millis = nanos.div_ceil(99 * 1_000_000);
    Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX))
}

/// Rounds down to whole milliseconds, the unit of the nodes.
pub fn whole_millis(duration: Duration) -> Duration {
    duration - Duration::from_nanos(u64::from(duration.subsec_nanos() % 1_000_000))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    // Rules: lock.validity
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

    #[test]
    fn ttl_for_a_lifetime_is_the_shortest_one() {
        for millis in 1..20_000 {
            let ttl = ttl_for(ms(millis));
            assert!(lifetime(ttl) >= Some(ms(millis)), "{millis}");
            assert!(lifetime(ttl - ms(1)) < Some(ms(millis)), "{millis}");
        }
        assert!(ttl_for(Duration::MAX) > ms(1 << 60));
    }
}
