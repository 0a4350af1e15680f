//! Runs work once, and records or replays its result.

use std::any::type_name;
use std::fmt::Debug;
use std::ops::RangeInclusive;
use std::time::Duration;

use bytes::BufMut;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::lock::{Denied, LockError, LostReason};
use crate::node::{sha256, unguessable};
use crate::once::error::{OnceError, report_conflict};
use crate::once::execution::{ExecutionHandle, run_to_end};
use crate::once::fetch::MAX_BODY;
use crate::once::request::{DAY, ExecuteOnce};
use crate::protocol::lease::{Decided, Effect};
use crate::protocol::{ExecutionId, Fingerprint, Record};

/// Result of [`ExecuteOnce::run`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome<T> {
    /// This call executed the work.
    Executed(T),
    /// An earlier call executed the work, and this is its recorded result.
    Replayed(T),
}

impl<T> Outcome<T> {
    /// Returns the result, of this call or an earlier one.
    pub fn into_inner(self) -> T {
        match self {
            Self::Executed(result) | Self::Replayed(result) => result,
        }
    }

    /// Returns whether an earlier call executed the work.
    #[must_use]
    pub fn is_replayed(&self) -> bool {
        matches!(self, Self::Replayed(_))
    }
}

impl ExecuteOnce {
    setters! {
        /// Sets how long the result is kept, between a millisecond and 100 years of 365 days. Default: 24 h.
        ///
        /// A value out of that range is replaced by the nearest one in it, with a warning in the log.
        retention(retention: Duration) => retention = bound("`Redlock::once`", "retention", retention, RETENTION);

        /// Sets the largest result that is kept, in bytes of JSON: at most 1 MiB. Default: 64 KiB.
        ///
        /// Of a larger result it is recorded only that there was one, with a warning in the log: later calls get
        /// [`OnceError::NotKept`].
        ///
        /// A value over 1 MiB is replaced by 1 MiB, with a warning in the log.
        max_result(bytes: usize) => max_result = bound("`Redlock::once`", "max_result", bytes, 0..=MAX_BODY);
    }

    /// Executes `work`, or returns the result that an earlier call with the key recorded.
    ///
    /// The result is recorded as JSON, so later versions of a program may add fields to it that have a default. JSON
    /// has no value of its own for some results: `Some(())`, `Some(None)` and `Some(f64::NAN)` are replayed as `None`,
    /// and a number that is NaN or infinite gets [`OnceError::NotKept`] when it is to be replayed. Return an enum with
    /// named variants, or a text, in their place.
    ///
    /// The work runs in a task of its own, which goes on if the caller goes away, or if the lock is lost. It gets
    /// an [`ExecutionHandle`] with the fencing token of the execution. [`Redlock::drain`](crate::Redlock::drain)
    /// waits for it, and at its timeout stops the renewal of the lock, but not the work.
    ///
    /// # Errors
    ///
    /// Returns an [`OnceError`] if the work failed, was not executed, or was executed with an outcome that is not
    /// known.
    ///
    /// # Panics
    ///
    /// If the work panics, or the encoding of its result; the key stays locked until its ttl. Outside of a tokio
    /// runtime.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point. Before the key is granted, the work is not executed; after that it is, and
    /// its result is recorded.
    pub async fn run<T, E, F, W>(self, work: F) -> Result<Outcome<T>, OnceError<E, T>>
    where
        F: FnOnce(ExecutionHandle) -> W + Send + 'static,
        W: Future<Output = Result<T, E>> + Send + 'static,
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Send + 'static,
    {
        let asked = Instant::now();
        let execution = match self.acquire().await {
            Ok(execution) => execution,
            Err(denied) => return self.denied(denied, asked).await,
        };
        let executing = async move {
            if let Err(denied) = execution.begin().await {
                execution.release(Effect::NotBegun).await;
                return self.denied(denied, asked).await;
            }
            let handle = execution.handle();
            let result = tokio::select! {
                biased;
                () = handle.reached_max_hold(Instant::now()) => {
                    tracing::error!(
                        reason = %LostReason::MaxHold,
                        "an execution was stopped at max_hold; its key stays locked until its ttl"
                    );
                    return Err(OnceError::Unknown);
                }
                result = work(execution.handle()) => result,
            };
            let result = match result {
                Ok(result) => result,
                Err(error) => {
                    execution.release(Effect::WithoutEffect).await;
                    return Err(OnceError::Work(error));
                }
            };
            let record = encode(&result, self.fingerprint, self.max_result);
            match self.conclude(execution, &record).await {
                Ok(()) => Ok(Outcome::Executed(result)),
                Err(Some(decided)) => self.denied(Denied::Decided(decided), asked).await,
                Err(None) => Err(OnceError::Unrecorded(result)),
            }
        };
        // Without an outcome, the work was stopped midway.
        let ended = run_to_end(executing).await;
        ended.unwrap_or(Err(OnceError::Unknown))
    }

