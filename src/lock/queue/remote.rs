//! The processes that wait for a key, as far as this one knows.
//!
//! # Implementation details
//!
//! A process learns of the others when it releases a key: each node reports to how many subscribers it
//! published the release. While local callers wait too, the release is not published and the next local
//! caller acquires the key, because that costs no message. To keep the other processes from starving, at most
//! [`LOCAL_RUN`] local callers in a row acquire the key this way; then the release is published, and the next
//! local caller waits like a remote one.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// How many local callers acquire a key in a row while other processes wait for it. Letting others in costs
/// several round trips and the attempts of those that come too late; a longer run makes others wait longer.
const LOCAL_RUN: usize = 4;

/// The processes that wait for one key.
#[derive(Debug, Default)]
pub(crate) struct RemoteWaiters {
    /// How many subscribers the last release was published to.
    subscribers: AtomicUsize,
    /// Whether this process is one of them.
    is_subscribed: AtomicBool,
    /// How many releases in a row were not published.
    kept: AtomicUsize,
}

impl RemoteWaiters {
    /// Takes the number of subscribers that a node published a release to.
    pub(crate) fn set_subscribers(&self, subscribers: usize) {
        self.subscribers.store(subscribers, Ordering::Relaxed);
    }

    /// Sets whether this process is among the subscribers.
    pub(super) fn set_subscribed(&self, is_subscribed: bool) {
        self.is_subscribed.store(is_subscribed, Ordering::Relaxed);
    }

    /// Returns the number of processes that wait, this one included, if there are others and the last release
    /// was published to them.
    pub(crate) fn notified(&self) -> Option<usize> {
        let is_kept = self.kept.load(Ordering::Relaxed) > 0;
        self.count().filter(|_| !is_kept)
    }

    /// Returns whether the next release need not be published, because a local caller waits.
    ///
    /// If that caller goes away without an attempt, the other processes find the key free when they poll.
    pub(super) fn keep(&self, is_waited_for: bool) -> bool {
        let kept = self.kept.load(Ordering::Relaxed) + 1;
        let keep = is_waited_for && kept < LOCAL_RUN && self.count().is_some();
        self.kept
            .store(if keep { kept } else { 0 }, Ordering::Relaxed);
        keep
    }

    fn count(&self) -> Option<usize> {
        let own = usize::from(self.is_subscribed.load(Ordering::Relaxed));
        let subscribers = self.subscribers.load(Ordering::Relaxed);
        let others = subscribers.saturating_sub(own);
        (others > 0).then_some(others + 1)
    }
}
