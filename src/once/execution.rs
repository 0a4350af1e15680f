//! The right to execute, and its view for the executed code.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::lock::{ExtendError, LockGuard, LockHandle, Lost, LostReason, Redlock, after};
use crate::once::error::{BeginError, Denied};
use crate::protocol::lease::{Effect, Input, OnceEvent, OnceInput, Recorded};
use crate::protocol::{FencingToken, LockKey, Record};

/// The right to execute while the lock of the key is held.
///
/// Dropping it before [`begin`](Self::begin) releases the key. Dropping it after that leaves the key locked until its
/// ttl, because something may have been executed.
#[derive(Debug)]
pub(crate) struct Execution {
    guard: LockGuard,
    /// The same execution in the group that the key moves to.
    next: Option<Box<Self>>,
}

impl Execution {
    pub(super) fn new(guard: LockGuard) -> Self {
        Self { guard, next: None }
    }

    /// Joins the execution of a key that moves with that in its next group. Both get the same fencing token.
    ///
    /// # Errors
    ///
    /// Returns an [`ExtendError`] if the token of the first one cannot be raised to that of the second. Both are released
    /// then.
    pub(super) async fn join(mut self, next: Self) -> Result<Self, ExtendError> {
        let (lease, token) = (self.guard.lease(), next.guard.fencing_token());
        let raised = match token {
            Some(token) if lease.token() < Some(token) => lease.raise(token).await,
            _ => Ok(()),
        };
        let leases = [&self, &next].map(|execution| Arc::clone(execution.guard.lease()));
        self.next = Some(Box::new(next));
        if let Err(error) = raised {
            self.release().await;
            return Err(error);
        }
        leases.iter().for_each(|lease| lease.set_delivered());
        Ok(self)
    }

    /// Begins the execution. From then on, something may have been executed.
    ///
    /// The grant may be old by now, for example if the inner service was not ready. The task takes the answers that
    /// arrived since, and if the grant is older than a node timeout, it asks all nodes once more: a record that
    /// arrives before the execution begins decides instead.
    ///
    /// # Errors
    ///
    /// Returns a [`BeginError`] if nothing may be executed.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point. The execution may have begun by then.
    pub(crate) async fn begin(&self) -> Result<(), BeginError> {
        let Some(next) = &self.next else {
            return self.begin_alone().await;
        };
        for execution in [self, next] {
            execution.begin_alone().await.map_err(|error| match error {
                // The other group may not have that record. The next call copies it there.
                BeginError::Denied(Denied::Recorded(_)) => BeginError::Denied(Denied::Undecided),
                error => error,
            })?;
        }
        // It may have been lost while the next began.
        self.check_validity()
    }

    async fn begin_alone(&self) -> Result<(), BeginError> {
        let begin = Input::Once(OnceInput::Begin);
        match self.guard.lease().command(begin).await {
            Ok(Some(OnceEvent::Begun)) => self.check_validity(),
            Ok(Some(OnceEvent::Decided(decided))) => Err(BeginError::Denied(decided.into())),
            Ok(_) => Err(BeginError::Denied(Denied::Undecided)),
            Err(ExtendError::Lost(reason)) => Err(BeginError::Lost(reason)),
            Err(_) => Err(self.lost()),
        }
    }

    fn check_validity(&self) -> Result<(), BeginError> {
        if self.guard.is_valid() {
            return Ok(());
        }
        // The process was paused, or its thread blocked, after the lease task had answered.
        self.guard.lease().set_effect(Effect::NotBegun);
        Err(self.lost())
    }

    fn lost(&self) -> BeginError {
        let reason = self.guard.lease().lost_reason();
        BeginError::Lost(reason.unwrap_or(LostReason::Expired))
    }

    /// Releases the key without a record, because nothing was executed.
    ///
    /// # Cancel safety
    ///
    /// Goes on in the background if the future is dropped.
    pub(crate) async fn release(self) {
        self.release_after(Effect::NotBegun).await;
    }

    /// Releases the key without a record, because the execution had no effect. A retry may execute, unless there is
    /// an intent.
    ///
    /// # Cancel safety
    ///
    /// Goes on in the background if the future is dropped.
    pub(crate) async fn release_without_effect(self) {
        self.release_after(Effect::WithoutEffect).await;
    }

    async fn release_after(self, effect: Effect) {
        self.guard.lease().set_effect(effect);
        let next = self.next.map(|next| {
            next.guard.lease().set_effect(effect);
            next.guard
        });
        // Both are given up before the first await, because this future may be dropped.
        let guard = self.guard.with_others(next.into_iter().collect());
        // Unconfirmed or lost, the key expires by its ttl.
        if let Err(error) = guard.release().await {
            tracing::debug!(%error, "the release of an execution was not confirmed");
        }
    }

