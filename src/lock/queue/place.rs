//! A place of the queue: the callers of this process that hold a key, ask for it, or wait for it.
//!
//! # Implementation details
//!
//! A place lists the callers that have its permits. Who is on the list owns permits, so a caller that does not react
//! can be taken off it, and its permits go to the next one. Exclusion does not depend on permits: the nodes decide.
//!
//! *Other processes.* A process learns of those that wait for a key when it releases the key: each node reports the number
//! of subscribers to which it published the release. While local callers wait too, releases are not published, and the next
//! local caller acquires the key without a message. To keep other processes from starving, at most [`LOCAL_RUN`] local
//! callers acquire the key in a row. Then the release is published, and the next local caller waits like a remote one.
//!
//! All local callers that wait for a release of another process share one subscription, and each watches it by itself. A
//! caller that waits for the permit will need it next, so the place keeps it while there is one.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use tokio::task;
use tokio::time::Instant;

use crate::lock::cluster::Cluster;
use crate::lock::error::LockError;
use crate::lock::slots::slot_at_random;
use crate::lock::state::LockState;
use crate::node::sync::atomic::{AtomicUsize, Ordering};
use crate::node::sync::{Notify, Semaphore};
use crate::node::{Mutex, NodeFailure, ReleaseSubscription, ReleaseWatch};
use crate::protocol::lease::{Access, Decided, OnceSpec};
use crate::protocol::{Holder, LockKey, LockKeys};

/// What was decided about a key, and when, for the next callers of this process.
pub(crate) type Memo = (Instant, Decided);

/// The permits of a place: the number of readers at a time.
pub(super) const PERMITS: u32 = 1 << 24;

#[derive(Debug)]
pub(crate) struct Place {
    /// What its callers queue for: a key, or one of so many slots of it. The two do not exclude each other.
    pub(super) key: (LockKey, u8),
    // All permits are in the semaphore, at callers on the list, or on their way: a caller takes them out of the semaphore
    // before it is on the list, and gives them back when it is off it. So who finds the list empty, but no permit, knows
    // that a caller is about to ask the nodes.
    pub(crate) permits: Semaphore,
    // A caller has one before it queues at the semaphore, and until it has its permits or goes away. So who gives permits back
    // and finds no waiter leaves none behind that was in the queue before.
    /// Each caller that waits for the permit has a clone. Most places have none.
    waiter: OnceLock<Arc<()>>,
    pub(super) callers: Mutex<Callers>,
    /// The number of callers that have entered it, and not left. Changed under the mutex of the map.
    entered: AtomicUsize,
    /// Notified when a caller got its permits, its refusal, or its lock.
    pub(crate) changed: Notify,
    /// Notified when a caller failed.
    pub(crate) failed: Notify,
    /// The number of processes that wait for the key: of subscribers to which its last release was published.
    pub(super) subscribers: AtomicUsize,
    /// The number of releases in a row that were not published.
    pub(super) kept: AtomicUsize,
    /// The subscription of this process to the releases of others: kept for the next callers, which wait for the permit,
    /// and known while some caller watches it. Made for the first caller that waits.
    subscription: OnceLock<Mutex<(Option<Arc<ReleaseSubscription>>, Weak<ReleaseSubscription>)>>,
}

/// The callers that have permits of a place.
#[derive(Debug, Default)]
pub(super) struct Callers {
    admitted: Vec<Admitted>,
    /// Counts the changes, also of the list.
    changes: u64,
    /// The last caller that went without a lock, and the number of such callers.
    failed: (u64, Option<Failed>),
    pub(super) memo: Option<Memo>,
}

/// A caller that has permits of a place.
#[derive(Debug)]
struct Admitted {
    caller: u64,
    /// How many; none if it went past a caller that does not react.
    permits: u32,
    /// The slot that it has chosen, if it takes one of several: one bit, or none.
    number: u64,
    /// The task that requested the lock; `None` if that was not in a task.
    task: Option<task::Id>,
    stage: CallerStage,
}

/// How far a caller with permits has come.
#[derive(Debug)]
pub(super) enum CallerStage {
    /// It asks the nodes, or is about to.
    Asks,
    /// The nodes have refused it, because others hold its keys. It asks again at this time.
    Refused {
        next: Instant,
        held_until: Option<Instant>,
        by: Option<Holder>,
    },
    Holds(Arc<LockState>),
}

/// A request that ended without a lock.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) keys: LockKeys,
    pub(super) access: Access,
    pub(super) once: Option<OnceSpec>,
    pub(super) error: LockError,
}

