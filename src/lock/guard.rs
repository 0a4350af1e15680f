//! Held locks: the guard, which holds a share, and the handle, which does not.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::lock::error::{ExtendError, ReleaseError};
use crate::lock::lease::{Lease, Share};
use crate::lock::lost::Lost;
use crate::protocol::{FencingToken, LockKey};

/// A held lock, or one share of it; the lock is released when the last share is dropped.
///
/// Dropping it releases in the background: it does no I/O, does not block and cannot panic. Use
/// [`release`](Self::release) to wait until others can have the lock.
///
/// A guard that is leaked (`mem::forget`) keeps its lock until `max_hold`, or for ever without one.
#[must_use = "dropping the guard releases the lock at once"]
pub struct LockGuard {
    share: Share,
    /// Further locks of the same request that belong to what this guard protects.
    others: Vec<Self>,
}

/// A view of a lock that holds no share of it: cheap to clone, harmless to keep.
///
/// The layers put one into the extensions of the request that they hold a lock for.
#[derive(Clone)]
pub struct LockHandle {
    lease: Arc<Lease>,
    /// Further locks of the same request; see [`LockGuard::keys`].
    others: Vec<Arc<Lease>>,
}

/// How a release ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Released {
    /// A majority of the nodes confirmed it: others can have the lock.
    Freed,
    /// The same lock has further shares; it is released with the last one.
    Shared,
}

/// The lock has been released, so there is no share to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AlreadyReleased;

