//! The in-process front: one contender per key and process, first come, first served.
//!
//! A key that this process holds or is asking for is not asked for again: the call is refused, or
//! it queues, and only the head of the queue talks to the nodes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Instant;

use crate::lock::lease::Lease;
use crate::lock::redlock::Inner;
use crate::node::{ReleaseSignal, Subscription};
use crate::protocol::{Fingerprint, KeyNames, LockKey, LockKeys, Record};

/// All keys that this process holds, asks for or waits for.
#[derive(Debug, Default)]
pub(super) struct Front {
    slots: Mutex<HashMap<LockKey, Arc<Slot>>>,
}

#[derive(Debug)]
struct Slot {
    /// One permit: tokio's semaphore is fair, and a waiter that is dropped leaves its queue.
    turn: Arc<Semaphore>,
    /// How many wait for it.
    queued: AtomicUsize,
    holding: Mutex<Held>,
    /// The last record that a majority of the nodes was found to have, and when.
    recorded: Mutex<Option<(Instant, Record)>>,
    rivals: Arc<Rivals>,
    /// Since when the turn was handed on in this process while nobody else was let in.
    run_began: Mutex<Option<Instant>>,
    /// Hears of releases, once the head of the queue has met somebody of another process.
    ears: Mutex<Option<Ears>>,
}

/// The lock that a holder has, once it has one.
#[derive(Debug, Default)]
struct Held {
    by: Option<Holder>,
    /// There if somebody ever asked who it is: nearly always nobody does.
    told: Option<watch::Sender<Option<Holder>>>,
}

#[derive(Debug)]
struct Ears {
    ear: Arc<ReleaseSignal>,
    /// At every node that can tell.
    _listening: Vec<Subscription>,
}

/// The other processes that want a key, as far as is known.
#[derive(Debug, Default)]
pub(super) struct Rivals {
    /// How many processes were told of the last release here.
    listeners: AtomicUsize,
    /// Whether this process is one of them.
    listening: AtomicBool,
    /// How often in a row the key was kept in this process, and nobody told.
    kept: AtomicUsize,
}

/// How many of those who wait in one process get the key in a row while others want it. To let others in
/// costs several round trips and the attempts of those who come too late; with more in a row, others wait
/// longer.
const ROW: usize = 4;

/// What others are told of a lock that is held.
#[derive(Debug, Clone)]
pub(super) struct Holder {
    pub(super) lease: Arc<Lease>,
    /// What it is held for, if it is a key that keeps records.
    pub(super) asked_for: Option<Fingerprint>,
}

/// The right to ask the nodes for some keys; given to the next in the queue when dropped.
#[derive(Debug, Default)]
pub(super) struct Turn {
    // The permit goes first, so that a slot that nobody else wants is seen to be unused.
    places: Vec<(OwnedSemaphorePermit, Place)>,
}

/// A claim on a slot, queued or served, that removes the slot with the last of them.
#[derive(Debug)]
struct Place {
    front: Arc<Front>,
    key: LockKey,
    /// There until it is dropped.
    slot: Option<Arc<Slot>>,
}

/// Somebody who waits for a turn, as long as this lives.
struct Queued<'a>(&'a Slot);

impl<'a> Queued<'a> {
    fn at(slot: &'a Slot) -> Self {
        slot.queued.fetch_add(1, Ordering::AcqRel);
        Self(slot)
    }
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.0.queued.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The key is held or being asked for in this process.
#[derive(Debug)]
pub(super) struct Busy {
    pub(super) retry_after: Option<Duration>,
    /// Who holds it; nobody, as long as it is only being asked for. It changes when somebody does.
    pub(super) holder: watch::Receiver<Option<Holder>>,
    /// Whether the lock is about to be given back and no other call waits for it, and so for all keys that
    /// are busy: the next call need not be refused, because its requests follow the release on every node.
    pub(super) is_ending: bool,
}

impl Front {
    /// Takes the turn for all keys, or none if one of them is busy.
    pub(super) fn try_take(self: &Arc<Self>, keys: &LockKeys) -> Result<Turn, Busy> {
        let mut turn = Turn::default();
        for key in keys.as_slice() {
            let place = self.place(key);
            match place.turn().and_then(|turn| turn.try_acquire_owned().ok()) {
                Some(permit) => turn.places.push((permit, place)),
                None => {
                    // With one that is not about to be given back, to wait for this one is of no use, and
                    // would keep it from others.
                    let rest = &keys.as_slice()[turn.places.len() + 1..];
                    let is_in_the_way = |key: &LockKey| self.place(key).is_in_the_way();
                    let is_ending = place.is_ending() && !rest.iter().any(is_in_the_way);
                    return Err(Busy {
                        retry_after: place.retry_after(),
                        holder: place.holder(),
                        is_ending,
                    });
                }
            }
        }
        Ok(turn)
    }

