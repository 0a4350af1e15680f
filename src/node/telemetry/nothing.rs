//! The functions of metrics without the feature `metrics`: they do nothing.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::node::telemetry::LockLabels;

pub(crate) fn describe<'a>(_: impl Iterator<Item = &'a Arc<str>>) {}

pub(crate) fn register(_: &'static str, _: bool) {}

pub(crate) fn acquired(_: &LockLabels, _: &'static str, _: Instant, _: Option<Duration>) {}

pub(crate) fn held(_: &LockLabels, _: Instant) {}

pub(crate) fn lost(_: &'static str) {}

pub(crate) fn unprotected(_: &'static str) {}

pub(crate) fn conflict() {}

pub(crate) fn unrecorded() {}

#[cfg(feature = "redis")]
pub(crate) fn node_up(_: &Arc<str>, _: Option<&Arc<str>>, _: bool) {}

/// Counts nothing.
#[derive(Debug)]
pub(crate) struct Nothing;

#[allow(clippy::unused_self, reason = "the feature `metrics` uses it")]
impl Nothing {
    #[cfg(feature = "redis")]
    pub(crate) fn new(_: &Arc<str>, _: Option<&Arc<str>>) -> Self {
        Self
    }

    #[cfg(feature = "redis")]
    pub(crate) fn record(&mut self, _: &'static str, _: Duration, _: Instant) {}

    pub(crate) fn held() -> Self {
        Self
    }

    pub(crate) fn waiter() -> Self {
        Self
    }
}