/// How a key stands whose permits a caller waits for.
#[derive(Debug)]
pub(crate) struct PlaceState {
    pub(crate) occupancy: Occupancy,
    /// How much longer the key is held, if it is.
    pub(crate) retry_after: Option<Duration>,
    /// Who holds it alone, if that is known.
    pub(crate) held_by: Option<Holder>,
    /// Counts the changes.
    pub(crate) changes: u64,
    /// When a caller that holds the key, or waits for it, does not react for certain, but for the allowance.
    pub(crate) idle_at: Option<Instant>,
    /// The lease that holds the key alone.
    pub(crate) holder: Option<Arc<LockState>>,
}

/// See [`PlaceState`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Occupancy {
    /// Callers ask the nodes for the key. Whether it is held is not known.
    Asked,
    /// About to be released, by enough holders.
    Ending,
    /// Held, by callers of this process or others.
    Held,
}

impl Place {
    pub(super) fn new(key: (LockKey, u8)) -> Self {
        Self {
            key,
            permits: Semaphore::new(PERMITS as usize),
            waiter: OnceLock::new(),
            callers: Mutex::new(Callers {
                // Most have one at a time.
                admitted: Vec::with_capacity(1),
                ..Callers::default()
            }),
            entered: AtomicUsize::new(0),
            changed: Notify::new(),
            failed: Notify::new(),
            subscribers: AtomicUsize::new(0),
            kept: AtomicUsize::new(0),
            subscription: OnceLock::new(),
        }
    }

    /// Counts a caller that enters.
    pub(super) fn enter(&self) {
        // Relaxed here and below: the mutex of the map orders them.
        if self.entered.fetch_add(1, Ordering::Relaxed) == 0 {
            // Those of before are old, and may have been set after the last caller left.
            self.subscribers.store(0, Ordering::Relaxed);
            self.kept.store(0, Ordering::Relaxed);
        }
    }

    /// Counts a caller that leaves. The last one leaves nothing to the next.
    pub(super) fn leave(&self) {
        if self.entered.fetch_sub(1, Ordering::Relaxed) == 1 {
            let mut callers = self.callers.lock();
            (callers.failed, callers.memo) = Default::default();
            drop(callers);
            self.end_subscription();
        }
    }

    /// Returns the number of callers that have entered it, and not left.
    pub(super) fn entered(&self) -> usize {
        self.entered.load(Ordering::Relaxed)
    }

    /// Returns what a caller keeps as long as it waits for the permit.
    pub(crate) fn waiter(&self) -> Arc<()> {
        Arc::clone(self.waiter.get_or_init(Arc::default))
    }

    /// Returns how many callers wait for the permit.
    pub(crate) fn waiters(&self) -> usize {
        // A hint, on which no other data depend, as below. A waiter that comes just after this look finds the permit free, or
        // asks the nodes like any other.
        let waiter = self.waiter.get();
        waiter.map_or(0, |waiter| Arc::strong_count(waiter) - 1)
    }

    /// Returns how many callers hold a lock.
    #[cfg(feature = "axum")]
    pub(super) fn holders(&self) -> usize {
        self.callers.lock().leases().count()
    }

    pub(super) fn has(&self, caller: u64) -> bool {
        let callers = self.callers.lock();
        callers.admitted.iter().any(|one| one.caller == caller)
    }

    /// Puts a caller with these permits on the list, which is about to ask the nodes.
    pub(super) fn admit(&self, caller: u64, permits: u32) {
        // Without a notification: nothing is decided yet, and who waits for a decision goes on waiting.
        self.callers.lock().entry(caller).permits = permits;
    }

    /// Sets the stage of a caller. One that was taken off the list is on it again, without permits.
    pub(super) fn set_stage(&self, caller: u64, stage: CallerStage, task: Option<task::Id>) {
        let mut callers = self.callers.lock();
        let one = callers.entry(caller);
        (one.stage, one.task) = (stage, task);
        drop(callers);
        // Behind the mutex, so that those who wake do not meet it. Each has asked to be notified before it looked.
        self.changed.notify_waiters();
    }

    /// Takes a caller off the list, and returns its permits.
    pub(super) fn remove(&self, caller: u64) -> Option<u32> {
        let mut callers = self.callers.lock();
        let mut admitted = callers.admitted.iter();
        let position = admitted.position(|one| one.caller == caller)?;
        callers.changes += 1;
        // With its slot, which others may choose from now on. A caller that is still on the list keeps its own, so two that
        // have permits never choose the same.
        Some(callers.admitted.swap_remove(position).permits)
    }

