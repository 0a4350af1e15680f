//! Requests for locks, and the acquisition: in one group of nodes, or in several one after the other.
//!
//! # Several groups
//!
//! The keys of one lock may belong to several groups, and a key that [moves](crate::RedlockBuilder::moving_to) belongs to
//! two. The caller then has a lease in each. It acquires them one after the other, and the guard gets all of them or none:
//! the shares of the leases that it has are dropped with its future.
//!
//! *Circles.* Callers that wait for each other in a circle would all wait in vain. Each caller therefore waits only for
//! leases that come after all those that it holds, in the order of the names of the groups and then of the keys. A key
//! that moves may be against this order, because it is locked in its old group first. There the caller tries once; if it is
//! refused, it gives up what it holds, and begins again later. It also begins again if it loses a lease while it waits
//! for others.
//!
//! *Slots.* A slot has the same number in all groups, because callers choose other things by it. If the slot that the caller
//! has is taken in a later group, it tries those that it has not tried.
//!
//! *Tokens.* All leases of a lock get one token. Each later one proposes the token of those before it. If a fence is
//! higher there, the earlier ones are raised. So every group of a key remembers a fence that is not lower than the tokens of
//! all holders, whichever groups the next holder asks.

use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::lock::driver::LockTask;
use crate::lock::error::{Denied, LockError, Lost};
use crate::lock::guard::LockGuard;
use crate::lock::layout::{Core, Group, GroupKeys};
use crate::lock::options::{LockOptions, kind_setters, option_setters};
use crate::lock::queue::{Permit, Wait, WaiterCap};
use crate::lock::registry::DrainStage;
use crate::lock::slots::{SlotTable, all_slots};
use crate::lock::span::LockSpan;
use crate::lock::state::LockSpec;
use crate::node::{NEVER, after, random_u64, sha256};
use crate::protocol::lease::Access;
use crate::protocol::{FencingToken, KeyNames, LockKeys, retry};

option_setters!(
    LockRequest.options,
    ttl: "Default: the builder's ttl.",
    wait: "Default: the builder's for [`lock`](crate::Redlock::lock), zero for \
[`try_lock`](crate::Redlock::try_lock).\n\nThe wait is for other holders only: an attempt waits for its nodes up to \
the node timeout.",
    max_hold: "Default: the builder's."
);

kind_setters!(LockRequest.options);

/// Request for a lock; await it to acquire the [`LockGuard`].
///
/// Awaiting it panics outside of a tokio runtime with a timer; see [`LockFuture`].
///
/// ```
/// use std::time::Duration;
/// use tower_redlock::Redlock;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_redlock::LockError> {
/// let redlock = Redlock::in_memory(3);
/// let guard = redlock
///     .lock(("account", "7"))
///     .ttl(Duration::from_secs(5))
///     .wait(Duration::from_secs(1))
///     .await?;
/// # drop(guard);
/// # Ok(())
/// # }
/// ```
///
/// Functions that take an `impl Future`, such as `tokio::spawn`, need
/// [`into_future`](std::future::IntoFuture::into_future).
#[must_use = "the lock is not requested until the request is awaited"]
pub struct LockRequest {
    pub(super) core: Arc<Core>,
    pub(super) keys: LockKeys,
    pub(super) options: LockOptions,
    /// The caps on waiting calls that count this one.
    pub(super) caps: [Option<Arc<WaiterCap>>; 2],
}

// Without the service, which has the keys of other callers.
opaque_debug! { LockRequest [keys = keys, options = options] }

/// Future of a [`LockRequest`].
///
/// # Errors
///
/// Resolves to a [`LockError`] if another caller holds the lock, too few nodes could be reached, or the request
/// itself is invalid.
///
/// # Panics
///
/// Panics if it is polled outside of a tokio runtime with a timer (`enable_time`).
///
/// # Cancel safety
///
/// May be dropped at any point: its place in the queue is given up, and keys that the nodes have granted or will
/// grant are released in the background. A future that is neither polled nor dropped keeps its place, as with any
/// fair lock; a lock that was granted to it meanwhile is held until it is dropped, or `max_hold` is over.
#[must_use = "futures do nothing unless awaited"]
pub struct LockFuture(
    pub(crate) Pin<Box<dyn Future<Output = Result<LockGuard, LockError>> + Send>>,
);

