//! The embedded node, which lives in this process: for development, tests and single-process services.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::node::Mutex;
use crate::node::failure::NodeFailure;
use crate::node::home::Home;
use crate::node::job::{Executed, Job, Packet};
use crate::node::release_signal::{Subscriber, Subscribers, Subscription};
use crate::node::traits::Node;
use crate::protocol::Store;
use crate::protocol::message::{Command, Op, Reply};

/// A [`Store`] behind a mutex, on the clock of its home.
#[derive(Debug)]
pub(crate) struct EmbeddedNode {
    name: Arc<str>,
    store: Mutex<Store>,
    /// Shared with the subscriptions, which may outlive the node.
    subscribers: Arc<Mutex<Subscribers>>,
    home: Arc<Home>,
}

impl EmbeddedNode {
    pub(crate) fn new(index: usize, home: Arc<Home>) -> Self {
        Self {
            name: format!("embedded-{index}").into(),
            store: Mutex::default(),
            subscribers: Arc::default(),
            home,
        }
    }

    #[cfg(feature = "test-util")]
    pub(crate) fn apply(&self, command: &Command) -> Reply {
        self.store.lock().apply(command, self.now())
    }

    #[cfg(feature = "test-util")]
    pub(crate) fn held(&self) -> usize {
        self.store.lock().held(self.now())
    }

    #[cfg(feature = "test-util")]
    pub(crate) fn wipe(&self) {
        *self.store.lock() = Store::new();
    }

    fn now(&self) -> Duration {
        self.home.epoch.at(Instant::now())
    }

    /// Publishes the release of a lock, and returns the number of its subscribers.
    fn publish(&self, lock: &[u8]) -> usize {
        // Copied, because a subscriber that is notified may lock them.
        let of_lock = match self.subscribers.lock() {
            subscribers if subscribers.0.is_empty() => return 0,
            subscribers => subscribers.of(lock).to_vec(),
        };
        for subscriber in &of_lock {
            subscriber.notify(of_lock.len());
        }
        of_lock.len()
    }
}

impl Node for EmbeddedNode {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn execute(&self, packet: &Packet, now: Duration) -> Option<Executed> {
        let Command { names, op, .. } = &packet.command;
        let reply = self.store.lock().apply(&packet.command, now);
        let subscribers = packet.notifies.then(|| {
            // A reader that leaves frees nothing while others stay.
            let may_stay = matches!(op, Op::Shared(_) | Op::ReleaseAfter { .. });
            let mut most = 0;
            for name in names.iter() {
                if !may_stay || self.store.lock().is_free(name, now) {
                    most = most.max(self.publish(name.channel()));
                }
            }
            u32::try_from(most).unwrap_or(u32::MAX)
        });
        let outcome = match reply {
            Reply::Overflow => Err(NodeFailure::overflow(&self.name)),
            reply => Ok(reply),
        };
        Some((outcome, subscribers))
    }

    fn submit(&self, mut job: Job) {
        if let Some((outcome, subscribers)) = self.execute(&job.packet, self.now()) {
            job.sender.subscribers = subscribers;
            job.sender.send(outcome);
        }
    }

    fn subscribe(&self, lock: &Arc<[u8]>, subscriber: Subscriber) -> Option<Subscription> {
        self.subscribers.lock().add(lock, subscriber.clone());
        subscriber.set_subscribed(true);
        let (from, lock) = (Arc::clone(&self.subscribers), Arc::clone(lock));
        Some(Subscription(Box::new(move || {
            from.lock().remove(&lock, &subscriber);
        })))
    }
}

#[cfg(test)]
mod tests {
    use tokio_test::assert_ready_eq;
    use tokio_test::task::spawn;

    use super::*;
    use crate::node::{ReleaseSubscription, ReleaseWatch};
    use crate::protocol::Quorum;

    #[test]
    fn publish_reaches_subscribers_until_their_subscriptions_are_dropped() {
        let (node, lock) = (EmbeddedNode::new(0, Arc::default()), Arc::from(&b"k"[..]));
        let subscriptions = [(); 2].map(|()| {
            let subscribe = |subscriber| node.subscribe(&lock, subscriber);
            ReleaseSubscription::new(Quorum::new(1).unwrap(), subscribe)
        });
        assert_eq!(node.publish(&lock), 2);
        let mut watch = ReleaseWatch::new(&subscriptions[1]);
        assert_ready_eq!(spawn(watch.released()).poll(), 2);
        drop((subscriptions, watch));
        assert_eq!(node.publish(&lock), 0);
        assert!(node.subscribers.lock().0.is_empty());
    }
}
