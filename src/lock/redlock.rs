//! The lock service over a set of nodes, and the entry to its API.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use crate::lock::acquisition::LockRequest;
use crate::lock::error::BuildError;
use crate::lock::guard::{LockGuard, LockHandle};
use crate::lock::health::{Health, check_group};
use crate::lock::layout::{Core, Layout};
use crate::lock::lead::Lead;
use crate::lock::options::LockOptions;
use crate::lock::queue::WaiterCap;
use crate::lock::registry::{DrainStage, Drained, HeldLock};
use crate::lock::settings::Settings;
use crate::node::telemetry;
use crate::protocol::{LockKey, LockKeys};

/// Distributed locks over a quorum of independent nodes.
///
/// Cheap to clone; all clones are the same service.
///
/// ```
/// use tower_redlock::{LockError, Redlock};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), LockError> {
/// let redlock = Redlock::in_memory(3);
/// let guard = redlock.lock(("account", "7")).await?;
/// assert!(guard.is_valid());
/// let refused = redlock.try_lock(("account", "7")).await;
/// assert!(matches!(refused, Err(LockError::Contended { .. })));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Redlock(Arc<Core>);

impl Redlock {
    /// Requests a lock, and waits for up to the builder's `wait` (default 5 s) while another caller holds it.
    ///
    /// Locks are not re-entrant: a caller that holds the lock and requests it again waits for itself, and is
    /// refused as if another caller held it. The first request of a task for a lock that the same task acquired, and
    /// that is still held, is logged as a warning, once for each lock service. A handler under
    /// a [`RedlockLayer`](crate::RedlockLayer) gets a share of its lock from [`LockHandle::upgrade`].
    ///
    /// # Panics
    ///
    /// Awaiting the request panics outside of a tokio runtime with a timer.
    pub fn lock(&self, key: impl Into<LockKey>) -> LockRequest {
        self.request(LockKeys::from(key.into()), LockOptions::default())
    }

    /// Requests a lock without waiting.
    ///
    /// Makes one attempt, and another only after a split vote, in which several callers got some nodes each and
    /// none a majority.
    ///
    /// # Panics
    ///
    /// As [`lock`](Self::lock).
    pub fn try_lock(&self, key: impl Into<LockKey>) -> LockRequest {
        self.lock(key).wait(Duration::ZERO)
    }

    /// Requests several keys as one lock, all or nothing.
    ///
    /// The keys are sorted and deduplicated; at most [`LockKeys::MAX`] may remain. The lock has one fencing token,
    /// which is above the earlier tokens of all its keys. If one key is lost, the whole lock is.
    ///
    /// Keys of several [groups](crate::RedlockBuilder::group) are acquired group by group, in the order of their names. The
    /// lock is granted if every group grants its keys; otherwise, none stays locked.
    ///
    /// # Panics
    ///
    /// As [`lock`](Self::lock).
    pub fn lock_all<K: Into<LockKey>>(&self, keys: impl IntoIterator<Item = K>) -> LockRequest {
        self.request(keys.into_iter().collect(), LockOptions::default())
    }

    /// Requests a set of keys as one lock; see [`lock_all`](Self::lock_all).
    pub(crate) fn request(&self, keys: LockKeys, options: LockOptions) -> LockRequest {
        LockRequest {
            core: Arc::clone(&self.0),
            keys,
            caps: [self.0.cap.clone(), options.cap.clone()],
            options,
        }
    }

    /// Does work in one process at a time: campaigns for a key, calls `work` with the lock, and campaigns again when the
    /// lock is lost or the work returns.
    ///
    /// The lock is held until the future that `work` returned ends, whether it keeps the guard or not. While another
    /// process holds the key, this one waits. When the lock is lost, or the process is drained, the future
    /// that `work` returned is dropped at its next `.await`, and the key is released. What must happen at the end of a
    /// term belongs into the `Drop` of a value in the future, which does not get to see
    /// [`lost`](crate::LockGuard::lost). After a crash, another process leads when the ttl is over.
    ///
    /// Work that returns begins again, after the pauses of [`retry`](crate::RedlockBuilder::retry), which grow while terms
    /// are shorter than a second.
    ///
    /// At most one process leads with a *valid* lock, by one of its calls. A deposed leader may not know yet that it is one: its process
    /// may be paused, or its last write may still be under way. So its writes carry
    /// [`LockGuard::fencing_token`](crate::LockGuard::fencing_token), and the storage refuses a token that is lower than
    /// one it has seen. Work that blocks its thread is not cancelled.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_redlock::{LockGuard, Redlock};
    ///
    /// async fn dispatch(guard: LockGuard) {
    ///     println!("leading with token {:?}", guard.fencing_token());
    ///     loop {
    ///         // One step of the work; writes carry the token.
    ///         tokio::time::sleep(Duration::from_secs(1)).await;
    ///     }
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let redlock = Redlock::in_memory(3);
    /// let leading = tokio::spawn(redlock.lead("dispatcher", dispatch));
    /// # tokio::time::sleep(Duration::from_millis(10)).await;
    /// // At shutdown: another process may lead at once.
    /// redlock.drain(Duration::from_secs(5)).await;
    /// leading.await??;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// `work` is called for each term, so it clones what it needs (an async closure that captures it does not compile):
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use tower_redlock::{Lead, LockGuard, Redlock};
    /// # struct Store;
    /// # async fn dispatch(_: Arc<Store>, _: LockGuard) {}
    /// fn leading(redlock: &Redlock, store: Arc<Store>) -> Lead {
    ///     redlock.lead("dispatcher", move |guard| dispatch(Arc::clone(&store), guard))
    /// }
    /// ```
    ///
    /// # Panics
    ///
    /// The future panics if it is polled outside of a tokio runtime with a timer.
    pub fn lead<F, W>(&self, key: impl Into<LockKey>, work: F) -> Lead
    where
        F: Fn(LockGuard) -> W + Send + Sync + 'static,
        W: Future<Output = ()> + Send + 'static,
    {
        Lead::new(Arc::clone(&self.0), LockKeys::from(key.into()), work)
    }

