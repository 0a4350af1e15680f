//! Requests for locks: their options, and the future that acquires the lock.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout};

use crate::lock::access::Access;
use crate::lock::core::Core;
use crate::lock::error::LockError;
use crate::lock::guard::LockGuard;
use crate::lock::lease::{LeaseTask, Terms, acquire};
use crate::lock::queue::{Busy, Permit, Waited, WaiterCap, WaiterSlots};
use crate::lock::registry::DrainStage;
use crate::lock::slots::SlotTable;
use crate::lock::span::LockSpan;
use crate::lock::time::after;
use crate::node::sha256;
use crate::protocol::LockKeys;

/// Options of a lock; see [`LockResource::options`](crate::LockResource::options) and
/// [`RedlockLayer::options`](crate::RedlockLayer::options).
///
/// ```
/// use std::time::Duration;
/// use tower_redlock::LockOptions;
///
/// let patient = LockOptions::default().wait(Duration::from_secs(2));
/// # let _ = patient;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[must_use]
pub struct LockOptions {
    pub(crate) ttl: Option<Duration>,
    pub(crate) wait: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) label: Option<&'static str>,
    pub(crate) access: Option<Access>,
    pub(crate) hold_at_least: Option<Duration>,
}

/// Implements the setters of a type with [`LockOptions`], which its `options_mut()` returns.
macro_rules! option_setters {
    ($type:ty, ttl: $ttl:literal, wait: $wait:literal, max_hold: $max_hold:literal) => {
        impl $type {
            /// Sets how long the lock lives on the nodes without renewal.
            #[doc = $ttl]
            pub fn ttl(mut self, ttl: Duration) -> Self {
                self.options_mut().ttl = Some(ttl);
                self
            }

            /// Sets how long to wait while another caller holds the lock.
            #[doc = $wait]
            pub fn wait(mut self, wait: Duration) -> Self {
                self.options_mut().wait = Some(wait);
                self
            }

            /// Sets for how long the lock is renewed.
            #[doc = $max_hold]
            pub fn max_hold(mut self, max_hold: Duration) -> Self {
                self.options_mut().max_hold = Some(max_hold);
                self
            }

            /// Sets the name of the kind of resource in spans and metrics. Do not make it of a key: keys come from
            /// clients, and each label is a time series of its own. Default: the first part of the key if it is a
            /// tuple that begins with a word, as in `("account", id)`; see
            /// [`LockKey`](crate::LockKey#the-kind-of-resource). Otherwise `unnamed`.
            pub fn label(mut self, label: &'static str) -> Self {
                self.options_mut().label = Some(label);
                self
            }
        }
    };
}

pub(crate) use option_setters;