    /// Returns the outcome of a call that must not execute.
    async fn denied<T, E>(
        &self,
        denied: Denied,
        asked: Instant,
    ) -> Result<Outcome<T>, OnceError<E, T>>
    where
        T: DeserializeOwned,
    {
        Err(match denied {
            Denied::Lock(error) => OnceError::Lock(error),
            Denied::Lost(_) => {
                let (ttl, elapsed) = (self.effective_ttl(), asked.elapsed());
                OnceError::Lock(LockError::Expired { ttl, elapsed })
            }
            Denied::Decided(Decided::Recorded(record)) => {
                let whole = self.read(&record).await.map_err(|error| {
                    tracing::debug!(%error, "the recorded result of an execution could not be read");
                    OnceError::Undecided
                })?;
                let result = whole.and_then(|whole| decode(&whole));
                return result.map(Outcome::Replayed).ok_or(OnceError::NotKept);
            }
            Denied::Decided(Decided::OtherRequest) => OnceError::OtherRequest,
            Denied::Decided(Decided::Undecided) => OnceError::Undecided,
            Denied::Decided(Decided::Unknown) => OnceError::Unknown,
            Denied::Decided(Decided::Conflicting) => {
                report_conflict();
                OnceError::Conflicting
            }
        })
    }
}

/// How long records are kept. A node accepts no record without a ttl, or with a ttl that overflows its clock.
pub(crate) const RETENTION: RangeInclusive<Duration> =
    Duration::from_millis(1)..=DAY.saturating_mul(100 * 365);

/// Returns the value of a setting within its range, with a warning if it was not.
pub(crate) fn bound<T: Ord + Copy + Debug>(
    owner: &str,
    setting: &str,
    requested: T,
    range: RangeInclusive<T>,
) -> T {
    let used = requested.clamp(*range.start(), *range.end());
    if used != requested {
        tracing::warn!(
            setting,
            ?requested,
            ?used,
            "a setting of {owner} is out of range; the nearest value is used"
        );
    }
    used
}

/// First byte of a record's body, which is JSON then. The records of the HTTP layer begin with other bytes.
const JSON: u8 = b'J';
/// The body of a record without a result.
const NOT_KEPT: u8 = b'N';

/// Makes the record of a result. A result that is over `max` bytes of JSON, or cannot be encoded, is recorded as
/// not kept.
pub(super) fn encode<T: Serialize>(result: &T, fingerprint: Fingerprint, max: usize) -> Record {
    // No more of the result is encoded than is kept.
    let mut json = vec![JSON].limit(max).writer();
    let body = match serde_json::to_writer(&mut json, result) {
        Ok(()) => json.into_inner().into_inner(),
        Err(error) => {
            tracing::warn!(%error, max_result = max, "the result of an execution is not kept");
            vec![NOT_KEPT]
        }
    };
    let id = ExecutionId::from_random(unguessable());
    Record::new(id, fingerprint, sha256(&body), &body)
}

/// Reads the result from a whole record; `None` if it was not kept, or is not of this type.
#[must_use]
#[allow(unreachable_pub, reason = "a fuzz target calls it")]
pub fn decode<T: DeserializeOwned>(record: &Record) -> Option<T> {
    let json = record.rest().strip_prefix(&[JSON])?;
    let result = serde_json::from_slice(json).inspect_err(|error| {
        // Without the error's message, which quotes the result.
        tracing::error!(
            expected = type_name::<T>(),
            column = error.column(),
            "a recorded result is not JSON of the expected type"
        );
    });
    result.ok()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use serde::Serializer;

    use super::*;

    fn fingerprint() -> Fingerprint {
        Fingerprint::from_digest([1; 32])
    }

    #[test]
    fn decode_returns_what_encode_was_given() {
        let record = encode(&vec![1, 2, 3], fingerprint(), 7);
        assert_eq!(decode(&record), Some(vec![1, 2, 3]));
        assert_eq!(decode::<String>(&record), None);
    }

    #[test]
    fn encode_keeps_no_result_over_the_limit() {
        let record = encode(&vec![1, 2, 3], fingerprint(), 6);
        assert_eq!(decode::<Vec<u8>>(&record), None);
    }

    #[test]
    fn encode_stops_at_the_limit() {
        struct Endless(Cell<usize>);
        impl Serialize for Endless {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let elements = (0..1_000).inspect(|element| self.0.set(*element));
                serializer.collect_seq(elements)
            }
        }
        let endless = Endless(Cell::new(0));
        let record = encode(&endless, fingerprint(), 10);
        assert_eq!(decode::<Vec<u8>>(&record), None);
        // `[0,1,2,3,4` is 10 bytes long.
        assert_eq!(endless.0.get(), 5);
    }
}
