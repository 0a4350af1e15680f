//! The right to execute, and its view for the executed code.

use std::panic;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tracing::Instrument;

use crate::lock::{Denied, ExtendError, LockGuard, LockHandle, Lost, LostReason};
use crate::node::after;
use crate::protocol::lease::{Decided, Effect, Event, Input};
use crate::protocol::{FencingToken, LockKey, Record};

/// The right to execute while the lock of the key is held, in each group that the key belongs to.
///
/// Dropping it before [`begin`](Self::begin) releases the key. Dropping it after that leaves the key locked until its
/// ttl, because something may have been executed.
#[derive(Debug)]
pub(crate) struct Execution(pub(super) LockGuard);

impl Execution {
    /// Joins the execution of a key that moves with that in its next group. Both get the same fencing token.
    ///
    /// # Errors
    ///
    /// Returns an [`ExtendError`] if the token of the first one cannot be raised to that of the second. Both are released
    /// then.
    pub(super) async fn join(self, next: Self) -> Result<Self, ExtendError> {
        let (lease, token) = (Arc::clone(self.0.lease()), next.0.fencing_token());
        // Owned by this future from here on, so that both are released if it is dropped.
        let joined = Self(self.0.join(vec![next.0]));
        if let Some(token) = token
            && lease.token() < Some(token)
            && let Err(error) = lease.raise(token).await
        {
            joined.release(Effect::NotBegun).await;
            return Err(error);
        }
        joined.0.set_delivered();
        Ok(joined)
    }

    /// Begins the execution. From then on, something may have been executed.
    ///
    /// The grant may be old by now, for example if the inner service was not ready. The task takes the answers that
    /// arrived since, and if the grant is older than a node timeout, it asks all nodes once more: a record that
    /// arrives before the execution begins decides instead.
    ///
    /// # Errors
    ///
    /// Returns [`Denied`] if nothing may be executed.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point. The execution may have begun by then.
    pub(crate) async fn begin(&self) -> Result<(), Denied> {
        let is_alone = self.0.leases().count() == 1;
        for lease in self.0.leases() {
            match lease.command(Input::Begin).await {
                Ok(Some(Event::Begun)) => {}
                // The other group may not have that record. The next call copies it there.
                Ok(Some(Event::Decided(decided))) if is_alone || !decided.is_memorable() => {
                    return Err(Denied::Decided(decided));
                }
                Ok(_) => return Err(Denied::Decided(Decided::Undecided)),
                Err(ExtendError::Lost(reason)) => return Err(Denied::Lost(reason)),
                Err(_) => return Err(self.lost()),
            }
        }
        if self.0.is_valid() {
            return Ok(());
        }
        // The process was paused, or its thread blocked, after the lease task had answered; or one was lost while the
        // next began.
        self.set_effect(Effect::NotBegun);
        Err(self.lost())
    }

    fn lost(&self) -> Denied {
        let reason = self.0.leases().find_map(|lease| lease.lost_reason());
        Denied::Lost(reason.unwrap_or(LostReason::Expired))
    }

    fn set_effect(&self, effect: Effect) {
        self.0.leases().for_each(|lease| lease.set_effect(effect));
    }

    /// Releases the key without a record, because of what is known of its effect. If it had none, a retry may execute, unless
    /// there is an intent.
    ///
    /// # Cancel safety
    ///
    /// Goes on in the background if the future is dropped.
    pub(crate) async fn release(self, effect: Effect) {
        self.set_effect(effect);
        // Unconfirmed or lost, the key expires by its ttl.
        if let Err(error) = self.0.release().await {
            tracing::debug!(%error, "the release of an execution was not confirmed");
        }
    }

    /// Records the outcome on the nodes, even if the lock was lost meanwhile, and releases the key. Returns the record that
    /// a majority has then: this one, or that of another execution.
    ///
    /// # Cancel safety
    ///
    /// Goes on in the background if the future is dropped.
    pub(crate) fn record(
        self,
        record: &Record,
        retention: Duration,
    ) -> impl Future<Output = Option<Record>> + use<> {
        // At once and to all groups, because the future may be dropped.
        let asked = self.0.leases().map(|lease| {
            let record = record.clone();
            lease.command(Input::Record { record, retention })
        });
        let asked: Vec<_> = asked.collect();
        async move {
            let mut recorded: Option<Record> = None;
            for (number, asked) in asked.into_iter().enumerate() {
                let in_group = match asked.await {
                    Ok(Some(Event::Recorded(record))) => record,
                    _ => None,
                };
                // A process that knows only the group without the outcome may record another.
                recorded = in_group.filter(|record| {
                    let same = |other: &Record| other.execution() == record.execution();
                    number == 0 || recorded.as_ref().is_some_and(same)
                });
            }
            drop(self);
            recorded
        }
    }

    /// Returns a view of the execution.
    pub(crate) fn handle(&self) -> ExecutionHandle {
        ExecutionHandle(self.0.handle())
    }
}

/// Runs an execution in a task of its own, which goes on if the caller goes away. Returns `None` if the runtime
/// is shut down first; a caller in another runtime outlives that.
///
/// # Panics
///
/// Panics if the execution panics, and outside of a runtime.
///
/// # Cancel safety
///
/// May be dropped at any point; the task goes on.
pub(crate) async fn run_to_end<T: Send + 'static>(
    executing: impl Future<Output = T> + Send + 'static,
) -> Option<T> {
    match tokio::spawn(executing.in_current_span()).await {
        Ok(outcome) => Some(outcome),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => panic::resume_unwind(panic),
            Err(_) => None,
        },
    }
}

/// A view of one execution: its key, its fencing token, and the validity of its lock. Cheap to clone; it holds no
/// share of the lock.
///
/// [`ExecuteOnce::run`](crate::ExecuteOnce::run) passes it to the work. An `IdempotencyLayer` puts it into the
/// extensions of the request that it executes: in axum, extract `Extension<ExecutionHandle>`.
///
/// A [`LockHandle`] is different: it belongs to a resource that a [`RedlockLayer`](crate::RedlockLayer) locks, and
/// its token orders the writes to that resource. The token of an execution only orders the executions of one key.
#[derive(Debug, Clone)]
pub struct ExecutionHandle(pub(crate) LockHandle);

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

    /// Waits until the execution reaches its `max_hold`; for ever if it has none.
    ///
    /// The lease reports the bound, unless it ended earlier, for example because the nodes could not be reached.
    pub(crate) async fn reached_max_hold(&self, began: Instant) {
        if self.lost().await == LostReason::MaxHold {
            return;
        }
        match self.0.lease().spec.lease.max_hold {
            Some(max_hold) => sleep_until(after(began, max_hold)).await,
            None => std::future::pending().await,
        }
    }
}
