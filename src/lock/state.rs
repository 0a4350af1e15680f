//! The state that the lease task and the holders of a lock share.
//!
//! # Implementation details
//!
//! Holders count their shares and queue their commands here. The task publishes how the lock stands and the
//! outcome of the release. Two rules keep the two sides from missing each other:
//!
//! * From the grant on, zero shares is final. Dropping the last share wakes the task, and no new share can be taken.
//! * The lease is closed once its release has an outcome. The task stores it as its last act, also when it dies.
//!
//! One mutex, and one [`Notify`] per side, carry all of this. A channel for each kind of message would cost more than
//! the rest of the lease, and most locks end with no message other than the outcome of the release.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use crate::lock::cluster::Cluster;
use crate::lock::error::{ExtendError, Lost, LostReason, ReleaseError};
use crate::lock::registry::{HeldLock, Listed, Registry};
use crate::lock::rest::Rest;
use crate::node::sync::Notify;
use crate::node::sync::atomic::{AtomicUsize, Ordering};
use crate::node::telemetry::LockLabels;
use crate::node::{Mutex, telemetry, wall_clock};
use crate::protocol::lease::{Access, Effect, Event, Input, LeaseSpec, Stored};
use crate::protocol::validity::whole_millis;
use crate::protocol::{FencingToken, Holder, KeyNames, LockKeys, validity};

/// A lock as its holders see it. It has none before it is granted.
#[derive(Debug)]
pub(crate) struct LockState {
    pub(crate) spec: Arc<LockSpec>,
    /// Who holds it, as the nodes are told.
    pub(crate) holder: Option<Holder>,
    /// The number of shares, which guards, responses and bodies hold.
    shares: AtomicUsize,
    state: Mutex<LeaseState>,
    /// Wakes the task for a command, or when the last share is dropped.
    notified: Notify,
    /// Wakes the holders when the lock is lost, when its release has an outcome, and when the task closes the lease.
    changed: Notify,
}

#[derive(Debug)]
struct LeaseState {
    valid_until: Instant,
    lost: Option<LostReason>,
    token: Option<FencingToken>,
    /// When the caller got its guard, so that its work may have begun; if a time counts from then.
    delivered_at: Option<Instant>,
    /// What the holder of an execution has said about its work.
    effect: Effect,
    commands: VecDeque<Box<HolderCommand>>,
    /// The outcome of the release, once the task is done with the lease and takes no more commands.
    released: Option<Result<(), ReleaseError>>,
    /// The task, while it rests.
    rest: Option<Rest>,
}

/// A holder's command: an input for the lease, and where the event that answers it goes.
#[derive(Debug)]
pub(crate) struct HolderCommand {
    pub(crate) input: Input,
    pub(crate) done: oneshot::Sender<CommandOutcome>,
}

/// The answer to a command; an event only where an execution asked.
pub(crate) type CommandOutcome = Result<Option<Event>, ExtendError>;

impl LockState {
    /// Creates the state of a lock that is not granted yet.
    pub(crate) fn new(spec: &Arc<LockSpec>, now: Instant) -> Arc<Self> {
        Arc::new(Self {
            holder: spec.holder(),
            spec: Arc::clone(spec),
            shares: AtomicUsize::new(0),
            state: Mutex::new(LeaseState {
                valid_until: now,
                lost: None,
                token: None,
                delivered_at: None,
                effect: Effect::default(),
                commands: VecDeque::new(),
                released: None,
                rest: None,
            }),
            notified: Notify::new(),
            changed: Notify::new(),
        })
    }

    /// Returns the fencing token of the lock.
    pub(crate) fn token(&self) -> Option<FencingToken> {
        self.state.lock().token
    }

    /// Takes one more share, unless the last is gone. Returns whether it has. [`leave`](Self::leave) gives it back.
    pub(crate) fn share(&self) -> bool {
        // A compare-and-swap and no plain add: zero is final, because the task may have begun the release.
        let more = |shares| (shares > 0).then_some(shares + 1);
        let shares = &self.shares;
        let shared = shares.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        shared.is_ok()
    }

