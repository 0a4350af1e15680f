//! The local queue: callers of this process wait for a key in the order in which they came.
//!
//! # Implementation details
//!
//! A process sends no second request for a key that it holds or requests already. Only the caller with the
//! [`Permit`] of the key asks the nodes; the next caller is refused, or waits for the permit.
//!
//! Each key that is held, requested or waited for has a slot with one permit, a semaphore of tokio: it is fair, and
//! a dropped waiter leaves it. Every [`Waiter`] refers to the slot, with or without the permit. The last waiter
//! removes the slot from the map. It drops its reference and compares the count under the map's mutex, so that of
//! two waiters that leave at the same time one is the last, and no waiter can enter in between.
//!
//! A set of keys takes its permits in ascending order, so two sets cannot wait for each other.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Instant;

use crate::lock::cluster::Cluster;
use crate::lock::queue::remote::RemoteWaiters;
use crate::node::{Mutex, ReleaseSignal, Subscription};
use crate::protocol::{KeyNames, LockKey, LockKeys};

/// The slots of all keys that this process holds, requests or waits for.
#[derive(Debug, Default)]
pub(crate) struct LocalQueue {
    slots: Mutex<HashMap<LockKey, Arc<Slot>>>,
}

/// Data of a higher floor about a key, for the next callers of this process; opaque to the queue.
pub(crate) type Memo = Arc<dyn Any + Send + Sync>;

/// The view of a lease that the waiting callers of its key have.
pub(crate) trait HeldLease: fmt::Debug + Send + Sync {
    /// Returns whether the last share is gone, so that the lock is about to be released.
    fn is_ending(&self) -> bool;

    /// Returns the end of the validity.
    fn valid_until(&self) -> Instant;

    /// Returns what the lock is held for, if a higher floor said so.
    fn purpose(&self) -> Option<&Memo>;
}

/// The right to request some keys from the nodes; dropping it admits the next waiters.
#[derive(Debug, Default)]
pub(crate) struct Permit {
    // The semaphore's permit is dropped first, so that the waiter finds a slot without other waiters unused.
    keys: Vec<(OwnedSemaphorePermit, Waiter)>,
}

/// Error of [`LocalQueue::try_acquire`]: this process holds or requests one of the keys already.
#[derive(Debug)]
pub(crate) struct Busy {
    /// How much longer the lock of the first busy key is valid, if it is held.
    pub(crate) retry_after: Option<Duration>,
    /// The holder of the first busy key; `None` while it is only being asked for.
    pub(crate) holder: watch::Receiver<Option<Arc<dyn HeldLease>>>,
    /// Whether every busy key is about to be released and no other caller waits for it. Such a call need not
    /// be refused: on every node, its requests follow the release.
    pub(crate) is_ending: bool,
}

/// A reference to a slot, before and after its permit is acquired.
#[derive(Debug)]
struct Waiter {
    queue: Arc<LocalQueue>,
    key: LockKey,
    /// `Some` until the waiter is dropped.
    slot: Option<Arc<Slot>>,
}

#[derive(Debug)]
struct Slot {
    permit: Arc<Semaphore>,
    /// The number of callers that wait for the permit.
    waiting: AtomicUsize,
    held: Mutex<Held>,
    memo: Mutex<Option<Memo>>,
    remote: Arc<RemoteWaiters>,
    /// The time since which local callers acquire the key in a row.
    run_began: Mutex<Option<Instant>>,
    /// Present once the nodes have refused a caller of this process.
    subscribed: Mutex<Option<Subscribed>>,
}

/// The lease that holds the key of a slot.
#[derive(Debug, Default)]
struct Held {
    by: Option<Arc<dyn HeldLease>>,
    /// Present once a caller has asked for the holder, which is rare.
    watched: Option<watch::Sender<Option<Arc<dyn HeldLease>>>>,
}

/// The subscription to the releases of a key, at every node that publishes them.
#[derive(Debug)]
struct Subscribed {
    signal: Arc<ReleaseSignal>,
    _subscriptions: Vec<Subscription>,
}

