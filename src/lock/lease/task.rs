//! The state that all steps of a lease task share.

use std::sync::Arc;

use tokio::task;
use tokio::time::Instant;

use crate::lock::backoff::Caller;
use crate::lock::cluster::Cluster;
use crate::lock::failures::Failures;
use crate::lock::queue::{Permit, Places};
use crate::lock::registry::Ticket;
use crate::lock::terms::Terms;
use crate::lock::time::Timer;
use crate::node::VoteReceiver;
use crate::node::telemetry::LockLabels;
use crate::protocol::LockKeys;
use crate::protocol::round::ReleaseRound;

/// The task that owns one lock; the other files of this folder have its steps.
pub(crate) struct LeaseTask {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) keys: LockKeys,
    pub(super) terms: Terms,
    /// The number of the slot, if the lock is one of several.
    pub(super) slot: Option<usize>,
    pub(crate) votes: VoteReceiver,
    /// The releases under way, of failed attempts and of the lock itself.
    pub(super) releases: Vec<Release>,
    pub(crate) ticket: Ticket,
    /// The task that requested the lock, which is not the one that owns it from the grant on.
    pub(super) task: Option<task::Id>,
    /// The labels of the lock in spans and metrics.
    pub(super) labels: LockLabels,
    /// The places of the keys in the queue, which know the processes that wait for each key.
    pub(super) places: Places,
    pub(crate) timer: Timer,
}

/// A release under way.
pub(super) struct Release {
    /// Those of an earlier slot may differ from those of the task.
    pub(super) keys: LockKeys,
    pub(super) phase: u32,
    pub(super) round: ReleaseRound,
    /// When the silent nodes count as failed; `None` once they do.
    pub(super) due: Option<Instant>,
    pub(super) failures: Failures,
    /// When the keys have expired on every node for certain.
    pub(super) gone_at: Instant,
}

impl LeaseTask {
    pub(crate) fn new(
        cluster: &Arc<Cluster>,
        keys: LockKeys,
        terms: Terms,
        ticket: Ticket,
        labels: LockLabels,
    ) -> Self {
        Self {
            votes: VoteReceiver::new(&cluster.names),
            cluster: Arc::clone(cluster),
            keys,
            terms,
            slot: None,
            releases: Vec::new(),
            ticket,
            task: task::try_id(),
            labels,
            places: Places::default(),
            timer: Timer::default(),
        }
    }

    pub(crate) fn caller<'a>(&'a self, permit: &'a Permit) -> Caller<'a> {
        let registry = self.ticket.registry();
        Caller::new(&self.cluster, registry, &self.terms, permit)
    }

    pub(crate) fn set_places(&mut self, permit: &Permit) {
        self.places = permit.places().clone();
    }
}
