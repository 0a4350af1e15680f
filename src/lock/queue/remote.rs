//! The other processes that wait for a key, as far as this one knows.
//!
//! # Implementation details
//!
//! A process learns of the others when it releases a key: each node reports the number of subscribers to which it
//! published the release. While local callers wait too, releases are not published, and the next local caller
//! acquires the key without a message. To keep other processes from starving, at most [`LOCAL_RUN`] local callers
//! acquire the key in a row. Then the release is published, and the next local caller waits like a remote one.

use crate::node::sync::atomic::{AtomicUsize, Ordering};

/// The number of local callers that acquire a key in a row while other processes wait for it.
///
/// A hand-over to another process costs several round trips, and the attempts of processes that come too late. A
/// longer run makes other processes wait longer.
const LOCAL_RUN: usize = 4;

/// The processes that wait for one key.
#[derive(Debug, Default)]
pub(crate) struct RemoteWaiters {
    /// The number of subscribers to which the last release was published.
    subscribers: AtomicUsize,
    /// The number of subscriptions of this process: one if it is one of them, and two while one follows another.
    own: AtomicUsize,
    /// The number of releases in a row that were not published.
    kept: AtomicUsize,
}

impl RemoteWaiters {
    /// Sets the number of subscribers to which a node published a release.
    pub(crate) fn set_subscribers(&self, subscribers: usize) {
        // Relaxed here and below: the counts only say who should go first. With a stale one, a process waits for one turn
        // more, or polls; no lock depends on it.
        self.subscribers.store(subscribers, Ordering::Relaxed);
    }

    /// Notes that this process is among the subscribers.
    pub(super) fn add_subscription(&self) {
        self.own.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that a subscription of this process has ended.
    pub(super) fn remove_subscription(&self) {
        self.own.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns the number of waiting processes, this one included, if there are others and the last release was
    /// published to them.
    pub(crate) fn notified(&self) -> Option<usize> {
        let is_kept = self.kept.load(Ordering::Relaxed) > 0;
        self.count().filter(|_| !is_kept)
    }

    /// Decides whether the key stays in this process, so that its release is not published. Counts the decision.
    ///
    /// If the local caller goes away without an attempt, the other processes find the key free when they poll.
    pub(super) fn keep(&self, is_waited_for: bool) -> bool {
        // Load and store, not one step: only the holder of the place's permit decides, and the permit's semaphore orders the
        // holders.
        let kept = self.kept.load(Ordering::Relaxed) + 1;
        let keep = is_waited_for && kept < LOCAL_RUN && self.count().is_some();
        self.kept
            .store(if keep { kept } else { 0 }, Ordering::Relaxed);
        keep
    }

    fn count(&self) -> Option<usize> {
        let own = usize::from(self.own.load(Ordering::Relaxed) > 0);
        let subscribers = self.subscribers.load(Ordering::Relaxed);
        let others = subscribers.saturating_sub(own);
        (others > 0).then_some(others + 1)
    }
}