/// Counts a caller as waiting for as long as it lives.
struct CountedWaiter<'a>(&'a Slot);

impl LocalQueue {
    /// Acquires the permits of all keys, or none if one of them is busy.
    pub(crate) fn try_acquire(self: &Arc<Self>, keys: &LockKeys) -> Result<Permit, Busy> {
        let mut permit = Permit::default();
        for key in keys.as_slice() {
            let waiter = self.waiter(key);
            let semaphore = waiter.semaphore();
            match semaphore.and_then(|semaphore| semaphore.try_acquire_owned().ok()) {
                Some(acquired) => permit.keys.push((acquired, waiter)),
                None => {
                    // If a later key is not about to be released, a wait for this one is in vain, and would keep
                    // it from other callers.
                    let rest = &keys.as_slice()[permit.keys.len() + 1..];
                    let is_blocked = |key: &LockKey| self.waiter(key).is_blocked();
                    let is_ending = waiter.is_ending() && !rest.iter().any(is_blocked);
                    return Err(Busy {
                        retry_after: waiter.retry_after(),
                        holder: waiter.holder(),
                        is_ending,
                    });
                }
            }
        }
        Ok(permit)
    }

    /// Waits for the permits of all keys, in ascending order.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point: its place in the queue is given up.
    pub(crate) async fn acquire(self: &Arc<Self>, keys: &LockKeys) -> Permit {
        let mut permit = Permit::default();
        for key in keys.as_slice() {
            let waiter = self.waiter(key);
            let waiting = waiter.slot.as_deref().map(CountedWaiter::new);
            // The semaphore is never closed. Even without its permit, the call would do no harm, because the nodes
            // decide.
            let acquired = match waiter.semaphore() {
                Some(semaphore) => semaphore.acquire_owned().await.ok(),
                None => None,
            };
            drop(waiting);
            if let Some(acquired) = acquired {
                permit.keys.push((acquired, waiter));
            }
        }
        permit
    }

    /// Returns how much longer the lock of the first busy key is valid.
    pub(crate) fn retry_after(&self, keys: &LockKeys) -> Option<Duration> {
        let slots = self.slots.lock();
        let slot = keys.as_slice().iter().find_map(|key| slots.get(key))?;
        slot.retry_after()
    }

    /// Returns whether no key is held, requested or waited for.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.slots.lock().is_empty()
    }

    fn waiter(self: &Arc<Self>, key: &LockKey) -> Waiter {
        let mut slots = self.slots.lock();
        let slot = slots.entry(key.clone()).or_insert_with(|| {
            Arc::new(Slot {
                permit: Arc::new(Semaphore::new(1)),
                waiting: AtomicUsize::new(0),
                held: Mutex::default(),
                memo: Mutex::default(),
                remote: Arc::default(),
                run_began: Mutex::default(),
                subscribed: Mutex::default(),
            })
        });
        Waiter {
            queue: Arc::clone(self),
            key: key.clone(),
            slot: Some(Arc::clone(slot)),
        }
    }
}

impl Permit {
    /// Returns whether the release of the keys is to be published, and not kept for a local caller; see
    /// [`RemoteWaiters`].
    pub(crate) fn publishes(&self) -> bool {
        let mut slots = self.slots();
        match (slots.next(), slots.next()) {
            (Some((slot, _)), None) => !slot.remote.keep(slot.is_waited_for()),
            // The next caller of several keys is not known.
            _ => true,
        }
    }

    /// Returns the remote waiters of each key.
    pub(crate) fn remote_waiters(&self) -> Vec<Arc<RemoteWaiters>> {
        let slots = self.slots();
        slots.map(|(slot, _)| Arc::clone(&slot.remote)).collect()
    }