    /// Gives a share up. The task releases the lock when the last is gone.
    ///
    /// Does no I/O and cannot panic: counts down and wakes the task.
    pub(crate) fn leave(&self) {
        // Release, for `is_shared`. The wake-up comes last: a task that wakes must find the share gone.
        if self.shares.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.wake();
        }
    }

    /// Ends the rest of the task.
    pub(crate) fn spawn(&self, rest: Rest) {
        rest.spawn(&self.spec.cluster.home);
    }

    /// Takes the task if it rests and this runtime may poll it.
    pub(crate) fn take_rest_here(&self) -> Option<Rest> {
        let is_elsewhere = self.spec.cluster.home.is_elsewhere();
        (!is_elsewhere).then(|| self.take_rest())?
    }

    /// Returns whether the lock has a holder.
    pub(crate) fn is_shared(&self) -> bool {
        // Acquire, with the release of each drop: what the holders did, such as their last command, is seen by the task that
        // finds them gone.
        self.shares.load(Ordering::Acquire) > 0
    }

    /// Notes what the holder of an execution says about its work.
    pub(crate) fn set_effect(&self, effect: Effect) {
        self.state.lock().effect = effect;
    }

    pub(crate) fn effect(&self) -> Effect {
        self.state.lock().effect
    }

    /// Notes that the caller gets its guard now. The times that `max_hold` and `hold_at_least` bound begin.
    pub(crate) fn set_delivered(&self) {
        let spec = &self.spec.lease;
        if spec.is_partial || spec.hold_at_least.is_some() {
            self.state.lock().delivered_at = Some(Instant::now());
        }
    }

    /// Returns when the caller got its guard, if it has and a time counts from then, and whether the lock was revoked.
    pub(crate) fn done_by_holders(&self) -> (Option<Instant>, bool) {
        let state = self.state.lock();
        let is_revoked = state.lost == Some(LostReason::Revoked);
        (state.delivered_at, is_revoked)
    }

    /// Returns how much longer the lock is certainly held.
    pub(crate) fn valid_for(&self) -> Duration {
        let state = self.state.lock();
        match state.lost() {
            Some(_) => Duration::ZERO,
            None => state.valid_until.saturating_duration_since(Instant::now()),
        }
    }

    /// Returns why the lock is lost: as reported, or by the clock, because a report is late if the thread of the task was
    /// busy or the process was stopped.
    pub(crate) fn lost_by_now(&self) -> Option<LostReason> {
        let is_lost = self.valid_for().is_zero();
        is_lost.then(|| self.lost_reason().unwrap_or(LostReason::Expired))
    }

    /// Returns the reason if the task has reported the loss of the lock, or is gone.
    ///
    /// Does not compare the end of the validity with the clock: the task reports it in time, and holders that need
    /// a comparison make it.
    pub(crate) fn lost_reason(&self) -> Option<LostReason> {
        self.state.lock().lost()
    }

    pub(crate) fn lost(self: &Arc<Self>) -> Lost {
        let lease = Arc::clone(self);
        Lost::new(async move {
            loop {
                // Created before the check, so that no notification is missed.
                let changed = lease.changed.notified();
                if let Some(reason) = lease.lost_reason() {
                    return reason;
                }
                if !lease.spec.cluster.home.is_elsewhere() {
                    changed.await;
                    continue;
                }
                // The task reports the loss before, unless its home is not run.
                drop(timeout_at(lease.valid_until(), changed).await);
                if lease.valid_until() <= Instant::now() {
                    return lease.lost_reason().unwrap_or(LostReason::Expired);
                }
            }
        })
    }

    /// Waits until a majority has confirmed the release of a lock whose last share is gone.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(crate) async fn released(&self) -> Result<(), ReleaseError> {
        let released = self.spec.cluster.home.report(async {
            loop {
                // Created before the check, so that no notification is missed.
                let changed = self.changed.notified();
                if let Some(outcome) = &self.state.lock().released {
                    return outcome.clone();
                }
                changed.await;
            }
        });
        let not_run = || {
            let cluster = &self.spec.cluster;
            Err(ReleaseError::Unavailable {
                reached: 0,
                needed: cluster.quorum.majority(),
                nodes: cluster.all_not_run(),
            })
        };
        released.await.unwrap_or_else(not_run)
    }

    /// Extends the lock; see [`LockGuard::extend`](crate::LockGuard::extend).
    pub(crate) async fn extend(self: &Arc<Self>, ttl: Duration) -> Result<(), ExtendError> {
        let settings = &self.spec.cluster.settings;
        let (asked, max) = (ttl, settings.max_ttl());
        if asked > max {
            return Err(ExtendError::TtlTooLong { asked, max });
        }
        let ttl = whole_millis(asked);
        if ttl <= settings.node_timeout || validity::lifetime(ttl).is_none() {
            return Err(ExtendError::TtlTooShort { asked });
        }
        let (ttl, token) = (Some(ttl), None);
        self.command(Input::Extend { ttl, token }).await.map(drop)
    }

    /// Raises the token, and the fences on a majority of the nodes.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, some fences may be raised.
    pub(crate) async fn raise(self: &Arc<Self>, token: FencingToken) -> Result<(), ExtendError> {
        let (ttl, token) = (None, Some(token.as_u64()));
        self.command(Input::Extend { ttl, token }).await.map(drop)
    }

    /// Sends a command, at once, and returns its outcome.
    pub(crate) fn command(
        self: &Arc<Self>,
        input: Input,
    ) -> impl Future<Output = CommandOutcome> + Send + use<> {
        let lease = Arc::clone(self);
        let (done, outcome) = oneshot::channel();
        let command = Box::new(HolderCommand { input, done });
        let mut state = self.state.lock();
        // Otherwise its drop says that the task takes no more commands.
        if state.released.is_none() {
            state.commands.push_back(command);
            drop(state);
            self.wake();
        }
        async move {
            let cluster = &lease.spec.cluster;
            match cluster.home.report(outcome).await {
                Some(Ok(outcome)) => outcome,
                Some(Err(_)) => {
                    let reason = lease.lost_reason();
                    Err(ExtendError::Lost(reason.unwrap_or(LostReason::Abandoned)))
                }
                None => Err(ExtendError::Unavailable {
                    reached: 0,
                    needed: cluster.quorum.majority(),
                    nodes: cluster.all_not_run(),
                }),
            }
        }
    }
}