/// Implements the setters of the kind of lock, for a type with [`LockOptions`] as above.
macro_rules! kind_setters {
    ($type:ty) => {
        impl $type {
            /// Shares the lock with other callers that do the same: any number of readers hold a key together, or one
            /// caller alone. Default: one caller alone.
            ///
            /// A reader is sure that no caller who locks the key alone is granted it while the reader's lock is valid. It
            /// gets no fencing token, because a reader writes nothing that a token could protect. A caller that waits to
            /// hold the key alone keeps new readers out, so that readers who come and go do not starve it. (Not with
            /// `fencing(false)` and `RestartGuard::Off`: such a lock is a plain `SET NX`, whose refusal does not tell readers
            /// from another holder.)
            ///
            /// A reader cannot become the only holder, nor the reverse: release the lock, and lock again. Of `shared`
            /// and [`slots`](Self::slots), the last one that is called applies.
            ///
            /// ```
            /// use tower_redlock::Redlock;
            ///
            /// # #[tokio::main(flavor = "current_thread")]
            /// # async fn main() -> Result<(), tower_redlock::LockError> {
            /// let redlock = Redlock::in_memory(3);
            /// let one = redlock.try_lock("catalogue").shared().await?;
            /// let other = redlock.try_lock("catalogue").shared().await?;
            /// assert!(redlock.try_lock("catalogue").await.is_err());
            /// # drop((one, other));
            /// # Ok(())
            /// # }
            /// ```
            pub fn shared(mut self) -> Self {
                self.options_mut().access = Some(Access::Shared);
                self
            }

            /// Lets up to `n` callers hold the key at a time, each with a slot of its own. `n` is between 1 and 64.
            /// Default: one caller, without slots.
            ///
            /// Slot `i`, counted from zero, is the lock of the key `(key, "slot", i)`; [`LockGuard::slot`] says which
            /// one it is. At most one caller holds a slot and there are `n` of them, so at most `n` callers hold a slot, as
            /// surely as a lock has one holder. All callers must use the same `n`: the highest applies. A slot and the
            /// lock of the key itself do not exclude each other.
            ///
            /// The nodes that refuse a slot name the free ones, so a caller asks them twice at most when a slot is free and
            /// no other caller takes it first. A fencing token orders the holders of one slot, not those of different
            /// ones.
            ///
            /// ```
            /// use tower_redlock::{LockError, Redlock};
            ///
            /// # #[tokio::main(flavor = "current_thread")]
            /// # async fn main() -> Result<(), LockError> {
            /// let redlock = Redlock::in_memory(3);
            /// let one = redlock.try_lock("converter").slots(2).await?;
            /// let other = redlock.try_lock("converter").slots(2).await?;
            /// assert_ne!(one.slot(), other.slot());
            /// let third = redlock.try_lock("converter").slots(2).await;
            /// assert!(matches!(third, Err(LockError::Contended { .. })));
            /// # Ok(())
            /// # }
            /// ```
            ///
            /// [`LockGuard::slot`]: crate::LockGuard::slot
            pub fn slots(mut self, n: usize) -> Self {
                self.options_mut().access = Some(Access::Slot(n));
                self
            }

            /// Keeps the key taken for at least this long from the grant on, even if the lock is released earlier.
            /// Default: a released key is free at once.
            ///
            /// For jobs that the clocks of several processes start: without it, a process whose clock is late would run a
            /// short job a second time. The release shortens the time that the key stays taken on the nodes, instead
            /// of deleting it. Choose a time that is longer than the clocks differ and shorter than the period, and do
            /// not wait for the lock.
            ///
            /// [`Released::Freed`](crate::Released::Freed) and [`Drained::is_clean`](crate::Drained::is_clean) then mean that
            /// the nodes confirmed the release; the key is free when the time is over. A caller that is dropped before
            /// it gets its guard frees the key at once.
            ///
            /// If the process dies, or the lock is lost, the key is free after its ttl, so that another process does
            /// the job. A node that restarts without its data forgets the rest of the time. It has no effect on a
            /// [`shared`](Self::shared) lock.
            ///
            /// ```
            /// use std::time::Duration;
            /// use tower_redlock::{LockError, Redlock};
            ///
            /// /// Runs in every process, each minute.
            /// async fn every_minute(redlock: &Redlock) -> Result<(), LockError> {
            ///     let lock = redlock.try_lock(("job", "report"));
            ///     match lock.hold_at_least(Duration::from_secs(30)).await {
            ///         Ok(_guard) => println!("writing the report"),
            ///         Err(LockError::Contended { .. }) => println!("another process has written it"),
            ///         Err(error) => return Err(error),
            ///     }
            ///     Ok(())
            /// }
            /// # #[tokio::main(flavor = "current_thread")]
            /// # async fn main() -> Result<(), LockError> {
            /// # let redlock = Redlock::in_memory(3);
            /// # every_minute(&redlock).await?;
            /// # assert!(redlock.try_lock(("job", "report")).await.is_err());
            /// # Ok(())
            /// # }
            /// ```
            pub fn hold_at_least(mut self, least: Duration) -> Self {
                self.options_mut().hold_at_least = Some(least);
                self
            }
        }
    };
}