    /// Subscribes this process to the releases of each key, until no local caller waits any more.
    pub(crate) fn subscribe(
        &self,
        cluster: &Cluster,
        names: &[KeyNames],
    ) -> Vec<Arc<ReleaseSignal>> {
        let signals = self.slots().filter_map(|(slot, index)| {
            let lock = &names.get(index)?.lock;
            let mut subscribed = slot.subscribed.lock();
            let subscribed = subscribed.get_or_insert_with(|| {
                slot.remote.set_subscribed(true);
                let signal = ReleaseSignal::new(cluster.settings.quorum);
                let nodes = cluster.nodes.iter().enumerate();
                let subscriptions =
                    nodes.filter_map(|(number, node)| node.subscribe(lock, &signal, number));
                Subscribed {
                    _subscriptions: subscriptions.collect(),
                    signal,
                }
            });
            Some(Arc::clone(&subscribed.signal))
        });
        signals.collect()
    }

    /// Unsubscribes from the keys for which no local caller waits any more.
    pub(crate) fn unsubscribe(&self) {
        for (slot, _) in self.slots() {
            if !slot.is_waited_for() {
                slot.remote.set_subscribed(false);
                let subscribed = slot.subscribed.lock().take();
                drop(subscribed);
            }
        }
    }

    /// Returns how long local callers have acquired the keys in a row; the longest time if there are several keys.
    pub(crate) fn run(&self) -> Duration {
        let runs = self.slots().map(|(slot, _)| {
            let mut began = slot.run_began.lock();
            began.get_or_insert_with(Instant::now).elapsed()
        });
        runs.max().unwrap_or_default()
    }

    /// Ends the run of local callers, because other processes go first.
    pub(crate) fn end_run(&self) {
        for (slot, _) in self.slots() {
            *slot.run_began.lock() = None;
        }
    }

    /// Sets the lease that is held with this permit.
    pub(crate) fn set_holder(&self, holder: &Arc<dyn HeldLease>) {
        for (slot, _) in self.slots() {
            slot.set_holder(Some(Arc::clone(holder)));
        }
    }

    /// Leaves a memo for the next callers of this process. A set of keys has it at the first key.
    pub(crate) fn set_memo(&self, memo: Memo) {
        if let Some((slot, _)) = self.slots().next() {
            *slot.memo.lock() = Some(memo);
        }
    }

    /// Returns the memo that an earlier caller left.
    pub(crate) fn memo(&self) -> Option<Memo> {
        let (slot, _) = self.slots().next()?;
        slot.memo.lock().clone()
    }

    /// Returns the slots, each with the index of its key.
    fn slots(&self) -> impl Iterator<Item = (&Arc<Slot>, usize)> {
        let waiters = self.keys.iter().enumerate();
        waiters.filter_map(|(index, (_, waiter))| Some((waiter.slot.as_ref()?, index)))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        for (slot, _) in self.slots() {
            slot.set_holder(None);
        }
    }
}

impl Waiter {
    fn semaphore(&self) -> Option<Arc<Semaphore>> {
        self.slot.as_ref().map(|slot| Arc::clone(&slot.permit))
    }

    fn retry_after(&self) -> Option<Duration> {
        self.slot.as_ref()?.retry_after()
    }

    fn is_ending(&self) -> bool {
        let slot = self.slot.as_deref();
        slot.is_some_and(|slot| slot.is_ending() && !slot.is_waited_for())
    }

    /// Returns whether the permit is taken and not about to be given to the next caller.
    fn is_blocked(&self) -> bool {
        let slot = self.slot.as_deref();
        slot.is_some_and(|slot| slot.permit.available_permits() == 0) && !self.is_ending()
    }

    fn holder(&self) -> watch::Receiver<Option<Arc<dyn HeldLease>>> {
        match &self.slot {
            Some(slot) => slot.holder(),
            None => watch::Sender::default().subscribe(),
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut slots = self.queue.slots.lock();
        drop(self.slot.take());
        // The map's own reference is the last one.
        if slots
            .get(&self.key)
            .is_some_and(|slot| Arc::strong_count(slot) == 1)
        {
            slots.remove(&self.key);
        }
    }
}

impl Slot {
    fn is_waited_for(&self) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
    }

    fn set_holder(&self, holder: Option<Arc<dyn HeldLease>>) {
        let mut held = self.held.lock();
        if let Some(watched) = &held.watched
            // A caller that requested the key in vain changes nothing for its watchers.
            && (held.by.is_some() || holder.is_some())
        {
            watched.send_replace(holder.clone());
        }
        held.by = holder;
    }

