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
//! `n`th of the permits, and the number of a slot that no other caller of this process has. Callers that count the slots
//! of a key differently have places of their own: the nodes decide between them. A caller enters the places of all its
//! keys at once, under the map's mutex, and its [`Permit`] leaves them. A place that all callers have left stays for the
//! next one, until the map is full: most keys are locked again.
//!
//! A call that waits for others also occupies a slot under each [`WaiterCap`].

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::SemaphorePermit;
use tokio::task;
use tokio::time::Instant;

use crate::lock::cluster::Cluster;
use crate::lock::error::LockError;
use crate::lock::queue::place::{
    CallerStage, Failed, Memo, Occupancy, PERMITS, Place, PlaceState, permits,
};
use crate::lock::state::LockState;
use crate::node::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::node::telemetry::Counted;
use crate::node::{Mutex, ReleaseWatch, after};
use crate::protocol::lease::{Access, Decided, OnceSpec};
use crate::protocol::{Few, Holder, KeyNames, LockKey, LockKeys};

/// The places of all keys that this process holds, requests or waits for.
#[derive(Debug, Default)]
pub(crate) struct LocalQueue {
    /// By key and number of slots, zero without.
    places: Mutex<HashMap<(LockKey, u8), Arc<Place>>>,
    /// The number of callers so far.
    callers: AtomicU64,
}

/// How often a set of keys may find one of them busy before it keeps the others while it waits.
const ROUNDS: u32 = 5;

/// The right to request some keys from the nodes; dropping it admits the next waiters.
///
/// While its caller waits, it holds the caller's place in the queue, without permits.
#[derive(Debug, Default)]
pub(crate) struct Permit {
    /// `None` if there are no keys.
    queue: Option<Arc<LocalQueue>>,
    /// In the order of the keys.
    pub(crate) places: Few<Arc<Place>>,
    access: Access,
    /// Tells it from the other callers of its places.
    caller: u64,
}

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
        if permit.try_acquire_rest().is_none() {
            return Ok(permit);
        }
        permit.give_back();
        Err(permit)
    }

    /// Returns the locks of this process that have a key.
    pub(crate) fn leases_of(&self, key: &LockKey) -> Vec<Arc<LockState>> {
        let mut found = Vec::new();
        // In all places, because callers do not queue for one slot of a key, but for any of them.
        for place in self.places.lock().values() {
            let callers = place.callers.lock();
            let leases = callers
                .leases()
                .filter(|lease| lease.spec.keys.as_slice().contains(key));
            found.extend(leases.map(Arc::clone));
        }
        found
    }

    /// Returns the keys that callers of this process wait for, each with their number.
    #[cfg(feature = "axum")]
    pub(crate) fn waited_for(&self) -> Vec<(LockKey, usize)> {
        let places = self.places.lock();
        // Those that ask the nodes are among them: they go on to hold the key, to wait, or away.
        let waited = places.values().map(|place| {
            let waiting = place.entered().saturating_sub(place.holders());
            (place.key.0.clone(), waiting)
        });
        waited.filter(|(_, callers)| *callers > 0).collect()
    }

    /// Returns whether no key is held, requested or waited for.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.places
            .lock()
            .values()
            .all(|place| place.entered() == 0)
    }

    /// Enters the places of all keys, without acquiring their permits.
    fn enter(self: &Arc<Self>, keys: &LockKeys, access: Access) -> Permit {
        let mut places = self.places.lock();
        let slots = match access {
            Access::Exclusive | Access::Shared => 0,
            Access::Slot(count) => u8::try_from(count).unwrap_or(u8::MAX),
        };
        let enter = |key: &LockKey| {
            let key = (key.clone(), slots);
            if places.len() == places.capacity() && !places.contains_key(&key) {
                places.retain(|_, place| place.entered() > 0);
                // As many callers more until the next look at all places, whose cost is amortised.
                let entered = places.len();
                places.shrink_to(2 * entered);
                places.reserve(entered);
            }
            let entry = places.entry(key);
            let place = entry.or_insert_with_key(|key| Arc::new(Place::new(key.clone())));
            place.enter();
            Arc::clone(place)
        };
        Permit {
            queue: Some(Arc::clone(self)),
            places: keys.as_slice().iter().map(enter).collect(),
            access,
            // A number that no other caller has; it orders nothing.
            caller: self.callers.fetch_add(1, Ordering::Relaxed),
        }
    }
}

