//! What a lock is, from its request to its end.

use std::sync::Arc;
use std::time::Duration;

use crate::lock::cluster::Cluster;
use crate::lock::registry::Registry;
use crate::node::telemetry::LockLabels;
use crate::protocol::lease::{Access, LeaseSpec};
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
    /// Its labels in spans and metrics.
    pub(crate) labels: LockLabels,
}

/// The leases that a caller has acquired before, in other groups, for the same lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Earlier {
    /// Their highest token. That of the next lease is not lower.
    pub(crate) token: Option<FencingToken>,
    /// The slots that the next lease may have, one bit for each.
    pub(crate) slots: u64,
}

impl LockSpec {
    /// Creates the spec of a lock that its caller holds alone, with the settings of the service. With `earlier`, it is one
    /// of several leases of its caller, and the times of all of them begin when it has them.
    pub(crate) fn new(
        cluster: &Arc<Cluster>,
        registry: &Arc<Registry>,
        keys: &LockKeys,
        names: Arc<[KeyNames]>,
        ttl: Duration,
        earlier: Option<Earlier>,
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
                // That of the other groups, so that all have the same token unless a fence is higher here.
                proposal: earlier
                    .and_then(|earlier| earlier.token)
                    .map(FencingToken::as_u64),
                retention: settings.fence_retention(),
                node_timeout: settings.node_timeout,
                renews: settings.renew,
                is_partial: earlier.is_some(),
                max_hold: None,
                hold_at_least: None,
                once: None,
            },
            is_fenced: settings.fencing,
            labels,
        }
    }
}

impl Default for Earlier {
    fn default() -> Self {
        Self {
            token: None,
            slots: u64::MAX,
        }
    }
}
