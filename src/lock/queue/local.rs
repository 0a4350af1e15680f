//! The local queue: callers of this process wait for a key in the order in which they came.
//!
//! # Implementation details
//!
//! A process sends no second request for a key that it holds or requests already. Only the caller with the
//! [`Permit`] of the key asks the nodes; the next caller is refused, or waits for the permit.
//! [`local_wait`](crate::lock::local_wait) has the rules for that.
//!
//! Each key that is held, requested or waited for has a place with a semaphore of tokio: it is fair, and a dropped
//! waiter leaves it. A caller that wants the key for itself takes all its permits, and a reader takes one. As the
//! semaphore is fair, readers that come after a writer wait for it. A caller that wants one of `n` slots takes an
//! `n`th of the permits, and the number of a slot that no other caller of this process has. A caller enters the
//! places of all its keys at once, under the map's mutex, and its [`Permit`] leaves them. The map counts the
//! callers of each place, and the last one removes it.
//!
//! A place lists the callers that have its permits. Who is on the list owns permits, so a caller that does not react
//! can be taken off it, and its permits go to the next one. Exclusion does not depend on permits: the nodes decide.

use std::any::Any;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::task;
use tokio::time::Instant;

use crate::lock::access::Access;
use crate::lock::cluster::Cluster;
use crate::lock::error::LockError;
use crate::lock::queue::remote::RemoteWaiters;
use crate::lock::queue::subscription::{PlaceSubscription, Watching};
use crate::lock::slots::slot_at_random;
use crate::lock::time::after;
use crate::node::Mutex;
use crate::protocol::{KeyNames, LockKey, LockKeys};

/// The places of all keys that this process holds, requests or waits for.
#[derive(Debug, Default)]
pub(crate) struct LocalQueue {
    places: Mutex<HashMap<PlaceKey, Entered>>,
    /// The number of callers so far.
    callers: AtomicU64,
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

/// How often a set of keys may find one of them busy before it keeps the others while it waits.
const ROUNDS: u32 = 5;

/// The right to request some keys from the nodes; dropping it admits the next waiters.
///
/// While its caller waits, it holds the caller's place in the queue, without permits.
#[derive(Debug, Default)]
pub(crate) struct Permit {
    /// `None` if there are no keys.
    queue: Option<Arc<LocalQueue>>,
    places: Places,
    access: Access,
    /// Tells it from the other callers of its places.
    caller: u64,
    /// The numbers that it has taken: one bit, or none.
    number: AtomicU64,
}

/// The places of some keys, in the order of the keys.
#[derive(Debug, Clone, Default)]
pub(crate) struct Places(Arc<[Arc<Place>]>);

#[derive(Debug)]
pub(crate) struct Place {
    key: PlaceKey,
    pub(crate) permits: Semaphore,
    /// The number of callers that wait for the permit.
    waiting: AtomicUsize,
    /// The numbers of the slots that callers of this process have taken, if the key has slots; one bit for each.
    numbers: AtomicU64,
    callers: Mutex<Callers>,
    /// Notified when a caller got its permits, its refusal, or its lock.
    pub(crate) changed: Notify,
    /// Notified when a caller failed.
    pub(crate) failed: Notify,
    memo: Mutex<Option<Memo>>,
    remote: Arc<RemoteWaiters>,
    /// The time since which local callers acquire the key in a row.
    run_began: Mutex<Option<Instant>>,
    /// Present once the nodes have refused a caller of this process.
    subscription: PlaceSubscription,
}

/// The callers that have permits of a place.
#[derive(Debug, Default)]
struct Callers {
    admitted: Vec<Admitted>,
    /// Counts the changes, also of the list.
    changes: u64,
    /// The last caller that went without a lock, and the number of such callers.
    failed: (u64, Option<Failed>),
}

/// A caller that has permits of a place.
#[derive(Debug)]
struct Admitted {
    caller: u64,
    /// How many; none if it went past a caller that does not react.
    permits: u32,
    /// The task that requested the lock; `None` if that was not in a task.
    task: Option<task::Id>,
    stage: Stage,
}

/// How far a caller with permits has come.
#[derive(Debug)]
enum Stage {
    /// It asks the nodes, or is about to.
    Asks,
    /// The nodes have refused it, because others hold its keys. It asks again at this time.
    Refused {
        next: Instant,
        held_until: Option<Instant>,
    },
    Holds(Arc<dyn HeldLease>),
}

/// A request that ended without a lock.
#[derive(Debug)]
struct Failed {
    keys: LockKeys,
    access: Access,
    is_execution: bool,
    error: LockError,
}

/// How a key stands whose permits a caller waits for.
#[derive(Debug)]
pub(crate) struct Standing {
    pub(crate) state: State,
    /// How much longer the key is held, if it is.
    pub(crate) retry_after: Option<Duration>,
    /// Counts the changes.
    pub(crate) changes: u64,
    /// When a caller that holds the key, or waits for it, does not react for certain, but for the allowance.
    pub(crate) idle_at: Option<Instant>,
    /// The lease that holds the key alone.
    pub(crate) holder: Option<Arc<dyn HeldLease>>,
}

/// See [`Standing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Callers ask the nodes for the key. Whether it is held is not known.
    Asked,
    /// About to be released, by enough holders.
    Ending,
    /// Held, by callers of this process or others.
    Held,
}

