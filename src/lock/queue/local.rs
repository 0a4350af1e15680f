//! The local queue: callers of this process wait for a key in the order in which they came.
//!
//! # Implementation details
//!
//! A process sends no second request for a key that it holds or requests already. Only the caller with the
//! [`Permit`] of the key asks the nodes; the next caller is refused, or waits for the permit.
//!
//! Each key that is held, requested or waited for has a place with a semaphore of tokio: it is fair, and a dropped
//! waiter leaves it. A caller that wants the key for itself takes all its permits, and a reader takes one. As the
//! semaphore is fair, readers that come after a writer wait for it. A caller that wants one of `n` slots takes an
//! `n`th of the permits, and the number of a slot that no other caller of this process has. A caller enters the
//! places of all its keys at once, under the map's mutex, and its [`Permit`] leaves them. The map counts the
//! callers of each place, and the last one removes it.
//!
//! A set of keys takes its permits in ascending order, so two sets cannot wait for each other.

use std::any::Any;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Semaphore, watch};
use tokio::task;
use tokio::time::Instant;

use crate::lock::access::Access;
use crate::lock::cluster::Cluster;
use crate::lock::queue::remote::RemoteWaiters;
use crate::lock::queue::subscription::{PlaceSubscription, Watching};
use crate::lock::slots::slot_at_random;
use crate::node::Mutex;
use crate::protocol::{KeyNames, LockKey, LockKeys};

/// The places of all keys that this process holds, requests or waits for.
#[derive(Debug, Default)]
pub(crate) struct LocalQueue {
    places: Mutex<HashMap<PlaceKey, Entered>>,
    /// The number of callers so far that may hold their keys beside others.
    holders: AtomicU64,
}

/// What callers queue for: a key, or one of its slots. They do not exclude each other.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct PlaceKey {
    key: LockKey,
    has_slots: bool,
}

/// A place in the map, and the number of callers that have entered it.
#[derive(Debug)]
struct Entered {
    place: Arc<Place>,
    callers: usize,
}

/// Data of a higher floor about a key, for the next callers of this process; opaque to the queue.
pub(crate) type Memo = Arc<dyn Any + Send + Sync>;

/// The view of a lease that the waiting callers of its key have.
pub(crate) trait HeldLease: fmt::Debug + Send + Sync {
    /// Returns whether the last share is gone or the lock is lost, so that the next caller is about to be admitted.
    fn is_ending(&self) -> bool;

    /// Returns the end of the validity.
    fn valid_until(&self) -> Instant;

    /// Returns what the lock is held for, if a higher floor said so.
    fn purpose(&self) -> Option<&Memo>;

    /// Returns whether the lock has a key.
    fn has(&self, key: &LockKey) -> bool;

    /// Declares the lock lost, because it was revoked.
    fn revoke(&self);
}

/// The permits of a place: the number of readers at a time.
const PERMITS: u32 = 1 << 24;

/// The right to request some keys from the nodes; dropping it admits the next waiters.
///
/// While its caller still waits, it holds the caller's place in the queue, and the permits of the first keys only.
#[derive(Debug, Default)]
pub(crate) struct Permit {
    /// `None` if there are no keys.
    queue: Option<Arc<LocalQueue>>,
    places: Places,
    /// How many places, counted from the first, it has the permits of.
    acquired: usize,
    access: Access,
    /// Tells it from other holders of the same keys.
    holder: u64,
    /// The numbers that it has taken: one bit, or none.
    number: AtomicU64,
}

/// The places of some keys, in the order of the keys.
#[derive(Debug, Clone, Default)]
pub(crate) struct Places(Arc<[Arc<Place>]>);

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
    /// Whether the task of this call requested the lock that holds the first busy key, so that it may wait for itself.
    pub(crate) is_own: bool,
}

#[derive(Debug)]
struct Place {
    key: PlaceKey,
    permits: Semaphore,
    /// The number of callers that wait for the permit.
    waiting: AtomicUsize,
    /// The numbers of the slots that callers of this process have taken, if the key has slots; one bit for each.
    numbers: AtomicU64,
    held: Mutex<Held>,
    memo: Mutex<Option<Memo>>,
    remote: Arc<RemoteWaiters>,
    /// The time since which local callers acquire the key in a row.
    run_began: Mutex<Option<Instant>>,
    /// Present once the nodes have refused a caller of this process.
    subscription: PlaceSubscription,
}

