//! Non-owning view of the lock under which an idempotent request is executed.

use std::fmt;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::lock::{LockHandle, Lost, LostReason, Redlock, after};
use crate::protocol::{FencingToken, LockKey};

/// A view of one execution of an idempotent request: its key, its fencing token, and whether its lock is
/// still held.
///
/// An [`IdempotencyLayer`](crate::IdempotencyLayer) puts it into the extensions of the request that it
/// executes; in axum it is an extractor too. It is not a [`LockHandle`](crate::LockHandle): that one is of
/// the resource that a [`RedlockLayer`](crate::RedlockLayer) locks, and its token orders the writes to that
/// resource. The token of an execution only orders executions of one idempotency key.
///
/// Cheap to clone; it holds no share of the lock.
#[derive(Clone)]
pub struct ExecutionHandle(LockHandle);

impl ExecutionHandle {
    pub(super) fn new(handle: LockHandle) -> Self {
        Self(handle)
    }

    /// Returns the key that the execution is recorded under: made of the scope, the method, the path and
    /// the idempotency key.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.0.keys()[0]
    }

    /// Returns the fencing token of the execution, unique and increasing among the executions of its key.
    /// There always is one, because records need fences even where `fencing(false)` is set.
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

    /// Waits until the execution, which begins now, reaches the bound that is set for it; for ever if none
    /// is. The lease tells when that is, unless it ended before, say because the nodes could not be reached.
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

    /// Whether this execution of `key` has not ended.
    pub(crate) fn is_executing(&self, redlock: &Redlock, key: &LockKey) -> bool {
        self.0.is_of(redlock) && self.key() == key && self.0.is_held()
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
