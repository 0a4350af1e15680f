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
struct ReleaseSignal {
    published: Mutex<Published>,
    // Not a watch channel, which wakes its receivers in an order by chance: a simulation could not be repeated.
    changed: Notify,
}

#[derive(Debug)]
struct Published {
    majority: usize,
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
    signal: Arc<ReleaseSignal>,
    _at_nodes: Vec<Subscription>,
}

/// What one waiter has not seen yet of a signal. Keeps the subscription.
#[derive(Debug)]
pub(crate) struct ReleaseWatch {
    subscription: Arc<ReleaseSubscription>,
    /// By node, the number of messages when the waiter last looked.
    seen: Vec<u64>,
}

/// A subscriber of the releases of one lock at one node. Its messages may be late, repeated, lost or untrue:
/// they are hints to try again.
#[derive(Debug, Clone)]
#[allow(unreachable_pub, reason = "simulated networks get it")]
pub struct Subscriber {
    signal: Arc<ReleaseSignal>,
    /// The number of the node.
    pub(crate) node: usize,
}

/// A subscription at one node; dropping it calls this, which unsubscribes.
pub(crate) struct Subscription(pub(crate) Box<dyn Fn() + Send + Sync>);

/// The subscribers at one node, by the name of the lock.
#[derive(Debug, Default)]
pub(crate) struct Subscribers(pub(crate) HashMap<Arc<[u8]>, Vec<Subscriber>>);

#[allow(unreachable_pub, reason = "simulated networks call it")]
impl Subscriber {
    /// Sets whether the node publishes releases from now on; initially it does not.
    pub fn set_subscribed(&self, subscribed: bool) {
        let mut published = self.signal.published.lock();
        let before = published.is_subscribed();
        if subscribed {
            published.subscribed.insert(self.node);
        } else {
            published.subscribed.remove(self.node);
        }
        if before != published.is_subscribed() {
            // The lock may have been released without a message to this process.
            published.messages.iter_mut().for_each(|count| *count += 1);
            self.signal.changed.notify_waiters();
        }
    }

    /// Reports a release that was published to this many processes, this one included.
    pub fn notify(&self, subscribers: usize) {
        let mut published = self.signal.published.lock();
        published.messages[self.node] += 1;
        published.subscribers = subscribers;
        drop(published);
        self.signal.changed.notify_waiters();
    }

    /// Returns whether the other is the same, or one of the same signal at another node.
    pub(crate) fn shares_signal(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.signal, &other.signal)
    }
}

impl ReleaseSubscription {
    /// Subscribes a new signal at each node that can publish releases.
    pub(crate) fn new(
        quorum: Quorum,
        subscribe: impl FnMut(Subscriber) -> Option<Subscription>,
    ) -> Arc<Self> {
        let signal = Arc::new(ReleaseSignal {
            published: Mutex::new(Published {
                majority: quorum.majority(),
                subscribed: NodeSet::default(),
                messages: vec![0; quorum.nodes()],
                subscribers: 1,
            }),
            changed: Notify::new(),
        });
        let subscribers = (0..quorum.nodes()).map(|node| Subscriber {
            signal: Arc::clone(&signal),
            node,
        });
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
        self.subscription.signal.published.lock().is_subscribed()
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
                if published.has_more(&self.seen) {
                    self.seen.clone_from(&published.messages);
                    return published.subscribers;
                }
            }
            changed.await;
        }
    }
}

impl Published {
    /// Returns whether a majority of the nodes publishes releases to this process.
    fn is_subscribed(&self) -> bool {
        self.subscribed.len() >= self.majority
    }

    /// Returns whether a majority of the nodes has sent messages since these counts.
    fn has_more(&self, seen: &[u64]) -> bool {
        let counts = self.messages.iter().zip(seen);
        counts.filter(|(count, seen)| count > seen).count() >= self.majority
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        (self.0)();
    }
}

opaque_debug! { Subscription }

impl Subscribers {
    pub(crate) fn add(&mut self, lock: &Arc<[u8]>, subscriber: Subscriber) {
        self.0.entry(Arc::clone(lock)).or_default().push(subscriber);
    }