/// The lease that holds the key of a place.
#[derive(Debug, Default)]
struct Held {
    by: Option<Arc<dyn HeldLease>>,
    /// The leases that hold it beside each other.
    beside: Vec<HeldBeside>,
    /// The task that requested the lock; `None` if that was not in a task.
    task: Option<task::Id>,
    /// Present once a caller has asked for the holder, which is rare.
    watched: Option<watch::Sender<Option<Arc<dyn HeldLease>>>>,
}

/// One of the leases that hold the key of a place beside each other.
#[derive(Debug)]
struct HeldBeside {
    number: u64,
    lease: Arc<dyn HeldLease>,
    /// The task that requested the lock; `None` if that was not in a task.
    task: Option<task::Id>,
}

/// Counts a caller as waiting for as long as it lives.
struct CountedWaiter<'a>(&'a Place);

impl LocalQueue {
    /// Acquires the permits of all keys, or none if one of them is busy.
    pub(crate) fn try_acquire(
        self: &Arc<Self>,
        keys: &LockKeys,
        access: Access,
    ) -> Result<Permit, Busy> {
        let mut permit = self.enter(keys, access);
        while let Some(place) = permit.places.0.get(permit.acquired) {
            if let Ok(acquired) = place.permits.try_acquire_many(permits(access)) {
                acquired.forget();
                permit.acquired += 1;
                continue;
            }
            // If a later key is not about to be released, a wait for this one is in vain, and would keep it from
            // other callers.
            let rest = &permit.places.0[permit.acquired + 1..];
            let is_ending =
                place.is_ending(access) && !rest.iter().any(|place| place.is_blocked(access));
            return Err(Busy {
                retry_after: place.retry_after(access),
                holder: place.holder(),
                is_ending,
                is_own: place.is_own(),
            });
        }
        Ok(permit)
    }

    /// Waits for the permits of all keys, in ascending order.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point: its place in the queue is given up.
    pub(crate) async fn acquire(self: &Arc<Self>, keys: &LockKeys, access: Access) -> Permit {
        let mut permit = self.enter(keys, access);
        while let Some(place) = permit.places.0.get(permit.acquired) {
            let waiting = CountedWaiter::new(place);
            if let Ok(acquired) = place.permits.acquire_many(permits(access)).await {
                acquired.forget();
            }
            drop(waiting);
            // The semaphore is never closed. Even without its permit, the call would do no harm, because the nodes
            // decide.
            permit.acquired += 1;
        }
        permit
    }

    /// Returns how much longer the lock of the first held key is valid.
    pub(crate) fn retry_after(&self, keys: &LockKeys, access: Access) -> Option<Duration> {
        let places = self.places.lock();
        let mut keys = keys.as_slice().iter();
        keys.find_map(|key| {
            let place = &places.get(&PlaceKey::new(key, access))?.place;
            place.retry_after(access)
        })
    }

    /// Returns the locks of this process that have a key.
    pub(crate) fn leases_of(&self, key: &LockKey) -> Vec<Arc<dyn HeldLease>> {
        let mut found = Vec::new();
        // In all places, because callers do not queue for one slot of a key, but for any of them.
        for entered in self.places.lock().values() {
            let held = entered.place.held.lock();
            let leases = held.leases().filter(|lease| lease.has(key));
            found.extend(leases.map(Arc::clone));
        }
        found
    }

    /// Returns whether no key is held, requested or waited for.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.places.lock().is_empty()
    }

    /// Enters the places of all keys, without acquiring their permits.
    fn enter(self: &Arc<Self>, keys: &LockKeys, access: Access) -> Permit {
        let mut places = self.places.lock();
        let mut enter = |key: &LockKey| {
            let key = PlaceKey::new(key, access);
            let entered = places.entry(key).or_insert_with_key(|key| Entered {
                place: Arc::new(Place::new(key.clone())),
                callers: 0,
            });
            entered.callers += 1;
            Arc::clone(&entered.place)
        };
        let places = keys.as_slice().iter().map(&mut enter).collect();
        Permit {
            queue: Some(Arc::clone(self)),
            places: Places(places),
            acquired: 0,
            access,
            holder: match access {
                Access::Exclusive => 0,
                Access::Shared | Access::Slot(_) => self.holders.fetch_add(1, Ordering::Relaxed),
            },
            number: AtomicU64::new(0),
        }
    }

    fn leave(&self, left: &Places) {
        let mut places = self.places.lock();
        for place in left.0.iter() {
            if let Entry::Occupied(mut entry) = places.entry(place.key.clone()) {
                entry.get_mut().callers -= 1;
                if entry.get().callers == 0 {
                    // The lease task of the last caller may keep the place alive for longer.
                    entry.remove().place.subscription.end();
                }
            }
        }
    }
}

