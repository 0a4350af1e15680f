//! All lease tasks of a Redlock, so that a process can end without leaving locks behind.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::protocol::LockKeys;

/// Counts the lease tasks in and out.
#[derive(Debug)]
pub(super) struct Registry {
    leases: Mutex<Leases>,
    /// Told when there are none left.
    emptied: Notify,
    stage: watch::Sender<Stage>,
}

#[derive(Debug, Default)]
struct Leases {
    next: u64,
    running: BTreeMap<u64, Running>,
    released: usize,
    /// Releases that were not confirmed, with the end of the ttl.
    unconfirmed: VecDeque<(Instant, Unconfirmed)>,
}

#[derive(Debug)]
struct Running {
    keys: LockKeys,
    /// Whether it has handed out a guard.
    held: bool,
}

/// How far the shutdown has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    Open,
    /// No new locks; those that are held go on.
    Draining,
    /// What is still held is not renewed any more.
    TimedOut,
}

/// A lease task's entry; removed when it is dropped, however the task ends.
#[derive(Debug)]
pub(super) struct Ticket {
    registry: Arc<Registry>,
    id: u64,
}

/// What [`Redlock::drain`](crate::Redlock::drain) achieved.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Drained {
    /// How many held locks were released, by their holders, while draining.
    pub released: usize,
    /// The locks that were still held at the timeout. They are not renewed any more and not
    /// released under their holders; they end by their ttl.
    pub held: Vec<LockKeys>,
    /// The releases that some node did not confirm; there the keys end by their ttl.
    pub unconfirmed: Vec<Unconfirmed>,
}

/// A release that a node did not confirm.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unconfirmed {
    /// The node's address, without credentials.
    pub node: Arc<str>,
    /// The keys that it may still have.
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
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            leases: Mutex::default(),
            emptied: Notify::new(),
            stage: watch::Sender::new(Stage::Open),
        })
    }

    /// Returns how far the shutdown has come.
    pub(super) fn stage(&self) -> Stage {
        *self.stage.borrow()
    }

    /// Waits until the shutdown has come as far as `stage`.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(super) async fn reached(&self, stage: Stage) {
        // The sender is ours, so it cannot be gone.
        drop(self.stage.subscribe().wait_for(|now| *now >= stage).await);
    }

    /// Enters a lease task, unless the shutdown has begun.
    pub(super) fn enter(self: &Arc<Self>, keys: &LockKeys) -> Option<Ticket> {
        let mut leases = self.leases();
        // Under the mutex, so that a drain that has begun counts all that were let in.
        if self.stage() != Stage::Open {
            return None;
        }
        let id = leases.next;
        leases.next += 1;
        let running = Running {
            keys: keys.clone(),
            held: false,
        };
        leases.running.insert(id, running);
        Some(Ticket {
            registry: Arc::clone(self),
            id,
        })
    }

    pub(super) async fn drain(&self, timeout: Duration) -> Drained {
        {
            let mut leases = self.leases();
            self.advance(Stage::Draining);
            leases.released = 0;
        }
        let in_time = tokio::time::timeout(timeout, self.empty()).await.is_ok();
        if !in_time {
            self.advance(Stage::TimedOut);
        }
        let (leases, now) = (self.leases(), Instant::now());
        Drained {
            released: leases.released,
            held: leases
                .running
                .values()
                .filter(|running| running.held)
                .map(|running| running.keys.clone())
                .collect(),
            unconfirmed: leases
                .unconfirmed
                .iter()
                .filter(|(gone_at, _)| *gone_at > now)
                .map(|(_, unconfirmed)| unconfirmed.clone())
                .collect(),
        }
    }

    async fn empty(&self) {
        loop {
            let emptied = self.emptied.notified();
            // Looked at after the place in the queue is taken, so that no end is missed.
            if self.leases().running.is_empty() {
                return;
            }
            emptied.await;
        }
    }

    fn advance(&self, stage: Stage) {
        self.stage.send_if_modified(|now| {
            let further = stage > *now;
            *now = stage.max(*now);
            further
        });
    }

    fn leases(&self) -> MutexGuard<'_, Leases> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ticket {
    /// Notes that a guard was handed out.
    pub(super) fn set_held(&self) {
        if let Some(running) = self.registry.leases().running.get_mut(&self.id) {
            running.held = true;
        }
    }

    /// Notes on which nodes a release was not confirmed, until the keys have ended by their ttl.
    pub(super) fn set_unconfirmed(
        &self,
        nodes: impl Iterator<Item = Arc<str>>,
        keys: &LockKeys,
        gone_at: Instant,
    ) {
        self.registry.set_unconfirmed(nodes, keys, gone_at);
    }
}

impl Registry {
    /// Notes on which nodes a release was not confirmed, or never sent, until the keys have ended by their
    /// ttl.
    pub(super) fn set_unconfirmed(
        &self,
        nodes: impl Iterator<Item = Arc<str>>,
        keys: &LockKeys,
        gone_at: Instant,
    ) {
        let mut leases = self.leases();
        let now = Instant::now();
        let is_over = |entry: &(Instant, Unconfirmed)| entry.0 <= now;
        while leases.unconfirmed.front().is_some_and(is_over) {
            leases.unconfirmed.pop_front();
        }
        leases.unconfirmed.extend(nodes.map(|node| {
            let keys = keys.clone();
            (gone_at, Unconfirmed { node, keys })
        }));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut leases = self.registry.leases();
        if leases
            .running
            .remove(&self.id)
            .is_some_and(|running| running.held)
        {
            leases.released += 1;
        }
        if leases.running.is_empty() {
            self.registry.emptied.notify_waiters();
        }
    }
}
