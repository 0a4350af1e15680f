//! Retry delays: random, so that contenders that collided do not collide again.

use std::time::Duration;

/// The delays between attempts while another client holds the lock.
///
/// The delay before attempt `n` is drawn uniformly from zero to `base * 2^n`, at most `max`
/// ("full jitter"), which keeps contenders from retrying in step; a fixed delay with a
/// little jitter does not. If the nodes report the expiry of the lock, no delay exceeds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retry {
    base: Duration,
    max: Duration,
    pub(crate) poll_interval: Duration,
}

impl Retry {
    /// Creates delays that grow from `base` to `max`; a `max` below `base` counts as `base`.
    #[must_use]
    pub fn new(base: Duration, max: Duration) -> Self {
        Self {
            base,
            max: max.max(base),
            poll_interval: Duration::from_millis(500),
        }
    }

    /// Sets the longest pause between attempts while a majority of the nodes would publish the release. Default: 500 ms.
    ///
    /// A process that waits polls all the same, because a message can be lost and a lock that expires sends none.
    #[must_use]
    pub fn poll_interval(mut self, longest: Duration) -> Self {
        self.poll_interval = longest;
        self
    }
}

/// Returns the delay before attempt `attempt` (0 is the first repetition).
///
/// `hint` is the remaining lifetime of the lock according to the nodes; `random` must be uniform.
#[must_use]
pub fn delay(retry: &Retry, attempt: u32, hint: Option<Duration>, random: u64) -> Duration {
    let grown = retry.base.saturating_mul(1 << attempt.min(16));
    drawn(retry, grown.min(retry.max), hint, random)
}

/// Returns the delay before the next attempt of a subscribed waiter: uniform from zero to
/// [`poll_interval`](Retry::poll_interval).
///
/// `hint` and `random` are those of [`delay`].
#[must_use]
pub fn poll_delay(retry: &Retry, hint: Option<Duration>, random: u64) -> Duration {
    drawn(retry, retry.poll_interval, hint, random)
}

fn drawn(retry: &Retry, bound: Duration, hint: Option<Duration>, random: u64) -> Duration {
    let drawn = scale(bound, random);
    match hint {
        // Shortly after the expiry, and spread over a base delay.
        Some(left) => drawn.min(left.saturating_add(scale(retry.base, random))),
        None => drawn,
    }
}

/// Returns the reaction of a process to the notification of a release that reached `subscribers` processes,
/// each of which calls this with a `random` of its own.
///
/// A single process tries at once. Of many processes only a few try, after different numbers of round
/// trips, because all attempts after the first successful one are in vain. `notifications` is the number of
/// earlier releases after which the process did not get the lock: with more of them it tries sooner, so that
/// no process waits much longer than the others.
pub fn on_release(
    subscribers: usize,
    notifications: u32,
    round_trip: Duration,
    random: u64,
) -> OnRelease {
    // Valkey 9 miscounts 8, 15 and 16 subscribers, as some millions or more. All that there are then try at once.
    let rivals = u16::try_from(subscribers).map_or(1, u32::from);
    if rivals <= 1 {
        return OnRelease::Try(Duration::ZERO);
    }
    let drawn = scale(round_trip.saturating_mul(rivals), random) / (1 + notifications / rivals);
    if drawn < round_trip.saturating_mul(CANDIDATES) {
        OnRelease::Try(drawn)
    } else {
        OnRelease::Rest(drawn.saturating_mul(PATIENCE))
    }
}

/// Returns the delay after split vote number `attempt` (0 is the first), in which several
/// contenders got some nodes each and none a majority: uniform from zero to twice the round
/// trip, doubling with every further split.
#[must_use]
pub fn split_delay(attempt: u32, round_trip: Duration, random: u64) -> Duration {
    let window = round_trip.saturating_mul(2_u32.saturating_pow(attempt.min(15) + 1));
    scale(window, random)
}

/// The reaction of a process to the notification of a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnRelease {
    /// Try after this time.
    Try(Duration),
    /// Leave the lock to other processes, and try after this time without a notification: they may all have
    /// done the same.
    Rest(Duration),
}

