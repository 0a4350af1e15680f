//! Requests for locks, and the future that acquires the lock.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::lock::acquisition::Acquisition;
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
pub struct LockRequest(Acquisition);

impl LockRequest {
    pub(crate) fn new(core: Arc<Core>, keys: LockKeys) -> Self {
        Self(Acquisition {
            core,
            keys,
            options: LockOptions::default(),
            cap: None,
            is_uncapped: false,
        })
    }

    fn options_mut(&mut self) -> &mut LockOptions {
        &mut self.0.options
    }

    /// Sets all options.
    pub(crate) fn options(mut self, options: LockOptions) -> Self {
        self.0.options = options;
        self
    }

    /// Makes a waiting call count against no cap.
    pub(crate) fn uncapped(mut self) -> Self {
        self.0.is_uncapped = true;
        self
    }

    /// Makes a waiting call count against one more cap.
    pub(crate) fn cap(mut self, cap: Option<Arc<WaiterCap>>) -> Self {
        self.0.cap = cap;
        self
    }
}

/// Not derived, because that would show the whole service, with the keys of other callers.
impl fmt::Debug for LockRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockRequest")
            .field("keys", &self.0.keys)
            .field("options", &self.0.options)
            .finish_non_exhaustive()
    }
}

impl IntoFuture for LockRequest {
    type Output = Result<LockGuard, LockError>;
    type IntoFuture = LockFuture;

    fn into_future(self) -> LockFuture {
        LockFuture(Box::pin(self.0.lock()))
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
    /// Returns a future that is ready with a lock that is held already.
    pub(crate) fn ready(guard: LockGuard) -> Self {
        Self(Box::pin(std::future::ready(Ok(guard))))
    }

    /// Returns a future that is ready with an error.
    pub(crate) fn failed(error: LockError) -> Self {
        Self(Box::pin(std::future::ready(Err(error))))
    }

    /// Adds other locks to the guard; see [`LockGuard::with_others`].
    pub(crate) fn with_others(self, others: Vec<LockGuard>) -> Self {
        if others.is_empty() {
            return self;
        }
        Self(Box::pin(async move { Ok(self.await?.with_others(others)) }))
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