    /// Chooses one of these slots, one bit each, that no caller on the list has, for a caller on the list. Its former one is
    /// given back, so that others can choose it.
    pub(super) fn take_number(&self, caller: u64, numbers: u64, random: u64) -> Option<usize> {
        let mut callers = self.callers.lock();
        let taken = callers.admitted.iter().map(|one| one.number);
        let taken = taken.fold(0, |taken, number| taken | number);
        let number = slot_at_random(numbers & !taken, random);
        let mut admitted = callers.admitted.iter_mut();
        let one = admitted.find(|one| one.caller == caller)?;
        one.number = number.map_or(0, |number| 1 << number);
        number
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
        // The callers find themselves off the list when they leave, so each permit is given back once.
        self.permits
            .add_permits(permits.iter().sum::<u32>() as usize);
        !permits.is_empty()
    }

    pub(super) fn set_failed(&self, failed: Failed) {
        let mut callers = self.callers.lock();
        callers.failed = (callers.failed.0 + 1, Some(failed));
        drop(callers);
        self.failed.notify_waiters();
    }

    /// Returns the number of callers that went without a lock.
    pub(crate) fn failures(&self) -> u64 {
        self.callers.lock().failed.0
    }

    /// Returns the error of the last caller that went without a lock since `failures` of them, and how many have since, if
    /// it had asked for the same, or for a part of it, or if the nodes did not answer.
    pub(crate) fn failed_since(
        &self,
        failures: u64,
        keys: &LockKeys,
        access: Access,
        once: Option<OnceSpec>,
    ) -> Option<(u64, LockError)> {
        let callers = self.callers.lock();
        let (number, Some(failed)) = &callers.failed else {
            return None;
        };
        let since = number - failures;
        // Nodes that do not answer are silent for all requests. One that refuses may have its reason in this request.
        let is_outage = match &failed.error {
            LockError::Unavailable { nodes, .. } => !nodes.iter().any(NodeFailure::is_refusal),
            _ => false,
        };
        let mut parts = failed.keys.as_slice().iter();
        // An execution refuses another request with its key for another reason.
        let is_same_request =
            failed.once == once || !matches!(failed.error, LockError::Contended { .. });
        let is_same = failed.access == access
            && failed.once.is_some() == once.is_some()
            && is_same_request
            && parts.all(|key| keys.as_slice().contains(key));
        (since > 0 && (is_outage || is_same)).then(|| (since, failed.error.clone()))
    }

    pub(super) fn is_held_by(&self, task: Option<task::Id>) -> bool {
        let callers = self.callers.lock();
        let mut admitted = callers.admitted.iter();
        admitted.any(|one| {
            let holds = matches!(&one.stage, CallerStage::Holds(lease) if !lease.is_ending());
            holds && one.task == task
        })
    }

    /// Returns how the key stands for a caller with this access.
    pub(crate) fn state(&self, access: Access) -> PlaceState {
        let callers = self.callers.lock();
        // Permits that no caller has are on their way to the next one, which asks the nodes.
        let mut is_asked = callers.admitted.is_empty();
        let (mut is_ending, mut is_held) = (false, false);
        let mut ends = Vec::new();
        for one in &callers.admitted {
            match &one.stage {
                CallerStage::Asks => is_asked = true,
                CallerStage::Refused { .. } => is_held = true,
                CallerStage::Holds(lease) if lease.is_ending() => is_ending = true,
                CallerStage::Holds(_) => is_held = true,
            }
            ends.extend(one.held_until());
        }
        let (occupancy, end) = match access {
            // One slot is enough, and the first that ends.
            Access::Slot(_) if is_asked => (Occupancy::Asked, ends.iter().min()),
            Access::Slot(_) if is_ending => (Occupancy::Ending, ends.iter().min()),
            Access::Slot(_) => (Occupancy::Held, ends.iter().min()),
            _ if is_held => (Occupancy::Held, ends.iter().max()),
            _ if is_asked => (Occupancy::Asked, ends.iter().max()),
            _ => (Occupancy::Ending, ends.iter().max()),
        };
        let mut alone = callers.leases().filter(|_| access == Access::Exclusive);
        let by = callers.admitted.iter().find_map(|one| match &one.stage {
            CallerStage::Asks => None,
            CallerStage::Refused { by, .. } => by.clone(),
            CallerStage::Holds(lease) => lease.holder.clone(),
        });
        PlaceState {
            occupancy,
            retry_after: end.and_then(|end| end.checked_duration_since(Instant::now())),
            held_by: by,
            changes: callers.changes,
            idle_at: callers.admitted.iter().filter_map(Admitted::idle_at).min(),
            holder: alone.next().map(Arc::clone),
        }
    }
}