/// The average number of notified processes that try. With fewer, it happens more often that none tries; with
/// more, more attempts are in vain.
const CANDIDATES: u32 = 4;
/// The factor by which a process waits longer that leaves the lock to others.
const PATIENCE: u32 = 4;

/// 10 ms growing to 250 ms.
impl Default for Retry {
    fn default() -> Self {
        Self::new(Duration::from_millis(10), Duration::from_millis(250))
    }
}

/// `ceiling * random / 2^64`, without floats.
fn scale(ceiling: Duration, random: u64) -> Duration {
    // A `u64` of nanoseconds is 584 years, and the product fits.
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
        let longest = |attempt| delay(&retry, attempt, None, u64::MAX).as_millis();
        assert_eq!([0, 1, 2, 3, 9, 400].map(longest), [9, 19, 39, 79, 99, 99]);
    }

    #[test]
    fn delays_spread_over_the_whole_window() {
        let retry = Retry::new(ms(10), ms(100));
        assert_eq!(delay(&retry, 0, None, 0), ms(0));
        assert_eq!(delay(&retry, 0, None, 1 << 63), ms(5));
    }

    #[test]
    fn no_delay_goes_past_the_expiry_by_more_than_the_base() {
        let retry = Retry::new(ms(10), ms(1_000));
        for random in [0, 1 << 62, 1 << 63, u64::MAX] {
            assert!(delay(&retry, 8, Some(ms(3)), random) <= ms(13));
        }
    }

    #[test]
    fn huge_delays_do_not_overflow() {
        let retry = Retry::new(Duration::from_secs(864_000), Duration::MAX);
        assert!(delay(&retry, 16, None, u64::MAX) > Duration::from_secs(864_000));
        for subscribers in [2, usize::from(u16::MAX), usize::MAX] {
            for notifications in [0, u32::MAX] {
                on_release(subscribers, notifications, Duration::MAX, u64::MAX);
            }
        }
    }

    #[test]
    fn split_votes_wait_up_to_two_round_trips_doubling() {
        let longest = |attempt| split_delay(attempt, ms(1), u64::MAX);
        assert!(longest(0) < ms(2) && longest(0) > Duration::from_micros(1_990));
        assert!(longest(2) < ms(8) && longest(2) > Duration::from_micros(7_990));
    }

    #[test]
    fn on_release_lets_a_single_subscriber_try_at_once_and_a_few_of_many() {
        let reaction = |subscribers, random| on_release(subscribers, 0, ms(1), random);
        // The last one is no number of processes.
        for subscribers in [0, 1, 48_366_519] {
            assert_eq!(reaction(subscribers, u64::MAX), OnRelease::Try(ms(0)));
        }
        // Four of sixteen try, within four round trips.
        let quarter = 1 << 62;
        assert_eq!(reaction(16, 0), OnRelease::Try(ms(0)));
        assert!(matches!(reaction(16, quarter - 1), OnRelease::Try(delay) if delay < ms(4)));
        assert_eq!(reaction(16, quarter), OnRelease::Rest(ms(16)));
        assert!(matches!(reaction(16, u64::MAX), OnRelease::Rest(delay) if delay < ms(64)));
    }

    #[test]
    fn on_release_lets_a_long_waiting_subscriber_try_sooner() {
        let after = |notifications| on_release(16, notifications, ms(1), 1 << 63);
        assert_eq!(after(0), OnRelease::Rest(ms(32)));
        assert_eq!(after(15), OnRelease::Rest(ms(32)));
        assert_eq!(after(32), OnRelease::Try(Duration::from_nanos(2_666_666)));
    }

    #[test]
    fn poll_delay_is_limited_by_the_bound_and_by_the_expiry() {
        let retry = Retry::new(ms(10), ms(20));
        assert_eq!(poll_delay(&retry, None, 1 << 63), ms(250));
        assert_eq!(poll_delay(&retry, Some(ms(40)), 1 << 63), ms(45));
    }
}