    /// Records the outcome on the nodes, even if the lock was lost meanwhile, and releases the key.
    ///
    /// # Cancel safety
    ///
    /// Goes on in the background if the future is dropped.
    pub(crate) async fn record(mut self, record: Record, retention: Duration) -> Recorded {
        let Some(next) = self.next.take() else {
            return self.record_alone(record, retention).await;
        };
        let in_next = next.record_alone(record.clone(), retention);
        let recorded = tokio::join!(self.record_alone(record, retention), in_next);
        match recorded {
            (Recorded::Yes, Recorded::Yes) => Recorded::Yes,
            (Recorded::Another(one), Recorded::Another(other))
                if one.execution() == other.execution() =>
            {
                Recorded::Another(one)
            }
            // A process that knows only the group without the outcome may record another.
            _ => Recorded::No,
        }
    }

    fn record_alone(self, record: Record, retention: Duration) -> impl Future<Output = Recorded> {
        let lease = Arc::clone(self.guard.lease());
        // At once, because the future may be dropped.
        let outcome = lease.command(Input::Once(OnceInput::Record { record, retention }));
        async move {
            let recorded = outcome.await;
            drop(self);
            match recorded {
                Ok(Some(OnceEvent::Recorded { outcome, .. })) => outcome,
                _ => Recorded::No,
            }
        }
    }

    /// Returns a view of the execution.
    pub(crate) fn handle(&self) -> ExecutionHandle {
        let handle = self.guard.handle();
        let next = self.next.iter().map(|next| next.guard.lease());
        ExecutionHandle(next.fold(handle, LockHandle::and_lease))
    }
}

/// A view of one execution: its key, its fencing token, and the validity of its lock. Cheap to clone; it holds no
/// share of the lock.
///
/// [`ExecuteOnce::run`](crate::ExecuteOnce::run) passes it to the work. An `IdempotencyLayer` puts it into the
/// extensions of the request that it executes; in axum it is an extractor too.
///
/// A [`LockHandle`] is different: it belongs to a resource that a [`RedlockLayer`](crate::RedlockLayer) locks, and
/// its token orders the writes to that resource. The token of an execution only orders the executions of one key.
#[derive(Clone)]
pub struct ExecutionHandle(LockHandle);

impl ExecutionHandle {
    /// Returns the key of the execution. An `IdempotencyLayer` makes it of the scope, the method, the path and the
    /// idempotency key.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        self.0.key()
    }

    /// Returns the fencing token of the execution, which is unique and increases among the executions of its key.
    ///
    /// Always `Some`: records need fences, even with `fencing(false)`.
    #[must_use]
    pub fn fencing_token(&self) -> Option<FencingToken> {
        self.0.fencing_token()
    }

    /// Returns how much longer the lock is certainly held; see
    /// [`LockGuard::valid_for`](crate::LockGuard::valid_for).
    #[must_use]
    pub fn valid_for(&self) -> Duration {
        self.0.valid_for()
    }

    /// Returns whether the lock is certainly held.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.0.is_valid()
    }

    /// Returns a future that resolves when the lock is lost, or is released because the execution ended.
    pub fn lost(&self) -> Lost {
        self.0.lost()
    }

    /// Waits until the execution reaches `max_hold`; for ever if that is `None`.
    ///
    /// The lease reports the bound, unless it ended earlier, for example because the nodes could not be reached.
    pub(crate) async fn reached_max_hold(&self, began: Instant, max_hold: Option<Duration>) {
        if self.lost().await == LostReason::MaxHold {
            return;
        }
        match max_hold {
            Some(max_hold) => sleep_until(after(began, max_hold)).await,
            None => std::future::pending().await,
        }
    }

    /// Returns whether this is an execution of `key` by `redlock` that has not ended.
    #[cfg_attr(
        not(feature = "idempotency"),
        expect(dead_code, reason = "only layers nest")
    )]
    pub(crate) fn is_executing(&self, redlock: &Redlock, key: &LockKey) -> bool {
        redlock.owns(&self.0) && self.key() == key && self.0.is_held()
    }
}

impl fmt::Debug for ExecutionHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExecutionHandle")
            .field("key", self.key())
            .field("fencing_token", &self.fencing_token())
            .field("valid_for", &self.valid_for())
            .finish()
    }
}