option_setters!(
    LockOptions,
    ttl: "Default: the builder's ttl.",
    wait: "Default: zero.",
    max_hold: "Default: the builder's, or else 60 s."
);

option_setters!(
    LockRequest,
    ttl: "Default: the builder's ttl.",
    wait: "Default: the builder's for [`lock`](crate::Redlock::lock), zero for \
[`try_lock`](crate::Redlock::try_lock).\n\nThe wait is for other holders only: an attempt waits for its nodes up to \
the node timeout.",
    max_hold: "Default: the builder's."
);

kind_setters!(LockOptions);
kind_setters!(LockRequest);

impl LockOptions {
    /// Takes the options that are not set from others.
    pub(crate) fn or(self, others: Self) -> Self {
        Self {
            ttl: self.ttl.or(others.ttl),
            wait: self.wait.or(others.wait),
            max_hold: self.max_hold.or(others.max_hold),
            label: self.label.or(others.label),
            access: self.access.or(others.access),
            hold_at_least: self.hold_at_least.or(others.hold_at_least),
        }
    }

    /// Returns whether the kind of lock is chosen.
    pub(crate) fn has_kind(&self) -> bool {
        self.access.is_some()
    }

    /// Returns whether a request takes one slot of several.
    pub(crate) fn is_slot(&self) -> bool {
        matches!(self.access, Some(Access::Slot(_)))
    }

    /// Returns whether a request waits for a held lock.
    pub(crate) fn has_wait(&self) -> bool {
        self.wait.is_some_and(|wait| !wait.is_zero())
    }

    fn options_mut(&mut self) -> &mut Self {
        self
    }
}

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
///     .lock("nightly-report")
///     .ttl(Duration::from_secs(5))
///     .wait(Duration::from_secs(1))
///     .await?;
/// # drop(guard);
/// # Ok(())
/// # }
/// ```
#[must_use = "the lock is not requested until the request is awaited"]
pub struct LockRequest {
    core: Arc<Core>,
    keys: LockKeys,
    options: LockOptions,
    /// A cap on waiting calls, in addition to that of the lock service.
    cap: Option<Arc<WaiterCap>>,
    /// Whether the call may wait beside those that the caps count.
    is_uncapped: bool,
}

impl LockRequest {
    pub(crate) fn new(core: Arc<Core>, keys: LockKeys) -> Self {
        Self {
            core,
            keys,
            options: LockOptions::default(),
            cap: None,
            is_uncapped: false,
        }
    }

    fn options_mut(&mut self) -> &mut LockOptions {
        &mut self.options
    }

    /// Sets all options.
    pub(crate) fn options(mut self, options: LockOptions) -> Self {
        self.options = options;
        self
    }

    /// Makes a waiting call count against no cap.
    pub(crate) fn uncapped(mut self) -> Self {
        self.is_uncapped = true;
        self
    }

