//! Held locks: the guard, which holds a share of the lease, and the handle, which only shows it.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::lock::error::{ExtendError, Lost, LostReason, ReleaseError};
use crate::lock::slots::key_of_slot;
use crate::lock::state::{LockState, Releasing};
use crate::node::Mutex;
use crate::protocol::{FencingToken, LockKey, LockKeys};

/// A held lock, or one share of it. The lock is released when its last share is dropped.
///
/// The release happens in the background: dropping a guard does no I/O, does not block and cannot panic. Use
/// [`release`](Self::release) to wait until other callers can acquire the lock.
///
/// A leaked guard (`mem::forget`) keeps its lock until `max_hold`, or for ever without one.
///
/// Work that must not go on without the lock ends when the lock is lost, and its writes carry the fencing token:
///
/// ```
/// use tower_redlock::{LockGuard, Redlock};
///
/// async fn report(guard: &LockGuard) -> Option<&'static str> {
///     tokio::select! {
///         report = async { "60 pages" } => Some(report),
///         _reason = guard.lost() => None,
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let redlock = Redlock::in_memory(3);
/// let guard = redlock.lock(("report", "monthly")).await?;
/// assert!(guard.fencing_token().is_some());
/// assert_eq!(report(&guard).await, Some("60 pages"));
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping the guard releases the lock at once"]
pub struct LockGuard(
    /// The guard has one share of each of its leases.
    LockHandle,
);

/// A view of a lock that holds no share of it. Cheap to clone.
///
/// A [`RedlockLayer`](crate::RedlockLayer) puts one into the extensions of each request that it locks. A handle
/// does not keep the lock from being released; [`upgrade`](Self::upgrade) takes a share. [`release`](Self::release)
/// gives up the share of the layer before the response is complete.
///
/// ```
/// use tower_redlock::{LockHandle, Redlock};
///
/// /// Goes on after the response, under the same lock.
/// fn archive(lock: &LockHandle) {
///     let Ok(guard) = lock.upgrade() else { return };
///     tokio::spawn(async move {
///         // The lock is released when the task ends.
///         let _guard = guard;
///     });
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_redlock::LockError> {
/// let guard = Redlock::in_memory(3).lock(("report", "monthly")).await?;
/// archive(&guard.handle());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct LockHandle {
    lease: Arc<LockState>,
    /// Present if there are further leases.
    further: Option<Arc<Further>>,
    /// The share of the layer that made the handle; dangling if a guard made it.
    request_share: Weak<RequestShare>,
}

/// The leases beside the first of a lock.
#[derive(Clone, Default)]
struct Further {
    /// The further leases of the lock, and behind them those of other locks of the same request.
    leases: Vec<Arc<LockState>>,
    /// All keys of a lock of several leases, which belong to several groups of nodes or move from one to another; and the
    /// number of its further leases.
    joined: Option<(LockKeys, usize)>,
}

/// The share that a layer holds while it serves a request. The handler may give it up through its handle; then it is the
/// reason for which the lock was lost before, if it was.
#[derive(Debug)]
pub(crate) struct RequestShare(Mutex<Result<LockGuard, Option<LostReason>>>);

/// Outcome of [`LockGuard::release`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Released {
    /// A majority of the nodes confirmed the release: other callers can acquire the lock, unless
    /// [`hold_at_least`](crate::LockRequest::hold_at_least) keeps it taken.
    Freed,
    /// The lock has other shares, and is released with the last one.
    Shared,
}

/// Error of [`LockHandle::upgrade`]: the lock has been released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the lock has been released; upgrade its handle before the response is sent")]
pub struct AlreadyReleased;