impl PlaceKey {
    fn new(key: &LockKey, access: Access) -> Self {
        Self {
            key: key.clone(),
            has_slots: matches!(access, Access::Slot(_)),
        }
    }
}

impl Permit {
    /// Returns whether the release of the keys is to be published, and not kept for a local caller; see
    /// [`RemoteWaiters`].
    pub(crate) fn publishes(&self) -> bool {
        match &*self.places.0 {
            // A node publishes only the release of the last reader, whose next caller is not known. Any caller can take
            // a slot that is free.
            _ if self.access != Access::Exclusive => true,
            [place] => !place.remote.keep(place.is_waited_for()),
            // The next caller of several keys is not known.
            _ => true,
        }
    }

    /// Returns the places of the keys, which outlive the permit.
    pub(crate) fn places(&self) -> &Places {
        &self.places
    }

    /// Watches the releases of each key, to which this process is subscribed until no local caller waits any more.
    pub(crate) fn subscribe(&self, cluster: &Cluster, names: &[KeyNames]) -> Vec<Watching> {
        let places = self.places.0.iter().zip(names);
        let watching = places.map(|(place, name)| {
            let (remote, channel) = (&place.remote, name.channel());
            place.subscription.watch(remote, cluster, channel)
        });
        watching.collect()
    }

    /// Unsubscribes from the keys for which no local caller waits any more.
    pub(crate) fn unsubscribe(&self) {
        for place in self.places.0.iter() {
            if !place.is_waited_for() {
                place.subscription.end();
            }
        }
    }

    /// Returns how long local callers have acquired the keys in a row; the longest time if there are several keys.
    pub(crate) fn run(&self) -> Duration {
        let runs = self.places.0.iter().map(|place| {
            let mut began = place.run_began.lock();
            began.get_or_insert_with(Instant::now).elapsed()
        });
        runs.max().unwrap_or_default()
    }

    /// Ends the run of local callers, because other processes go first.
    pub(crate) fn end_run(&self) {
        for place in self.places.0.iter() {
            *place.run_began.lock() = None;
        }
    }

    /// Sets the lease that is held with this permit, and the task that requested it.
    pub(crate) fn set_holder(&self, holder: &Arc<dyn HeldLease>, task: Option<task::Id>) {
        for place in self.places.0.iter() {
            match self.access {
                Access::Exclusive => place.set_holder(Some(Arc::clone(holder)), task),
                Access::Shared | Access::Slot(_) => place.held.lock().beside.push(HeldBeside {
                    number: self.holder,
                    lease: Arc::clone(holder),
                    task,
                }),
            }
        }
    }

    /// Takes one of the numbers, one bit each, that no other caller of this process has. Gives the former number back.
    pub(crate) fn take_number(&self, numbers: u64, random: u64) -> Option<usize> {
        let place = self.places.0.first()?;
        let number = loop {
            let taken = place.numbers.load(Ordering::Acquire);
            let number = slot_at_random(numbers & !taken, random)?;
            let with = taken | 1 << number;
            let taken =
                place
                    .numbers
                    .compare_exchange(taken, with, Ordering::AcqRel, Ordering::Acquire);
            if taken.is_ok() {
                break number;
            }
        };
        self.give_number_back();
        self.number.store(1 << number, Ordering::Release);
        Some(number)
    }

    /// Gives the number back, so that other callers can take it.
    pub(crate) fn give_number_back(&self) {
        let number = self.number.swap(0, Ordering::AcqRel);
        if let Some(place) = self.places.0.first().filter(|_| number != 0) {
            place.numbers.fetch_and(!number, Ordering::AcqRel);
        }
    }

    /// Leaves a memo for the next callers of this process. A set of keys has it at the first key.
    pub(crate) fn set_memo(&self, memo: Memo) {
        if let Some(place) = self.places.0.first() {
            *place.memo.lock() = Some(memo);
        }
    }

    /// Returns the memo that an earlier caller left.
    pub(crate) fn memo(&self) -> Option<Memo> {
        let place = self.places.0.first()?;
        place.memo.lock().clone()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let Some(queue) = &self.queue else {
            return;
        };
        self.give_number_back();
        for (number, place) in self.places.0.iter().enumerate() {
            let has_permits = number < self.acquired;
            if has_permits {
                match self.access {
                    Access::Exclusive => place.set_holder(None, None),
                    Access::Shared | Access::Slot(_) => place.remove_holder(self.holder),
                }
            }
            if !place.is_waited_for() {
                // Callers that have entered the place may wait for another key for long, or hold this one.
                place.subscription.end();
            }
            if has_permits {
                if !place.is_waited_for() {
                    *place.run_began.lock() = None;
                }
                place.permits.add_permits(permits(self.access) as usize);
            }
        }
        queue.leave(&self.places);
    }
}