/// What the waiting callers of its keys see.
impl LockState {
    /// Returns whether the last share is gone or the lock is lost, so that the next caller is about to be admitted.
    pub(crate) fn is_ending(&self) -> bool {
        // The task of a lost lock gives its permit back at once, although there are shares.
        !self.is_shared() || self.lost_reason().is_some()
    }

    /// Returns the end of the validity.
    pub(crate) fn valid_until(&self) -> Instant {
        self.state.lock().valid_until
    }

    /// Declares the lock lost, because it was revoked.
    pub(crate) fn revoke(&self) {
        if self.lose(LostReason::Revoked).is_none() {
            self.report_loss(LostReason::Revoked);
            // The task gives its permit back.
            self.wake();
        }
    }
}

impl Listed for LockState {
    fn keys(&self) -> &LockKeys {
        &self.spec.keys
    }

    fn show(&self, since: Instant) -> Option<HeldLock> {
        let (spec, valid_for) = (&self.spec, self.valid_for());
        (self.is_shared() && !valid_for.is_zero()).then(|| HeldLock {
            keys: spec.keys.clone(),
            is_shared: spec.lease.access == Access::Shared,
            slot: spec.slot,
            fencing_token: self.token(),
            held_for: since.elapsed(),
            valid_for,
            resource: spec.labels.resource,
            holder: self.holder.clone(),
        })
    }

    fn take_rest(&self) -> Option<Rest> {
        self.state.lock().rest.take()
    }

    fn wake(&self) {
        match self.take_rest() {
            Some(rest) => self.spawn(rest),
            None => self.notified.notify_one(),
        }
    }
}

impl LeaseState {
    fn lost(&self) -> Option<LostReason> {
        let is_closed = self.released.is_some();
        let abandoned = is_closed.then_some(LostReason::Abandoned);
        self.lost.or(abandoned)
    }
}

/// The release of a lock that rested until its last share was gone, up to its outcome.
///
/// # Cancel safety
///
/// May be dropped at any point; the release goes on.
pub(crate) struct Releasing(pub(super) Arc<LockState>, pub(super) Option<Rest>);

impl Future for Releasing {
    type Output = Result<(), ReleaseError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.1.take_if(|rest| rest.has_ended(context));
        let outcome = self.0.state.lock().released.clone();
        outcome.map_or(Poll::Pending, Poll::Ready)
    }
}

impl Drop for Releasing {
    fn drop(&mut self) {
        if let Some(rest) = self.1.take() {
            self.0.spawn(rest);
        }
    }
}

/// The task's side.
impl LockState {
    /// Makes the lock one that is held, with one share, which is that of the caller.
    pub(crate) fn grant(&self, token: Option<FencingToken>, valid_until: Instant) {
        let mut state = self.state.lock();
        (state.token, state.valid_until) = (token, valid_until);
        drop(state);
        // Release, with the acquire of those who look for holders. Until now, the task alone had the lock.
        self.shares.store(1, Ordering::Release);
    }

    /// Leaves the task at rest. Returns it if it has something to do already.
    pub(crate) fn set_rest(&self, rest: Rest) -> Option<Rest> {
        let mut state = self.state.lock();
        if state.lost.is_some() {
            return Some(rest);
        }
        state.rest.replace(rest)
    }

    /// Prolongs the validity, and sets the token, which may be higher than before; never moves the end back.
    pub(crate) fn prolong(&self, valid_until: Instant, token: Option<FencingToken>) {
        let mut state = self.state.lock();
        state.valid_until = state.valid_until.max(valid_until);
        state.token = token;
    }

    /// Publishes that the lock is lost. Returns the reason that was published before, which stays.
    pub(crate) fn lose(&self, reason: LostReason) -> Option<LostReason> {
        let mut state = self.state.lock();
        let before = state.lost;
        state.lost = before.or(Some(reason));
        drop(state);
        self.changed.notify_waiters();
        before
    }

