//! What a holder holds.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::lock::error::{ExtendError, ReleaseError};
use crate::lock::handle::LockHandle;
use crate::lock::lease::{Lease, Share};
use crate::lock::lost::Lost;
use crate::protocol::{FencingToken, LockKey};

/// A held lock, or one share of it; the lock is released when the last share is gone.
///
/// Dropping it releases in the background: it does no I/O, does not block and cannot panic. Use
/// [`release`](Self::release) to wait until others can have the lock.
///
/// A guard that is leaked (`mem::forget`) keeps its lock until `max_hold`, or for ever without one.
#[must_use = "dropping the guard releases the lock at once"]
pub struct LockGuard {
    share: Share,
    /// Locks that the same request took before, and that belong to what this guard is for.
    beside: Vec<Self>,
}

/// How a release ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Released {
    /// A majority of the nodes confirmed it: others can have the lock.
    Freed,
    /// Somebody else holds a share of the same lock; it is released with the last one.
    Shared,
}

impl LockGuard {
    pub(super) fn new(share: Share) -> Self {
        Self {
            share,
            beside: Vec::new(),
        }
    }

    pub(super) fn lease(&self) -> &Arc<Lease> {
        self.share.lease()
    }

    /// Makes this guard keep other locks too, and be valid only as long as all of them.
    pub(crate) fn beside(mut self, others: Vec<Self>) -> Self {
        self.beside.extend(others);
        self
    }

    /// Returns the key; of several, the first in ascending order.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.keys()[0]
    }

    /// Returns all keys of the lock in ascending order; never empty.
    ///
    /// Keys that the same request had locked before, by a layer say, are not among them: they are
    /// shared, and a lock of their own with a token of its own.
    #[must_use]
    pub fn keys(&self) -> &[LockKey] {
        self.share.lease().keys.as_slice()
    }

    /// Returns the fencing token of [`keys`](Self::keys), for the storage to check; `None` only when
    /// fencing is off.
    #[must_use]
    pub fn fencing_token(&self) -> Option<FencingToken> {
        self.share.lease().token
    }

    /// Returns the fencing token for writes to what `key` names, also if the request had locked that
    /// before; `None` if the guard does not hold it, or fencing is off.
    ///
    /// Tokens are in order key by key: what is shared has the token with which it was locked.
    #[must_use]
    pub fn fencing_token_of(&self, key: &LockKey) -> Option<FencingToken> {
        let leases = self.beside.iter().map(|guard| guard.share.lease());
        let mut leases = leases.chain([self.share.lease()]);
        leases
            .find(|lease| lease.keys.as_slice().contains(key))?
            .token
    }

    /// Returns how much longer the lock is certainly held, on the monotonic clock.
    ///
    /// The ttl less what it took to acquire or renew it and less the drift of clocks; zero once
    /// that is over or the lock is lost. A process that is paused after this call gets no warning,
    /// and a computer that was suspended may have a monotonic clock that stood still meanwhile:
    /// only a storage that checks the fencing token is safe from that.
    #[must_use]
    pub fn valid_for(&self) -> Duration {
        let others = self.beside.iter().map(Self::valid_for);
        others.fold(self.share.lease().valid_for(), Duration::min)
    }

    /// Returns whether [`valid_for`](Self::valid_for) is more than zero: a comparison with the
    /// clock, never a flag that somebody has to clear in time.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        !self.valid_for().is_zero()
    }

    /// Returns a future that resolves when the lock is lost, for a `select!` beside the work.
    ///
    /// It resolves at once when a majority of the nodes says that the lock is gone, and at the end
    /// of the validity, never after it, when a majority could not be reached to renew it or
    /// `max_hold` is over. From then on [`valid_for`](Self::valid_for) is zero.
    pub fn lost(&self) -> Lost {
        let others = self.beside.iter().map(Self::lost);
        others.fold(self.share.lease().lost(), Lost::or)
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
        for other in &self.beside {
            other.share.lease().extend(ttl).await?;
        }
        self.share.lease().extend(ttl).await
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
    /// Dropping the future drops only the waiting; the release happens.
    pub async fn release(self) -> Result<Released, ReleaseError> {
        let Self { share, beside } = self;
        let beside = beside.into_iter().map(|guard| guard.share);
        // All are given back before the first is waited for: this future may be dropped.
        let left: Vec<_> = beside.chain([share]).map(leave).collect();
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

    /// Returns a handle, which tells about the lock but does not hold it.
    #[must_use]
    pub fn handle(&self) -> LockHandle {
        let others = self.beside.iter();
        let others = others.map(|guard| Arc::clone(guard.share.lease()));
        LockHandle::new(Arc::clone(self.share.lease()), others.collect())
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("keys", &self.keys())
            .field("fencing_token", &self.fencing_token())
            .field("valid_for", &self.valid_for())
            .finish()
    }
}

/// Gives a share back, and says of what and whether it was the last.
fn leave(share: Share) -> (Arc<Lease>, bool) {
    let lease = Arc::clone(share.lease());
    let was_last = share.leave();
    (lease, was_last)
}
