//! The right to execute, and the view of it that the executed code gets.

use std::fmt;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

use crate::lock::{Disposal, LockGuard, LockHandle, Lost, LostReason, Redlock, after};
use crate::once::command::{ExecutionCommand, RecordCommand, Recorded};
use crate::once::error::BeginError;
use crate::protocol::{FencingToken, LockKey, Record};

/// The right to execute, as long as the lock is held; a recording uses it up.
///
/// Dropped before [`begin`](Self::begin), it frees the key. Dropped after it, it leaves the key locked until
/// its ttl, because something may have been executed.
#[derive(Debug)]
pub(crate) struct Execution {
    guard: LockGuard,
    commands: mpsc::UnboundedSender<ExecutionCommand>,
}

impl Execution {
    pub(super) fn new(guard: LockGuard, commands: mpsc::UnboundedSender<ExecutionCommand>) -> Self {
        Self { guard, commands }
    }

    /// Asks whether the execution may begin; from then on something may have been executed.
    ///
    /// The caller may have waited long since the grant, say for the inner service to become ready. Answers
    /// that arrived meanwhile are taken, and after more than a node timeout all nodes are asked once more: a
    /// record that arrives before the execution begins decides instead (PROTOCOL, section 2.3.4).
    ///
    /// # Errors
    ///
    /// [`BeginError`]: then nothing may be executed.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point. The execution counts as begun if the lease task was faster.
    pub(crate) async fn begin(&self) -> Result<(), BeginError> {
        let lost = || {
            let reason = self.guard.lease().lost_reason();
            BeginError::Lost(reason.unwrap_or(LostReason::Expired))
        };
        let (done, begun) = oneshot::channel();
        if self.commands.send(ExecutionCommand::Begin(done)).is_err() {
            return Err(lost());
        }
        begun.await.unwrap_or_else(|_| Err(lost()))?;
        if self.guard.is_valid() {
            return Ok(());
        }
        // The process was stopped, or its thread busy, after the lease task had answered.
        self.guard.lease().set_disposal(Disposal::ReleaseUnused);
        Err(lost())
    }

    /// Frees the key without a record, because nothing was executed.
    ///
    /// # Cancel safety
    ///
    /// Goes on in the background if the future is dropped.
    pub(crate) async fn release(self) {
        self.release_as(Disposal::ReleaseUnused).await;
    }

    /// Frees the key without a record, because the execution is known to have had no effect. A retry may
    /// execute, unless intents are kept.
    ///
    /// # Cancel safety
    ///
    /// Goes on in the background if the future is dropped.
    pub(crate) async fn release_without_effect(self) {
        self.release_as(Disposal::ReleaseExecuted).await;
    }

    async fn release_as(self, disposal: Disposal) {
        self.guard.lease().set_disposal(disposal);
        // Unconfirmed or lost, the key expires by its ttl.
        if let Err(error) = self.guard.release().await {
            tracing::debug!(%error, "the release of an execution was not confirmed");
        }
    }

    /// Records the outcome on the nodes, also if the lock was lost meanwhile, and frees the key.
    ///
    /// # Cancel safety
    ///
    /// Goes on in the background if the future is dropped.
    pub(crate) async fn record(self, record: Record, retention: Duration) -> Recorded {
        let (done, outcome) = oneshot::channel();
        let command = RecordCommand {
            record,
            retention,
            done,
        };
        if self
            .commands
            .send(ExecutionCommand::Record(command))
            .is_err()
        {
            // The lease task is gone with its runtime.
            return Recorded::No;
        }
        outcome.await.unwrap_or(Recorded::No)
    }

    /// Returns a view of the execution.
    pub(crate) fn handle(&self) -> ExecutionHandle {
        ExecutionHandle(self.guard.handle())
    }
}

/// A view of one execution: its key, its fencing token, and whether its lock is still held.
///
/// [`ExecuteOnce::run`](crate::ExecuteOnce::run) passes it to the work. An `IdempotencyLayer` puts it into the
/// extensions of the request that it executes; in axum it is an extractor too. It is not a
/// [`LockHandle`](crate::LockHandle), which belongs to a resource that a
/// [`RedlockLayer`](crate::RedlockLayer) locks, and whose token orders the writes to that resource. The token of
/// an execution only orders the executions of one key.
///
/// Cheap to clone; it holds no share of the lock.
#[derive(Clone)]
pub struct ExecutionHandle(LockHandle);

impl ExecutionHandle {
    /// Returns the key that the execution is recorded under. An `IdempotencyLayer` makes it of the scope, the
    /// method, the path and the idempotency key.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        self.0.key()
    }

    /// Returns the fencing token of the execution, unique and increasing among the executions of its key.
    /// Always `Some`: records need fences, also with `fencing(false)`.
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

    /// Returns a future that resolves when the lock is lost, or released because the execution ended.
    pub fn lost(&self) -> Lost {
        self.0.lost()
    }

    /// Waits until the execution, which begins now, reaches its bound; for ever without one. The lease reports
    /// that, unless it ended earlier, say because the nodes could not be reached.
    pub(crate) async fn reached_max_hold(&self, max_hold: Option<Duration>) {
        let began = Instant::now();
        if self.lost().await == LostReason::MaxHold {
            return;
        }
        match max_hold {
            Some(max_hold) => sleep_until(after(began, max_hold)).await,
            None => std::future::pending().await,
        }
    }

    /// Returns whether this is an execution of `key` by this service that has not ended.
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
