//! What a lock is, from its request to its end.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::lock::cluster::Cluster;
use crate::lock::registry::Registry;
use crate::node::telemetry::LockLabels;
use crate::protocol::lease::{Access, Input, LeaseSpec, Stored};
use crate::protocol::{FencingToken, KeyNames, LockKeys};

/// A lock in one group: all that is known before the nodes are asked. The task, its leases and the holders share it.
#[derive(Debug, Clone)]
pub(crate) struct LockSpec {
    pub(crate) cluster: Arc<Cluster>,
    /// Identifies the lock service.
    pub(crate) registry: Arc<Registry>,
    pub(crate) keys: LockKeys,
    pub(crate) names: Arc<[KeyNames]>,
    /// The number of the slot, if it is one of several.
    pub(crate) slot: Option<usize>,
    /// What each attempt asks for. Each proposes this number, or else one that it takes from the clock.
    pub(crate) lease: LeaseSpec,
    /// Whether the lock comes with a fencing token.
    pub(crate) is_fenced: bool,
    /// Present if the lease may ask for a read.
    pub(crate) reader: Option<Arc<dyn Reader>>,
    /// Its labels in spans and metrics.
    pub(crate) labels: LockLabels,
}

/// Reads what a lease asks for.
pub(crate) trait Reader: fmt::Debug + Send + Sync {
    /// Reads it, and returns the input that the lease waits for.
    fn read(&self, unread: Stored) -> Pin<Box<dyn Future<Output = Input> + Send + Sync>>;
}

impl LockSpec {
    /// Creates the spec of a lock that its caller holds alone, with the settings of the service.
    pub(crate) fn new(
        cluster: &Arc<Cluster>,
        registry: &Arc<Registry>,
        keys: &LockKeys,
        names: Arc<[KeyNames]>,
        ttl: Duration,
        labels: LockLabels,
    ) -> Self {
        let settings = &cluster.settings;
        Self {
            cluster: Arc::clone(cluster),
            registry: Arc::clone(registry),
            keys: keys.clone(),
            names,
            slot: None,
            lease: LeaseSpec {
                access: Access::Exclusive,
                ttl,
                proposal: None,
                retention: settings.fence_retention(),
                node_timeout: settings.node_timeout,
                renews: settings.renew,
                is_partial: false,
                max_hold: None,
                hold_at_least: None,
                once: None,
            },
            is_fenced: settings.fencing,
            reader: None,
            labels,
        }
    }

    /// Makes it one of several leases of its caller, of which this is the highest token so far. The times of all of them begin
    /// when the caller has them.
    pub(crate) fn join(&mut self, token: Option<FencingToken>) {
        self.lease.is_partial = true;
        // That of the other groups, so that all have the same token unless a fence is higher here.
        self.lease.proposal = token.map(FencingToken::as_u64);
    }
}