impl Future for LockFuture {
    type Output = Result<LockGuard, LockError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(context)
    }
}

opaque_debug! { LockFuture }

impl Group {
    /// Acquires the permits of all keys for a caller that wants this lock, at once if they are free.
    ///
    /// # Errors
    ///
    /// Returns why a caller does not get them.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point; the caller's place in the queue is given up.
    pub(crate) async fn admit(&self, spec: &LockSpec, wait: &mut Wait) -> Result<Permit, Denied> {
        match self.queue.try_acquire(&spec.keys, spec.lease.access) {
            Ok(permit) => Ok(permit),
            Err(waiting) => {
                if spec.lease.once.is_none() && waiting.is_held_by_own_task() {
                    spec.registry.warn_of_reentry(spec.labels.resource);
                }
                // Boxed, because most calls do not wait, and would reserve its space all the same.
                Box::pin(self.wait_for_all(spec, waiting, wait)).await
            }
        }
    }
}

/// Error of a stage.
enum StageError {
    /// Another attempt may succeed: other callers hold its keys, and the caller must not wait for them while it holds
    /// others; or the caller lost a lease that it held.
    Again(LockError),
    /// The slot with this number, which the caller has in other groups, is taken in one.
    SlotTaken(usize, LockError),
    Failed(LockError),
}

impl From<LockError> for StageError {
    fn from(error: LockError) -> Self {
        Self::Failed(error)
    }
}

impl IntoFuture for LockRequest {
    type Output = Result<LockGuard, LockError>;
    type IntoFuture = LockFuture;

    fn into_future(self) -> LockFuture {
        // Written in place, as most of it is for later.
        let future = Box::write(Box::new_uninit(), self.lock());
        LockFuture(Box::into_pin(future))
    }
}