/// The methods that a guard and a handle have in common. Both provide `leases()`: that of the lock itself, and
/// then those of the other locks.
macro_rules! view {
    ($view:ty) => {
        impl $view {
            /// Returns the key; of several, the first in ascending order.
            #[must_use]
            pub fn key(&self) -> &LockKey {
                &self.keys()[0]
            }

            /// Returns all keys of the lock in ascending order; never empty.
            ///
            /// Keys that the same request locked before, say by a layer, are not among them: they are shared,
            /// and belong to a lock of their own with a token of its own.
            #[must_use]
            pub fn keys(&self) -> &[LockKey] {
                self.lease().keys.as_slice()
            }

            /// Returns the fencing token of [`keys`](Self::keys), for the storage to check; `None` only when
            /// fencing is off.
            #[must_use]
            pub fn fencing_token(&self) -> Option<FencingToken> {
                self.lease().token
            }

            /// Returns the fencing token for writes to what `key` names, also if the same request locked that
            /// before; `None` if the lock does not include it, or fencing is off.
            ///
            /// Tokens are ordered key by key: a shared lock has the token with which it was acquired.
            #[must_use]
            pub fn fencing_token_of(&self, key: &LockKey) -> Option<FencingToken> {
                let mut leases = self.leases();
                let lease = leases.find(|lease| lease.keys.as_slice().contains(key))?;
                lease.token
            }

            /// Returns how much longer the lock is certainly held, on the monotonic clock.
            ///
            /// This is the ttl, less the time that it took to acquire or renew it, less the drift of clocks;
            /// zero once that is over or the lock is lost. A process that is paused after this call gets no
            /// warning, and the monotonic clock of a suspended computer may stand still: only a storage that
            /// checks the fencing token is safe from both.
            #[must_use]
            pub fn valid_for(&self) -> Duration {
                let left = self.leases().map(|lease| lease.valid_for());
                left.min().unwrap_or_default()
            }

            /// Returns whether [`valid_for`](Self::valid_for) is more than zero: a comparison with the clock,
            /// never a flag that has to be cleared in time.
            #[must_use]
            pub fn is_valid(&self) -> bool {
                !self.valid_for().is_zero()
            }

            /// Returns a future that resolves when the lock is lost, for a `select!` beside the work.
            ///
            /// It resolves at once when a majority of the nodes answers that the lock is gone, and at the end
            /// of the validity, never after it, when a majority could not be reached to renew it or
            /// `max_hold` is over. From then on [`valid_for`](Self::valid_for) is zero. If the lock is
            /// released first, it resolves to [`LostReason::Released`](crate::LostReason::Released).
            pub fn lost(&self) -> Lost {
                let others = self.leases().skip(1).map(|lease| lease.lost());
                others.fold(self.lease().lost(), Lost::or)
            }

            /// Sets the ttl of the lock from now on, also for later renewals, and extends it by that now.
            ///
            /// Never shortens a lock: a shorter ttl takes effect with the next renewal.
            ///
            /// # Errors
            ///
            /// [`ExtendError`] if the ttl is over `max_ttl` or too short, if the lock is lost, or if no
            /// majority confirmed the extension. The lock is then exactly as valid as before; of locks that
            /// the request shares, some may live longer by then.
            ///
            /// # Cancel safety
            ///
            /// Dropping the future does not undo the extension: it may take effect or not. The lock is
            /// never shortened by it.
            pub async fn extend(&self, ttl: Duration) -> Result<(), ExtendError> {
                for other in self.leases().skip(1) {
                    other.extend(ttl).await?;
                }
                self.lease().extend(ttl).await
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

view!(LockGuard);
view!(LockHandle);

impl LockGuard {
    pub(crate) fn new(share: Share) -> Self {
        Self {
            share,
            others: Vec::new(),
        }
    }

    /// Adds other locks, which this guard keeps too, and which it is valid only together with.
    pub(crate) fn with_others(mut self, others: Vec<Self>) -> Self {
        self.others.extend(others);
        self
    }

    /// Gives this share back, and if it was the last, waits until a majority has released the lock.
    ///
    /// Nodes that have not answered by then are released in the background.
    ///
    /// # Errors
    ///
    /// [`ReleaseError::Lost`] if the lock was lost before, [`ReleaseError::Unavailable`] if no
    /// majority confirmed within `node_timeout`; the release goes on in the background then.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future ends only the waiting; the release happens.
    pub async fn release(self) -> Result<Released, ReleaseError> {
        let Self { share, others } = self;
        let others = others.into_iter().map(|guard| guard.share);
        // All shares are given back before the first wait, because this future may be dropped.
        let left: Vec<_> = others.chain([share]).map(Share::leave).collect();
        let mut outcome = Ok(Released::Freed);
        for (lease, was_last) in left {
            let released = if was_last {
                lease.released().await.map(|()| Released::Freed)
            } else {
                Ok(Released::Shared)
            };
            if released != Ok(Released::Freed) && outcome.is_ok() {
                outcome = released;
            }
        }
        outcome
    }

    /// Returns a handle, which shows the lock but does not hold it.
    #[must_use]
    pub fn handle(&self) -> LockHandle {
        let others = self.leases().skip(1).map(Arc::clone);
        LockHandle {
            lease: Arc::clone(self.lease()),
            others: others.collect(),
        }
    }

    pub(crate) fn lease(&self) -> &Arc<Lease> {
        self.share.lease()
    }

    fn leases(&self) -> impl Iterator<Item = &Arc<Lease>> {
        let others = self.others.iter().map(Self::lease);
        std::iter::once(self.lease()).chain(others)
    }
}

impl LockHandle {
    /// Takes a share of the lock, which outlives the request that the handle came with.
    ///
    /// Call it in the handler and move the guard into the task that goes on: a WebSocket, say, or
    /// work that continues after the response.
    ///
    /// # Errors
    ///
    /// [`AlreadyReleased`] if the last share is gone.
    pub fn upgrade(&self) -> Result<LockGuard, AlreadyReleased> {
        let share = |lease: &Arc<Lease>| lease.share().map(LockGuard::new).ok_or(AlreadyReleased);
        let others: Result<_, _> = self.others.iter().map(share).collect();
        Ok(share(&self.lease)?.with_others(others?))
    }

    /// Returns a handle of the lock itself, without the others.
    pub(crate) fn alone(&self) -> Self {
        Self {
            lease: Arc::clone(&self.lease),
            others: Vec::new(),
        }
    }

    /// Returns whether the lock has a holder: it is neither released nor about to be.
    pub(crate) fn is_held(&self) -> bool {
        self.lease.is_shared()
    }

    /// Returns whether both handles are of one lock.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.lease, &other.lease)
    }

    pub(crate) fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    fn leases(&self) -> impl Iterator<Item = &Arc<Lease>> {
        std::iter::once(&self.lease).chain(&self.others)
    }
}

impl fmt::Display for AlreadyReleased {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the lock has been released; upgrade its handle before the response is sent")
    }
}

impl std::error::Error for AlreadyReleased {}