impl Permit {
    /// Acquires the permits that it does not have. Returns the number of the first busy place.
    pub(crate) fn try_acquire_rest(&self) -> Option<usize> {
        self.places.iter().position(|place| {
            let acquire = || place.permits.try_acquire_many(permits(self.access));
            let admit = |acquired| self.admit(place, Some(acquired));
            !place.has(self.caller) && acquire().map(admit).is_err()
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
            let place = &self.places[busy];
            let waiting = place.waiter();
            let acquired = place.permits.acquire_many(permits(self.access)).await;
            drop(waiting);
            // The semaphore is never closed.
            self.admit(place, acquired.ok());
        }
    }

    /// Acquires the permits that are free, and returns the number of the place to wait at; `None` if it has all.
    ///
    /// A set of keys keeps no permit while it waits for another one, so that no caller waits for a key that is free. A
    /// set that was too late for [`ROUNDS`] rounds keeps its permits from then on, so that it cannot starve. It takes
    /// them in ascending order, so sets cannot wait for each other. One that lost a permit meanwhile, because it did not
    /// seem to react, keeps none of a later key.
    pub(crate) fn next_busy(&self, rounds: &mut u32) -> Option<usize> {
        let busy = self.try_acquire_rest()?;
        *rounds += 1;
        let mut later = self.places.iter().skip(busy);
        if *rounds <= ROUNDS || later.any(|place| place.has(self.caller)) {
            self.give_back();
        }
        Some(if *rounds == ROUNDS { 0 } else { busy })
    }

    /// Puts the caller on the list of a place: with the permits that it has acquired there, or without, past a caller that
    /// does not react.
    pub(crate) fn admit(&self, place: &Place, acquired: Option<SemaphorePermit<'_>>) {
        let permits = acquired.map_or(0, |acquired| {
            let permits = u32::try_from(acquired.num_permits()).unwrap_or(PERMITS);
            // The list owns them from now on.
            acquired.forget();
            permits
        });
        place.admit(self.caller, permits);
    }

    /// Gives all permits back, and keeps the place in the queue. Such a caller keeps no other one from its keys.
    pub(crate) fn give_back(&self) {
        for place in self.places.iter() {
            let permits = place.remove(self.caller);
            // Also by a caller without permits: it may wait for another of its keys for long.
            place.unsubscribe();
            if let Some(permits) = permits {
                // Last: the caller that gets them must find this one off the list.
                place.permits.add_permits(permits as usize);
            }
        }
    }

    /// Returns how a key stands that is not to be had, and that no wait for another key of the set would change.
    pub(crate) fn blocked(&self) -> Option<PlaceState> {
        let places = self.places.iter();
        let blocked = places.filter(|place| {
            place.permits.available_permits() < permits(self.access) as usize
                && !place.has(self.caller)
        });
        let mut states = blocked.map(|place| place.state(self.access));
        states.find(|state| state.occupancy == Occupancy::Held)
    }

    /// Returns whether the present task requested a lock that holds one of the keys, and has not released it.
    pub(crate) fn is_held_by_own_task(&self) -> bool {
        let own = task::try_id();
        own.is_some() && self.places.iter().any(|place| place.is_held_by(own))
    }

    /// Notes that the nodes refused the caller, which asks again at this time. A set of keys gives its permits back
    /// until then, so that other callers can have the keys that are free.
    pub(crate) fn set_refused(
        &self,
        next: Instant,
        retry_after: Option<Duration>,
        by: &Option<Holder>,
    ) {
        let held_until = retry_after.map(|left| after(Instant::now(), left));
        for place in self.places.iter() {
            let refused = CallerStage::Refused {
                next,
                held_until,
                by: by.clone(),
            };
            place.set_stage(self.caller, refused, None);
        }
        if self.places.len() > 1 {
            self.give_back();
        }
    }

    /// Notes that the caller goes without a lock, for those that wait for the same.
    pub(crate) fn set_failed(&self, once: Option<OnceSpec>, error: &LockError) {
        let places = self.places.iter();
        let keys: LockKeys = places.map(|place| &place.key.0).collect();
        let waited = self.places.iter().filter(|place| place.waiters() > 0);
        for place in waited {
            place.set_failed(Failed {
                keys: keys.clone(),
                access: self.access,
                once,
                error: error.clone(),
            });
        }
    }

    /// Returns whether the release of the keys is to be published, and not kept for a local caller; see
    /// [`Place::keep`].
    pub(crate) fn publishes(&self) -> bool {
        match (self.access, &*self.places) {
            (Access::Exclusive, [place]) => !place.keep(),
            // A node publishes only the release of the last reader, whose next caller is not known. Any caller can take
            // a slot that is free. The next caller of several keys is not known.
            _ => true,
        }
    }

    /// Returns the number of processes that wait for one of the keys; see [`Place::notified`].
    pub(crate) fn notified(&self) -> Option<usize> {
        let places = self.places.iter();
        places.filter_map(|place| place.notified()).max()
    }

    /// Watches the releases of each key, to which this process is subscribed until no local caller waits any more.
    pub(crate) fn subscribe(&self, cluster: &Cluster, names: &[KeyNames]) -> Vec<ReleaseWatch> {
        let places = self.places.iter().zip(names);
        let watching = places.map(|(place, name)| place.watch(cluster, name.channel()));
        watching.collect()
    }

    /// Unsubscribes from the keys for which no local caller waits any more.
    pub(crate) fn unsubscribe(&self) {
        self.places.iter().for_each(|place| place.unsubscribe());
    }

    /// Sets the lease that is held with this permit, and the task that requested it.
    pub(crate) fn set_holder(&self, holder: &Arc<LockState>, task: Option<task::Id>) {
        for place in self.places.iter() {
            place.set_stage(self.caller, CallerStage::Holds(Arc::clone(holder)), task);
        }
    }

    /// Chooses one of these slots, one bit each, that no other caller of this process has. Gives the former one back.
    pub(crate) fn take_number(&self, numbers: u64, random: u64) -> Option<usize> {
        let place = self.places.first()?;
        place.take_number(self.caller, numbers, random)
    }

    /// Leaves a memo for the next callers of this process. A set of keys has it at the first key.
    pub(crate) fn set_memo(&self, decided: Decided) {
        if let Some(place) = self.places.first() {
            place.callers.lock().memo = Some((Instant::now(), decided));
        }
    }

    /// Returns the memo that an earlier caller left.
    pub(crate) fn memo(&self) -> Option<Memo> {
        let place = self.places.first()?;
        place.callers.lock().memo.clone()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(queue) = &self.queue {
            // The permits first, so that a place has all of them when its last caller has left it.
            self.give_back();
            let _entering = queue.places.lock();
            self.places.iter().for_each(|place| place.leave());
        }
    }
}

/// Counts and limits the waiting calls of a whole [`Redlock`](crate::Redlock) or of one layer.
#[derive(Debug)]
pub(crate) struct WaiterCap {
    waiting: AtomicUsize,
    max: usize,
}

/// The wait of one call for other holders: until when, and the slots that it occupies under its caps. Dropping it frees
/// them.
#[derive(Debug)]
pub(crate) struct Wait {
    /// Not after the request, if the call does not wait.
    pub(crate) deadline: Instant,
    caps: [Option<Arc<WaiterCap>>; 2],
    /// How many of them it occupies.
    occupied: usize,
    /// When the call began to wait, for its span; `None` for a call that does not wait.
    waits_since: Option<Arc<OnceLock<Instant>>>,
    /// Counts the call in the metrics while it waits.
    counted: Option<Counted>,
}

impl WaiterCap {
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self {
            waiting: AtomicUsize::new(0),
            max,
        })
    }
}