/// Counts a caller as waiting for as long as it lives.
pub(crate) struct CountedWaiter<'a>(&'a Place);

impl LocalQueue {
    /// Acquires the permits of all keys.
    ///
    /// # Errors
    ///
    /// Returns a permit that has entered the queue, and has no key yet, if one of the keys is busy.
    pub(crate) fn try_acquire(
        self: &Arc<Self>,
        keys: &LockKeys,
        access: Access,
    ) -> Result<Permit, Permit> {
        let permit = self.enter(keys, access);
        match permit.try_acquire_rest() {
            None => Ok(permit),
            Some(_) => {
                permit.give_back();
                Err(permit)
            }
        }
    }

    /// Returns the locks of this process that have a key.
    pub(crate) fn leases_of(&self, key: &LockKey) -> Vec<Arc<dyn HeldLease>> {
        let mut found = Vec::new();
        // In all places, because callers do not queue for one slot of a key, but for any of them.
        for entered in self.places.lock().values() {
            let callers = entered.place.callers.lock();
            let leases = callers.leases().filter(|lease| lease.has(key));
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
            access,
            caller: self.callers.fetch_add(1, Ordering::Relaxed),
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
    pub(crate) fn place(&self, number: usize) -> &Arc<Place> {
        &self.places.0[number]
    }

    pub(crate) fn access(&self) -> Access {
        self.access
    }

    /// Acquires the permits that it does not have. Returns the number of the first busy place.
    pub(crate) fn try_acquire_rest(&self) -> Option<usize> {
        self.places.0.iter().position(|place| {
            if place.has(self.caller) {
                return false;
            }
            let acquired = place.permits.try_acquire_many(permits(self.access));
            acquired
                .map(|acquired| self.set_acquired(place, acquired))
                .is_err()
        })
    }

    /// Acquires the permits that it does not have, one after the other.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(crate) async fn acquire_rest(&self) {
        let mut rounds = 0;
        while let Some(busy) = self.next_busy(&mut rounds) {
            let place = self.place(busy);
            let waiting = CountedWaiter::new(place);
            let acquired = place.permits.acquire_many(permits(self.access)).await;
            drop(waiting);
            // The semaphore is never closed.
            if let Ok(acquired) = acquired {
                self.set_acquired(place, acquired);
            }
        }
    }

    /// Acquires the permits that are free, and returns the number of the place to wait at; `None` if it has all.
    ///
    /// A set of keys keeps no permit while it waits for another one, so that no caller waits for a key that is free. A
    /// set that was too late for [`ROUNDS`] rounds keeps its permits from then on, so that it cannot starve. It takes
    /// them in ascending order, so two sets cannot wait for each other.
    pub(crate) fn next_busy(&self, rounds: &mut u32) -> Option<usize> {
        let busy = self.try_acquire_rest()?;
        *rounds += 1;
        if *rounds <= ROUNDS {
            self.give_back();
        }
        Some(if *rounds == ROUNDS { 0 } else { busy })
    }

    /// Takes the permits that were acquired at a place.
    pub(crate) fn set_acquired(&self, place: &Place, acquired: SemaphorePermit<'_>) {
        let permits = u32::try_from(acquired.num_permits()).unwrap_or(PERMITS);
        acquired.forget();
        place.admit(self.caller, permits, Stage::Asks, None);
    }

    /// Goes on without the permits of a place, past a caller that does not react.
    pub(crate) fn bypass(&self, place: &Place) {
        place.admit(self.caller, 0, Stage::Asks, None);
    }

    /// Gives all permits back, and keeps the place in the queue. Such a caller keeps no other one from its keys.
    pub(crate) fn give_back(&self) {
        self.give_number_back();
        for place in self.places.0.iter() {
            let permits = place.remove(self.caller);
            if !place.is_waited_for() {
                // Callers that have entered the place may wait for another key for long, or hold this one.
                place.subscription.end();
            }
            if let Some(permits) = permits {
                if !place.is_waited_for() {
                    *place.run_began.lock() = None;
                }
                place.permits.add_permits(permits as usize);
            }
        }
    }

    /// Returns how a key stands that is not to be had, and that no wait for another key of the set would change.
    pub(crate) fn blocked(&self) -> Option<Standing> {
        let places = self.places.0.iter();
        let blocked = places.filter(|place| {
            place.permits.available_permits() < permits(self.access) as usize
                && !place.has(self.caller)
        });
        let mut standing = blocked.map(|place| place.standing(self.access));
        standing.find(|standing| standing.state == State::Held)
    }

    /// Returns whether the present task requested a lock that holds one of the keys, and has not released it.
    pub(crate) fn is_held_by_own_task(&self) -> bool {
        let own = task::try_id();
        own.is_some() && self.places.0.iter().any(|place| place.is_held_by(own))
    }

    /// Notes that the nodes refused the caller, which asks again at this time. A set of keys gives its permits back
    /// until then, so that other callers can have the keys that are free.
    pub(crate) fn set_refused(&self, next: Instant, retry_after: Option<Duration>) {
        let held_until = retry_after.map(|left| after(Instant::now(), left));
        for place in self.places.0.iter() {
            place.set_stage(self.caller, Stage::Refused { next, held_until }, None);
        }
        if self.is_set() {
            self.give_back();
        }
    }

    pub(crate) fn is_set(&self) -> bool {
        self.places.0.len() > 1
    }

    /// Notes that the caller goes without a lock, for those that wait for the same.
    pub(crate) fn set_failed(&self, is_execution: bool, error: &LockError) {
        let places = self.places.0.iter();
        let keys: LockKeys = places.map(|place| &place.key.key).collect();
        let waited = self.places.0.iter().filter(|place| place.is_waited_for());
        for place in waited {
            place.set_failed(Failed {
                keys: keys.clone(),
                access: self.access,
                is_execution,
                error: error.clone(),
            });
        }
    }

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
            place.set_stage(self.caller, Stage::Holds(Arc::clone(holder)), task);
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
        if let Some(queue) = &self.queue {
            self.give_back();
            queue.leave(&self.places);
        }
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
            callers: Mutex::default(),
            changed: Notify::new(),
            failed: Notify::new(),
            memo: Mutex::default(),
            remote: Arc::default(),
            run_began: Mutex::default(),
            subscription: PlaceSubscription::default(),
        }
    }

    fn is_waited_for(&self) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
    }

    /// Returns whether another caller waits for the permit, beside this one, which waits.
    pub(crate) fn has_other_waiters(&self) -> bool {
        self.waiting.load(Ordering::Acquire) > 1
    }

    fn has(&self, caller: u64) -> bool {
        let callers = self.callers.lock();
        callers.admitted.iter().any(|one| one.caller == caller)
    }

    fn admit(&self, caller: u64, permits: u32, stage: Stage, task: Option<task::Id>) {
        let mut callers = self.callers.lock();
        callers.changes += 1;
        callers.admitted.push(Admitted {
            caller,
            permits,
            task,
            stage,
        });
    }

    /// Sets the stage of a caller. One that was taken off the list is on it again, without permits.
    fn set_stage(&self, caller: u64, stage: Stage, task: Option<task::Id>) {
        let mut callers = self.callers.lock();
        callers.changes += 1;
        match callers.admitted.iter_mut().find(|one| one.caller == caller) {
            Some(one) => (one.stage, one.task) = (stage, task),
            None => {
                drop(callers);
                self.admit(caller, 0, stage, task);
            }
        }
        self.changed.notify_waiters();
    }

    /// Takes a caller off the list, and returns its permits.
    fn remove(&self, caller: u64) -> Option<u32> {
        let mut callers = self.callers.lock();
        let mut admitted = callers.admitted.iter();
        let number = admitted.position(|one| one.caller == caller)?;
        callers.changes += 1;
        Some(callers.admitted.swap_remove(number).permits)
    }

    /// Takes callers off the list that do not react: their runtime is at rest, or their futures are not polled. The
    /// permits go to the next callers. With `asking`, those that ask the nodes count among them. Returns whether there was
    /// one.
    pub(crate) fn remove_idle(&self, allowance: Duration, asking: bool) -> bool {
        let now = Instant::now();
        let mut callers = self.callers.lock();
        let idle = callers.admitted.extract_if(.., |one| match one.idle_at() {
            Some(idle_at) => idle_at + allowance <= now,
            None => asking,
        });
        let permits: Vec<u32> = idle.map(|one| one.permits).collect();
        callers.changes += 1;
        drop(callers);
        self.permits
            .add_permits(permits.iter().sum::<u32>() as usize);
        !permits.is_empty()
    }

    fn set_failed(&self, failed: Failed) {
        let mut callers = self.callers.lock();
        callers.failed = (callers.failed.0 + 1, Some(failed));
        drop(callers);
        self.failed.notify_waiters();
    }

    /// Returns the number of callers that went without a lock.
    pub(crate) fn failures(&self) -> u64 {
        self.callers.lock().failed.0
    }

    /// Returns the error of the last caller that went without a lock since `failures` of them, if it had asked for the
    /// same, or for a part of it.
    pub(crate) fn failed_since(
        &self,
        failures: u64,
        keys: &LockKeys,
        access: Access,
        is_execution: bool,
    ) -> Option<LockError> {
        let callers = self.callers.lock();
        let (number, Some(failed)) = &callers.failed else {
            return None;
        };
        let is_part = || {
            let mut parts = failed.keys.as_slice().iter();
            parts.all(|key| keys.as_slice().contains(key))
        };
        let is_same = failed.access == access && failed.is_execution == is_execution;
        (*number > failures && is_same && is_part()).then(|| failed.error.clone())
    }

    fn is_held_by(&self, task: Option<task::Id>) -> bool {
        let callers = self.callers.lock();
        let mut admitted = callers.admitted.iter();
        admitted.any(|one| match &one.stage {
            Stage::Holds(lease) => one.task == task && !lease.is_ending(),
            Stage::Asks | Stage::Refused { .. } => false,
        })
    }

    /// Returns how the key stands for a caller with this access.
    pub(crate) fn standing(&self, access: Access) -> Standing {
        let callers = self.callers.lock();
        // Permits that no caller has are on their way to the next one, which asks the nodes.
        let mut is_asked = callers.admitted.is_empty();
        let (mut is_ending, mut is_held) = (false, false);
        let mut ends = Vec::new();
        for one in &callers.admitted {
            match &one.stage {
                Stage::Asks => is_asked = true,
                Stage::Refused { .. } => is_held = true,
                Stage::Holds(lease) if lease.is_ending() => is_ending = true,
                Stage::Holds(_) => is_held = true,
            }
            ends.extend(one.held_until());
        }
        let (state, end) = match access {
            // One slot is enough, and the first that ends.
            Access::Slot(_) if is_asked => (State::Asked, ends.iter().min()),
            Access::Slot(_) if is_ending => (State::Ending, ends.iter().min()),
            Access::Slot(_) => (State::Held, ends.iter().min()),
            _ if is_held => (State::Held, ends.iter().max()),
            _ if is_asked => (State::Asked, ends.iter().max()),
            _ => (State::Ending, ends.iter().max()),
        };
        let mut alone = callers.leases().filter(|_| access == Access::Exclusive);
        Standing {
            state,
            retry_after: end.and_then(|end| end.checked_duration_since(Instant::now())),
            changes: callers.changes,
            idle_at: callers.admitted.iter().filter_map(Admitted::idle_at).min(),
            holder: alone.next().map(Arc::clone),
        }
    }
}

