//! A lock as it is asked for.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout};

use crate::lock::error::LockError;
use crate::lock::front::{Busy, Turn};
use crate::lock::guard::LockGuard;
use crate::lock::once::NotGranted;
use crate::lock::record::Asking;
use crate::lock::redlock::Inner;
use crate::lock::registry::Stage;
use crate::lock::settings::{Options, after};
use crate::lock::task::{Order, Story};
use crate::lock::waiters::{Waited, Waiters, Waiting};
use crate::node::sha256;
use crate::protocol::LockKeys;

/// A lock that is being asked for; await it to get the [`LockGuard`].
///
/// ```
/// use std::time::Duration;
/// use tower_redlock::Redlock;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_redlock::LockError> {
/// let redlock = Redlock::in_memory(3);
/// let guard = redlock
///     .lock("nightly-report")
///     .ttl(Duration::from_secs(5))
///     .wait(Duration::from_secs(1))
///     .await?;
/// # drop(guard);
/// # Ok(())
/// # }
/// ```
#[must_use = "a lock is not asked for until the request is awaited"]
pub struct LockRequest {
    inner: Arc<Inner>,
    keys: LockKeys,
    options: Options,
}

impl LockRequest {
    pub(super) fn new(inner: Arc<Inner>, keys: LockKeys) -> Self {
        Self {
            inner,
            keys,
            options: Options::default(),
        }
    }

    /// Sets how long the lock lives on the nodes when nothing renews it. Default: the builder's.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.options.ttl = Some(ttl);
        self
    }

    /// Sets how long to wait while somebody else holds the lock. Default: the builder's for
    /// [`lock`](crate::Redlock::lock), zero for [`try_lock`](crate::Redlock::try_lock).
    ///
    /// Nodes that cannot be reached are not waited for beyond the node timeout.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.options.wait = Some(wait);
        self
    }

    /// Sets after what time the lock is not renewed any more. Default: the builder's.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.options.max_hold = Some(max_hold);
        self
    }

    /// Sets what kind of resource this is, for spans and metrics, which never show a key; so it
    /// must not be made of one. Default: `unnamed`.
    pub fn label(mut self, label: &'static str) -> Self {
        self.options.label = Some(label);
        self
    }

    /// Makes a waiting call count against one more cap.
    pub(crate) fn waiters(mut self, waiters: Option<Arc<Waiters>>) -> Self {
        self.options.waiters = waiters;
        self
    }
}

/// By hand: a derived one would show the whole service, with the keys that others hold.
impl fmt::Debug for LockRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockRequest")
            .field("keys", &self.keys)
            .field("ttl", &self.options.ttl)
            .field("wait", &self.options.wait)
            .field("max_hold", &self.options.max_hold)
            .field("label", &self.options.label)
            .finish_non_exhaustive()
    }
}

impl IntoFuture for LockRequest {
    type Output = Result<LockGuard, LockError>;
    type IntoFuture = LockFuture;

    fn into_future(self) -> LockFuture {
        LockFuture(Box::pin(acquire(self)))
    }
}

/// Future of a [`LockRequest`].
///
/// # Errors
///
/// Resolves to a [`LockError`] that says whether somebody else holds the lock, the nodes could not
/// be reached, or the request itself is wrong.
///
/// # Panics
///
/// Polling it outside of a tokio runtime panics, like `tokio::spawn`.
///
/// # Cancel safety
///
/// It may be dropped at any point: whatever the nodes have granted or will grant is released in the
/// background, and a place in the queue is given up. One that is neither polled nor dropped keeps its
/// place, as with any fair lock; what was granted to it meanwhile ends with its ttl.
#[must_use = "futures do nothing unless awaited"]
pub struct LockFuture(Pin<Box<dyn Future<Output = Result<LockGuard, LockError>> + Send>>);

impl LockFuture {
    /// A lock that is held already.
    pub(crate) fn ready(guard: LockGuard) -> Self {
        Self(Box::pin(std::future::ready(Ok(guard))))
    }

