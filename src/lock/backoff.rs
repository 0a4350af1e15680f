//! Back-off: the waits between the attempts of one caller.
//!
//! # Implementation details
//!
//! After a refused attempt, the caller waits and makes another one, until the deadline of the caller. The length of
//! the wait depends on the refusal and the subscription:
//!
//! * *Split vote.* Several attempts got some nodes each and none a majority. The next attempt follows soon, after a
//!   random delay that doubles, even for a caller that does not wait.
//! * *Subscribed.* A majority of the nodes would publish a release. The next attempt follows the release. In between,
//!   the caller polls slowly, because a message can be lost.
//! * *Not subscribed.* The caller polls, with growing random delays.
//!
//! A release wakes all waiting processes. With [`Retry::on_release`], a few of them try soon and the others rest for
//! a moment. A caller that got its permit from a local one would always be first, because it needs no message.
//! It therefore lets remote waiters go first when it is their turn.

use std::future::{Future, poll_fn};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::lock::announcement::Announcement;
use crate::lock::error::LockError;
use crate::lock::handoff::Handoff;
use crate::lock::queue::{CapPermits, Permit, Watching};
use crate::lock::registry::DrainStage;
use crate::lock::spec::LockSpec;
use crate::lock::time::TICK;
use crate::node::random_u64;
use crate::protocol::lease::Decided;
use crate::protocol::{OnRelease, Retry};

/// The longest run of local callers that acquire a key in a row while releases are not published, in multiples of
/// the longest delay between attempts.
const RUN: u32 = 10;

/// The waits between the attempts of one caller.
pub(crate) struct Backoff {
    began: Instant,
    deadline: Instant,
    slots: CapPermits,
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
    /// Present while the caller waits for readers to leave. Dropped with this when the caller has the lock, so that
    /// readers may come again behind it.
    announcement: Option<Box<Announcement>>,
}

/// Error of an attempt, before the caller gets it as a [`LockError`].
pub(crate) enum AcquireError {
    /// Other callers held too many nodes. Another attempt may succeed.
    Contended {
        retry_after: Option<Duration>,
        /// Whether this attempt got some nodes, so that perhaps no caller has a majority.
        is_split: bool,
        /// Whether readers hold the lock at some node.
        is_shared: bool,
        /// The free slots of the key, one bit for each.
        free: u64,
    },
    /// What was executed under the key decides; no further attempt is made.
    Decided(Decided),
    /// The acquisition failed; no further attempt is made.
    Failed(LockError),
    /// The caller went away.
    Abandoned,
}

impl From<LockError> for AcquireError {
    fn from(error: LockError) -> Self {
        Self::Failed(error)
    }
}

impl AcquireError {
    /// Returns the error for the caller of a plain lock, for whom nothing else decides.
    pub(crate) fn into_lock_error(self) -> LockError {
        match self {
            Self::Contended { retry_after, .. } => LockError::Contended { retry_after },
            Self::Failed(error) => error,
            Self::Decided(_) | Self::Abandoned => LockError::Closed,
        }
    }

    /// Returns the error that callers behind this one in the queue may get too.
    pub(crate) fn for_others(&self) -> Option<LockError> {
        match self {
            Self::Contended { retry_after, .. } => Some(LockError::Contended {
                retry_after: *retry_after,
            }),
            Self::Failed(error) => Some(error.clone()),
            Self::Decided(_) | Self::Abandoned => None,
        }
    }
}