/// Implements the methods that guard and handle have in common. The guard has its handle in this field.
macro_rules! view {
    ($view:ty $(, $handle:tt)?) => {
        impl $view {
            /// Returns the key of the lock; the first in ascending order if there are several.
            #[must_use]
            pub fn key(&self) -> &LockKey {
                &self.keys()[0]
            }

            /// Returns all keys of the lock in ascending order; never empty.
            ///
            /// Keys that the same request locked before, for example by a layer, are not included. They belong to
            /// another lock with another token, of which this one holds a share; see [`LockHandles`](crate::LockHandles).
            #[must_use]
            pub fn keys(&self) -> &[LockKey] {
                let further = self$(.$handle)?.further.as_ref();
                let joined = further.and_then(|further| further.joined.as_ref());
                let all = joined.map(|(keys, _)| keys);
                all.unwrap_or(&self.lease().spec.keys).as_slice()
            }

            /// Returns the fencing token of [`keys`](Self::keys), which the storage should check; `None` only if
            /// fencing is off.
            #[must_use]
            pub fn fencing_token(&self) -> Option<FencingToken> {
                self.lease().token()
            }

            /// Returns the number of the slot, counted from zero; `None` if the lock was requested without
            /// [`slots`](crate::LockRequest::slots).
            #[must_use]
            pub fn slot(&self) -> Option<usize> {
                self.lease().spec.slot
            }

            /// Returns how much longer the lock is certainly held, by the monotonic clock.
            ///
            /// This is the rest of the ttl since the acquisition or the last renewal began, less an allowance for
            /// clock drift; zero once that is over or the lock is lost. A process that is paused after this call
            /// gets no warning, and the monotonic clock of a suspended computer may stand still. Only a storage
            /// that checks the fencing token is safe from both.
            #[must_use]
            pub fn valid_for(&self) -> Duration {
                let left = self.leases().map(|lease| lease.valid_for());
                left.min().unwrap_or_default()
            }

            /// Returns whether [`valid_for`](Self::valid_for) is more than zero.
            ///
            /// Compares with the clock, so the answer does not depend on a task that runs in time.
            #[must_use]
            pub fn is_valid(&self) -> bool {
                !self.valid_for().is_zero()
            }

            /// Returns a future that resolves when the lock is lost, for a `select!` with the work.
            ///
            /// It resolves as soon as a majority of the nodes answers a renewal with the loss of the lock. If no
            /// majority can be reached for a renewal, or there is none because renewal is off or `max_hold` is
            /// over, it resolves at the end of the validity and never later. From then on,
            /// [`valid_for`](Self::valid_for) is zero. If the lock is released first, the future resolves to
            /// [`LostReason::Released`](crate::LostReason::Released).
            pub fn lost(&self) -> Lost {
                let others = self.leases().skip(1).map(|lease| lease.lost());
                others.fold(self.lease().lost(), Lost::or)
            }

            /// Extends the lock to `ttl` from now, and renews it with that ttl from then on.
            ///
            /// The end of the validity never moves back: a shorter ttl takes effect with the next renewal.
            ///
            /// # Errors
            ///
            /// Returns an [`ExtendError`] if the ttl is over `max_ttl` or too short, if the lock is lost, or if no
            /// majority confirmed the extension. A lock that is not lost is then exactly as valid as before. Locks
            /// that this one shares may have been extended already.
            ///
            /// An extension that the nodes carry out after the validity has ended does not bring the lock back. It
            /// keeps other callers out for at most `ttl`, or until the guard is dropped.
            ///
            /// # Cancel safety
            ///
            /// If the future is dropped, the extension may or may not take effect. It never shortens the lock.
            pub async fn extend(&self, ttl: Duration) -> Result<(), ExtendError> {
                for other in self.leases().skip(1) {
                    other.extend(ttl).await?;
                }
                self.lease().extend(ttl).await
            }

            /// Returns the first lease of the lock itself.
            pub(crate) fn lease(&self) -> &Arc<LockState> {
                &self$(.$handle)?.lease
            }

            /// Returns that lease, followed by the further ones of the lock, and those of the other locks.
            pub(crate) fn leases(&self) -> impl Iterator<Item = &Arc<LockState>> {
                let further = self$(.$handle)?.further.as_ref();
                let further = further.map(|further| further.leases.as_slice());
                std::iter::once(self.lease()).chain(further.unwrap_or_default())
            }
        }

        impl fmt::Debug for $view {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($view))
                    .field("keys", &self.keys())
                    .field("fencing_token", &self.fencing_token())
                    .field("valid_for", &self.valid_for())
                    .finish()
            }
        }
    };
}

view!(LockGuard, 0);
view!(LockHandle);

impl LockGuard {
    /// Creates the guard of a lease, and takes over a share of it.
    pub(crate) fn new(lease: &Arc<LockState>) -> Self {
        Self(LockHandle {
            lease: Arc::clone(lease),
            further: None,
            request_share: Weak::new(),
        })
    }

