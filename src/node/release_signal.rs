//! Wake-ups: how a process that waits for a lock learns of its release.
//!
//! # Implementation details
//!
//! A [`ReleaseSignal`] is a process's subscription to the releases of one lock at all nodes. Each waiter has a
//! [`ReleaseWatch`], which fires when a majority of the nodes has published a release, because the lock can only be
//! acquired at a majority then. The signal counts the messages of each node, and a watch remembers the counts that it
//! has seen, so that one waiter does not take the messages of another: readers, and callers that wait for slots, wait at
//! the same time.
//!
//! A message is a hint to try again and nothing more: it can be lost, and a lock that expires sends none. Waiters
//! therefore poll as well, at a lower rate. The watches also fire when the number of subscribed nodes reaches a
//! majority, or falls below one: a release may have been missed in between, and the waiter has to choose its polling
//! rate anew.

use std::collections::HashMap;
use std::sync::Arc;

use crate::node::sync::{Mutex, Notify};
use crate::protocol::{NodeSet, Quorum};

/// What the nodes have published to this process about one lock.
#[derive(Debug)]
pub(crate) struct ReleaseSignal {
    majority: usize,
    published: Mutex<Published>,
    // Not a watch channel, which wakes its receivers in an order by chance: a simulation could not be repeated.
    changed: Notify,
}

#[derive(Debug)]
struct Published {
    /// The nodes at which this process is subscribed.
    subscribed: NodeSet,
    /// By node, the number of its messages.
    messages: Vec<u64>,
    /// The number of subscribers of the last message, this process included.
    subscribers: usize,
}

/// The subscription of this process to the releases of a lock, at every node that publishes them. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct ReleaseSubscription {
    pub(crate) signal: Arc<ReleaseSignal>,
    _at_nodes: Vec<Subscription>,
}

/// What one waiter has not seen yet of a signal. Keeps the subscription.
#[derive(Debug)]
pub(crate) struct ReleaseWatch {
    subscription: Arc<ReleaseSubscription>,
    /// By node, the number of messages when the waiter last looked.
    seen: Vec<u64>,
}

/// A signal, and the number that one of its nodes has to it.
pub(crate) type Subscriber = (Arc<ReleaseSignal>, usize);

/// A subscription at one node; dropping it unsubscribes.
pub(crate) struct Subscription(Option<Box<dyn FnOnce() + Send + Sync>>);

/// The subscribers at an embedded node, by the name of the lock.
#[derive(Debug, Default)]
pub(crate) struct Subscribers(Mutex<HashMap<Arc<[u8]>, Vec<Subscriber>>>);

impl ReleaseSignal {
    fn new(quorum: Quorum) -> Arc<Self> {
        Arc::new(Self {
            majority: quorum.majority(),
            published: Mutex::new(Published {
                subscribed: NodeSet::default(),
                messages: vec![0; quorum.nodes()],
                subscribers: 1,
            }),
            changed: Notify::new(),
        })
    }

    /// Sets whether a node publishes releases to this process from now on.
    pub(crate) fn set_subscribed(&self, node: usize, subscribed: bool) {
        let mut published = self.published.lock();
        let before = published.is_subscribed(self.majority);
        if subscribed {
            published.subscribed.insert(node);
        } else {
            published.subscribed.remove(node);
        }
        if before != published.is_subscribed(self.majority) {
            // The lock may have been released without a message to this process.
            published.messages.iter_mut().for_each(|count| *count += 1);
            self.changed.notify_waiters();
        }
    }

    /// Takes a node's message that the lock was released, sent to this many subscribers.
    pub(crate) fn notify(&self, node: usize, subscribers: usize) {
        let mut published = self.published.lock();
        published.messages[node] += 1;
        published.subscribers = subscribers;
        drop(published);
        self.changed.notify_waiters();
    }
}

impl ReleaseSubscription {
    /// Subscribes a new signal at each node that can publish releases.
    pub(crate) fn new(
        quorum: Quorum,
        subscribe: impl FnMut(Subscriber) -> Option<Subscription>,
    ) -> Arc<Self> {
        let signal = ReleaseSignal::new(quorum);
        let subscribers = (0..quorum.nodes()).map(|node| (Arc::clone(&signal), node));
        Arc::new(Self {
            _at_nodes: subscribers.filter_map(subscribe).collect(),
            signal,
        })
    }
}