    fn holder(&self) -> watch::Receiver<Option<Arc<dyn HeldLease>>> {
        let mut held = self.held.lock();
        let Held { by, watched } = &mut *held;
        let watched = watched.get_or_insert_with(|| watch::Sender::new(by.clone()));
        watched.subscribe()
    }

    fn is_ending(&self) -> bool {
        let held = self.held.lock();
        held.by.as_ref().is_some_and(|lease| lease.is_ending())
    }

    fn retry_after(&self) -> Option<Duration> {
        let held = self.held.lock();
        let valid_until = held.by.as_ref()?.valid_until();
        valid_until.checked_duration_since(Instant::now())
    }
}

impl<'a> CountedWaiter<'a> {
    fn new(slot: &'a Slot) -> Self {
        slot.waiting.fetch_add(1, Ordering::AcqRel);
        Self(slot)
    }
}

impl Drop for CountedWaiter<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(names: &[&str]) -> LockKeys {
        names.iter().map(|name| LockKey::from(*name)).collect()
    }

    #[tokio::test]
    async fn acquire_admits_waiters_in_order() {
        let queue = Arc::new(LocalQueue::default());
        let first = queue.acquire(&keys(&["k"])).await;
        let (one, other) = (keys(&["k"]), keys(&["k"]));
        let mut second = tokio_test::task::spawn(queue.acquire(&one));
        let mut third = tokio_test::task::spawn(queue.acquire(&other));
        tokio_test::assert_pending!(second.poll());
        tokio_test::assert_pending!(third.poll());
        drop(first);
        tokio_test::assert_pending!(third.poll());
        drop(tokio_test::assert_ready!(second.poll()));
        tokio_test::assert_ready!(third.poll());
    }

    #[tokio::test]
    async fn a_dropped_waiter_leaves_the_queue_and_removes_the_slot() {
        let queue = Arc::new(LocalQueue::default());
        let first = queue.acquire(&keys(&["k"])).await;
        let wanted = keys(&["k"]);
        let mut second = tokio_test::task::spawn(queue.acquire(&wanted));
        tokio_test::assert_pending!(second.poll());
        drop(first);
        // The permit was assigned to the waiter, which was never polled again.
        drop(second);
        assert!(queue.is_empty());
        assert!(queue.try_acquire(&keys(&["k"])).is_ok());
    }

    #[test]
    fn waiters_dropped_at_the_same_time_remove_the_slot() {
        let queue = Arc::new(LocalQueue::default());
        for _ in 0..2_000 {
            let waiters = [(), ()].map(|()| queue.waiter(&LockKey::from("k")));
            std::thread::scope(|scope| {
                for waiter in waiters {
                    scope.spawn(move || drop(waiter));
                }
            });
            assert!(queue.is_empty());
        }
    }

    #[tokio::test]
    async fn try_acquire_takes_all_keys_of_a_set_or_none() {
        let queue = Arc::new(LocalQueue::default());
        let y = queue.try_acquire(&keys(&["y"])).unwrap();
        assert!(queue.try_acquire(&keys(&["x", "y"])).is_err());
        assert!(queue.try_acquire(&keys(&["x"])).is_ok());
        drop(y);
        assert!(queue.is_empty());
    }

    #[tokio::test]
    async fn publishes_is_false_for_three_local_waiters_in_a_row() {
        let queue = Arc::new(LocalQueue::default());
        let permit = queue.acquire(&keys(&["k"])).await;
        let wanted = keys(&["k"]);
        let mut waiting = tokio_test::task::spawn(queue.acquire(&wanted));
        tokio_test::assert_pending!(waiting.poll());
        // No other process is known.
        assert!(permit.publishes());
        permit.remote_waiters()[0].set_subscribers(1);
        assert_eq!(
            [(); 8].map(|()| permit.publishes()),
            [false, false, false, true, false, false, false, true]
        );
        // A refused caller does not count as waiting.
        drop(waiting);
        assert!(queue.try_acquire(&wanted).is_err());
        assert!(permit.publishes());
    }
}