    /// Makes one lock of several leases, before its caller gets it. They have the same token.
    pub(crate) fn join(self, further: Vec<Self>) -> Self {
        let mut joined = self.with_others(further);
        let keys = joined.leases().flat_map(|lease| lease.spec.keys.as_slice());
        let keys = keys.collect();
        let further = joined.0.further_mut();
        further.joined = Some((keys, further.leases.len()));
        joined
    }

    /// Adds other locks. The guard holds them too, and is valid only as long as all of them are.
    pub(crate) fn with_others(mut self, others: Vec<Self>) -> Self {
        for other in others {
            // There is a share to take, because the other guard gives up its own behind this.
            let shared = other.leases().filter(|lease| lease.share());
            self.0.further_mut().leases.extend(shared.map(Arc::clone));
        }
        self
    }

    /// Notes that the caller gets the guard now. The times that `max_hold` and `hold_at_least` bound begin.
    pub(crate) fn set_delivered(&self) {
        self.leases().for_each(|lease| lease.set_delivered());
    }

    /// Gives up this share. If it was the last one, waits until a majority of the nodes has released the lock.
    ///
    /// The release of the other nodes goes on in the background.
    ///
    /// # Errors
    ///
    /// Returns [`ReleaseError::Lost`] if the lock was lost before, and [`ReleaseError::Unavailable`] if no majority
    /// confirmed within `node_timeout`; the release then goes on in the background.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future ends only the wait; the lock is released all the same.
    pub async fn release(self) -> Result<Released, ReleaseError> {
        match self.end() {
            Ok(releasing) => releasing.await.map(|()| Released::Freed),
            // Boxed, so that the usual case has no room for it.
            Err(handle) => Box::pin(handle.released()).await,
        }
    }

    /// Gives up this share. Returns the release, if it was the last share of a lock at rest, or else a handle to wait with.
    pub(crate) fn end(self) -> Result<Releasing, LockHandle> {
        // The task is taken before the share is given up: the drop of the last share would find it at rest, and spawn it.
        let only = Some(self.lease()).filter(|_| self.0.further.is_none());
        let Some(rest) = only.and_then(|lease| lease.take_rest_here()) else {
            return Err(self.give_up());
        };
        let releasing = Releasing(Arc::clone(self.lease()), Some(rest));
        match self.give_up() {
            // The task goes on with the other shares.
            shared if shared.lease.is_shared() => Err(shared),
            _ => Ok(releasing),
        }
    }

    /// Gives up this share, and returns a handle of what it was a share of.
    pub(crate) fn give_up(self) -> LockHandle {
        self.handle()
    }

    /// Returns a handle, which shows the lock and holds no share of it.
    #[must_use]
    pub fn handle(&self) -> LockHandle {
        self.0.clone()
    }

    /// Returns why the lock is lost: as reported, or by the clock.
    fn lost_reason(&self) -> Option<LostReason> {
        self.leases().find_map(|lease| lease.lost_by_now())
    }

    /// Returns whether this is one of the first `count` slots of the keys.
    pub(crate) fn is_slot_of(&self, keys: &LockKeys, count: usize) -> bool {
        let is_slot = |key: &LockKey| {
            let mut slots = (0..count).map(|slot| key_of_slot(key, slot));
            slots.any(|slot| self.keys().contains(&slot))
        };
        self.slot().is_some() && keys.as_slice().iter().all(is_slot)
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        self.leases().for_each(|lease| lease.leave());
    }
}

impl LockHandle {
    /// Takes a share of the lock, which may outlive the request of the handle.
    ///
    /// Call it in the handler, and move the guard into the task that outlives the response, such as a WebSocket.
    ///
    /// # Errors
    ///
    /// Returns [`AlreadyReleased`] if the last share is gone.
    pub fn upgrade(&self) -> Result<LockGuard, AlreadyReleased> {
        // All or none: a guard without a share of one lease would let that be released under its holder.
        let mut untaken = self.leases().skip_while(|lease| lease.share());
        if let Some(gone) = untaken.next() {
            let taken = self.leases().take_while(|lease| !Arc::ptr_eq(lease, gone));
            taken.for_each(|lease| lease.leave());
            return Err(AlreadyReleased);
        }
        Ok(LockGuard(Self {
            request_share: Weak::new(),
            ..self.clone()
        }))
    }

