//! The state that the lease task and the holders of a lock share.
//!
//! # Implementation details
//!
//! Holders count their shares and queue their extensions here. The task publishes the status of the lock and the
//! outcome of the release. Two rules keep the two sides from missing each other:
//!
//! * Zero shares is final. Dropping the last share wakes the task, and no new share can be taken.
//! * The task stores an outcome before it closes the channel of that outcome. A holder therefore checks whether the
//!   channel is closed first, and reads the outcome after that: if it is closed without an outcome, the task died.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{Notify, oneshot, watch};
use tokio::time::Instant;

use crate::lock::cluster::Settings;
use crate::lock::error::{ExtendError, ReleaseError};
use crate::lock::lost::{LeaseStatus, Lost, LostReason};
use crate::lock::queue::{HeldLease, Memo};
use crate::lock::registry::Registry;
use crate::lock::time::whole_millis;
use crate::node::Mutex;
use crate::protocol::{FencingToken, LockKeys, validity};

/// A held lock, as its holders see it.
#[derive(Debug)]
pub(crate) struct Lease {
    /// Identifies the lock service.
    pub(crate) registry: Arc<Registry>,
    pub(crate) keys: LockKeys,
    pub(crate) token: Option<FencingToken>,
    max_ttl: Duration,
    node_timeout: Duration,
    status: watch::Receiver<LeaseStatus>,
    /// What the lock is held for; see [`Memo`].
    purpose: Option<Memo>,
    /// A [`Disposal`].
    disposal: AtomicU8,
    /// The number of shares, which guards, responses and bodies hold. Zero is final.
    shares: AtomicUsize,
    commands: Mutex<CommandQueue>,
    /// Wakes the task for a command, or when the last share is dropped.
    notified: Notify,
    /// The outcome of the release, once a majority has confirmed it or cannot.
    released: OnceLock<Result<(), ReleaseError>>,
    /// Wakes the holders that wait for `released`, even if the task ends without an outcome.
    ended: Notify,
}

#[derive(Debug, Default)]
struct CommandQueue {
    extensions: VecDeque<ExtendCommand>,
    /// Whether the task accepts no more commands.
    is_closed: bool,
}

/// A holder's command to extend the lock.
#[derive(Debug)]
pub(super) struct ExtendCommand {
    pub(super) ttl: Duration,
    pub(super) done: oneshot::Sender<Result<(), ExtendError>>,
}

/// The task's end of the command queue. Dropping it closes the queue and drops the remaining commands.
#[derive(Debug)]
pub(crate) struct Commands(Arc<Lease>);

/// The treatment of the keys when their lease ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Disposal {
    /// The keys are released with the last share. If the task dies while there are shares, they stay until their
    /// ttl, because a lock is never released under its holder.
    Release,
    /// The keys are released even if the task dies while there are shares, because nothing begins under the lock
    /// without the task.
    ReleaseUnused,
    /// Like [`Release`](Self::Release), for keys under which something was executed.
    ReleaseExecuted,
    /// The keys stay until their ttl.
    Expire,
}

/// One share of a lease. The task releases the lock when the last is dropped.
///
/// Dropping it does no I/O and cannot panic: it counts down and wakes the task.
#[derive(Debug)]
pub(crate) struct Share(Arc<Lease>);

impl Lease {
    pub(super) fn new(
        settings: &Settings,
        registry: Arc<Registry>,
        keys: LockKeys,
        token: Option<FencingToken>,
        disposal: Disposal,
        purpose: Option<Memo>,
        status: watch::Receiver<LeaseStatus>,
    ) -> (Arc<Self>, Share, Commands) {
        let lease = Arc::new(Self {
            registry,
            keys,
            token,
            max_ttl: settings.max_ttl,
            node_timeout: settings.node_timeout,
            status,
            purpose,
            disposal: AtomicU8::new(disposal as u8),
            shares: AtomicUsize::new(1),
            commands: Mutex::default(),
            notified: Notify::new(),
            released: OnceLock::new(),
            ended: Notify::new(),
        });
        let (share, commands) = (Share(Arc::clone(&lease)), Commands(Arc::clone(&lease)));
        (lease, share, commands)
    }