    /// Makes the guard keep other locks too.
    pub(crate) fn beside(self, others: Vec<LockGuard>) -> Self {
        if others.is_empty() {
            return self;
        }
        Self(Box::pin(async move { Ok(self.await?.beside(others)) }))
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

async fn acquire(request: LockRequest) -> Result<LockGuard, LockError> {
    let nodes = request.inner.nodes.len();
    let logged = request.inner.settings.log_keys.then_some(&request.keys);
    let asking = Asking::new(request.options.label, nodes, logged);
    let waited = Waited::default();
    let outcome = ask(request, &asking, &waited).await;
    asking.tell(&outcome, waited.so_far());
    outcome
}

async fn ask(
    request: LockRequest,
    asking: &Asking,
    waited: &Waited,
) -> Result<LockGuard, LockError> {
    let LockRequest {
        inner,
        keys,
        options,
    } = request;
    let settings = &inner.settings;
    let names = settings.namespace.names(&keys, sha256)?;
    let ttl = settings.ttl_of(&options)?;
    let wait = options.wait.unwrap_or(settings.wait);
    let deadline = after(Instant::now(), wait);
    let caps = [settings.waiters.clone(), options.waiters.clone()];
    let caps = caps.into_iter().flatten().collect();
    let mut waiting = Waiting::new(caps, waited.clone());
    let turn = match try_turn(&inner, &keys)? {
        Ok(turn) => turn,
        // Boxed: most calls need not wait, and would have its room all the same.
        Err(busy) if wait.is_zero() => Box::pin(wait_for_release(&inner, &keys, &busy)).await?,
        Err(_) => Box::pin(wait_for_turn(&inner, &keys, deadline, &mut waiting)).await?,
    };
    let ticket = inner.registry.enter(&keys).ok_or(LockError::Closed)?;
    let order = Order {
        keys,
        names: names.into(),
        ttl,
        max_hold: options.max_hold.or(settings.max_hold),
        deadline,
        turn,
        waiting,
        ticket,
        label: asking.label(),
        asked_for: None,
        inner: Arc::clone(&inner),
    };
    let granted = Story::of(order, asking.span()).await;
    granted.map_err(NotGranted::into_lock_error)
}

/// Makes this call the only one in the process that asks the nodes for its keys, if it can be that at once.
fn try_turn(inner: &Arc<Inner>, keys: &LockKeys) -> Result<Result<Turn, Busy>, LockError> {
    if inner.registry.stage() != Stage::Open {
        return Err(LockError::Closed);
    }
    Ok(inner.front.try_take(keys))
}

/// Refuses a call that does not wait, unless the lock is about to be given back in this process.
///
/// A guard, a response body or a future that is dropped only wakes the lease task. A caller that goes on at
/// once, such as `tower::retry` after it has dropped a response, would meet the lock of its own last request.
/// The release is sent within moments, so this waits for that; the node timeout only bounds it.
async fn wait_for_release(
    inner: &Arc<Inner>,
    keys: &LockKeys,
    busy: &Busy,
) -> Result<Turn, LockError> {
    let contended = LockError::Contended {
        retry_after: busy.retry_after,
    };
    if !busy.is_ending {
        return Err(contended);
    }
    let turn = timeout(inner.settings.node_timeout, inner.front.take(keys)).await;
    turn.map_err(|_| contended)
}

/// Waits until this call is the only one in the process that asks the nodes for its keys.
async fn wait_for_turn(
    inner: &Arc<Inner>,
    keys: &LockKeys,
    deadline: Instant,
    waiting: &mut Waiting,
) -> Result<Turn, LockError> {
    waiting.begin()?;
    tokio::select! {
        biased;
        turn = inner.front.take(keys) => Ok(turn),
        () = sleep_until(deadline) => Err(LockError::Contended {
            retry_after: inner.front.retry_after(keys),
        }),
        () = inner.registry.reached(Stage::Draining) => Err(LockError::Closed),
    }
}
