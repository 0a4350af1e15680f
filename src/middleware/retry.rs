//! When the clients that a layer refuses are told to retry: after the typical hold of its locks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::lock::LockHandle;
use crate::middleware::rejection::Rejection;

/// The `Retry-After` of one layer for contended locks; clones belong to the same layer.
///
/// # Design
///
/// The average is one number for all keys of the layer. A number for each key would need a map that grows with the
/// keys of clients, and the key that is refused now is often one that was never held in this process.
#[derive(Debug, Clone, Default)]
pub(crate) struct RetryAfter {
    fixed: Option<Duration>,
    typical: TypicalHold,
}

/// A moving average of holds in microseconds; zero before the first hold.
///
/// Two holds that end at the same moment may count as one, which an average can bear.
#[derive(Debug, Clone, Default)]
struct TypicalHold(Arc<AtomicU64>);

/// Measures a hold, and adds it to the average when it is dropped.
#[derive(Debug)]
pub(crate) struct MeasuredHold {
    began: Instant,
    ended: Option<Instant>,
    typical: TypicalHold,
    /// The lock, if others may have shares of it. A hold that goes on is not added.
    lock: Option<LockHandle>,
}

impl RetryAfter {
    /// Sets a fixed time in place of the average.
    pub(crate) fn set_fixed(&mut self, retry_after: Duration) {
        self.fixed = Some(retry_after);
    }

    /// Begins to measure a hold.
    pub(crate) fn measure(&self, lock: Option<LockHandle>) -> MeasuredHold {
        MeasuredHold {
            began: Instant::now(),
            ended: None,
            typical: self.typical.clone(),
            lock,
        }
    }

    /// Replaces the remaining ttl in a refusal by the time after which a retry makes sense. That is the typical hold only
    /// if `is_typical`.
    pub(crate) fn applied_to(&self, rejection: Rejection, is_typical: bool) -> Rejection {
        match rejection {
            Rejection::Contended {
                status,
                retry_after,
            } => Rejection::Contended {
                status,
                retry_after: self.after(retry_after, is_typical),
            },
            Rejection::TooManyConcurrent { retry_after } => Rejection::TooManyConcurrent {
                retry_after: self.after(retry_after, is_typical),
            },
            Rejection::InProgress { retry_after } => Rejection::InProgress {
                retry_after: self.after(retry_after, is_typical),
            },
            other => other,
        }
    }

    /// Returns when to retry, for a lock that expires after `left` unless it is renewed.
    fn after(&self, left: Option<Duration>, is_typical: bool) -> Option<Duration> {
        if self.fixed.is_some() {
            return self.fixed;
        }
        let left = left?;
        let typical = self.typical.get().filter(|_| is_typical);
        Some(typical.map_or(left, |typical| typical.min(left)))
    }
}

impl TypicalHold {
    fn get(&self) -> Option<Duration> {
        let micros = self.0.load(Ordering::Relaxed);
        (micros > 0).then(|| Duration::from_micros(micros))
    }

    /// Adds a hold, with an eighth of the weight of all earlier ones.
    fn add(&self, hold: Duration) {
        let hold = u64::try_from(hold.as_micros()).unwrap_or(u64::MAX).max(1);
        let next = match self.0.load(Ordering::Relaxed) {
            0 => hold,
            average => average - average / 8 + hold / 8,
        };
        self.0.store(next.max(1), Ordering::Relaxed);
    }
}

impl MeasuredHold {
    /// Ends the hold before this value is dropped.
    pub(crate) fn end(&mut self, at: Instant) {
        self.ended = Some(at);
    }
}

impl Drop for MeasuredHold {
    fn drop(&mut self) {
        if self.lock.as_ref().is_some_and(LockHandle::is_held) {
            return;
        }
        let ended = self.ended.unwrap_or_else(Instant::now);
        self.typical.add(ended - self.began);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(retry: &RetryAfter, left: Option<Duration>) -> Duration {
        let rejection = Rejection::Contended {
            status: http::StatusCode::LOCKED,
            retry_after: left,
        };
        let retry_after = retry.applied_to(rejection, true).retry_after();
        retry_after.expect("contention has a Retry-After")
    }

    #[test]
    fn typical_hold_follows_the_holds_slowly() {
        let typical = TypicalHold::default();
        assert_eq!(typical.get(), None);
        typical.add(Duration::from_secs(8));
        assert_eq!(typical.get(), Some(Duration::from_secs(8)));
        typical.add(Duration::ZERO);
        assert_eq!(typical.get(), Some(Duration::from_secs(7)));
        typical.add(Duration::MAX);
        assert!(typical.get() > Some(Duration::from_secs(60)));
    }

    #[test]
    fn retry_after_is_one_second_to_a_minute_and_never_above_the_remaining_ttl() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..1_000 {
            let retry = RetryAfter::default();
            for _ in 0..random.u8(0..20) {
                let hold = Duration::from_micros(random.u64(0..200_000_000));
                retry.typical.add(hold);
            }
            let left = random.u64(0..200_000_000);
            let left = random.bool().then(|| Duration::from_micros(left));
            let seconds = refused(&retry, left).as_secs();
            let most = left.unwrap_or_default().as_micros().div_ceil(1_000_000);
            let most = most.clamp(1, 60);
            assert!(
                (1..=most).contains(&u128::from(seconds)),
                "{seconds} s of {left:?}"
            );
        }
    }

    #[test]
    fn a_fixed_retry_after_does_not_depend_on_the_lock() {
        let mut retry = RetryAfter::default();
        retry.typical.add(Duration::from_secs(9));
        retry.set_fixed(Duration::from_millis(4_500));
        for left in [None, Some(Duration::from_secs(1))] {
            assert_eq!(refused(&retry, left), Duration::from_secs(5));
        }
        retry.set_fixed(Duration::ZERO);
        assert_eq!(refused(&retry, None), Duration::from_secs(1));
        retry.set_fixed(Duration::from_secs(600));
        assert_eq!(refused(&retry, None), Duration::from_secs(60));
    }
}