    /// Removes a subscriber, and returns whether it was the last one of its lock.
    pub(crate) fn remove(&mut self, lock: &[u8], subscriber: &Subscriber) -> bool {
        let Some(of_lock) = self.0.get_mut(lock) else {
            return false;
        };
        of_lock.retain(|other| !other.shares_signal(subscriber));
        of_lock.is_empty() && self.0.remove(lock).is_some()
    }

    /// Returns the subscribers of a lock.
    pub(crate) fn of(&self, lock: &[u8]) -> &[Subscriber] {
        self.0.get(lock).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use tokio_test::task::spawn;
    use tokio_test::{assert_pending, assert_ready_eq};

    use super::*;

    #[cfg(shuttle)]
    mod schedules;

    /// A subscription at so many nodes, and what they publish to.
    fn subscription(nodes: usize) -> (Arc<ReleaseSubscription>, Vec<Subscriber>) {
        let mut subscribers = Vec::new();
        let subscription = ReleaseSubscription::new(Quorum::new(nodes).unwrap(), |subscriber| {
            subscribers.push(subscriber);
            None
        });
        (subscription, subscribers)
    }

    #[test]
    fn released_needs_messages_from_a_majority() {
        let (subscription, nodes) = subscription(5);
        let mut watch = ReleaseWatch::new(&subscription);
        nodes[0].notify(4);
        nodes[0].notify(4);
        nodes[3].notify(4);
        let mut released = spawn(watch.released());
        assert_pending!(released.poll());
        nodes[4].notify(4);
        assert!(released.is_woken());
        assert_ready_eq!(released.poll(), 4);
        drop(released);
        nodes[2].notify(4);
        nodes[1].notify(4);
        assert_pending!(spawn(watch.released()).poll());
        nodes[2].notify(4);
        assert_pending!(spawn(watch.released()).poll());
        nodes[3].notify(7);
        assert_ready_eq!(spawn(watch.released()).poll(), 7);
    }

    #[test]
    fn each_watch_sees_every_release_that_it_has_not_discarded() {
        let (subscription, nodes) = subscription(3);
        let mut watches = [(); 3].map(|()| ReleaseWatch::new(&subscription));
        let mut waiting = watches.each_mut().map(|watch| spawn(watch.released()));
        waiting
            .iter_mut()
            .for_each(|waiting| assert_pending!(waiting.poll()));
        nodes[0].notify(3);
        nodes[1].notify(3);
        for waiting in &mut waiting {
            assert!(waiting.is_woken());
            assert_ready_eq!(waiting.poll(), 3);
        }
        drop(waiting);
        nodes[1].notify(3);
        nodes[2].notify(3);
        let [one, other, third] = &mut watches;
        one.reset();
        assert_pending!(spawn(one.released()).poll());
        assert_ready_eq!(spawn(other.released()).poll(), 3);
        assert_ready_eq!(spawn(third.released()).poll(), 3);
    }

    #[test]
    fn released_resolves_when_a_majority_becomes_subscribed() {
        let (subscription, nodes) = subscription(3);
        let [mut watch, other] = [(); 2].map(|()| ReleaseWatch::new(&subscription));
        let mut released = spawn(watch.released());
        assert_pending!(released.poll());
        nodes[2].set_subscribed(true);
        assert!(!other.is_subscribed());
        assert!(!released.is_woken());
        nodes[0].set_subscribed(true);
        assert!(other.is_subscribed());
        assert_ready_eq!(released.poll(), 1);
    }

    #[test]
    fn released_resolves_when_the_subscribed_majority_is_lost() {
        let (subscription, nodes) = subscription(3);
        let [mut watch, other] = [(); 2].map(|()| ReleaseWatch::new(&subscription));
        nodes.iter().for_each(|node| node.set_subscribed(true));
        assert_ready_eq!(spawn(watch.released()).poll(), 1);
        let mut released = spawn(watch.released());
        nodes[0].set_subscribed(false);
        assert_pending!(released.poll());
        nodes[1].set_subscribed(false);
        assert!(!other.is_subscribed());
        assert_ready_eq!(released.poll(), 1);
    }
}
