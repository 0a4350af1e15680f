//! Acquiring a lock for a caller: in one group of nodes, or in several one after the other.
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

use std::future::{Future, IntoFuture, pending};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::lock::backoff::AcquireError;
use crate::lock::driver::LockTask;
use crate::lock::error::LockError;
use crate::lock::guard::LockGuard;
use crate::lock::layout::{Group, GroupKeys};
use crate::lock::lost::Lost;
use crate::lock::queue::Wait;
use crate::lock::registry::DrainStage;
use crate::lock::request::{LockFuture, LockRequest};
use crate::lock::slots::{SlotTable, all_slots};
use crate::lock::span::LockSpan;
use crate::lock::spec::LockSpec;
use crate::lock::state::LockState;
use crate::lock::time::{NEVER, after};
use crate::node::{random_u64, sha256};
use crate::protocol::lease::Access;
use crate::protocol::{FencingToken, KeyNames, LockKeys, Namespace};

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
        LockFuture::new(self.lock())
    }
}

impl LockRequest {
    /// Acquires the lock.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point; see [`LockFuture`].
    ///
    /// Not an `async fn`, which would keep a second copy of the request.
    pub(crate) fn lock(self) -> impl Future<Output = Result<LockGuard, LockError>> + Send {
        async move {
            let layout = &self.core.layout;
            let begin = |group: &Group| {
                let span = LockSpan::new(self.options.label, &group.cluster, &self.keys);
                let wait = self.options.wait.unwrap_or(self.core.settings.wait);
                let deadline = after(span.began, wait);
                (span, deadline)
            };
            let (span, outcome) = match layout.only_group(&self.keys) {
                Some(group) => {
                    let (span, deadline) = begin(group);
                    let guard = match self.spec(group, &self.keys, u64::MAX, &span) {
                        Ok((spec, slots)) => {
                            let spec = Arc::new(spec);
                            self.acquire(group, spec, slots, deadline, &span).await
                        }
                        Err(error) => Err(error),
                    };
                    (span, guard)
                }
                None => {
                    let stages = layout.by_group(&self.keys);
                    let (span, deadline) = begin(stages[0].group);
                    let guard = Box::pin(self.lock_in_all(&stages, deadline, &span)).await;
                    (span, guard)
                }
            };
            match &outcome {
                Ok(guard) => {
                    guard.set_delivered();
                    span.finish("lock acquired", "granted", guard.fencing_token());
                }
                Err(error) => span.finish("lock refused", error.outcome(), None),
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
                    slots &= !(1 << slot);
                    if slots != 0 {
                        continue;
                    }
                    error
                }
            };
            slots = self.all_slots();
            let LockError::Contended { retry_after } = refused else {
                return Err(refused);
            };
            let delay = settings.retry.delay(tries, retry_after, random_u64());
            tries += 1;
            let next = after(Instant::now(), delay);
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
            let (mut spec, slot_table) = self.spec(group, keys, slots, span)?;
            spec.join(token);
            let locked = tokio::select! {
                biased;
                locked = self.acquire(group, Arc::new(spec), slot_table, until, span) => locked,
                () = lost(&guards) => {
                    give_up(guards).await;
                    let retry_after = None;
                    return Err(StageError::Again(LockError::Contended { retry_after }));
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
                    return Err(match (error, slot) {
                        (error @ LockError::Contended { .. }, Some(slot)) => {
                            StageError::SlotTaken(slot, error)
                        }
                        (error @ LockError::Contended { .. }, None) if !may_wait => {
                            StageError::Again(error)
                        }
                        (error, _) => StageError::Failed(error),
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
                drop(span.in_group(stage.group.label.clone()));
                give_up(guards).await;
                let (names, elapsed) = (&stage.group.cluster.names, span.began.elapsed());
                return Err(LockError::from_raise(error, names, self.asked_ttl(), elapsed).into());
            }
        }
        let mut guards = guards.into_iter();
        // There are several stages.
        let first = guards.next().ok_or(LockError::Closed)?;
        let guard = first.join(guards.collect());
        if !guard.is_valid() {
            let (ttl, elapsed) = (self.asked_ttl(), span.began.elapsed());
            return Err(LockError::Expired { ttl, elapsed }.into());
        }
        Ok(guard)
    }

    fn asked_ttl(&self) -> Duration {
        self.options.ttl.unwrap_or(self.core.settings.ttl)
    }

    fn wait_until(&self, deadline: Instant, span: &LockSpan) -> Wait {
        let caps = [self.core.cap.clone(), self.cap.clone()];
        let caps = caps.into_iter().flatten().filter(|_| !self.is_uncapped);
        Wait::new(deadline, caps, &span.waits_since)
    }

    /// Returns what to ask the nodes of a group for. Of several slots, the lock takes one of these.
    fn spec(
        &self,
        group: &Group,
        keys: &LockKeys,
        slots: u64,
        span: &LockSpan,
    ) -> Result<(LockSpec, Option<SlotTable>), LockError> {
        let Self { core, options, .. } = self;
        let (settings, access) = (&core.settings, self.access());
        let labels = span.in_group(group.label.clone());
        let (names, slot_table) = names(&settings.namespace, keys, access, slots)?;
        let ttl = settings.ttl(options.ttl)?;
        let (cluster, registry) = (&group.cluster, &core.registry);
        let mut spec = LockSpec::new(cluster, registry, keys, names, ttl, labels);
        // A token would be no use to a reader, who must not write.
        spec.is_fenced &= access != Access::Shared;
        spec.lease.access = access;
        spec.lease.max_hold = options.max_hold.or(settings.max_hold);
        spec.lease.hold_at_least = options.hold_at_least.map(|least| least.min(NEVER));
        Ok((spec, slot_table))
    }

    /// Acquires keys of one group. Waits until the deadline while other callers hold them.
    async fn acquire(
        &self,
        group: &Group,
        // Shared from here on, because a caller that waits keeps it for long.
        spec: Arc<LockSpec>,
        slot_table: Option<SlotTable>,
        deadline: Instant,
        span: &LockSpan,
    ) -> Result<LockGuard, LockError> {
        let mut wait = self.wait_until(deadline, span);
        let refuse = |_: &LockState| None::<LockError>;
        let permit = group.admit(&spec, &mut wait, refuse).await?;
        let task = LockTask::new(spec, slot_table, permit, wait, &span.span)?;
        task.acquire().await.map_err(AcquireError::into_lock_error)
    }
}

/// Returns the names of keys on the nodes. Of several slots, those of the first, and the table with those that are wanted.
fn names(
    namespace: &Namespace,
    keys: &LockKeys,
    access: Access,
    slots: u64,
) -> Result<(Arc<[KeyNames]>, Option<SlotTable>), LockError> {
    Ok(match access {
        Access::Exclusive => (namespace.names(keys, sha256)?.into(), None),
        Access::Shared => {
            let names = namespace.names(keys, sha256)?.into_iter();
            let names = names.map(|name| namespace.with_shared(name));
            (names.collect(), None)
        }
        Access::Slot(count) => {
            let table = SlotTable::new(namespace, keys, count, slots)?;
            // The task chooses one of the slots.
            (table.get(0).1, Some(table))
        }
    })
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
