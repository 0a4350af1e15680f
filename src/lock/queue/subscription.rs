//! The subscription of this process to the releases of a key.
//!
//! # Implementation details
//!
//! All local callers that wait for a release share one subscription, and each watches it by itself. A caller that waits
//! for the permit will need it next, so a place keeps it while there is one.

use std::sync::{Arc, Weak};

use crate::lock::cluster::Cluster;
use crate::lock::queue::remote::RemoteWaiters;
use crate::node::{Mutex, ReleaseSignal, ReleaseWatch, Subscription};

/// The subscription of a place, while callers need it.
#[derive(Debug, Default)]
pub(super) struct PlaceSubscription(Mutex<KeptSubscription>);

#[derive(Debug, Default)]
struct KeptSubscription {
    /// Kept for the next callers, which wait for the permit.
    kept: Option<Arc<Subscribed>>,
    /// The same, while some caller watches.
    watched: Weak<Subscribed>,
}

/// The subscription to the releases of a key, at every node that publishes them.
#[derive(Debug)]
struct Subscribed {
    signal: Arc<ReleaseSignal>,
    remote: Arc<RemoteWaiters>,
    _subscriptions: Vec<Subscription>,
}

/// A caller's watch for the releases of a key. Keeps the subscription.
#[derive(Debug)]
pub(crate) struct Watching {
    pub(crate) watch: ReleaseWatch,
    subscribed: Arc<Subscribed>,
}

impl PlaceSubscription {
    /// Watches the releases of a lock, which are published on this channel.
    pub(super) fn watch(
        &self,
        remote: &Arc<RemoteWaiters>,
        cluster: &Cluster,
        channel: &Arc<[u8]>,
    ) -> Watching {
        let mut subscription = self.0.lock();
        let subscribed = subscription.watched.upgrade().unwrap_or_else(|| {
            let signal = ReleaseSignal::new(cluster.quorum);
            let nodes = cluster.nodes.iter().enumerate();
            let subscriptions =
                nodes.filter_map(|(number, node)| node.subscribe(channel, &signal, number));
            remote.add_subscription();
            Arc::new(Subscribed {
                _subscriptions: subscriptions.collect(),
                signal,
                remote: Arc::clone(remote),
            })
        });
        subscription.watched = Arc::downgrade(&subscribed);
        subscription.kept = Some(Arc::clone(&subscribed));
        Watching {
            watch: ReleaseWatch::new(&subscribed.signal),
            subscribed,
        }
    }

    /// Ends the subscription, unless a caller watches.
    pub(super) fn end(&self) {
        let kept = self.0.lock().kept.take();
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

impl Drop for Subscribed {
    fn drop(&mut self) {
        self.remote.remove_subscription();
    }
}