    /// Gives up the share of the layer, for a handler that is done with the resource before its response is complete.
    /// If it was the last share, waits until a majority of the nodes has released the lock.
    ///
    /// From then on, the layer serves the request as one without a lock: nothing stops the handler, and the response is
    /// not delayed. After [`Released::Freed`], [`lost`](Self::lost) resolves and [`is_valid`](Self::is_valid) is false,
    /// as after any release. A second call returns the outcome again.
    ///
    /// The lock stays, with [`Released::Shared`], as long as there is another share of it: that of a
    /// [`Locked`](crate::Locked) extractor, of a guard from [`upgrade`](Self::upgrade), of another layer with the same
    /// key, or of an execution of an [`IdempotencyLayer`](crate::IdempotencyLayer) inside of the layer. A handle that
    /// [`LockGuard::handle`] made belongs to no layer and gives up nothing.
    ///
    /// ```
    /// use axum::http::StatusCode;
    /// use tower_redlock::LockHandle;
    ///
    /// async fn withdraw(lock: LockHandle) -> Result<&'static str, StatusCode> {
    ///     // Reads and writes the balance; then others may.
    ///     if let Err(error) = lock.release().await {
    ///         // Lost before, or kept until its ttl by nodes that did not answer.
    ///         eprintln!("{error}");
    ///         return Err(StatusCode::SERVICE_UNAVAILABLE);
    ///     }
    ///     // Sends an e-mail.
    ///     Ok("withdrawn")
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`LockGuard::release`]. If the lock was lost before, and the layer has
    /// [`OnLost::Abort`](crate::OnLost::Abort), the client gets 503 `lock-lost`.
    ///
    /// # Cancel safety
    ///
    /// The share is given up when the future is first polled. Dropping it then ends only the wait.
    pub async fn release(&self) -> Result<Released, ReleaseError> {
        let share = self.request_share.upgrade();
        match share.and_then(|share| share.give_up()) {
            Some(guard) => guard.release().await,
            None => self.released().await,
        }
    }

    /// Waits until a majority has confirmed the release, if the lock has no holder any more.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(crate) async fn released(&self) -> Result<Released, ReleaseError> {
        let mut outcome = Ok(Released::Freed);
        // The other locks first.
        for lease in self.leases().skip(1).chain([&self.lease]) {
            let released = match lease.is_shared() {
                true => Ok(Released::Shared),
                false => lease.released().await.map(|()| Released::Freed),
            };
            if released != Ok(Released::Freed) && outcome.is_ok() {
                outcome = released;
            }
        }
        outcome
    }

    /// Returns a handle of the lock itself, without the other locks.
    pub(crate) fn alone(&self) -> Self {
        let mut alone = self.clone();
        if alone.further.is_some() {
            let further = alone.further_mut();
            let own = further.joined.as_ref().map_or(0, |(_, own)| *own);
            further.leases.truncate(own);
        }
        alone
    }

    fn further_mut(&mut self) -> &mut Further {
        Arc::make_mut(self.further.get_or_insert_default())
    }

    /// Returns whether both handles belong to the same lock.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.lease, &other.lease)
    }
}

impl RequestShare {
    /// Makes the guard of a layer a share that its handler may give up. Returns it with the handle for the handler.
    pub(crate) fn new(guard: LockGuard) -> (Arc<Self>, LockHandle) {
        let mut handle = guard.handle();
        let share = Arc::new(Self(Mutex::new(Ok(guard))));
        // Weak, because handles may outlive the response, as in a task of the handler, and must not keep the lock.
        handle.request_share = Arc::downgrade(&share);
        (share, handle)
    }

    /// Returns why the lock was lost, before its share was given up if it was.
    pub(crate) fn lost_reason(&self) -> Option<LostReason> {
        match &*self.0.lock() {
            Ok(guard) => guard.lost_reason(),
            Err(lost) => *lost,
        }
    }

    /// Takes the guard out at the end of the request, unless the handler has done so. Nothing asks for the loss behind it.
    pub(crate) fn end(&self) -> Option<LockGuard> {
        std::mem::replace(&mut *self.0.lock(), Err(None)).ok()
    }

    /// Takes the guard out, unless that has happened before.
    fn give_up(&self) -> Option<LockGuard> {
        let mut share = self.0.lock();
        // Under the same mutex: the layer sees either the guard, or how the lock stood when it went.
        let lost = share.as_ref().ok()?.lost_reason();
        std::mem::replace(&mut *share, Err(lost)).ok()
    }
}