impl Callers {
    fn leases(&self) -> impl Iterator<Item = &Arc<dyn HeldLease>> {
        self.admitted.iter().filter_map(|one| match &one.stage {
            Stage::Holds(lease) => Some(lease),
            Stage::Asks | Stage::Refused { .. } => None,
        })
    }
}

impl Admitted {
    /// Returns until when the key is held, as far as is known.
    fn held_until(&self) -> Option<Instant> {
        match &self.stage {
            Stage::Asks => None,
            Stage::Refused { held_until, .. } => *held_until,
            Stage::Holds(lease) => Some(lease.valid_until()),
        }
    }

    /// Returns when the caller is to have made its next step, if that is known.
    fn idle_at(&self) -> Option<Instant> {
        match &self.stage {
            Stage::Asks => None,
            Stage::Refused { next, .. } => Some(*next),
            Stage::Holds(lease) => Some(lease.valid_until()),
        }
    }
}

/// Returns how many permits of a place a caller takes.
pub(crate) fn permits(access: Access) -> u32 {
    match access {
        Access::Exclusive => PERMITS,
        Access::Shared => 1,
        // So that exactly so many fit.
        Access::Slot(count) => PERMITS / u32::try_from(count).unwrap_or(PERMITS).max(1),
    }
}

impl<'a> CountedWaiter<'a> {
    pub(crate) fn new(place: &'a Place) -> Self {
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