impl Backoff {
    pub(crate) fn new(deadline: Instant, slots: CapPermits, is_for_slot: bool) -> Self {
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
            is_for_slot,
            announcement: None,
        }
    }

    /// Begins an attempt, and discards the signals of earlier releases.
    pub(crate) fn begin_attempt(&mut self, now: Instant) {
        self.forget_releases();
        self.attempt_began = now;
    }

    /// Lets other processes try first if it is their turn.
    pub(crate) async fn let_remote_first<T: Send>(
        &mut self,
        spec: &LockSpec,
        permit: &Permit,
        handoff: &mut Handoff<T>,
    ) -> Result<(), AcquireError> {
        let settings = &spec.cluster.settings;
        let left = self.deadline.saturating_duration_since(self.began);
        let delay = if settings.wake_ups {
            let waiters = permit.notified();
            let Some(waiters) = waiters.filter(|_| !left.is_zero()) else {
                return Ok(());
            };
            match Retry::on_release(waiters, 0, TICK, random_u64()) {
                OnRelease::Try(delay) => delay,
                OnRelease::Rest(delay) => {
                    self.watching = permit.subscribe(&spec.cluster, &spec.names);
                    // No attempt was refused yet, so there is no release that it could have missed.
                    self.forget_releases();
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
        Box::pin(self.pause(spec, delay.min(left), handoff)).await?;
        Ok(())
    }

    /// Waits after a refused attempt, or gives up at the deadline.
    pub(crate) async fn back_off<T: Send>(
        &mut self,
        spec: &LockSpec,
        permit: &Permit,
        refusal: AcquireError,
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
        self.round_trip = self.attempt_began.elapsed().max(TICK);
        let delay = self.delay(spec, permit, retry_after, is_split)?;
        if !is_split {
            permit.set_refused(Instant::now() + delay, retry_after);
        }
        if is_shared && Instant::now() < self.deadline {
            // Until shortly after the next attempt. Should this process end, readers wait for no longer.
            let patience = delay + spec.cluster.settings.node_timeout;
            let new = || Announcement::new(&spec.cluster, &spec.names);
            self.announcement
                .get_or_insert_with(|| Box::new(new()))
                .renew(patience.min(spec.lease.ttl));
        }
        if Box::pin(self.pause(spec, delay, handoff)).await? {
            // The release woke other processes too, so the next split vote is a first one.
            self.splits = None;
        }
        Ok(())
    }

    /// Acquires the permits that a set of keys gave back while it waited.
    pub(crate) async fn queue_again<T: Send>(
        &self,
        spec: &LockSpec,
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
            () = spec.registry.reached(DrainStage::Draining) => Err(LockError::Closed.into()),
            () = permit.acquire_rest() => Ok(()),
            () = sleep_until(self.deadline) => Err(LockError::Contended { retry_after }.into()),
        }
    }

    /// Returns how long to wait before the next attempt, if there is to be one.
    fn delay(
        &mut self,
        spec: &LockSpec,
        permit: &Permit,
        retry_after: Option<Duration>,
        is_split: bool,
    ) -> Result<Duration, LockError> {
        let settings = &spec.cluster.settings;
        let now = Instant::now();
        if is_split {
            // A caller that has waited gets as much time for split votes as a new one, but only a new one past its
            // deadline.
            let last = self.deadline.max(self.began + settings.node_timeout);
            let end = last.min(self.attempt_began + settings.node_timeout);
            let (splits, end) = self.splits.get_or_insert((0, end));
            if now < *end {
                let delay = Retry::split_delay(*splits, self.round_trip, random_u64());
                *splits += 1;
                // The delays double, so the last one could exceed all earlier ones together.
                return Ok(delay.min(*end - now));
            }
        } else {
            self.splits = None;
        }
        if now >= self.deadline {
            return Err(LockError::Contended { retry_after });
        }
        permit.end_run();
        self.slots.occupy()?;
        if settings.wake_ups && self.watching.is_empty() {
            self.watching = permit.subscribe(&spec.cluster, &spec.names);
        }
        let delay = if self.is_subscribed() {
            let bound = settings.poll_interval;
            settings.retry.poll_delay(bound, retry_after, random_u64())
        } else {
            self.polls += 1;
            let polls = self.polls - 1;
            settings.retry.delay(polls, retry_after, random_u64())
        };
        Ok(delay.min(self.deadline - now))
    }

    /// Waits for `delay`, or until a release is published and this process may try. Returns true in the latter
    /// case.
    async fn pause<T: Send>(
        &mut self,
        spec: &LockSpec,
        delay: Duration,
        handoff: &mut Handoff<T>,
    ) -> Result<bool, AcquireError> {
        handoff.detach();
        tokio::select! {
            biased;
            () = handoff.closed() => Err(AcquireError::Abandoned),
            () = spec.registry.reached(DrainStage::Draining) => Err(LockError::Closed.into()),
            () = self.released() => Ok(true),
            () = sleep(delay.max(TICK)) => Ok(false),
        }
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