    /// Takes one more share, unless the last is gone.
    pub(crate) fn share(self: &Arc<Self>) -> Option<Share> {
        let more = |shares| (shares > 0).then_some(shares + 1);
        let shares = &self.shares;
        shares
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, more)
            .ok()?;
        Some(Share(Arc::clone(self)))
    }

    /// Returns whether the lock has a holder.
    pub(crate) fn is_shared(&self) -> bool {
        self.shares.load(Ordering::Acquire) > 0
    }

    pub(crate) fn set_disposal(&self, disposal: Disposal) {
        self.disposal.store(disposal as u8, Ordering::Release);
    }

    pub(crate) fn disposal(&self) -> Disposal {
        const RELEASE: u8 = Disposal::Release as u8;
        const RELEASE_UNUSED: u8 = Disposal::ReleaseUnused as u8;
        const RELEASE_EXECUTED: u8 = Disposal::ReleaseExecuted as u8;
        match self.disposal.load(Ordering::Acquire) {
            RELEASE => Disposal::Release,
            RELEASE_UNUSED => Disposal::ReleaseUnused,
            RELEASE_EXECUTED => Disposal::ReleaseExecuted,
            _ => Disposal::Expire,
        }
    }

    /// Returns how much longer the lock is certainly held.
    pub(crate) fn valid_for(&self) -> Duration {
        if self.lost_reason().is_some() {
            return Duration::ZERO;
        }
        self.valid_until().saturating_duration_since(Instant::now())
    }

    /// Returns the reason if the task has reported the loss of the lock, or is gone.
    pub(crate) fn lost_reason(&self) -> Option<LostReason> {
        LeaseStatus::lost(&self.status)
    }

    pub(crate) fn lost(&self) -> Lost {
        Lost::new(self.status.clone())
    }

    /// Waits until a majority has confirmed the release of a lock whose last share is gone.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(crate) async fn released(&self) -> Result<(), ReleaseError> {
        loop {
            let ended = self.ended.notified();
            // Read before the outcome, which the task stores before it closes the queue.
            let is_closed = self.commands.lock().is_closed;
            if let Some(outcome) = self.released.get() {
                return outcome.clone();
            }
            if is_closed {
                // The task died. Even if it had begun the release, the nodes may not have received it.
                let reason = self.lost_reason();
                let reason = reason.filter(|reason| *reason != LostReason::Released);
                return Err(ReleaseError::Lost(reason.unwrap_or(LostReason::Abandoned)));
            }
            ended.await;
        }
    }

    /// Extends the lock; see [`LockGuard::extend`](crate::LockGuard::extend).
    pub(crate) async fn extend(&self, ttl: Duration) -> Result<(), ExtendError> {
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
        let lost = || {
            let reason = self.lost_reason().unwrap_or(LostReason::Abandoned);
            ExtendError::Lost(reason)
        };
        if !self.send(ExtendCommand { ttl, done }) {
            return Err(lost());
        }
        outcome.await.unwrap_or_else(|_| Err(lost()))
    }

    /// Queues a command; returns false if the task accepts no more commands.
    fn send(&self, command: ExtendCommand) -> bool {
        let mut commands = self.commands.lock();
        if commands.is_closed {
            return false;
        }
        commands.extensions.push_back(command);
        drop(commands);
        self.notified.notify_one();
        true
    }
}

impl HeldLease for Lease {
    fn is_ending(&self) -> bool {
        !self.is_shared()
    }

    fn valid_until(&self) -> Instant {
        self.status.borrow().valid_until
    }

    fn purpose(&self) -> Option<&Memo> {
        self.purpose.as_ref()
    }
}

impl Commands {
    pub(super) fn try_recv(&self) -> Option<ExtendCommand> {
        self.0.commands.lock().extensions.pop_front()
    }

    /// Waits for a command or the drop of the last share; may return without either.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(super) async fn notified(&self) {
        self.0.notified.notified().await;
    }

    /// Publishes the outcome of the release. Only the first outcome counts.
    pub(crate) fn set_released(&self, outcome: Result<(), ReleaseError>) {
        self.0.released.set(outcome).ok();
        self.0.ended.notify_waiters();
    }
}

impl Drop for Commands {
    fn drop(&mut self) {
        let mut commands = self.0.commands.lock();
        commands.is_closed = true;
        let extensions = std::mem::take(&mut commands.extensions);
        // Dropping a command wakes its sender, which locks the mutex.
        drop(commands);
        drop(extensions);
        self.0.ended.notify_waiters();
    }
}

impl Share {
    pub(crate) fn lease(&self) -> &Arc<Lease> {
        &self.0
    }

    /// Gives the share up. Returns its lease, and whether it was the last share.
    pub(crate) fn leave(self) -> (Arc<Lease>, bool) {
        let lease = Arc::clone(&self.0);
        drop(self);
        let was_last = !lease.is_shared();
        (lease, was_last)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.0.shares.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.notified.notify_one();
        }
    }
}