impl LockRequest {
    /// Acquires the lock.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point; see [`LockFuture`].
    #[expect(
        clippy::manual_async_fn,
        reason = "an `async fn` would keep a second copy of the request"
    )]
    pub(crate) fn lock(self) -> impl Future<Output = Result<LockGuard, LockError>> + Send {
        async move {
            let layout = &self.core.layout;
            let only_group = match &*layout.groups {
                [group] => Some(group),
                _ => layout.only_group(&self.keys),
            };
            let stages = match only_group {
                Some(_) => Vec::new(),
                None => layout.by_group(&self.keys),
            };
            let first = only_group.unwrap_or_else(|| stages[0].group);
            let mut span = LockSpan::new(self.options.label, &first.cluster, &self.keys);
            let wait = self.options.wait.unwrap_or(self.core.settings.wait);
            let deadline = after(span.began, wait);
            let outcome = match only_group {
                Some(group) => {
                    let is_alone = |_: &mut LockSpec| ();
                    self.acquire(group, &self.keys, u64::MAX, is_alone, deadline, &span)
                        .await
                }
                None => Box::pin(self.lock_in_all(&stages, deadline, &span)).await,
            };
            match &outcome {
                Ok(guard) => {
                    guard.set_delivered();
                    span.finish("lock acquired", "granted", guard.fencing_token());
                }
                Err(error) => span.refuse(error.outcome(), error.holder()),
            }
            outcome
        }
    }

    fn access(&self) -> Access {
        self.options.access.unwrap_or_default()
    }

    /// Acquires keys of several groups, all or none.
    async fn lock_in_all(
        &self,
        stages: &[GroupKeys<'_>],
        deadline: Instant,
        span: &LockSpan,
    ) -> Result<LockGuard, LockError> {
        let settings = &self.core.settings;
        // All errors of the request itself, before any key is locked.
        settings.namespace.names(&self.keys, sha256)?;
        let (mut tries, mut slots) = (0, self.all_slots());
        loop {
            let refused = match self.lock_stages(stages, deadline, slots, span).await {
                Ok(guard) => return Ok(guard),
                Err(StageError::Failed(error)) => return Err(error),
                Err(StageError::Again(error)) => error,
                Err(StageError::SlotTaken(slot, error)) => {
                    // Its leases are given up, and the others are asked for first.
                    slots &= !(1 << slot);
                    if slots != 0 {
                        continue;
                    }
                    error
                }
            };
            slots = self.all_slots();
            let LockError::Contended { retry_after, .. } = refused else {
                return Err(refused);
            };
            let delay = retry::delay(&settings.retry, tries, retry_after, random_u64());
            tries += 1;
            let next = after(Instant::now(), delay);
            // A caller whose next attempt would come too late need not wait to be told so.
            if next >= deadline {
                return Err(refused);
            }
            let mut wait = self.wait_until(deadline, span);
            wait.occupy()?;
            let registry = &self.core.registry;
            tokio::select! {
                biased;
                () = registry.reached(DrainStage::Draining) => return Err(LockError::Closed),
                () = sleep_until(next) => {}
            }
        }
    }

    /// Returns one bit for each slot that the caller may take.
    fn all_slots(&self) -> u64 {
        match self.access() {
            Access::Slot(count) => all_slots(count),
            Access::Exclusive | Access::Shared => u64::MAX,
        }
    }

    /// Acquires stage after stage. The leases that it has are released if a later one is refused.
    ///
    /// Waits until the deadline. Of several slots, takes one of these.
    async fn lock_stages(
        &self,
        stages: &[GroupKeys<'_>],
        deadline: Instant,
        mut slots: u64,
        span: &LockSpan,
    ) -> Result<LockGuard, StageError> {
        let mut guards: Vec<LockGuard> = Vec::with_capacity(stages.len());
        // The highest one of the leases so far. That of the next is not lower.
        let mut token: Option<FencingToken> = None;
        for (number, stage) in stages.iter().enumerate() {
            let GroupKeys { group, keys } = stage;
            // Any slot may be released first.
            let may_wait = stage.comes_after(&stages[..number]) && slots == self.all_slots();
            let until = if may_wait { deadline } else { span.began };
            let join = |spec: &mut LockSpec| spec.join(token);
            // A grant comes before a loss: whether all leases are still valid is checked once, when the last one is there.
            let locked = tokio::select! {
                biased;
                locked = self.acquire(group, keys, slots, join, until, span) => locked,
                () = lost(&guards) => {
                    give_up(guards).await;
                    return Err(StageError::Again(LockError::contended(None, None)));
                }
            };
            match locked {
                Ok(guard) => {
                    token = guard.fencing_token();
                    if let Some(slot) = guard.slot() {
                        slots = 1 << slot;
                    }
                    guards.push(guard);
                }
                Err(error) => {
                    let slot = guards.first().and_then(LockGuard::slot);
                    give_up(guards).await;
                    let is_contended = matches!(error, LockError::Contended { .. });
                    return Err(match slot {
                        Some(slot) if is_contended => StageError::SlotTaken(slot, error),
                        None if is_contended && !may_wait => StageError::Again(error),
                        _ => StageError::Failed(error),
                    });
                }
            }
        }
        for (stage, guard) in stages.iter().zip(&guards) {
            let lease = guard.lease();
            let raised = match token {
                Some(token) if lease.token() < Some(token) => lease.raise(token).await,
                _ => Ok(()),
            };
            if let Err(error) = raised {
                let ttl = lease.spec.lease.ttl;
                drop(span.in_group(stage.group.label.clone()));
                give_up(guards).await;
                let (names, elapsed) = (&stage.group.cluster.names, span.began.elapsed());
                return Err(LockError::from_raise(error, names, ttl, elapsed).into());
            }
        }
        let mut guards = guards.into_iter();
        // There are several stages.
        let first = guards.next().ok_or(LockError::Closed)?;
        let guard = first.join(guards.collect());
        if !guard.is_valid() {
            let (ttl, elapsed) = (guard.lease().spec.lease.ttl, span.began.elapsed());
            return Err(LockError::Expired { ttl, elapsed }.into());
        }
        Ok(guard)
    }

    fn wait_until(&self, deadline: Instant, span: &LockSpan) -> Wait {
        Wait::new(deadline, self.caps.clone(), span.waits_since(deadline))
    }

    /// Acquires keys of one group. Waits until the deadline while other callers hold them. Of several slots, takes one of
    /// these. In one of several groups, it joins the leases before.
    async fn acquire(
        &self,
        group: &Group,
        keys: &LockKeys,
        slots: u64,
        join: impl FnOnce(&mut LockSpec),
        deadline: Instant,
        span: &LockSpan,
    ) -> Result<LockGuard, LockError> {
        let (spec, slot_table) = self.spec(group, keys, slots, join, span)?;
        let mut wait = self.wait_until(deadline, span);
        let permit = group.admit(&spec, &mut wait).await?;
        let task = LockTask::new(spec, slot_table, permit, wait, span.span.clone())?;
        Ok(task.acquire().await?)
    }

    /// Returns what to ask the nodes of a group for. Shared from the beginning, because a caller that waits keeps it for
    /// long.
    fn spec(
        &self,
        group: &Group,
        keys: &LockKeys,
        slots: u64,
        join: impl FnOnce(&mut LockSpec),
        span: &LockSpan,
    ) -> Result<(Arc<LockSpec>, Option<SlotTable>), LockError> {
        let Self { core, options, .. } = self;
        let (settings, access) = (&core.settings, self.access());
        let (namespace, labels) = (&settings.namespace, span.in_group(group.label.clone()));
        let (names, slot_table): (Arc<[KeyNames]>, _) = match access {
            Access::Exclusive => (namespace.names(keys, sha256)?, None),
            Access::Shared => {
                let names = namespace.names(keys, sha256)?;
                let names = names.iter().cloned();
                let names = names.map(|name| namespace.with_shared(name));
                (names.collect(), None)
            }
            Access::Slot(count) => {
                let table = SlotTable::new(namespace, keys, count, slots)?;
                // The task chooses one of the slots.
                (table.get(0).1, Some(table))
            }
        };
        let ttl = settings.ttl(options.ttl)?;
        let (cluster, registry) = (&group.cluster, &core.registry);
        let mut spec = LockSpec::new(cluster, registry, keys, names, ttl, labels);
        // A token would be no use to a reader, who must not write.
        spec.is_fenced &= access != Access::Shared;
        spec.lease.access = access;
        spec.lease.max_hold = options.max_hold.or(settings.max_hold);
        spec.lease.hold_at_least = options.hold_at_least.map(|least| least.min(NEVER));
        spec.note.clone_from(&options.note);
        join(&mut spec);
        Ok((Arc::new(spec), slot_table))
    }
}

/// Waits until one of the leases is lost.
async fn lost(guards: &[LockGuard]) {
    match guards.iter().map(LockGuard::lost).reduce(Lost::or) {
        Some(lost) => drop(lost.await),
        None => pending().await,
    }
}

/// Gives the leases of a failed acquisition up, and waits for their release, so that the next attempt of this process does
/// not meet them.
async fn give_up(guards: Vec<LockGuard>) {
    // All are given up before the first await, because this future may be dropped.
    let leases: Vec<_> = guards.into_iter().map(LockGuard::give_up).collect();
    for lease in leases {
        // Unconfirmed, the keys end by their ttl.
        drop(lease.released().await);
    }
}

#[cfg(test)]
mod tests;