impl ReleaseWatch {
    /// Creates a watch that has seen nothing, so that it fires at once if there was a message before.
    pub(crate) fn new(subscription: &Arc<ReleaseSubscription>) -> Self {
        let nodes = subscription.signal.published.lock().messages.len();
        Self {
            subscription: Arc::clone(subscription),
            seen: vec![0; nodes],
        }
    }

    /// Discards the messages so far, because the nodes are about to be asked anyway.
    pub(crate) fn reset(&mut self) {
        let published = self.subscription.signal.published.lock();
        self.seen.clone_from(&published.messages);
    }

    /// Returns how many share the subscription with this watch.
    pub(crate) fn sharers(&self) -> usize {
        Arc::strong_count(&self.subscription) - 1
    }

    /// Returns whether a majority of the nodes would publish a release to this process.
    pub(crate) fn is_subscribed(&self) -> bool {
        let signal = &self.subscription.signal;
        signal.published.lock().is_subscribed(signal.majority)
    }

    /// Waits until a majority has published a release, and returns the number of subscribers.
    ///
    /// # Cancel safety
    ///
    /// No message is lost if the future is dropped.
    pub(crate) async fn released(&mut self) -> usize {
        let signal = &self.subscription.signal;
        loop {
            // Created before the check, so that no notification is missed.
            let changed = signal.changed.notified();
            {
                let published = signal.published.lock();
                if published.has_more(&self.seen, signal.majority) {
                    self.seen.clone_from(&published.messages);
                    return published.subscribers;
                }
            }
            changed.await;
        }
    }
}

impl Published {
    fn is_subscribed(&self, majority: usize) -> bool {
        self.subscribed.len() >= majority
    }

    /// Returns whether a majority of the nodes has sent messages since these counts.
    fn has_more(&self, seen: &[u64], majority: usize) -> bool {
        let counts = self.messages.iter().zip(seen);
        counts.filter(|(count, seen)| count > seen).count() >= majority
    }
}

impl Subscription {
    pub(crate) fn new(unsubscribe: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self(Some(Box::new(unsubscribe)))
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if let Some(unsubscribe) = self.0.take() {
            unsubscribe();
        }
    }
}

opaque_debug! { Subscription }

impl Subscribers {
    /// Adds a signal, to which this node is number `node`. The subscription may outlive the node.
    pub(crate) fn subscribe(
        self: &Arc<Self>,
        lock: &Arc<[u8]>,
        (signal, node): Subscriber,
    ) -> Subscription {
        let mut signals = self.0.lock();
        let of_lock = signals.entry(Arc::clone(lock)).or_default();
        of_lock.push((Arc::clone(&signal), node));
        drop(signals);
        signal.set_subscribed(node, true);
        let (from, lock) = (Arc::clone(self), Arc::clone(lock));
        Subscription::new(move || from.unsubscribe(&lock, &signal))
    }

    fn unsubscribe(&self, lock: &Arc<[u8]>, signal: &Arc<ReleaseSignal>) {
        let mut signals = self.0.lock();
        if let Some(of_lock) = signals.get_mut(lock) {
            of_lock.retain(|(other, _)| !Arc::ptr_eq(other, signal));
            if of_lock.is_empty() {
                signals.remove(lock);
            }
        }
    }

    /// Publishes the release of a lock, and returns the number of its subscribers.
    pub(crate) fn publish(&self, lock: &Arc<[u8]>) -> usize {
        let signals = self.0.lock().get(lock).cloned().unwrap_or_default();
        for (signal, node) in &signals {
            signal.notify(*node, signals.len());
        }
        signals.len()
    }
}

#[cfg(test)]
mod tests {
    use tokio_test::task::spawn;
    use tokio_test::{assert_pending, assert_ready_eq};

    use super::*;

    #[cfg(shuttle)]
    mod schedules;

