//! Retry delays: random, so that contenders that collided do not collide again.

use std::time::Duration;

/// How long to wait between attempts while somebody else holds the lock.
///
/// The delay before attempt `n` is drawn uniformly from zero to `base * 2^n`, at most `max`
/// ("full jitter"), which is what keeps contenders from moving in step; a fixed delay with a
/// little jitter does not. When the nodes report when the lock expires, no delay goes past that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retry {
    base: Duration,
    max: Duration,
}

impl Retry {
    /// Delays that grow from `base` to `max`; a `max` below `base` counts as `base`.
    #[must_use]
    pub fn new(base: Duration, max: Duration) -> Self {
        Self {
            base,
            max: max.max(base),
        }
    }

    /// Returns the longest delay.
    #[must_use]
    pub fn max(&self) -> Duration {
        self.max
    }

    /// Returns the delay before attempt `attempt` (0 is the first repetition).
    ///
    /// `hint` is how long the lock still lives according to the nodes; `random` must be uniform.
    #[must_use]
    pub fn delay(&self, attempt: u32, hint: Option<Duration>, random: u64) -> Duration {
        let ceiling = self
            .base
            .saturating_mul(1_u32.checked_shl(attempt.min(16)).unwrap_or(u32::MAX))
            .min(self.max);
        let drawn = scale(ceiling, random);
        match hint {
            // A hair after the expiry, and not all at the same hair.
            Some(left) => drawn.min(left.saturating_add(scale(self.base, random))),
            None => drawn,
        }
    }

    /// Returns the delay before asking again when a release would be told: uniform from zero to `bound`.
    ///
    /// `hint` and `random` are those of [`delay`](Self::delay). A message can be lost, and a lock that
    /// expires sends none.
    #[must_use]
    pub fn poll_delay(&self, bound: Duration, hint: Option<Duration>, random: u64) -> Duration {
        Self::new(bound, bound)
            .delay(0, None, random)
            .min(match hint {
                Some(left) => left.saturating_add(scale(self.base, random)),
                None => Duration::MAX,
            })
    }

    /// Returns what to do on news of a release that `listeners` processes heard, of which every one asks
    /// this with a `random` of its own.
    ///
    /// One alone tries at once. Of many only a few try, each after some round trips of its own: the first
    /// has the lock, and whoever tries after it does so in vain. Who has `heard` of more releases before
    /// and not got the lock is sooner, so that nobody waits much longer than others.
    #[must_use]
    pub fn on_release(
        listeners: usize,
        heard: u32,
        round_trip: Duration,
        random: u64,
    ) -> OnRelease {
        let rivals = u32::try_from(listeners).unwrap_or(u32::MAX);
        if rivals <= 1 {
            return OnRelease::Try(Duration::ZERO);
        }
        let drawn = scale(round_trip.saturating_mul(rivals), random) / (1 + heard / rivals);
        if drawn < round_trip.saturating_mul(CANDIDATES) {
            OnRelease::Try(drawn)
        } else {
            OnRelease::Rest(drawn.saturating_mul(PATIENCE))
        }
    }

    /// Returns the delay after split vote number `attempt` (0 is the first), in which several
    /// contenders got some nodes each and nobody a majority: uniform from zero to twice the round
    /// trip, doubling with every further split.
    #[must_use]
    pub fn split_delay(attempt: u32, round_trip: Duration, random: u64) -> Duration {
        let window = round_trip.saturating_mul(2_u32.saturating_pow(attempt.min(15) + 1));
        scale(window, random)
    }
}

/// What a process that heard of a release does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnRelease {
    /// Try after this time.
    Try(Duration),
    /// Leave it to others, and try after this time if there is no news by then: they may all have.
    Rest(Duration),
}

/// How many of those who heard of a release try, on average. With fewer it happens more often that
/// nobody does, with more there are more attempts in vain.
const CANDIDATES: u32 = 4;
/// How many times longer those wait who leave it to others.
const PATIENCE: u32 = 4;

/// 10 ms growing to 250 ms.
impl Default for Retry {
    fn default() -> Self {
        Self::new(Duration::from_millis(10), Duration::from_millis(250))
    }
}

/// `ceiling * random / 2^64`, without floats.
fn scale(ceiling: Duration, random: u64) -> Duration {
    // 584 years are enough for anybody, and their product fits.
    let ceiling = u64::try_from(ceiling.as_nanos()).unwrap_or(u64::MAX);
    let nanos = (u128::from(ceiling) * u128::from(random)) >> 64;
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn delays_double_up_to_the_maximum() {
        let retry = Retry::new(ms(10), ms(100));
        let longest = |attempt| retry.delay(attempt, None, u64::MAX).as_millis();
        assert_eq!([0, 1, 2, 3, 9, 400].map(longest), [9, 19, 39, 79, 99, 99]);
    }

    #[test]
    fn delays_spread_over_the_whole_window() {
        let retry = Retry::new(ms(10), ms(100));
        assert_eq!(retry.delay(0, None, 0), ms(0));
        assert_eq!(retry.delay(0, None, 1 << 63), ms(5));
    }

    #[test]
    fn no_delay_goes_past_the_expiry_by_more_than_the_base() {
        let retry = Retry::new(ms(10), ms(1_000));
        for random in [0, 1 << 62, 1 << 63, u64::MAX] {
            assert!(retry.delay(8, Some(ms(3)), random) <= ms(13));
        }
    }

    #[test]
    fn absurd_delays_do_not_overflow() {
        let retry = Retry::new(Duration::from_secs(864_000), Duration::MAX);
        assert!(retry.delay(16, None, u64::MAX) > Duration::from_secs(864_000));
    }

    #[test]
    fn split_votes_wait_up_to_two_round_trips_doubling() {
        let longest = |attempt| Retry::split_delay(attempt, ms(1), u64::MAX);
        assert!(longest(0) < ms(2) && longest(0) > Duration::from_micros(1_990));
        assert!(longest(2) < ms(8) && longest(2) > Duration::from_micros(7_990));
    }

    #[test]
    fn one_who_hears_of_a_release_alone_tries_at_once_and_of_many_some_do() {
        let heard_by = |listeners, random| Retry::on_release(listeners, 0, ms(1), random);
        for listeners in [0, 1] {
            assert_eq!(heard_by(listeners, u64::MAX), OnRelease::Try(ms(0)));
        }
        // Of sixteen four, within four round trips.
        let quarter = 1 << 62;
        assert_eq!(heard_by(16, 0), OnRelease::Try(ms(0)));
        assert!(matches!(heard_by(16, quarter - 1), OnRelease::Try(delay) if delay < ms(4)));
        assert_eq!(heard_by(16, quarter), OnRelease::Rest(ms(16)));
        assert!(matches!(heard_by(16, u64::MAX), OnRelease::Rest(delay) if delay < ms(64)));
    }

    #[test]
    fn one_who_has_waited_long_tries_sooner() {
        let after = |heard| Retry::on_release(16, heard, ms(1), 1 << 63);
        assert_eq!(after(0), OnRelease::Rest(ms(32)));
        assert_eq!(after(15), OnRelease::Rest(ms(32)));
        assert_eq!(after(32), OnRelease::Try(Duration::from_nanos(2_666_666)));
    }

    #[test]
    fn one_who_would_be_told_asks_by_the_bound_and_by_the_expiry() {
        let retry = Retry::new(ms(10), ms(20));
        assert_eq!(retry.poll_delay(ms(500), None, 1 << 63), ms(250));
        assert_eq!(retry.poll_delay(ms(500), Some(ms(40)), 1 << 63), ms(45));
    }
}