impl Wait {
    pub(crate) fn new(
        deadline: Instant,
        caps: [Option<Arc<WaiterCap>>; 2],
        waits_since: Option<Arc<OnceLock<Instant>>>,
    ) -> Self {
        Self {
            deadline,
            caps,
            occupied: 0,
            waits_since,
            counted: None,
        }
    }

    /// Occupies a slot under each cap, unless the call waits already.
    ///
    /// # Errors
    ///
    /// Returns [`LockError::Overloaded`] if no slot is free.
    pub(crate) fn occupy(&mut self) -> Result<(), LockError> {
        for cap in self.caps.iter().flatten().skip(self.occupied) {
            // Relaxed here and below: the count is all that is shared, and one atomic add decides. A caller that is one too many
            // counts itself for a moment, so another may be refused beside it; never is one admitted too many.
            if cap.waiting.fetch_add(1, Ordering::Relaxed) >= cap.max {
                cap.waiting.fetch_sub(1, Ordering::Relaxed);
                return Err(LockError::Overloaded { max: cap.max });
            }
            self.occupied += 1;
        }
        if let Some(waits_since) = &self.waits_since {
            waits_since.get_or_init(Instant::now);
        }
        self.counted.get_or_insert_with(Counted::waiter);
        Ok(())
    }

    /// Frees the slots, because the call waits no longer.
    pub(crate) fn end(&mut self) {
        for cap in self.caps.iter().flatten().take(self.occupied) {
            cap.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        (self.occupied, self.counted) = (0, None);
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests;
