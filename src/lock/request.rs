//! Requests for locks, and the future that acquires the lock.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::lock::core::Core;
use crate::lock::error::LockError;
use crate::lock::guard::LockGuard;
use crate::lock::options::{LockOptions, kind_setters, option_setters};
use crate::lock::queue::WaiterCap;
use crate::protocol::LockKeys;
use crate::protocol::lease::Access;

option_setters!(
    LockRequest,
    ttl: "Default: the builder's ttl.",
    wait: "Default: the builder's for [`lock`](crate::Redlock::lock), zero for \
[`try_lock`](crate::Redlock::try_lock).\n\nThe wait is for other holders only: an attempt waits for its nodes up to \
the node timeout.",
    max_hold: "Default: the builder's."
);

kind_setters!(LockRequest);

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
/// Macros and functions that take futures, such as `tokio::join!`, need
/// [`into_future`](std::future::IntoFuture::into_future):
///
/// ```
/// use std::future::IntoFuture;
/// use tower_redlock::Redlock;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_redlock::LockError> {
/// let redlock = Redlock::in_memory(3);
/// let (from, to) = tokio::try_join!(
///     redlock.lock("from").into_future(),
///     redlock.lock("to").into_future(),
/// )?;
/// # drop((from, to));
/// # Ok(())
/// # }
/// ```
#[must_use = "the lock is not requested until the request is awaited"]
pub struct LockRequest {
    pub(super) core: Arc<Core>,
    pub(super) keys: LockKeys,
    pub(super) options: LockOptions,
    /// A cap on waiting calls, in addition to that of the lock service.
    pub(super) cap: Option<Arc<WaiterCap>>,
    /// Whether the call may wait beside those that the caps count.
    pub(super) is_uncapped: bool,
}

impl LockRequest {
    fn options_mut(&mut self) -> &mut LockOptions {
        &mut self.options
    }
}

/// Not derived, because that would show the whole service, with the keys of other callers.
impl fmt::Debug for LockRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockRequest")
            .field("keys", &self.keys)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

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
/// fair lock; a lock that was granted to it meanwhile ends with its ttl.
#[must_use = "futures do nothing unless awaited"]
pub struct LockFuture(Pin<Box<dyn Future<Output = Result<LockGuard, LockError>> + Send>>);

impl LockFuture {
    pub(crate) fn new(
        future: impl Future<Output = Result<LockGuard, LockError>> + Send + 'static,
    ) -> Self {
        Self(Box::pin(future))
    }
}

impl Future for LockFuture {
    type Output = Result<LockGuard, LockError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(context)
    }
}

impl fmt::Debug for LockFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockFuture").finish_non_exhaustive()
    }
}
