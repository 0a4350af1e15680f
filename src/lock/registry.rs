//! The registry of lease tasks, with which a process shuts down without leaving locks behind.
//!
//! # Implementation details
//!
//! Each lease task holds a [`Ticket`] from before its first request until its last release is confirmed or given
//! up. [`Registry::enter`] issues tickets under a mutex, and [`Registry::drain`] ends that under the same mutex
//! before it waits. No task enters after that, and `drain` waits for all that entered before.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::node::Mutex;
use crate::protocol::LockKeys;

/// The running lease tasks, and the stage of the shutdown.
#[derive(Debug)]
pub(crate) struct Registry {
    leases: Mutex<Leases>,
    /// Notified when the last task ends.
    emptied: Notify,
    stage: watch::Sender<DrainStage>,
}

#[derive(Debug, Default)]
struct Leases {
    next: u64,
    running: BTreeMap<u64, Running>,
    released: usize,
    /// Unconfirmed releases, each with the end of the ttl.
    unconfirmed: VecDeque<(Instant, Unconfirmed)>,
}

#[derive(Debug)]
struct Running {
    keys: LockKeys,
    /// Whether the task has handed out a guard.
    is_held: bool,
}

impl Leases {
    /// Forgets the unconfirmed releases whose keys have ended by their ttl.
    fn forget_expired(&mut self) {
        while let Some((gone_at, _)) = self.unconfirmed.front() {
            if *gone_at > Instant::now() {
                return;
            }
            self.unconfirmed.pop_front();
        }
    }
}

/// The stages of a shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DrainStage {
    Open,
    /// No new locks; held locks are renewed.
    Draining,
    /// Locks that are still held are not renewed any more.
    TimedOut,
}

/// A lease task's entry, removed when it is dropped.
#[derive(Debug)]
pub(crate) struct Ticket {
    registry: Arc<Registry>,
    id: u64,
}

/// Report of [`Redlock::drain`](crate::Redlock::drain).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Drained {
    /// The number of held locks that ended while draining. A lock in several [groups](crate::RedlockBuilder::group) counts
    /// once for each.
    pub released: usize,
    /// The locks that were still held at the timeout. They are no longer renewed, never released under their
    /// holders, and end by their ttl. A lock in several groups has an entry for each.
    pub held: Vec<LockKeys>,
    /// The releases that some node did not confirm. On that node, the keys end by their ttl.
    pub unconfirmed: Vec<Unconfirmed>,
}

/// A release that a node did not confirm.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unconfirmed {
    /// The node's address, without credentials.
    pub node: Arc<str>,
    /// The keys that the node may still have.
    pub keys: LockKeys,
}

impl Drained {
    /// Returns whether no key of this process is left on any node.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.held.is_empty() && self.unconfirmed.is_empty()
    }
}

impl Registry {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            leases: Mutex::default(),
            emptied: Notify::new(),
            stage: watch::Sender::new(DrainStage::Open),
        })
    }

    /// Returns the stage of the shutdown.
    pub(crate) fn stage(&self) -> DrainStage {
        *self.stage.borrow()
    }

    /// Waits until the shutdown reaches a stage.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(crate) async fn reached(&self, stage: DrainStage) {
        // The sender is `self.stage`, so the channel is open.
        drop(self.stage.subscribe().wait_for(|now| *now >= stage).await);
    }

    /// Returns a ticket for a lease task, unless the shutdown has begun.
    pub(crate) fn enter(self: &Arc<Self>, keys: &LockKeys) -> Option<Ticket> {
        let mut leases = self.leases.lock();
        if self.stage() != DrainStage::Open {
            return None;
        }
        leases.forget_expired();
        let id = leases.next;
        leases.next += 1;
        let running = Running {
            keys: keys.clone(),
            is_held: false,
        };
        leases.running.insert(id, running);
        Some(Ticket {
            registry: Arc::clone(self),
            id,
        })
    }

    /// Issues no more tickets, and waits until all lease tasks have ended or the timeout is over.
    pub(crate) async fn drain(&self, timeout: Duration) -> Drained {
        {
            let mut leases = self.leases.lock();
            self.advance(DrainStage::Draining);
            leases.released = 0;
        }
        let in_time = tokio::time::timeout(timeout, self.emptied()).await.is_ok();
        if !in_time {
            self.advance(DrainStage::TimedOut);
        }
        let (leases, now) = (self.leases.lock(), Instant::now());
        let held = leases.running.values().filter(|running| running.is_held);
        let unconfirmed = leases.unconfirmed.iter();
        let unconfirmed = unconfirmed.filter(|(gone_at, _)| *gone_at > now);
        Drained {
            released: leases.released,
            held: held.map(|running| running.keys.clone()).collect(),
            unconfirmed: unconfirmed.map(|(_, entry)| entry.clone()).collect(),
        }
    }

    /// Notes the nodes on which a release was not confirmed, or never sent. The entries last until the keys have
    /// ended by their ttl.
    pub(crate) fn set_unconfirmed(
        &self,
        nodes: impl Iterator<Item = Arc<str>>,
        keys: &LockKeys,
        gone_at: Instant,
    ) {
        let mut nodes = nodes.peekable();
        if nodes.peek().is_none() {
            return;
        }
        let mut leases = self.leases.lock();
        leases.unconfirmed.extend(nodes.map(|node| {
            let keys = keys.clone();
            (gone_at, Unconfirmed { node, keys })
        }));
    }

    async fn emptied(&self) {
        loop {
            // Created before the check, so that no notification is missed.
            let emptied = self.emptied.notified();
            if self.leases.lock().running.is_empty() {
                return;
            }
            emptied.await;
        }
    }

    fn advance(&self, stage: DrainStage) {
        self.stage.send_if_modified(|now| {
            let is_further = stage > *now;
            *now = stage.max(*now);
            is_further
        });
    }
}

impl Ticket {
    pub(crate) fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Notes that a guard is handed out, for these keys if they are not known yet.
    pub(crate) fn set_held(&self, keys: Option<&LockKeys>) {
        if let Some(running) = self.registry.leases.lock().running.get_mut(&self.id) {
            running.is_held = true;
            if let Some(keys) = keys {
                running.keys = keys.clone();
            }
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut leases = self.registry.leases.lock();
        let running = leases.running.remove(&self.id);
        if running.is_some_and(|running| running.is_held) {
            leases.released += 1;
        }
        if leases.running.is_empty() {
            self.registry.emptied.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::LockKey;

    #[tokio::test(start_paused = true)]
    async fn enter_forgets_unconfirmed_releases_whose_keys_have_ended() {
        let registry = Registry::new();
        let keys = LockKeys::from(LockKey::from("k"));
        let second = Duration::from_secs(1);
        for seconds in [1, 3] {
            let nodes = [Arc::from("n")].into_iter();
            registry.set_unconfirmed(nodes, &keys, Instant::now() + seconds * second);
        }
        tokio::time::advance(2 * second).await;
        let _ticket = registry.enter(&keys);
        assert_eq!(registry.leases.lock().unconfirmed.len(), 1);
    }
}