impl Places {
    /// Returns the number of processes that wait for one of the keys; see [`RemoteWaiters::notified`].
    pub(crate) fn notified(&self) -> Option<usize> {
        let places = self.0.iter();
        places.filter_map(|place| place.remote.notified()).max()
    }

    /// Sets the number of subscribers to which a node published the release of the keys.
    pub(crate) fn set_subscribers(&self, subscribers: usize) {
        for place in self.0.iter() {
            place.remote.set_subscribers(subscribers);
        }
    }
}

impl Place {
    fn new(key: PlaceKey) -> Self {
        Self {
            key,
            permits: Semaphore::new(PERMITS as usize),
            waiting: AtomicUsize::new(0),
            numbers: AtomicU64::new(0),
            held: Mutex::default(),
            memo: Mutex::default(),
            remote: Arc::default(),
            run_began: Mutex::default(),
            subscription: PlaceSubscription::default(),
        }
    }

    fn is_waited_for(&self) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
    }

    fn set_holder(&self, holder: Option<Arc<dyn HeldLease>>, task: Option<task::Id>) {
        let mut held = self.held.lock();
        if let Some(watched) = &held.watched
            // A caller that requested the key in vain changes nothing for its watchers.
            && (held.by.is_some() || holder.is_some())
        {
            watched.send_replace(holder.clone());
        }
        held.by = holder;
        held.task = task;
    }

    fn remove_holder(&self, number: u64) {
        let mut held = self.held.lock();
        held.beside.retain(|holder| holder.number != number);
    }

    fn holder(&self) -> watch::Receiver<Option<Arc<dyn HeldLease>>> {
        let mut held = self.held.lock();
        let Held { by, watched, .. } = &mut *held;
        let watched = watched.get_or_insert_with(|| watch::Sender::new(by.clone()));
        watched.subscribe()
    }

    /// Returns whether the present task requested the lock that holds the key, and has not released it.
    fn is_own(&self) -> bool {
        let held = self.held.lock();
        let Some(own) = task::try_id() else {
            return false;
        };
        let by = held.by.iter().map(|lease| (lease, held.task));
        let beside = held.beside.iter();
        let beside = beside.map(|holder| (&holder.lease, holder.task));
        by.chain(beside)
            .any(|(lease, task)| task == Some(own) && !lease.is_ending())
    }

    /// Returns whether enough holders are about to release the key, and no other caller waits for it.
    fn is_ending(&self, access: Access) -> bool {
        let held = self.held.lock();
        let mut leases = held.leases().peekable();
        let is_held = leases.peek().is_some();
        let is_ending = match access {
            Access::Exclusive | Access::Shared => leases.all(|lease| lease.is_ending()),
            // One slot is enough.
            Access::Slot(_) => leases.any(|lease| lease.is_ending()),
        };
        is_held && is_ending && !self.is_waited_for()
    }

    /// Returns whether too few permits are left for this access, and not about to be given to the next caller.
    fn is_blocked(&self, access: Access) -> bool {
        self.permits.available_permits() < permits(access) as usize && !self.is_ending(access)
    }

    /// Returns how much longer the key is held for this access.
    fn retry_after(&self, access: Access) -> Option<Duration> {
        let held = self.held.lock();
        let valid_until = held.leases().map(|lease| lease.valid_until());
        let valid_until = match access {
            Access::Exclusive | Access::Shared => valid_until.max(),
            // The first slot that ends is enough.
            Access::Slot(_) => valid_until.min(),
        }?;
        valid_until.checked_duration_since(Instant::now())
    }
}

impl Held {
    fn leases(&self) -> impl Iterator<Item = &Arc<dyn HeldLease>> {
        let beside = self.beside.iter().map(|holder| &holder.lease);
        self.by.iter().chain(beside)
    }
}

/// Returns how many permits of a place a caller takes.
fn permits(access: Access) -> u32 {
    match access {
        Access::Exclusive => PERMITS,
        Access::Shared => 1,
        // So that exactly so many fit.
        Access::Slot(count) => PERMITS / u32::try_from(count).unwrap_or(PERMITS).max(1),
    }
}

impl<'a> CountedWaiter<'a> {
    fn new(place: &'a Place) -> Self {
        place.waiting.fetch_add(1, Ordering::AcqRel);
        Self(place)
    }
}

impl Drop for CountedWaiter<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests;