    /// Ends the lock for its holders, because its release begins. Returns why it was lost before, if it was.
    pub(crate) fn end(&self, now: Instant) -> Option<LostReason> {
        let mut state = self.state.lock();
        // Before its task has noticed.
        let has_expired = state.lost.is_none() && state.valid_until <= now;
        let before = match has_expired {
            true => Some(LostReason::Expired),
            false => state.lost,
        };
        state.lost = before.or(Some(LostReason::Released));
        drop(state);
        self.changed.notify_waiters();
        if has_expired {
            self.report_loss(LostReason::Expired);
        }
        before
    }

    /// Counts and logs that the lock was lost while it was held.
    pub(crate) fn report_loss(&self, reason: LostReason) {
        telemetry::lost(reason.name());
        let resource = self.spec.labels.resource;
        tracing::warn!(resource, %reason, "lock lost while it was held");
    }

    /// Returns the next command of a holder.
    pub(crate) fn try_recv(&self) -> Option<Box<HolderCommand>> {
        self.state.lock().commands.pop_front()
    }

    /// Waits for a command or the drop of the last share; may return without either.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(crate) async fn notified(&self) {
        self.notified.notified().await;
    }

    /// Publishes the outcome of the release, as the last act of the task on the lease; `None` if the task dies. Commands that
    /// remain are dropped.
    pub(crate) fn close(&self, released: Option<Result<(), ReleaseError>>) {
        let mut state = self.state.lock();
        if state.released.is_some() {
            return;
        }
        // Even if a task that dies had begun the release, the nodes may not have received it.
        let lost = state.lost;
        let lost = lost.filter(|reason| *reason != LostReason::Released);
        let died = || Err(ReleaseError::Lost(lost.unwrap_or(LostReason::Abandoned)));
        state.released = Some(released.unwrap_or_else(died));
        let commands = std::mem::take(&mut state.commands);
        // Dropping a command wakes its sender, which locks the mutex.
        drop(state);
        drop(commands);
        self.changed.notify_waiters();
    }
}

#[cfg(test)]
pub(crate) mod tests;

/// A lock in one group: all that is known before the nodes are asked. The task, its leases and the holders share it.
#[derive(Clone)]
pub(crate) struct LockSpec {
    pub(crate) cluster: Arc<Cluster>,
    /// Identifies the lock service.
    pub(crate) registry: Arc<Registry>,
    pub(crate) keys: LockKeys,
    pub(crate) names: Arc<[KeyNames]>,
    /// The number of the slot, if it is one of several.
    pub(crate) slot: Option<usize>,
    /// What each attempt asks for. Each proposes this number, or else one that it takes from the clock.
    pub(crate) lease: LeaseSpec,
    /// Whether the lock comes with a fencing token.
    pub(crate) is_fenced: bool,
    /// Present if the lease may ask for a read.
    pub(crate) reader: Option<Arc<dyn Fn(Stored) -> Reading + Send + Sync>>,
    /// Its labels in spans and metrics.
    pub(crate) labels: LockLabels,
    /// What its holder says of it.
    pub(crate) note: Option<Arc<str>>,
}

/// A read of what a lease asks for, which ends with the input that the lease waits for.
pub(crate) type Reading = Pin<Box<dyn Future<Output = Input> + Send + Sync>>;

// Without the services that it belongs to.
opaque_debug! { LockSpec [keys = keys, lease = lease] }

impl LockSpec {
    /// Creates the spec of a lock that its caller holds alone, with the settings of the service.
    pub(crate) fn new(
        cluster: &Arc<Cluster>,
        registry: &Arc<Registry>,
        keys: &LockKeys,
        names: Arc<[KeyNames]>,
        ttl: Duration,
        labels: LockLabels,
    ) -> Self {
        let settings = &cluster.settings;
        Self {
            cluster: Arc::clone(cluster),
            registry: Arc::clone(registry),
            keys: keys.clone(),
            names,
            slot: None,
            lease: LeaseSpec {
                ttl,
                retention: settings.fence_retention(),
                node_timeout: settings.node_timeout,
                renews: settings.renew,
                ..LeaseSpec::default()
            },
            is_fenced: settings.fencing,
            reader: None,
            labels,
            note: None,
        }
    }

    /// Returns who would hold a lock from now on, if the process or the lock has a word for it.
    fn holder(&self) -> Option<Holder> {
        let label = self.cluster.settings.holder.as_deref();
        let note = self.note.as_deref();
        (label.is_some() || note.is_some()).then(|| Holder::new(label, note, wall_clock()))
    }

    /// Makes it one of several leases of its caller, of which this is the highest token so far. The times of all of them begin
    /// when the caller has them.
    pub(crate) fn join(&mut self, token: Option<FencingToken>) {
        self.lease.is_partial = true;
        // That of the other groups, so that all have the same token unless a fence is higher here.
        self.lease.proposal = token.map(FencingToken::as_u64);
    }
}