    /// Asks every node whether it answers, and reports which of them may vote.
    ///
    /// Takes as long as the slowest node: at most the node timeout, and before the first connection the connect
    /// timeout too.
    ///
    /// # Panics
    ///
    /// Panics outside of a tokio runtime with a timer.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub async fn health(&self) -> Health {
        let groups = self.0.layout.groups.iter();
        let groups = join_all(groups.map(|group| check_group(group))).await;
        Health::new(groups, self.0.registry.stage() != DrainStage::Open)
    }

    /// Returns the locks that this service holds in this process, those that are held for longest first. Asks no node.
    ///
    /// Locks of executions are included. A lock is not any more when its release begins or it is lost, even if its holder
    /// goes on; and all shares of a lock are one. A lock in several [groups](crate::RedlockBuilder::group) has an entry
    /// for each. [`list`](Self::list) asks the nodes for the locks of all processes.
    ///
    /// ```
    /// use tower_redlock::Redlock;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_redlock::LockError> {
    /// let redlock = Redlock::in_memory(3);
    /// let guard = redlock.lock(("account", 7)).await?;
    /// for lock in redlock.held() {
    ///     println!("{} {:?} for {:?}", lock.resource, lock.keys, lock.held_for);
    /// }
    /// assert_eq!(redlock.held()[0].fencing_token, guard.fencing_token());
    /// drop(guard);
    /// assert!(redlock.held().is_empty());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn held(&self) -> Vec<HeldLock> {
        self.0.registry.held()
    }

    /// Returns the keys that callers of this process wait for, each with their number.
    #[cfg(feature = "axum")]
    pub(crate) fn waited_for(&self) -> Vec<(LockKey, usize)> {
        let groups = self.0.layout.groups.iter();
        groups.flat_map(|group| group.queue.waited_for()).collect()
    }

    /// Drains the service for a graceful shutdown, and waits until all held locks are released.
    ///
    /// New requests and waiting callers are refused with [`LockError::Closed`](crate::LockError::Closed). At the
    /// timeout, the locks that are still held are no longer renewed, but a lock is never released under its
    /// holder. If all holders ended in time and the nodes answered, no key of this process is left.
    ///
    /// [`serve_until`](Self::serve_until) also stops a server.
    ///
    /// # Panics
    ///
    /// Panics outside of a tokio runtime with a timer.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future ends only the wait; new locks stay refused.
    pub async fn drain(&self, timeout: Duration) -> Drained {
        self.0.registry.drain(timeout).await
    }

    pub(super) fn new(settings: Arc<Settings>, layout: Layout) -> Self {
        let groups = layout.groups.iter();
        telemetry::describe(groups.filter_map(|group| group.label.as_ref()));
        Self(Arc::new(Core {
            cap: settings.max_waiters.map(WaiterCap::new),
            settings,
            layout,
            registry: Arc::default(),
        }))
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.0
    }

    /// Returns whether a lock belongs to this service, and not to one with other nodes or another namespace.
    pub(crate) fn owns(&self, handle: &LockHandle) -> bool {
        Arc::ptr_eq(&self.0.registry, &handle.lease().spec.registry)
    }

    /// Adds the defaults for HTTP requests: their locks fail fast, and are renewed for a bounded time, because a
    /// client must not keep a lock for ever by reading slowly.
    pub(crate) fn request_options(&self, mut options: LockOptions) -> LockOptions {
        let max_hold = self.0.settings.max_hold.unwrap_or(MAX_HOLD_OF_REQUESTS);
        options.wait.get_or_insert(Duration::ZERO);
        options.max_hold.get_or_insert(max_hold);
        options
    }

    /// Checks the ttl of a layer against the settings of the service.
    pub(crate) fn check_ttl(&self, ttl: Duration) -> Result<(), BuildError> {
        BuildError::check_ttl("ttl", ttl)?;
        let max = self.0.settings.max_ttl();
        if ttl > max {
            let remedy = format!("it is over max_ttl = {max:?}; raise that in the builder");
            return Err(BuildError::new("ttl", format_args!("{ttl:?}"), remedy));
        }
        Ok(())
    }
}

/// Shows the nodes by their addresses, without credentials.
impl fmt::Debug for Redlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups = self.0.layout.groups.iter();
        let nodes: Vec<_> = groups.flat_map(|group| &*group.cluster.names).collect();
        f.debug_struct("Redlock")
            .field("nodes", &nodes)
            .field("settings", &self.0.settings)
            .finish_non_exhaustive()
    }
}

/// The default `max_hold` of the lock of an HTTP request.
const MAX_HOLD_OF_REQUESTS: Duration = Duration::from_secs(60);