    /// Waits for the turn for all keys, one after the other in their order, so that two calls
    /// cannot wait for each other.
    pub(super) async fn take(self: &Arc<Self>, keys: &LockKeys) -> Turn {
        let mut turn = Turn::default();
        for key in keys.as_slice() {
            let place = self.place(key);
            let queued = place.slot.as_deref().map(Queued::at);
            // The semaphore is never closed; a turn without a permit would still be harmless,
            // because the nodes decide.
            let permit = match place.turn() {
                Some(waiting) => waiting.acquire_owned().await.ok(),
                None => None,
            };
            drop(queued);
            if let Some(permit) = permit {
                turn.places.push((permit, place));
            }
        }
        turn
    }

    /// Returns how long the holder of the first busy key may keep it.
    pub(super) fn retry_after(&self, keys: &LockKeys) -> Option<Duration> {
        let slots = self.slots();
        let slot = keys.as_slice().iter().find_map(|key| slots.get(key))?;
        slot.retry_after()
    }

    fn place(self: &Arc<Self>, key: &LockKey) -> Place {
        let mut slots = self.slots();
        let slot = slots.entry(key.clone()).or_insert_with(|| {
            Arc::new(Slot {
                turn: Arc::new(Semaphore::new(1)),
                queued: AtomicUsize::new(0),
                holding: Mutex::default(),
                recorded: Mutex::default(),
                rivals: Arc::default(),
                run_began: Mutex::default(),
                ears: Mutex::default(),
            })
        });
        Place {
            front: Arc::clone(self),
            key: key.clone(),
            slot: Some(Arc::clone(slot)),
        }
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<LockKey, Arc<Slot>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn {
    /// Returns whether others are to be told that the keys are released: unless it is somebody of this
    /// process who is next.
    pub(super) fn tells(&self) -> bool {
        let mut slots = self.slots();
        match (slots.next(), slots.next()) {
            (Some((slot, _)), None) => !slot.rivals.keep(slot.is_waited_for()),
            // Who is next for several keys is not known.
            _ => true,
        }
    }

    /// Returns what is known of other processes that want the keys.
    pub(super) fn rivals(&self) -> Vec<Arc<Rivals>> {
        let slots = self.slots();
        slots.map(|(slot, _)| Arc::clone(&slot.rivals)).collect()
    }

    /// Makes this process hear of the release of any of its keys, until nobody here waits any more.
    pub(super) fn listen(&self, inner: &Inner, names: &[KeyNames]) -> Vec<Arc<ReleaseSignal>> {
        let ears = self.slots().filter_map(|(slot, key)| {
            let lock = &names.get(key)?.lock;
            let mut ears = slot.ears();
            let ears = ears.get_or_insert_with(|| {
                slot.rivals.listening.store(true, Ordering::Relaxed);
                let ear = ReleaseSignal::new(inner.settings.quorum);
                let nodes = inner.nodes.iter().enumerate();
                let listening = nodes.filter_map(|(index, node)| node.subscribe(lock, &ear, index));
                Ears {
                    _listening: listening.collect(),
                    ear,
                }
            });
            Some(Arc::clone(&ears.ear))
        });
        ears.collect()
    }

    /// Stops listening for keys that nobody in this process waits for any more.
    pub(super) fn hush(&self) {
        for (slot, _) in self.slots() {
            if !slot.is_waited_for() {
                slot.rivals.listening.store(false, Ordering::Relaxed);
                let ears = slot.ears().take();
                drop(ears);
            }
        }
    }

    /// Returns for how long the turn for any of the keys was handed on in this process.
    pub(super) fn run(&self) -> Duration {
        let runs = self.slots().map(|(slot, _)| {
            let mut began = slot.run_began();
            began.get_or_insert_with(Instant::now).elapsed()
        });
        runs.max().unwrap_or_default()
    }

    /// Notes that others were let in.
    pub(super) fn end_run(&self) {
        for (slot, _) in self.slots() {
            *slot.run_began() = None;
        }
    }

    /// Returns the slots, each with the place of its key among the keys.
    fn slots(&self) -> impl Iterator<Item = (&Arc<Slot>, usize)> {
        let places = self.places.iter().enumerate();
        places.filter_map(|(key, (_, place))| Some((place.slot.as_ref()?, key)))
    }

    /// Makes a record known to those who wait for this turn: they need not ask the nodes for it, one
    /// after the other.
    pub(super) fn set_recorded(&self, record: &Record) {
        for (slot, _) in self.slots() {
            *slot.recorded() = Some((Instant::now(), record.clone()));
        }
    }

    /// Returns the record that was made known since `asked`; whoever asks later asks the nodes.
    pub(super) fn recorded_since(&self, asked: Instant) -> Option<Record> {
        self.slots().find_map(|(slot, _)| {
            let (at, record) = slot.recorded().clone()?;
            (at >= asked).then_some(record)
        })
    }

    /// Makes known what lock is held in this turn.
    pub(super) fn set_holder(&self, holder: &Holder) {
        for (slot, _) in self.slots() {
            slot.set_holder(Some(holder.clone()));
        }
    }
}

/// Whoever is next has nothing to do with the lock that was held.
impl Drop for Turn {
    fn drop(&mut self) {
        for (slot, _) in self.slots() {
            // Silently if nobody held it: others go on waiting for whoever asks next.
            slot.set_holder(None);
        }
    }
}

impl Rivals {
    /// Notes how many processes a node told of a release.
    pub(super) fn set_subscribers(&self, listeners: usize) {
        self.listeners.store(listeners, Ordering::Relaxed);
    }

    /// Returns how many processes want the key, this one included, if others do and it is their turn.
    pub(super) fn waiting(&self) -> Option<usize> {
        let is_ours = self.kept.load(Ordering::Relaxed) > 0;
        self.count().filter(|_| !is_ours)
    }

    /// Returns whether the key stays in this process, where somebody waits for it or not. Should that
    /// one go away without having asked, others find out when they ask next.
    fn keep(&self, is_waited_for: bool) -> bool {
        let kept = self.kept.load(Ordering::Relaxed) + 1;
        let keep = is_waited_for && kept < ROW && self.count().is_some();
        self.kept
            .store(if keep { kept } else { 0 }, Ordering::Relaxed);
        keep
    }

    fn count(&self) -> Option<usize> {
        let listening = usize::from(self.listening.load(Ordering::Relaxed));
        let others = self
            .listeners
            .load(Ordering::Relaxed)
            .saturating_sub(listening);
        (others > 0).then_some(others + 1)
    }
}

impl Place {
    fn turn(&self) -> Option<Arc<Semaphore>> {
        self.slot.as_ref().map(|slot| Arc::clone(&slot.turn))
    }

    fn retry_after(&self) -> Option<Duration> {
        self.slot.as_ref()?.retry_after()
    }

    fn is_ending(&self) -> bool {
        let slot = self.slot.as_deref();
        slot.is_some_and(|slot| slot.is_ending() && !slot.is_waited_for())
    }

    /// Whether its turn is taken, and not about to be given back to the next call.
    fn is_in_the_way(&self) -> bool {
        let slot = self.slot.as_deref();
        slot.is_some_and(|slot| slot.turn.available_permits() == 0) && !self.is_ending()
    }

    fn holder(&self) -> watch::Receiver<Option<Holder>> {
        match &self.slot {
            Some(slot) => slot.holder(),
            None => watch::Sender::default().subscribe(),
        }
    }
}

impl Slot {
    /// Whether somebody in this process waits for the turn.
    fn is_waited_for(&self) -> bool {
        self.queued.load(Ordering::Acquire) > 0
    }

    fn set_holder(&self, holder: Option<Holder>) {
        let mut holding = self.holding();
        if let Some(told) = &holding.told
            && (holding.by.is_some() || holder.is_some())
        {
            told.send_replace(holder.clone());
        }
        holding.by = holder;
    }

    fn holder(&self) -> watch::Receiver<Option<Holder>> {
        let mut holding = self.holding();
        let Held { by, told } = &mut *holding;
        let told = told.get_or_insert_with(|| watch::Sender::new(by.clone()));
        told.subscribe()
    }

    /// Whether the last share of the lock is gone, and its release is about to be sent.
    fn is_ending(&self) -> bool {
        let holding = self.holding();
        holding
            .by
            .as_ref()
            .is_some_and(|holder| holder.lease.is_ending())
    }

    fn retry_after(&self) -> Option<Duration> {
        let holding = self.holding();
        let status = holding.by.as_ref()?.lease.status.borrow();
        let left = status.valid_until.checked_duration_since(Instant::now())?;
        Some(left)
    }

    fn holding(&self) -> MutexGuard<'_, Held> {
        self.holding.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recorded(&self) -> MutexGuard<'_, Option<(Instant, Record)>> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_began(&self) -> MutexGuard<'_, Option<Instant>> {
        self.run_began
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn ears(&self) -> MutexGuard<'_, Option<Ears>> {
        self.ears.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut slots = self.front.slots();
        // Given up under the mutex, so that of two places dropped at once one sees itself alone.
        drop(self.slot.take());
        // The map's own: nobody else is here, and nobody comes without this mutex.
        if slots
            .get(&self.key)
            .is_some_and(|slot| Arc::strong_count(slot) == 1)
        {
            slots.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(names: &[&str]) -> LockKeys {
        names.iter().map(|name| LockKey::from(*name)).collect()
    }

    #[tokio::test]
    async fn turns_come_in_the_order_of_asking() {
        let front = Arc::new(Front::default());
        let first = front.take(&keys(&["k"])).await;
        let (one, other) = (keys(&["k"]), keys(&["k"]));
        let mut second = tokio_test::task::spawn(front.take(&one));
        let mut third = tokio_test::task::spawn(front.take(&other));
        tokio_test::assert_pending!(second.poll());
        tokio_test::assert_pending!(third.poll());
        drop(first);
        tokio_test::assert_pending!(third.poll());
        drop(tokio_test::assert_ready!(second.poll()));
        tokio_test::assert_ready!(third.poll());
    }

    #[tokio::test]
    async fn a_dropped_waiter_leaves_its_place_and_no_slot_behind() {
        let front = Arc::new(Front::default());
        let first = front.take(&keys(&["k"])).await;
        let wanted = keys(&["k"]);
        let mut second = tokio_test::task::spawn(front.take(&wanted));
        tokio_test::assert_pending!(second.poll());
        drop(first);
        // The turn was handed to the waiter, which never looked.
        drop(second);
        assert!(front.slots().is_empty());
        assert!(front.try_take(&keys(&["k"])).is_ok());
    }

    #[test]
    fn places_dropped_at_once_leave_no_slot_behind() {
        let front = Arc::new(Front::default());
        for _ in 0..2_000 {
            let places = [(), ()].map(|()| front.place(&LockKey::from("k")));
            std::thread::scope(|scope| {
                for place in places {
                    scope.spawn(move || drop(place));
                }
            });
            assert!(front.slots().is_empty());
        }
    }

    #[cfg(feature = "idempotency")]
    #[tokio::test(start_paused = true)]
    async fn keys_that_were_executed_and_replayed_leave_nothing_behind() {
        use std::time::Duration;

        use crate::lock::{NotGranted, Once, Recorded, Redlock};
        use crate::node::sha256;
        use crate::protocol::{ExecutionId, Record};

        let redlock = Redlock::in_memory(3);
        let tasks = tokio::runtime::Handle::current().metrics();
        let before = tasks.num_alive_tasks();
        let asked_for = Fingerprint::of_digest([1; 32]);
        // Some are so big that they are read by themselves.
        let (small, big) = (vec![1; 64], vec![1; Record::MAX_INLINE]);
        for number in 0..1_000_u32 {
            let once = || Once {
                key: LockKey::from(number.to_string()),
                asked_for,
                ttl: None,
                max_hold: None,
                wait: Duration::ZERO,
                waiters: None,
                intents: None,
                label: None,
            };
            let execution = redlock.once(once()).await.unwrap();
            execution.begin().await.unwrap();
            let rest = if number % 10 == 0 { &big } else { &small };
            let id = ExecutionId::from_random(u128::from(number).to_be_bytes());
            let record = Record::new(id, asked_for, sha256(rest), rest);
            let recorded = execution.record(record.clone(), Duration::from_secs(1));
            assert!(matches!(recorded.await, Recorded::Yes));
            let done = match redlock.once(once()).await {
                Err(NotGranted::Done(done)) => done,
                other => panic!("{other:?}"),
            };
            if !done.is_whole() {
                let whole = redlock.rest_of(&once().key, &done).await;
                assert_eq!(whole.unwrap(), record);
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        let inner = redlock.inner();
        assert_eq!(inner.front.slots().len(), 0);
        assert_eq!(tasks.num_alive_tasks(), before);
        assert!(redlock.drain(Duration::ZERO).await.is_clean());
    }

    #[tokio::test]
    async fn a_set_takes_all_or_nothing() {
        let front = Arc::new(Front::default());
        let y = front.try_take(&keys(&["y"])).unwrap();
        assert!(front.try_take(&keys(&["x", "y"])).is_err());
        assert!(front.try_take(&keys(&["x"])).is_ok());
        drop(y);
        assert!(front.slots().is_empty());
    }

    #[tokio::test]
    async fn a_key_is_kept_for_four_who_wait_here_and_then_others_are_told() {
        let front = Arc::new(Front::default());
        let turn = front.take(&keys(&["k"])).await;
        let wanted = keys(&["k"]);
        let mut waiting = tokio_test::task::spawn(front.take(&wanted));
        tokio_test::assert_pending!(waiting.poll());
        // Of other processes nobody is known.
        assert!(turn.tells());
        turn.rivals()[0].set_subscribers(1);
        assert_eq!(
            [(); 8].map(|()| turn.tells()),
            [false, false, false, true, false, false, false, true]
        );
        // Whoever only looks does not wait.
        drop(waiting);
        assert!(front.try_take(&wanted).is_err());
        assert!(turn.tells());
    }
}
