//! The guard that releases the keys that an attempt may hold.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::lock::cluster::Cluster;
use crate::lock::lost::LostReason;
use crate::lock::registry::{Unsettled, UnsettledRelease};
use crate::lock::state::{Disposal, LockState};
use crate::node::{Job, Packet, Request, Trail, VoteReceiver};
use crate::protocol::lease::Access;
use crate::protocol::message::{Command, Op, SharedOp};
use crate::protocol::round::{Answer, ReleaseRound};
use crate::protocol::{KeyNames, NodeSet, OwnerToken};

/// Guard that releases the keys of one attempt on the nodes that may hold them.
///
/// It is armed before the first request is sent; [`release`](Self::release) and [`disarm`](Self::disarm) disarm it.
/// If it is dropped while armed, because the lease task panicked, it sends the releases itself, unless the
/// [`Disposal`] of its lease leaves the keys to their ttl.
#[derive(Debug)]
pub(crate) struct Cleanup {
    cluster: Arc<Cluster>,
    names: Arc<[KeyNames]>,
    owner: OwnerToken,
    access: Access,
    /// The nodes that may hold the keys for this owner.
    may_hold: NodeSet,
    /// When the keys have expired on every node for certain. An intent lives longer.
    gone_at: Instant,
    /// The nodes to which requests of the attempt have been sent.
    trail: Trail,
    /// The lease, once the attempt is granted.
    pub(super) lease: Option<Arc<LockState>>,
    is_armed: bool,
}

impl Cleanup {
    /// Creates the armed guard of an attempt that has sent no request.
    pub(crate) fn new(
        cluster: &Arc<Cluster>,
        names: &Arc<[KeyNames]>,
        owner: OwnerToken,
        access: Access,
        now: Instant,
    ) -> Self {
        Self {
            cluster: Arc::clone(cluster),
            names: Arc::clone(names),
            owner,
            access,
            may_hold: NodeSet::default(),
            gone_at: now,
            trail: Trail::default(),
            lease: None,
            is_armed: true,
        }
    }

    /// Sends a request that may lock or extend the keys to some nodes, in the current phase.
    pub(crate) fn send(
        &mut self,
        op: Op,
        ttl: Duration,
        now: Instant,
        votes: &VoteReceiver,
        nodes: impl IntoIterator<Item = usize>,
    ) {
        let packet = self.packet(op, false);
        // Twice the ttl, because a request may be on its way for as long as a ttl. Never earlier than before,
        // because no request shortens the ttl that an earlier one set.
        self.gone_at = self.gone_at.max(now + 2 * ttl);
        for node in nodes {
            self.may_hold.insert(node);
            self.cluster.submit(node, self.job(node, &packet, votes));
        }
    }

    /// Sends a request that neither locks nor extends a key to some nodes, in the current phase. With `publishes`,
    /// a node on which the request ends the lock publishes that.
    pub(crate) fn ask(
        &self,
        op: Op,
        publishes: bool,
        votes: &VoteReceiver,
        nodes: impl IntoIterator<Item = usize>,
    ) {
        let packet = self.packet(op, publishes);
        for node in nodes {
            self.cluster.submit(node, self.job(node, &packet, votes));
        }
    }

    /// Notes that a node certainly holds no key for this owner.
    pub(crate) fn mark_not_held(&mut self, node: usize) {
        self.may_hold.remove(node);
    }

    /// Forgets the lease of an execution that did not begin.
    pub(crate) fn forget_lease(&mut self) {
        self.lease = None;
    }

    /// Returns when the keys have expired on every node for certain.
    pub(crate) fn gone_at(&self) -> Instant {
        self.gone_at
    }

    /// Returns the treatment of the keys when the lease ends.
    pub(crate) fn disposal(&self) -> Disposal {
        let lease = self.lease.as_ref();
        lease.map_or(Disposal::ReleaseUnused, |lease| lease.disposal())
    }

    /// Disarms the guard, so that the keys stay until their ttl. Returns the round of a release that fails on all nodes
    /// that may hold them.
    pub(crate) fn disarm(mut self) -> ReleaseRound {
        self.is_armed = false;
        self.failed_round()
    }

    fn failed_round(&self) -> ReleaseRound {
        let mut round = ReleaseRound::new(self.cluster.quorum, self.may_hold);
        for node in self.may_hold.iter() {
            round.on_release(node, &Answer::Failed);
        }
        round
    }

    /// Releases the keys on every node that may hold them, in the current phase.
    pub(crate) fn release(mut self, votes: &VoteReceiver, publishes: bool) -> ReleaseRound {
        self.send_release(votes, publishes, Cluster::submit)
    }

    fn send_release(
        &mut self,
        votes: &VoteReceiver,
        publishes: bool,
        submit: fn(&Cluster, usize, Job),
    ) -> ReleaseRound {
        self.is_armed = false;
        let now = Instant::now();
        let is_in_time = |lease: &&Arc<LockState>| {
            matches!(lease.lost_reason(), None | Some(LostReason::Released))
        };
        let lease = self.lease.as_ref().filter(is_in_time);
        let left = lease.map_or(Duration::ZERO, |lease| lease.stays_for(now));
        let op = match (self.access, self.disposal()) {
            (Access::Shared, _) => Op::Shared(SharedOp::Release),
            _ if !left.is_zero() => Op::ReleaseAfter { left },
            (_, Disposal::Release | Disposal::ReleaseUnused) => Op::Release,
            (_, Disposal::ReleaseExecuted | Disposal::Expire) => Op::ReleaseExecuted,
        };
        let packet = self.packet(op, publishes && self.cluster.settings.wake_ups);
        for node in self.may_hold.iter() {
            submit(&self.cluster, node, self.job(node, &packet, votes));
        }
        ReleaseRound::new(self.cluster.quorum, self.may_hold)
    }

    fn job(&self, node: usize, packet: &Arc<Packet>, votes: &VoteReceiver) -> Job {
        let request = Request::Command(Arc::clone(packet));
        Job::new(request, votes.sender(node), self.gone_at)
    }

    fn packet(&self, op: Op, publishes: bool) -> Arc<Packet> {
        let command = Command {
            names: Arc::clone(&self.names),
            owner: self.owner.clone(),
            op,
        };
        let retention = self.names.first().and_then(KeyNames::intent_retention);
        let until = match command.op {
            Op::Release => retention.map(|retention| self.gone_at + retention),
            Op::ReleaseAfter { left } => Some(Instant::now() + left),
            _ => None,
        };
        Packet::of_release(until, command, publishes, self.trail.clone())
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        if !self.is_armed {
            return;
        }
        let is_held = self.lease.as_ref().is_some_and(|lease| lease.is_shared());
        let is_kept = match self.disposal() {
            Disposal::ReleaseUnused => false,
            Disposal::Release | Disposal::ReleaseExecuted => is_held,
            Disposal::Expire => true,
        };
        let votes = VoteReceiver::new(&self.cluster.names);
        let phase = votes.next_phase();
        let round = match is_kept {
            true => self.failed_round(),
            false => {
                let publishes = self.lease.is_some();
                self.send_release(&votes, publishes, Cluster::submit_in_drop)
            }
        };
        if let Some(lease) = &self.lease {
            // No task is left to count the answers.
            lease.terms.registry.keep_unsettled(Unsettled {
                votes,
                names: Arc::clone(&self.cluster.names),
                releases: vec![UnsettledRelease {
                    keys: lease.own_keys().clone(),
                    phase,
                    round,
                    gone_at: self.gone_at,
                }],
            });
        }
    }
}
