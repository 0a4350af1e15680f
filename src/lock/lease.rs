//! The lease: what the lease task and the holders of a lock have in common.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot, watch};
use tokio::time::Instant;

use crate::lock::error::{ExtendError, ReleaseError};
use crate::lock::lost::{Lost, LostReason};
use crate::lock::once::{NotBegun, Recorded};
use crate::lock::redlock::Inner;
use crate::lock::registry::Registry;
use crate::lock::settings::whole_millis;
use crate::protocol::{FencingToken, LockKeys, Record, validity};

/// One held lock, as its holders see it.
#[derive(Debug)]
pub(super) struct Lease {
    /// The lock service that it is a lock of.
    pub(super) service: Arc<Registry>,
    pub(super) keys: LockKeys,
    pub(super) token: Option<FencingToken>,
    pub(super) max_ttl: Duration,
    pub(super) node_timeout: Duration,
    pub(super) status: watch::Receiver<Status>,
    /// The [`Effect`] of the execution that the lock is for.
    effect: AtomicU8,
    /// Guards, responses and bodies that hold the lock. Zero is final.
    shares: AtomicUsize,
    wishes: Mutex<Wishes>,
    /// Wakes the lease task when there is a wish, or the last share is gone.
    stirred: Notify,
    /// How the release went, once a majority has answered it or cannot.
    released: OnceLock<Result<(), ReleaseError>>,
    /// Wakes those who wait for that, also if the task is gone without it.
    ended: Notify,
}

/// What holders wish that the task has not heard of.
#[derive(Debug, Default)]
struct Wishes {
    waiting: VecDeque<Wish>,
    /// Nobody will hear of any more.
    closed: bool,
}

/// The task's ear for wishes. Dropped, those that are left are dropped too, unheard.
#[derive(Debug)]
pub(super) struct Wished(Arc<Lease>);

/// What the lease task says about the lock.
#[derive(Debug, Clone)]
pub(super) struct Status {
    pub(super) valid_until: Instant,
    pub(super) lost: Option<LostReason>,
}

/// What a holder asks of the lease task.
#[derive(Debug)]
pub(super) enum Wish {
    Extend(Extension),
    Begin(Beginning),
    Record(Recording),
}

/// What an execution may have done under its lock, which decides how the lock ends.
///
/// Once an execution has begun, its lock is never released without a record, unless it is known that it
/// had no effect (PROTOCOL, section 2.3.7): otherwise a retry would run beside it, or after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Effect {
    /// Nothing was executed: the lock and the intent are given back.
    None,
    /// Something may have been executed: without a record, the lock stays until its ttl.
    Possible,
    /// The user stated that what was executed had no effect: the lock is given back, the intent stays.
    Denied,
}

/// A holder's wish to begin an execution.
pub(super) type Beginning = oneshot::Sender<Result<(), NotBegun>>;

/// A holder's wish to leave a record, and with it the lock.
#[derive(Debug)]
pub(super) struct Recording {
    pub(super) record: Record,
    pub(super) retention: Duration,
    pub(super) done: oneshot::Sender<Recorded>,
}

/// A holder's wish for a longer validity.
#[derive(Debug)]
pub(super) struct Extension {
    pub(super) ttl: Duration,
    pub(super) done: oneshot::Sender<Result<(), ExtendError>>,
}

/// One share of a lease; the lease task releases the lock when the last is dropped.
///
/// Dropping it does no I/O and cannot panic: it counts down and wakes the task.
#[derive(Debug)]
pub(super) struct Share(Arc<Lease>);

impl Lease {
    pub(super) fn new(
        inner: &Inner,
        keys: LockKeys,
        token: Option<FencingToken>,
        status: watch::Receiver<Status>,
    ) -> (Arc<Self>, Share, Wished) {
        let lease = Arc::new(Self {
            service: Arc::clone(&inner.registry),
            keys,
            token,
            max_ttl: inner.settings.max_ttl,
            node_timeout: inner.settings.node_timeout,
            status,
            effect: AtomicU8::new(Effect::None as u8),
            shares: AtomicUsize::new(1),
            wishes: Mutex::default(),
            stirred: Notify::new(),
            released: OnceLock::new(),
            ended: Notify::new(),
        });
        let (share, wished) = (Share(Arc::clone(&lease)), Wished(Arc::clone(&lease)));
        (lease, share, wished)
    }

    /// Asks something of the task; false if that is gone, or releases already.
    pub(super) fn wish(&self, wish: Wish) -> bool {
        let mut wishes = self.wishes();
        if wishes.closed {
            return false;
        }
        wishes.waiting.push_back(wish);
        drop(wishes);
        self.stirred.notify_one();
        true
    }

