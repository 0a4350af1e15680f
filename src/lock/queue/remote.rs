//! The other processes that wait for a key, as far as this one knows, and the subscription to their releases.
//!
//! # Implementation details
//!
//! A process learns of the others when it releases a key: each node reports the number of subscribers to which it
//! published the release. While local callers wait too, releases are not published, and the next local caller
//! acquires the key without a message. To keep other processes from starving, at most [`LOCAL_RUN`] local callers
//! acquire the key in a row. Then the release is published, and the next local caller waits like a remote one.
//!
//! All local callers that wait for a release of another process share one subscription, and each watches it by itself. A
//! caller that waits for the permit will need it next, so the place keeps it while there is one.

use std::sync::Arc;

use crate::lock::cluster::Cluster;
use crate::lock::queue::place::{Place, Subscribed};
use crate::node::sync::atomic::Ordering;
use crate::node::{ReleaseSignal, ReleaseWatch};

/// The number of local callers that acquire a key in a row while other processes wait for it.
///
/// A hand-over to another process costs several round trips, and the attempts of processes that come too late. A
/// longer run makes other processes wait longer.
const LOCAL_RUN: usize = 4;

/// A caller's watch for the releases of a key. Keeps the subscription.
#[derive(Debug)]
pub(crate) struct Watching {
    pub(crate) watch: ReleaseWatch,
    subscribed: Arc<Subscribed>,
}

/// The processes that wait for the key of a place.
impl Place {
    /// Sets the number of subscribers to which a node published a release.
    pub(crate) fn set_subscribers(&self, subscribers: usize) {
        // Relaxed here and below: the counts only say who should go first. With a stale one, a process waits for one turn
        // more, or polls; no lock depends on it.
        self.subscribers.store(subscribers, Ordering::Relaxed);
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
    pub(super) fn keep(&self) -> bool {
        // Load and store, not one step: only the holder of the place's permit decides, and the permit's semaphore orders the
        // holders.
        let kept = self.kept.load(Ordering::Relaxed) + 1;
        let keep = self.is_waited_for() && kept < LOCAL_RUN && self.count().is_some();
        self.kept
            .store(if keep { kept } else { 0 }, Ordering::Relaxed);
        keep
    }

    fn count(&self) -> Option<usize> {
        // Looked at first, because most keys have none, and most locks need not ask for the subscription then.
        let subscribers = self.subscribers.load(Ordering::Relaxed);
        if subscribers == 0 {
            return None;
        }
        // The nodes count this process once while it is subscribed. A subscription that just ends is gone here before it is
        // gone there, so for a moment this process may be taken for another one, which costs one published release.
        let own = usize::from(self.subscription.lock().1.strong_count() > 0);
        let others = subscribers.saturating_sub(own);
        (others > 0).then_some(others + 1)
    }

    /// Watches the releases of a lock, which are published on this channel.
    pub(super) fn watch(&self, cluster: &Cluster, channel: &Arc<[u8]>) -> Watching {
        let mut subscription = self.subscription.lock();
        let (kept, watched) = &mut *subscription;
        let subscribed = watched.upgrade().unwrap_or_else(|| {
            let signal = ReleaseSignal::new(cluster.quorum);
            let nodes = cluster.nodes.iter().enumerate();
            let subscriptions =
                nodes.filter_map(|(number, node)| node.subscribe(channel, &signal, number));
            Arc::new(Subscribed {
                _subscriptions: subscriptions.collect(),
                signal,
            })
        });
        *watched = Arc::downgrade(&subscribed);
        *kept = Some(Arc::clone(&subscribed));
        Watching {
            watch: ReleaseWatch::new(&subscribed.signal),
            subscribed,
        }
    }

    /// Ends the subscription to the releases of other processes, if no caller waits here.
    pub(super) fn unsubscribe(&self) {
        if !self.is_waited_for() {
            self.end_subscription();
        }
    }

    /// Ends the subscription, unless a caller watches.
    pub(super) fn end_subscription(&self) {
        let kept = self.subscription.lock().0.take();
        // Behind the mutex, because the nodes are told of its end, if this was the last owner.
        drop(kept);
    }
}

impl Watching {
    /// Returns how many other callers watch.
    pub(crate) fn others(&self) -> usize {
        // Beside the watches, the place has one while callers wait for the permit.
        Arc::strong_count(&self.subscribed).saturating_sub(2)
    }
}
