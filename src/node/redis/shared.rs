//! The state of a Redis node that its handle, its lane and its reader share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use deadpool::managed::Pool;
use tokio::time::Instant;

use crate::node::failure::NodeFailure;
use crate::node::home::Home;
use crate::node::job::Job;
use crate::node::redis::connector::Connector;
use crate::node::redis::describe::PUBLISH_PERMISSIONS;
use crate::node::redis::endpoint::Endpoint;
use crate::node::redis::guard::Guard;
use crate::node::redis::inbox::Inbox;
use crate::node::redis::reachability::Reachability;
use crate::node::traits::NodeState;

/// The state of a Redis node that its handle, its lane and its reader share.
pub(super) struct Shared {
    pub(super) name: Arc<str>,
    /// The connections for reading records. Its manager also makes those of lanes, which never enter the pool.
    pub(super) pool: Pool<Connector>,
    pub(super) timeouts: Timeouts,
    /// The restart guard; `None` if it is off and there is no other server.
    pub(super) guard: Option<Arc<Guard>>,
    pub(super) reachability: Reachability,
    pub(super) inbox: Inbox,
    /// Where its tasks live.
    pub(super) home: Arc<Home>,
    /// Whether the missing permission to publish releases has been logged.
    has_warned: AtomicBool,
}

/// The timeouts of one node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timeouts {
    pub(crate) node: Duration,
    pub(crate) connect: Duration,
}

impl Shared {
    pub(super) fn new(
        endpoint: Endpoint,
        timeouts: Timeouts,
        guard: Option<Arc<Guard>>,
        home: &Arc<Home>,
    ) -> Self {
        Self {
            reachability: Reachability::new(&endpoint.name),
            name: endpoint.name,
            pool: endpoint.pool,
            timeouts,
            guard,
            inbox: Inbox::default(),
            home: Arc::clone(home),
            has_warned: AtomicBool::new(false),
        }
    }

    /// Returns the failure of a request that is not sent because the node is down or must not vote, as far as that is
    /// known. Otherwise, the request waits until the lane knows more; if there is no lane, it starts one.
    pub(super) fn failure(&self) -> Option<NodeFailure> {
        self.is_known().then(|| self.last_failure()).flatten()
    }

    /// Returns the same as the lane has just found it, or found it last.
    pub(super) fn last_failure(&self) -> Option<NodeFailure> {
        let node = || Arc::clone(&self.name);
        match self.state() {
            NodeState::Up => None,
            NodeState::Quarantined { left } => {
                Some(NodeFailure::Quarantined { node: node(), left })
            }
            NodeState::Unreachable { why, .. } => {
                Some(NodeFailure::Unreachable { node: node(), why })
            }
        }
    }

    /// Returns what is known about the node.
    pub(super) fn state(&self) -> NodeState {
        match self.duplicate() {
            Some(why) if self.reachability.is_tried() => NodeState::Unreachable {
                why,
                since: Duration::ZERO,
            },
            _ => self.reachability.state(),
        }
    }

    /// Returns whether it is known if the server can be reached. Not before the first attempt to connect, and not after
    /// the time at which the lane was to ask the server again: the home may not be run meanwhile.
    pub(super) fn is_known(&self) -> bool {
        let reachability = &self.reachability;
        reachability.is_tried()
            && (reachability.is_open() || !reachability.is_out_of_date(self.timeouts.node))
    }

    /// Returns whether another node leads to the same server.
    pub(super) fn is_duplicate(&self) -> bool {
        let guard = self.guard.as_ref();
        guard.is_some_and(|guard| guard.duplicate_of(&self.name).is_some())
    }

    /// Returns why the node must not vote if another node leads to the same server.
    pub(super) fn duplicate(&self) -> Option<Arc<str>> {
        let other = self.guard.as_ref()?.duplicate_of(&self.name)?;
        let why = format!("{} and {other} are one server; list it once", self.name);
        Some(why.into())
    }

    /// Reports that the server answers and must not vote for this time.
    pub(super) fn set_quarantined(&self, left: Duration) {
        let until = Instant::now() + left;
        let duplicate = self.duplicate();
        self.reachability
            .set_quarantined(until, duplicate.as_deref());
    }

    /// Returns the failure of a request to a server that has lost its memory since it was admitted.
    pub(super) fn amnesia(&self) -> NodeFailure {
        let window = self.guard.as_ref().map(|guard| guard.window());
        NodeFailure::Quarantined {
            node: Arc::clone(&self.name),
            left: window.unwrap_or_default(),
        }
    }

    /// Passes the number of subscribers that a release was published to on to its vote. Logs once if the server's
    /// user must not publish.
    pub(super) fn set_subscribers(&self, release: &mut Job, published: i64) {
        if let Ok(subscribers) = usize::try_from(published) {
            release.sender.set_subscribers(subscribers);
        // Relaxed: one swap decides who logs.
        } else if published == -1 && !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                node = &*self.name,
                "redlock node's user must not publish releases, so waiters poll; it needs {PUBLISH_PERMISSIONS}"
            );
        }
    }
}