    fn wishes(&self) -> MutexGuard<'_, Wishes> {
        self.wishes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one more share, unless the last is gone.
    pub(super) fn share(self: &Arc<Self>) -> Option<Share> {
        self.shares
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |shares| {
                (shares > 0).then_some(shares + 1)
            })
            .ok()?;
        Some(Share(Arc::clone(self)))
    }

    /// Notes what the execution that the lock is for may have done.
    pub(super) fn set_effect(&self, effect: Effect) {
        self.effect.store(effect as u8, Ordering::Release);
    }

    pub(super) fn effect(&self) -> Effect {
        match self.effect.load(Ordering::Acquire) {
            effect if effect == Effect::None as u8 => Effect::None,
            effect if effect == Effect::Denied as u8 => Effect::Denied,
            _ => Effect::Possible,
        }
    }

    pub(super) fn is_shared(&self) -> bool {
        self.shares.load(Ordering::Acquire) > 0
    }

    /// Whether the last share is gone, and the task is about to give the lock back.
    pub(super) fn is_ending(&self) -> bool {
        !self.is_shared()
    }

    pub(super) fn valid_for(&self) -> Duration {
        if Status::over(&self.status).is_some() {
            return Duration::ZERO;
        }
        let valid_until = self.status.borrow().valid_until;
        valid_until.saturating_duration_since(Instant::now())
    }

    pub(super) fn lost(&self) -> Lost {
        Lost::new(self.status.clone())
    }

    /// Waits until a majority has released a lock whose last share is gone.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(super) async fn released(&self) -> Result<(), ReleaseError> {
        loop {
            let ended = self.ended.notified();
            // In this order: a task that is gone has told before what there was to tell.
            let task_is_gone = self.wishes().closed;
            if let Some(outcome) = self.released.get() {
                return outcome.clone();
            }
            if task_is_gone {
                // It died. That it had begun the release says nothing about the nodes.
                let reason = Status::over(&self.status);
                let reason = reason.filter(|reason| *reason != LostReason::Released);
                return Err(ReleaseError::Lost(reason.unwrap_or(LostReason::Abandoned)));
            }
            ended.await;
        }
    }

    pub(super) async fn extend(&self, ttl: Duration) -> Result<(), ExtendError> {
        if ttl > self.max_ttl {
            return Err(ExtendError::TtlTooLong {
                asked: ttl,
                max: self.max_ttl,
            });
        }
        let asked = ttl;
        let ttl = whole_millis(asked);
        if ttl <= self.node_timeout || validity::lifetime(ttl).is_none() {
            return Err(ExtendError::TtlTooShort { asked });
        }
        let (done, outcome) = oneshot::channel();
        let gone = || {
            let reason = Status::over(&self.status).unwrap_or(LostReason::Abandoned);
            ExtendError::Lost(reason)
        };
        if !self.wish(Wish::Extend(Extension { ttl, done })) {
            return Err(gone());
        }
        outcome.await.unwrap_or_else(|_| Err(gone()))
    }
}

impl Wished {
    pub(super) fn next(&self) -> Option<Wish> {
        self.0.wishes().waiting.pop_front()
    }

    /// Tells those who wait for the release how it went. Only the first word counts.
    pub(super) fn tell_released(&self, outcome: Result<(), ReleaseError>) {
        self.0.released.set(outcome).ok();
        self.0.ended.notify_waiters();
    }

    /// Waits until there may be a wish, or the last share may be gone.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(super) async fn stirred(&self) {
        self.0.stirred.notified().await;
    }
}

impl Drop for Wished {
    fn drop(&mut self) {
        let mut wishes = self.0.wishes();
        wishes.closed = true;
        let unheard = std::mem::take(&mut wishes.waiting);
        // Whoever waits for one is told.
        drop(wishes);
        drop(unheard);
        self.0.ended.notify_waiters();
    }
}

impl Wish {
    pub(super) fn recording(self) -> Option<Recording> {
        match self {
            Self::Record(recording) => Some(recording),
            Self::Extend(_) | Self::Begin(_) => None,
        }
    }
}

impl Status {
    /// Returns why the lock is not held any more, if it is not. The end of the validity by the
    /// clock is not asked for here: the lease task reports that in time, and holders compare.
    pub(super) fn over(status: &watch::Receiver<Self>) -> Option<LostReason> {
        // In this order: a task that is gone has written its last word before.
        let task_is_gone = status.has_changed().is_err();
        let now = status.borrow();
        now.lost
            .or_else(|| task_is_gone.then_some(LostReason::Abandoned))
    }
}

impl Share {
    pub(super) fn lease(&self) -> &Arc<Lease> {
        &self.0
    }

    /// Gives the share back and returns whether it was the last.
    pub(super) fn leave(self) -> bool {
        let lease = Arc::clone(&self.0);
        drop(self);
        !lease.is_shared()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.0.shares.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.stirred.notify_one();
        }
    }
}
