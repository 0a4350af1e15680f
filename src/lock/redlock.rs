//! The entry: a lock service over some nodes.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::lock::builder::{BuildError, RedlockBuilder, check_ttl};
use crate::lock::front::Front;
use crate::lock::health::{self, Health};
use crate::lock::registry::{Drained, Registry};
use crate::lock::request::LockRequest;
use crate::lock::rest::Readings;
use crate::lock::settings::Settings;
use crate::node::{Node, telemetry};
use crate::protocol::{LockKey, LockKeys};

/// Distributed locks over a quorum of independent nodes; cheap to clone, clones are the same.
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
pub struct Redlock(Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) nodes: Vec<Arc<dyn Node>>,
    /// What they are called.
    pub(super) names: Arc<[Arc<str>]>,
    pub(super) settings: Settings,
    pub(super) front: Arc<Front>,
    pub(super) registry: Arc<Registry>,
    pub(super) readings: Readings,
}

impl Redlock {
    /// Returns a builder, which is told the nodes and the settings.
    pub fn builder() -> RedlockBuilder {
        RedlockBuilder::new()
    }

    /// Makes a lock service over embedded nodes, for development, tests and single processes.
    ///
    /// The same as `builder().embedded(nodes).build()`: nothing leaves this process, and what is
    /// locked is forgotten with it.
    ///
    /// # Panics
    ///
    /// If `nodes` is zero.
    #[must_use]
    pub fn in_memory(nodes: usize) -> Self {
        assert!(nodes > 0, "Redlock::in_memory needs at least one node");
        let built = Self::builder().embedded(nodes).build();
        built.expect("defaults with at least one node are valid")
    }

    /// Asks for a lock, waiting up to the builder's `wait` (default 5 s) while others hold it.
    pub fn lock(&self, key: impl Into<LockKey>) -> LockRequest {
        LockRequest::new(Arc::clone(&self.0), LockKeys::from(key.into()))
    }

    /// Asks for a lock without waiting: one round, repeated only after a split vote, in which
    /// several contenders got some nodes each and nobody a majority.
    pub fn try_lock(&self, key: impl Into<LockKey>) -> LockRequest {
        self.lock(key).wait(Duration::ZERO)
    }

    /// Asks for several locks as one, all or nothing: sorted, without duplicates, at most
    /// [`LockKeys::MAX`], with one fencing token above those of all its keys.
    ///
    /// One lost key loses the whole lock.
    pub fn lock_all<K: Into<LockKey>>(&self, keys: impl IntoIterator<Item = K>) -> LockRequest {
        LockRequest::new(Arc::clone(&self.0), keys.into_iter().collect())
    }

    /// Asks for a set of locks that has been made before.
    pub(crate) fn lock_keys(&self, keys: LockKeys) -> LockRequest {
        LockRequest::new(Arc::clone(&self.0), keys)
    }

    /// Asks every node whether it answers; takes as long as the slowest, at most the node timeout
    /// (and the connect timeout, before the first connection).
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub async fn health(&self) -> Health {
        health::check(&self.0).await
    }

    /// Ends the service for a graceful shutdown: refuses new locks with
    /// [`LockError::Closed`](crate::LockError::Closed), wakes those who wait with the same, and
    /// waits until all guards are gone and released.
    ///
    /// At the timeout it stops renewing what is still held, but never releases it under its holder.
    /// When all holders ended in time and the nodes answered, no key of this process is left.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future ends only the waiting; new locks stay refused.
    pub async fn drain(&self, timeout: Duration) -> Drained {
        self.0.registry.drain(timeout).await
    }

    pub(super) fn new(nodes: Vec<Arc<dyn Node>>, settings: Settings) -> Self {
        telemetry::describe();
        Self(Arc::new(Inner {
            names: nodes.iter().map(|node| Arc::clone(node.name())).collect(),
            nodes,
            settings,
            front: Arc::default(),
            registry: Registry::new(),
            readings: Readings::default(),
        }))
    }

    pub(super) fn inner(&self) -> &Arc<Inner> {
        &self.0
    }

    /// Whether this is the service with this registry.
    pub(super) fn is_service(&self, registry: &Arc<Registry>) -> bool {
        Arc::ptr_eq(&self.0.registry, registry)
    }

    /// Returns after what time the lock of a request is not renewed any more: as the request's layer or
    /// extractor says, else as the builder says. A client must not keep a lock for ever by reading slowly.
    pub(crate) fn max_hold_of_request(&self, asked: Option<Duration>) -> Duration {
        let max_hold = asked.or(self.0.settings.max_hold);
        max_hold.unwrap_or(MAX_HOLD_OF_REQUESTS)
    }

    /// Checks a ttl that is to be asked for.
    pub(crate) fn check_ttl(&self, ttl: Duration) -> Result<(), BuildError> {
        check_ttl("ttl", ttl)?;
        let max = self.0.settings.max_ttl;
        if ttl > max {
            let remedy = format!("it is over max_ttl = {max:?}; raise that in the builder");
            return Err(BuildError::of("ttl", ttl, remedy));
        }
        Ok(())
    }
}

/// Names the nodes by their addresses; credentials are never shown.
impl fmt::Debug for Redlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes: Vec<_> = self.0.nodes.iter().map(|node| node.name()).collect();
        f.debug_struct("Redlock")
            .field("nodes", &nodes)
            .field("settings", &self.0.settings)
            .finish_non_exhaustive()
    }
}

/// How long the lock of a request is renewed unless something else is said.
const MAX_HOLD_OF_REQUESTS: Duration = Duration::from_secs(60);
