//! Exposes the reader of environment variables and the reaction to a release to fuzz targets.

use std::ffi::OsString;
use std::time::Duration;

use crate::lock::config::RedlockConfig;
use crate::lock::error::BuildError;
use crate::protocol::{OnRelease, Retry};

/// Reads the settings from variables.
///
/// # Errors
///
/// Returns what [`RedlockConfig::from_env`] returns.
pub fn config_from_vars(
    var: impl Fn(&str) -> Option<OsString>,
) -> Result<RedlockConfig, BuildError> {
    RedlockConfig::from_vars(var)
}

/// Returns when a waiter tries that was told of a release, unless it leaves the lock to others.
#[must_use]
pub fn delay_on_release(
    subscribers: usize,
    notifications: u32,
    round_trip: Duration,
    random: u64,
) -> Option<Duration> {
    match Retry::on_release(subscribers, notifications, round_trip, random) {
        OnRelease::Try(delay) => Some(delay),
        OnRelease::Rest(_) => None,
    }
}
