//! What those learn of a lock who do not hold it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::lock::error::ExtendError;
use crate::lock::guard::LockGuard;
use crate::lock::lease::Lease;
use crate::lock::lost::Lost;
use crate::lock::redlock::Redlock;
use crate::protocol::{FencingToken, LockKey};

/// A view of a lock that holds no share of it: cheap to clone, harmless to keep.
///
/// The layers put one into the extensions of the request that they hold a lock for.
#[derive(Clone)]
pub struct LockHandle {
    lease: Arc<Lease>,
    /// Locks that the same request took before, and that belong to what this handle is for.
    beside: Vec<Arc<Lease>>,
}

impl LockHandle {
    pub(super) fn new(lease: Arc<Lease>, beside: Vec<Arc<Lease>>) -> Self {
        Self { lease, beside }
    }

    /// Without the locks beside it.
    pub(crate) fn alone(&self) -> Self {
        Self::new(Arc::clone(&self.lease), Vec::new())
    }

    /// Whether it is a lock of this service; another has other nodes or another namespace.
    pub(crate) fn is_of(&self, redlock: &Redlock) -> bool {
        redlock.is_service(&self.lease.service)
    }

    /// Whether the lock has a holder: it is neither released nor about to be.
    pub(crate) fn is_held(&self) -> bool {
        self.lease.is_shared()
    }

    /// Whether both are of one lock.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.lease, &other.lease)
    }

    /// Returns all keys of the lock in ascending order; never empty.
    #[must_use]
    pub fn keys(&self) -> &[LockKey] {
        self.lease.keys.as_slice()
    }

    /// Returns the fencing token, for the storage to check; `None` only when fencing is off.
    #[must_use]
    pub fn fencing_token(&self) -> Option<FencingToken> {
        self.lease.token
    }

    /// Returns the fencing token for writes to what `key` names; see
    /// [`LockGuard::fencing_token_of`].
    #[must_use]
    pub fn fencing_token_of(&self, key: &LockKey) -> Option<FencingToken> {
        let mut leases = self.beside.iter().chain([&self.lease]);
        leases
            .find(|lease| lease.keys.as_slice().contains(key))?
            .token
    }

    /// Returns how much longer the lock is certainly held; see [`LockGuard::valid_for`].
    #[must_use]
    pub fn valid_for(&self) -> Duration {
        let others = self.beside.iter().map(|lease| lease.valid_for());
        others.fold(self.lease.valid_for(), Duration::min)
    }

    /// Returns whether the lock is certainly held; see [`LockGuard::is_valid`].
    #[must_use]
    pub fn is_valid(&self) -> bool {
        !self.valid_for().is_zero()
    }

    /// Returns a future that resolves when the lock is lost or released; see [`LockGuard::lost`].
    pub fn lost(&self) -> Lost {
        let others = self.beside.iter().map(|lease| lease.lost());
        others.fold(self.lease.lost(), Lost::or)
    }

    /// Extends the lock; see [`LockGuard::extend`].
    ///
    /// # Errors
    ///
    /// As [`LockGuard::extend`].
    ///
    /// # Cancel safety
    ///
    /// As [`LockGuard::extend`].
    pub async fn extend(&self, ttl: Duration) -> Result<(), ExtendError> {
        for lease in &self.beside {
            lease.extend(ttl).await?;
        }
        self.lease.extend(ttl).await
    }

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
        let others: Result<_, _> = self.beside.iter().map(share).collect();
        Ok(share(&self.lease)?.beside(others?))
    }
}

impl fmt::Debug for LockHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockHandle")
            .field("keys", &self.keys())
            .field("fencing_token", &self.fencing_token())
            .field("valid_for", &self.valid_for())
            .finish()
    }
}

/// The lock has been released, so there is nothing to take a share of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AlreadyReleased;

impl fmt::Display for AlreadyReleased {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the lock has already been released; detach it before the response is sent")
    }
}

impl std::error::Error for AlreadyReleased {}