impl Callers {
    /// Returns a caller on the list. A new one asks the nodes, and has no permits.
    fn entry(&mut self, caller: u64) -> &mut Admitted {
        self.changes += 1;
        let known = self.admitted.iter().position(|one| one.caller == caller);
        let position = known.unwrap_or(self.admitted.len());
        if known.is_none() {
            self.admitted.push(Admitted {
                caller,
                permits: 0,
                number: 0,
                task: None,
                stage: CallerStage::Asks,
            });
        }
        &mut self.admitted[position]
    }

    pub(super) fn leases(&self) -> impl Iterator<Item = &Arc<LockState>> {
        self.admitted.iter().filter_map(|one| match &one.stage {
            CallerStage::Holds(lease) => Some(lease),
            CallerStage::Asks | CallerStage::Refused { .. } => None,
        })
    }
}

impl Admitted {
    /// Returns until when the key is held, as far as is known.
    fn held_until(&self) -> Option<Instant> {
        match &self.stage {
            CallerStage::Asks => None,
            CallerStage::Refused { held_until, .. } => *held_until,
            CallerStage::Holds(lease) => Some(lease.valid_until()),
        }
    }

    /// Returns when the caller is to have made its next step, if that is known.
    fn idle_at(&self) -> Option<Instant> {
        match self.stage {
            CallerStage::Refused { next, .. } => Some(next),
            CallerStage::Asks | CallerStage::Holds(_) => self.held_until(),
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

/// The number of local callers that acquire a key in a row while other processes wait for it.
///
/// A hand-over to another process costs several round trips, and the attempts of processes that come too late. A
/// longer run makes other processes wait longer.
const LOCAL_RUN: usize = 4;

/// The processes that wait for the key of a place.
impl Place {
    /// Sets the number of subscribers to which a node published a release.
    pub(crate) fn set_subscribers(&self, subscribers: u32) {
        // Relaxed here and below: the counts only say who should go first. With a stale one, a process waits for one turn
        // more, or polls; no lock depends on it.
        self.subscribers
            .store(subscribers as usize, Ordering::Relaxed);
    }

    /// Returns the number of waiting processes, this one included, if there are others and the last release was
    /// published to them.
    pub(crate) fn notified(&self) -> Option<usize> {
        let is_kept = self.kept.load(Ordering::Relaxed) > 0;
        self.count().filter(|_| !is_kept)
    }

    /// Decides whether the key stays in this process, so that its release is not published. Counts the decision.
    ///
    /// If the local caller goes away without an attempt, the other processes find the key free when they poll.
    pub(super) fn keep(&self) -> bool {
        // Load and store, not one step: only the holder of the place's permit decides, and the permit's semaphore orders the
        // holders.
        let kept = self.kept.load(Ordering::Relaxed) + 1;
        let keep = self.waiters() > 0 && kept < LOCAL_RUN && self.count().is_some();
        self.kept
            .store(if keep { kept } else { 0 }, Ordering::Relaxed);
        keep
    }

    fn count(&self) -> Option<usize> {
        // Looked at first, because most keys have none, and most locks need not ask for the subscription then.
        let subscribers = self.subscribers.load(Ordering::Relaxed);
        if subscribers == 0 {
            return None;
        }
        // The nodes count this process once while it is subscribed. A subscription that just ends is gone here before it is
        // gone there, so for a moment this process may be taken for another one, which costs one published release.
        let own = self.subscription.get();
        let own = own.map_or(0, |own| usize::from(own.lock().1.strong_count() > 0));
        let others = subscribers.saturating_sub(own);
        (others > 0).then_some(others + 1)
    }

    /// Watches the releases of a lock, which are published on this channel.
    pub(super) fn watch(&self, cluster: &Cluster, channel: &Arc<[u8]>) -> ReleaseWatch {
        let mut subscription = self.subscription.get_or_init(Mutex::default).lock();
        let (kept, watched) = &mut *subscription;
        let subscribed = watched.upgrade();
        let subscribed = subscribed.unwrap_or_else(|| cluster.subscribe(channel));
        *watched = Arc::downgrade(&subscribed);
        ReleaseWatch::new(kept.insert(subscribed))
    }

    /// Ends the subscription to the releases of other processes, if no caller waits here.
    pub(super) fn unsubscribe(&self) {
        if self.waiters() == 0 {
            self.end_subscription();
        }
    }

    /// Ends the subscription, unless a caller watches.
    pub(super) fn end_subscription(&self) {
        let subscription = self.subscription.get();
        let kept = subscription.and_then(|subscription| subscription.lock().0.take());
        // Behind the mutex, because the nodes are told of its end, if this was the last owner.
        drop(kept);
    }
}
