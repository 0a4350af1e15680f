//! Acquiring: attempts until a majority grants the lock, and the waits between them.
//!
//! # Implementation details
//!
//! After a refused attempt, the task waits and makes another one, until the deadline of the caller. The length of
//! the wait depends on the refusal and the subscription:
//!
//! * *Split vote.* Several attempts got some nodes each and none a majority. The next attempt follows soon, after a
//!   random delay that doubles, even for a caller that does not wait.
//! * *Subscribed.* A majority of the nodes would publish a release. The next attempt follows the release. In between,
//!   the task polls slowly, because a message can be lost.
//! * *Not subscribed.* The task polls, with growing random delays.
//!
//! A release wakes all waiting processes. With [`Retry::on_release`], a few of them try soon and the others rest for
//! a moment. A caller that got its permit from a local one would always be first, because it needs no message.
//! It therefore lets remote waiters go first when it is their turn.

use std::future::{Future, poll_fn};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::lock::error::LockError;
use crate::lock::lease::announce::Announcement;
use crate::lock::lease::attempt::{AcquireError, GrantedLock};
use crate::lock::lease::handoff::Handoff;
use crate::lock::lease::task::LeaseTask;
use crate::lock::queue::{Permit, WaiterSlots, Watching};
use crate::lock::registry::DrainStage;
use crate::lock::slots::slot_at_random;
use crate::lock::time::TICK;
use crate::node::random_u64;
use crate::protocol::{OnRelease, Retry};

/// The longest run of local callers that acquire a key in a row while releases are not published, in multiples of
/// the longest delay between attempts.
const RUN: u32 = 10;

/// How often in a row a caller goes on to another free slot before it waits. The nodes name those that are free, so
/// more than one move means that other callers were faster.
const MAX_MOVES: u32 = 4;

/// The waits between the attempts of one caller.
pub(crate) struct Backoff {
    began: Instant,
    deadline: Instant,
    slots: WaiterSlots,
    /// When the current attempt began.
    attempt_began: Instant,
    /// How long the last attempt took.
    round_trip: Duration,
    /// The number of split votes in a row, and the end of the time in which the next attempt follows soon.
    splits: Option<(u32, Instant)>,
    /// The number of polls.
    polls: u32,
    /// The number of releases that were published.
    releases: u32,
    /// The watches for the releases of the keys, once subscribed.
    watching: Vec<Watching>,
    /// Whether one of several slots is enough.
    is_for_slot: bool,
}

impl LeaseTask {
    /// Acquires a plain lock.
    pub(super) async fn acquire<T: Send>(
        &mut self,
        slots: WaiterSlots,
        deadline: Instant,
        permit: &Permit,
        handoff: &mut Handoff<T>,
    ) -> Result<GrantedLock, AcquireError> {
        let backoff = &mut Backoff::new(deadline, slots);
        backoff.is_for_slot = self.terms.slot_table.is_some();
        self.let_remote_first(backoff, permit, handoff).await?;
        self.take_any_slot(permit);
        let mut moves = 0;
        let outcome = loop {
            backoff.begin_attempt();
            // Boxed, so that the future of the task has less to store in later steps.
            let refusal = match Box::pin(self.attempt(handoff.closed())).await {
                Ok(granted) => break Ok(granted),
                Err(error) => error,
            };
            if moves < MAX_MOVES && self.take_free_slot(permit, &refusal) {
                moves += 1;
                continue;
            }
            // Another caller may take the slot meanwhile.
            permit.give_number_back();
            if let Err(error) = self.back_off(backoff, refusal, permit, handoff).await {
                break Err(error);
            }
            if let Err(error) = self.queue_again(backoff, permit, handoff).await {
                break Err(error);
            }
            self.take_any_slot(permit);
            moves = 0;
        };
        self.terms.slot_table = None;
        // Readers may come again in the place of this caller.
        self.announcement = None;
        outcome
    }

    /// Chooses a slot at random, if the caller takes one of several. Where no free slot is known, callers of several
    /// processes should not all ask for the same one.
    fn take_any_slot(&mut self, permit: &Permit) {
        let Some(wanted) = self.terms.slot_table.as_ref().map(|table| table.wanted()) else {
            return;
        };
        if !self.take_slot(permit, wanted) {
            // Other callers of this process ask for all of them, perhaps with another number of slots. The nodes decide.
            self.set_slot(slot_at_random(wanted, random_u64()).unwrap_or_default());
        }
    }

