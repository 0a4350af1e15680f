//! Settings of a Redlock that have been checked, and the options of one lock.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::lock::error::LockError;
use crate::lock::waiters::Waiters;
use crate::protocol::{Namespace, Quorum, Retry, validity};

/// What a builder was told, checked and completed with defaults.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) namespace: Namespace,
    pub(super) quorum: Quorum,
    pub(super) ttl: Duration,
    pub(super) max_ttl: Duration,
    pub(super) node_timeout: Duration,
    pub(super) wait: Duration,
    pub(super) retry: Retry,
    pub(super) wake_ups: bool,
    pub(super) poll_interval: Duration,
    pub(super) max_hold: Option<Duration>,
    pub(super) renew: bool,
    pub(super) fencing: bool,
    pub(super) fence_retention: Duration,
    pub(super) waiters: Option<Arc<Waiters>>,
    pub(super) log_keys: bool,
}

/// How one lock is asked for; what is `None` is as the builder says.
#[derive(Debug, Clone, Default)]
pub(super) struct Options {
    pub(super) ttl: Option<Duration>,
    pub(super) wait: Option<Duration>,
    pub(super) max_hold: Option<Duration>,
    pub(super) waiters: Option<Arc<Waiters>>,
    pub(super) label: Option<&'static str>,
}

impl Settings {
    /// Returns the ttl of a lock in whole milliseconds, which is what the nodes count in.
    pub(super) fn ttl_of(&self, options: &Options) -> Result<Duration, LockError> {
        let asked = options.ttl.unwrap_or(self.ttl);
        if asked > self.max_ttl {
            return Err(LockError::TtlTooLong {
                asked,
                max: self.max_ttl,
            });
        }
        let ttl = whole_millis(asked);
        if validity::lifetime(ttl).is_none() {
            return Err(LockError::TtlTooShort { asked });
        }
        Ok(ttl)
    }
}

/// Adds a duration of any length; what the clock cannot hold is as good as never.
pub(crate) fn after(instant: Instant, duration: Duration) -> Instant {
    const NEVER: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);
    instant + duration.min(NEVER)
}

/// Rounds down to whole milliseconds.
pub(super) fn whole_millis(duration: Duration) -> Duration {
    duration - Duration::from_nanos(u64::from(duration.subsec_nanos() % 1_000_000))
}