    /// A subscription at so many nodes that publish nothing by themselves.
    fn subscription(nodes: usize) -> Arc<ReleaseSubscription> {
        ReleaseSubscription::new(Quorum::new(nodes).unwrap(), |_| None)
    }

    #[test]
    fn released_needs_messages_from_a_majority() {
        let subscription = subscription(5);
        let signal = &subscription.signal;
        let mut watch = ReleaseWatch::new(&subscription);
        signal.notify(0, 4);
        signal.notify(0, 4);
        signal.notify(3, 4);
        let mut released = spawn(watch.released());
        assert_pending!(released.poll());
        signal.notify(4, 4);
        assert!(released.is_woken());
        assert_ready_eq!(released.poll(), 4);
        drop(released);
        signal.notify(2, 4);
        signal.notify(1, 4);
        assert_pending!(spawn(watch.released()).poll());
        signal.notify(2, 4);
        assert_pending!(spawn(watch.released()).poll());
        signal.notify(3, 7);
        assert_ready_eq!(spawn(watch.released()).poll(), 7);
    }

    #[test]
    fn each_watch_sees_every_release_that_it_has_not_discarded() {
        let subscription = subscription(3);
        let signal = &subscription.signal;
        let mut watches = [(); 3].map(|()| ReleaseWatch::new(&subscription));
        let mut waiting = watches.each_mut().map(|watch| spawn(watch.released()));
        waiting
            .iter_mut()
            .for_each(|waiting| assert_pending!(waiting.poll()));
        signal.notify(0, 3);
        signal.notify(1, 3);
        for waiting in &mut waiting {
            assert!(waiting.is_woken());
            assert_ready_eq!(waiting.poll(), 3);
        }
        drop(waiting);
        signal.notify(1, 3);
        signal.notify(2, 3);
        let [one, other, third] = &mut watches;
        one.reset();
        assert_pending!(spawn(one.released()).poll());
        assert_ready_eq!(spawn(other.released()).poll(), 3);
        assert_ready_eq!(spawn(third.released()).poll(), 3);
    }

    #[test]
    fn released_resolves_when_a_majority_becomes_subscribed() {
        let subscription = subscription(3);
        let signal = &subscription.signal;
        let [mut watch, other] = [(); 2].map(|()| ReleaseWatch::new(&subscription));
        let mut released = spawn(watch.released());
        assert_pending!(released.poll());
        signal.set_subscribed(2, true);
        assert!(!other.is_subscribed());
        assert!(!released.is_woken());
        signal.set_subscribed(0, true);
        assert!(other.is_subscribed());
        assert_ready_eq!(released.poll(), 1);
    }

    #[test]
    fn released_resolves_when_the_subscribed_majority_is_lost() {
        let subscription = subscription(3);
        let signal = &subscription.signal;
        let [mut watch, other] = [(); 2].map(|()| ReleaseWatch::new(&subscription));
        (0..3).for_each(|node| signal.set_subscribed(node, true));
        assert_ready_eq!(spawn(watch.released()).poll(), 1);
        let mut released = spawn(watch.released());
        signal.set_subscribed(0, false);
        assert_pending!(released.poll());
        signal.set_subscribed(1, false);
        assert!(!other.is_subscribed());
        assert_ready_eq!(released.poll(), 1);
    }

    #[test]
    fn publish_reaches_subscribers_until_their_subscriptions_are_dropped() {
        let (subscribers, lock) = (Arc::new(Subscribers::default()), Arc::from(&b"k"[..]));
        let subscriptions = [(); 2].map(|()| {
            let subscribe = |subscriber| Some(subscribers.subscribe(&lock, subscriber));
            ReleaseSubscription::new(Quorum::new(1).unwrap(), subscribe)
        });
        assert_eq!(subscribers.publish(&lock), 2);
        let mut watch = ReleaseWatch::new(&subscriptions[1]);
        assert_ready_eq!(spawn(watch.released()).poll(), 2);
        drop((subscriptions, watch));
        assert_eq!(subscribers.publish(&lock), 0);
        assert!(subscribers.0.lock().is_empty());
    }
}