    /// Makes a waiting call count against one more cap.
    pub(crate) fn cap(mut self, cap: Option<Arc<WaiterCap>>) -> Self {
        self.cap = cap;
        self
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

impl IntoFuture for LockRequest {
    type Output = Result<LockGuard, LockError>;
    type IntoFuture = LockFuture;

    fn into_future(self) -> LockFuture {
        LockFuture(Box::pin(lock(self)))
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

async fn lock(request: LockRequest) -> Result<LockGuard, LockError> {
    let settings = &request.core.cluster.settings;
    let span = LockSpan::new(
        request.options.label,
        settings.quorum.nodes(),
        &request.keys,
        settings.log_keys,
    );
    let waited = Waited::default();
    let outcome = lock_in(request, &span, &waited).await;
    match &outcome {
        Ok(guard) => span.granted(guard.fencing_token(), waited.so_far()),
        Err(error) => span.refused(error.outcome(), waited.so_far()),
    }
    outcome
}

async fn lock_in(
    request: LockRequest,
    span: &LockSpan,
    waited: &Waited,
) -> Result<LockGuard, LockError> {
    let LockRequest {
        core,
        keys,
        options,
        cap,
        is_uncapped,
    } = request;
    let settings = &core.cluster.settings;
    let (namespace, access) = (&settings.namespace, options.access.unwrap_or_default());
    let mut slot_table = None;
    let (keys, names) = match access {
        Access::Exclusive => {
            let names = namespace.names(&keys, sha256)?;
            (keys, names.into())
        }
        Access::Shared => {
            let names = namespace.names(&keys, sha256)?.into_iter();
            (
                keys,
                names.map(|name| namespace.with_shared(name)).collect(),
            )
        }
        Access::Slot(count) => {
            let table = slot_table.insert(SlotTable::new(namespace, &keys, count)?);
            // The task chooses one of the slots.
            (keys, table.get(0).1)
        }
    };
    let ttl = settings.ttl(options.ttl)?;
    let wait = options.wait.unwrap_or(settings.wait);
    let deadline = after(span.began(), wait);
    let caps = [settings.max_waiters.clone(), cap].into_iter().flatten();
    let caps = caps.filter(|_| !is_uncapped);
    let mut slots = WaiterSlots::new(caps, waited.clone());
    if core.registry.stage() != DrainStage::Open {
        return Err(LockError::Closed);
    }
    let permit = core.queue.try_acquire(&keys, access);
    if permit.as_ref().is_err_and(|busy| busy.is_own) {
        core.warn_of_reentry(span.label());
    }
    let permit = match permit {
        Ok(permit) => permit,
        // Boxed, because most calls do not wait, and would reserve its space all the same.
        Err(busy) if wait.is_zero() => {
            Box::pin(wait_for_release(&core, &keys, access, &busy)).await?
        }
        Err(_) => Box::pin(wait_for_permit(&core, &keys, access, deadline, &mut slots)).await?,
    };
    let ticket = core.registry.enter(&keys).ok_or(LockError::Closed)?;
    let terms = Terms {
        names,
        ttl,
        is_fenced: settings.fencing,
        access,
        slot_table,
        hold_at_least: options.hold_at_least,
    };
    let task = LeaseTask::new(&core.cluster, keys, terms, ticket, span.label());
    let max_hold = options.max_hold.or(settings.max_hold);
    let share = acquire(task, permit, slots, deadline, max_hold, span.span()).await?;
    share.lease().set_delivered();
    Ok(LockGuard::new(share))
}

/// Refuses a call that does not wait, unless the lock is about to be released in this process.
///
/// Dropping a guard, a response body or a future only wakes the lease task. A caller that continues at once, such
/// as `tower::retry` after it has dropped a response, would meet the lock of its own last request. The task sends
/// the release within moments, so this waits for it, for at most the node timeout.
async fn wait_for_release(
    core: &Core,
    keys: &LockKeys,
    access: Access,
    busy: &Busy,
) -> Result<Permit, LockError> {
    let contended = LockError::Contended {
        retry_after: busy.retry_after,
    };
    if !busy.is_ending {
        return Err(contended);
    }
    let node_timeout = core.cluster.settings.node_timeout;
    let permit = timeout(node_timeout, core.queue.acquire(keys, access)).await;
    permit.map_err(|_| contended)
}

/// Waits for the permits of the keys, until the deadline of the caller.
async fn wait_for_permit(
    core: &Core,
    keys: &LockKeys,
    access: Access,
    deadline: Instant,
    slots: &mut WaiterSlots,
) -> Result<Permit, LockError> {
    slots.occupy()?;
    tokio::select! {
        biased;
        permit = core.queue.acquire(keys, access) => Ok(permit),
        () = sleep_until(deadline) => Err(LockError::Contended {
            retry_after: core.queue.retry_after(keys, access),
        }),
        () = core.registry.reached(DrainStage::Draining) => Err(LockError::Closed),
    }
}
