//! How one lock is asked for, where it is not asked for by hand.

use std::time::Duration;

/// How a resource is locked; see [`LockResource::options`](crate::LockResource::options).
///
/// ```
/// use std::time::Duration;
/// use tower_redlock::LockOptions;
///
/// let patient = LockOptions::default().wait(Duration::from_secs(2));
/// # let _ = patient;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[must_use]
pub struct LockOptions {
    pub(crate) ttl: Option<Duration>,
    pub(crate) wait: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) label: Option<&'static str>,
}

impl LockOptions {
    /// Sets how long the lock lives when nothing renews it. Default: the builder's ttl.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Sets how long to wait while somebody else holds the lock. Default: zero.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// Sets after what time the lock is not renewed any more. Default: the builder's, and 60 s if that has
    /// none.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.max_hold = Some(max_hold);
        self
    }

    /// Sets what kind of resource this is, for spans and metrics, which never show a key. Default:
    /// `unnamed`.
    pub fn label(mut self, label: &'static str) -> Self {
        self.label = Some(label);
        self
    }
}
