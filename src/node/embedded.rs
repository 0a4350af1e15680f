//! The embedded node, which lives in this process: for development, tests and single-process services.

use std::sync::Arc;

use tokio::time::Instant;

use crate::node::Mutex;
use crate::node::failure::NodeFailure;
use crate::node::job::{Executed, Job, Packet};
use crate::node::release_signal::{Subscriber, Subscribers, Subscription};
use crate::node::system::Epoch;
use crate::node::traits::Node;
use crate::protocol::message::{Command, Op, Reply};
use crate::protocol::{KeyNames, Store};

/// A [`Store`] behind a mutex, on tokio's clock, which tests can pause.
#[derive(Debug)]
pub(crate) struct EmbeddedNode {
    name: Arc<str>,
    store: Mutex<Store>,
    /// Shared with the subscriptions, which may outlive the node.
    subscribers: Arc<Subscribers>,
    epoch: Epoch,
}

impl EmbeddedNode {
    pub(crate) fn new(index: usize) -> Self {
        Self {
            name: format!("embedded-{index}").into(),
            store: Mutex::default(),
            subscribers: Arc::default(),
            epoch: Epoch::default(),
        }
    }

    #[cfg(feature = "test-util")]
    pub(crate) fn apply(&self, command: &Command) -> Reply {
        self.store
            .lock()
            .apply(command, self.epoch.at(Instant::now()))
    }

    #[cfg(feature = "test-util")]
    pub(crate) fn held(&self) -> usize {
        self.store.lock().held(self.epoch.at(Instant::now()))
    }

    #[cfg(feature = "test-util")]
    pub(crate) fn wipe(&self) {
        *self.store.lock() = Store::new();
    }
}

impl Node for EmbeddedNode {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn execute(&self, packet: &Packet, now: Instant) -> Option<Executed> {
        let now = self.epoch.at(now);
        let Command { names, op, .. } = &packet.command;
        let reply = self.store.lock().apply(&packet.command, now);
        let subscribers = packet.notifies.then(|| {
            // A reader that leaves frees nothing while others stay.
            let may_stay = matches!(op, Op::Shared(_) | Op::ReleaseAfter { .. });
            let is_free = |name: &&KeyNames| !may_stay || self.store.lock().is_free(name, now);
            let names = names.iter().filter(is_free);
            let counts = names.map(|name| self.subscribers.publish(name.channel()));
            u32::try_from(counts.max().unwrap_or(0)).unwrap_or(u32::MAX)
        });
        let outcome = match reply {
            Reply::Overflow => Err(NodeFailure::overflow(&self.name)),
            reply => Ok(reply),
        };
        Some((outcome, subscribers))
    }

    fn submit(&self, mut job: Job) {
        if let Some((outcome, subscribers)) = self.execute(&job.packet, Instant::now()) {
            job.sender.subscribers = subscribers;
            job.sender.send(outcome);
        }
    }

    fn subscribe(&self, lock: &Arc<[u8]>, subscriber: Subscriber) -> Option<Subscription> {
        Some(self.subscribers.subscribe(lock, subscriber))
    }
}