    /// Chooses one of the slots that the nodes named as free when they refused another one.
    fn take_free_slot(&mut self, permit: &Permit, refusal: &AcquireError) -> bool {
        match refusal {
            AcquireError::Contended { free, .. } => self.take_slot(permit, *free),
            AcquireError::Failed(_) | AcquireError::Abandoned => false,
        }
    }

    fn take_slot(&mut self, permit: &Permit, slots: u64) -> bool {
        let Some(table) = &self.terms.slot_table else {
            return false;
        };
        let slot = permit.take_number(slots & table.wanted(), random_u64());
        if let Some(slot) = slot {
            self.set_slot(slot);
        }
        slot.is_some()
    }

    fn set_slot(&mut self, slot: usize) {
        if let Some(table) = &self.terms.slot_table {
            (self.keys, self.terms.names) = table.get(slot);
            self.slot = Some(slot);
        }
    }

    /// Lets other processes try first if it is their turn.
    pub(crate) async fn let_remote_first<T: Send>(
        &mut self,
        backoff: &mut Backoff,
        permit: &Permit,
        handoff: &mut Handoff<T>,
    ) -> Result<(), AcquireError> {
        self.places = permit.places().clone();
        let settings = &self.cluster.settings;
        let left = backoff.deadline.saturating_duration_since(backoff.began);
        let delay = if settings.wake_ups {
            let Some(waiters) = self.places.notified().filter(|_| !left.is_zero()) else {
                return Ok(());
            };
            match Retry::on_release(waiters, 0, TICK, random_u64()) {
                OnRelease::Try(delay) => delay,
                OnRelease::Rest(delay) => {
                    backoff.watching = permit.subscribe(&self.cluster, &self.terms.names);
                    // No attempt was refused yet, so there is no release that it could have missed.
                    backoff.forget_releases();
                    delay
                }
            }
        } else {
            // Whether other processes wait is not known, so they get their turn after a while.
            let is_run_over = permit.run() >= settings.retry.max().saturating_mul(RUN);
            if !is_run_over || left.is_zero() {
                return Ok(());
            }
            permit.end_run();
            // As long as the refused processes wait.
            settings.retry.delay(u32::MAX, None, random_u64())
        };
        Box::pin(self.pause(backoff, delay.min(left), handoff)).await?;
        Ok(())
    }

    /// Waits after a refused attempt, or gives up at the deadline.
    pub(crate) async fn back_off<T: Send>(
        &mut self,
        backoff: &mut Backoff,
        refusal: AcquireError,
        permit: &Permit,
        handoff: &mut Handoff<T>,
    ) -> Result<(), AcquireError> {
        let AcquireError::Contended {
            retry_after,
            is_split,
            is_shared,
            ..
        } = refusal
        else {
            return Err(refusal);
        };
        // At least a tick, the resolution of timers: shorter delays would all be equal, and zero on a paused
        // clock.
        backoff.round_trip = backoff.attempt_began.elapsed().max(TICK);
        let delay = self.delay(backoff, permit, retry_after, is_split)?;
        if !is_split {
            permit.set_refused(Instant::now() + delay, retry_after);
        }
        if is_shared && Instant::now() < backoff.deadline {
            // Until shortly after the next attempt. Should this process end, readers wait for no longer.
            let patience = delay + self.cluster.settings.node_timeout;
            let new = || Announcement::new(&self.cluster, &self.terms.names);
            self.announcement
                .get_or_insert_with(|| Box::new(new()))
                .renew(patience.min(self.terms.ttl));
        }
        if Box::pin(self.pause(backoff, delay, handoff)).await? {
            // The release woke other processes too, so the next split vote is a first one.
            backoff.splits = None;
        }
        Ok(())
    }

    /// Acquires the permits that a set of keys gave back while it waited.
    async fn queue_again<T: Send>(
        &mut self,
        backoff: &Backoff,
        permit: &Permit,
        handoff: &mut Handoff<T>,
    ) -> Result<(), AcquireError> {
        if permit.try_acquire_rest().is_none() {
            return Ok(());
        }
        let retry_after = None;
        tokio::select! {
            biased;
            () = handoff.closed() => Err(AcquireError::Abandoned),
            () = self.ticket.registry().reached(DrainStage::Draining) => Err(LockError::Closed.into()),
            () = permit.acquire_rest() => Ok(()),
            () = sleep_until(backoff.deadline) => Err(LockError::Contended { retry_after }.into()),
        }
    }

    /// Returns how long to wait before the next attempt, if there is to be one.
    fn delay(
        &self,
        backoff: &mut Backoff,
        permit: &Permit,
        retry_after: Option<Duration>,
        is_split: bool,
    ) -> Result<Duration, LockError> {
        let settings = &self.cluster.settings;
        let now = Instant::now();
        if is_split {
            // A caller that has waited gets as much time for split votes as a new one, but only a new one past its
            // deadline.
            let last = backoff.deadline.max(backoff.began + settings.node_timeout);
            let end = last.min(backoff.attempt_began + settings.node_timeout);
            let (splits, end) = backoff.splits.get_or_insert((0, end));
            if now < *end {
                let delay = Retry::split_delay(*splits, backoff.round_trip, random_u64());
                *splits += 1;
                // The delays double, so the last one could exceed all earlier ones together.
                return Ok(delay.min(*end - now));
            }
        } else {
            backoff.splits = None;
        }
        if now >= backoff.deadline {
            return Err(LockError::Contended { retry_after });
        }
        permit.end_run();
        backoff.slots.occupy()?;
        if settings.wake_ups && backoff.watching.is_empty() {
            backoff.watching = permit.subscribe(&self.cluster, &self.terms.names);
        }
        let delay = if backoff.is_subscribed() {
            let bound = settings.poll_interval;
            settings.retry.poll_delay(bound, retry_after, random_u64())
        } else {
            backoff.polls += 1;
            let polls = backoff.polls - 1;
            settings.retry.delay(polls, retry_after, random_u64())
        };
        Ok(delay.min(backoff.deadline - now))
    }

    /// Waits for `delay`, or until a release is published and this process may try. Returns true in the latter
    /// case.
    async fn pause<T: Send>(
        &mut self,
        backoff: &mut Backoff,
        delay: Duration,
        handoff: &mut Handoff<T>,
    ) -> Result<bool, AcquireError> {
        handoff.detach();
        tokio::select! {
            biased;
            () = handoff.closed() => Err(AcquireError::Abandoned),
            () = self.ticket.registry().reached(DrainStage::Draining) => Err(LockError::Closed.into()),
            () = backoff.released() => Ok(true),
            () = sleep(delay.max(TICK)) => Ok(false),
        }
    }
}

impl Backoff {
    pub(crate) fn new(deadline: Instant, slots: WaiterSlots) -> Self {
        let began = Instant::now();
        Self {
            began,
            deadline,
            slots,
            attempt_began: began,
            round_trip: TICK,
            splits: None,
            polls: 0,
            releases: 0,
            watching: Vec::new(),
            is_for_slot: false,
        }
    }

    /// Begins an attempt, and discards the signals of earlier releases.
    pub(crate) fn begin_attempt(&mut self) {
        self.forget_releases();
        self.attempt_began = Instant::now();
    }

    fn forget_releases(&mut self) {
        for watching in &mut self.watching {
            watching.watch.reset();
        }
    }

    /// Returns how many other callers of this process wait for the same slots. Of them, a released one serves one.
    fn local_rivals(&self) -> usize {
        let watching = self.watching.iter().filter(|_| self.is_for_slot);
        watching.map(Watching::others).max().unwrap_or_default()
    }

    /// Returns whether the current attempt began before the deadline.
    pub(crate) fn is_in_time(&self) -> bool {
        self.attempt_began < self.deadline
    }

    /// Returns whether this process is subscribed to the releases of all keys.
    fn is_subscribed(&self) -> bool {
        let mut watching = self.watching.iter();
        !self.watching.is_empty() && watching.all(|watching| watching.watch.is_subscribed())
    }

    /// Waits until a release is published and this process may try.
    async fn released(&mut self) {
        let mut rest = Duration::MAX;
        loop {
            let Ok(subscribers) = timeout(rest, first_release(&mut self.watching)).await else {
                return;
            };
            self.releases = self.releases.saturating_add(1);
            let waiters = subscribers + self.local_rivals();
            match Retry::on_release(waiters, self.releases, self.round_trip, random_u64()) {
                OnRelease::Try(Duration::ZERO) => return,
                OnRelease::Try(delay) => return sleep(delay).await,
                OnRelease::Rest(delay) => rest = delay,
            }
        }
    }
}

/// Waits until the release of one of the keys is published, and returns the number of its subscribers.
async fn first_release(watching: &mut [Watching]) -> usize {
    let watching = watching.iter_mut();
    let released = watching.map(|watching| Box::pin(watching.watch.released()));
    let mut released: Vec<_> = released.collect();
    poll_fn(|context| {
        let polled = released.iter_mut().map(|next| next.as_mut().poll(context));
        polled.fold(
            Poll::Pending,
            |first, next| if first.is_ready() { first } else { next },
        )
    })
    .await
}
