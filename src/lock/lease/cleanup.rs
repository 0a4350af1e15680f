//! The duty to release what an attempt may have acquired.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::lock::cluster::Cluster;
use crate::lock::lease::shared::{Disposal, Lease};
use crate::node::{Job, Packet, Request, Trail, VoteReceiver};
use crate::protocol::message::{Command, Op, Reply};
use crate::protocol::round::{Answer, ReleaseRound};
use crate::protocol::{KeyNames, OwnerToken};

/// The nodes that may hold the keys of one attempt, and the duty to release them.
///
/// Armed before the first request is sent, disarmed by [`release`](Self::release) and
/// [`disarm`](Self::disarm). Dropped armed, because the lease task panicked, it sends the releases itself,
/// unless the [`Disposal`] of its lease says that the keys stay until their ttl.
#[derive(Debug)]
pub(crate) struct Cleanup {
    cluster: Arc<Cluster>,
    names: Arc<[KeyNames]>,
    owner: OwnerToken,
    /// By node, whether it may hold the keys for this owner.
    may_hold: Vec<bool>,
    /// When every request that could have locked a key has expired for certain. An intent lives longer.
    gone_at: Instant,
    /// Which requests of the attempt have been sent.
    trail: Trail,
    /// The lease, once the attempt was granted.
    pub(super) lease: Option<Arc<Lease>>,
    is_armed: bool,
}

impl Cleanup {
    /// Arms the clean-up of an attempt of which nothing has been sent.
    pub(crate) fn new(cluster: &Arc<Cluster>, names: &Arc<[KeyNames]>, owner: OwnerToken) -> Self {
        Self {
            cluster: Arc::clone(cluster),
            names: Arc::clone(names),
            owner,
            may_hold: vec![false; cluster.nodes.len()],
            gone_at: Instant::now(),
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
        votes: &VoteReceiver,
        nodes: impl IntoIterator<Item = usize>,
    ) {
        let packet = self.packet(op, false);
        // Twice the ttl: a request may have been on its way for as long as it lives. Never sooner than before,
        // because no request shortens what an earlier one set.
        self.gone_at = self.gone_at.max(Instant::now() + 2 * ttl);
        for node in nodes {
            self.may_hold[node] = true;
            self.submit(node, &packet, votes);
        }
    }

    /// Sends a request that locks nothing to some nodes, in the current phase. If it ends the lock, the node
    /// publishes that.
    pub(crate) fn ask(
        &self,
        op: Op,
        publishes: bool,
        votes: &VoteReceiver,
        nodes: impl IntoIterator<Item = usize>,
    ) {
        let packet = self.packet(op, publishes);
        for node in nodes {
            self.submit(node, &packet, votes);
        }
    }

    /// Notes that a node certainly holds nothing for this owner.
    pub(crate) fn mark_not_held(&mut self, node: usize) {
        self.may_hold[node] = false;
    }

    /// Forgets the lease, under which nothing was done.
    pub(crate) fn forget_lease(&mut self) {
        self.lease = None;
    }

    /// Returns when no lock of this attempt can be left on any node.
    pub(crate) fn gone_at(&self) -> Instant {
        self.gone_at
    }

    /// Returns what becomes of the keys when the lease ends.
    pub(crate) fn disposal(&self) -> Disposal {
        let lease = self.lease.as_ref();
        lease.map_or(Disposal::ReleaseUnused, |lease| lease.disposal())
    }

    /// Gives up the duty to release: the keys stay until their ttl. Returns the nodes that may hold them.
    pub(crate) fn disarm(mut self) -> Vec<usize> {
        self.is_armed = false;
        let nodes = self.may_hold.iter().enumerate();
        nodes
            .filter(|(_, may_hold)| **may_hold)
            .map(|(node, _)| node)
            .collect()
    }

    /// Releases the keys on every node that may hold them, in the current phase.
    pub(crate) fn release(mut self, votes: &VoteReceiver, publishes: bool) -> ReleaseRound {
        self.send_release(votes, publishes)
    }

    fn send_release(&mut self, votes: &VoteReceiver, publishes: bool) -> ReleaseRound {
        self.is_armed = false;
        let op = match self.disposal() {
            Disposal::Release | Disposal::ReleaseUnused => Op::Release,
            Disposal::ReleaseExecuted | Disposal::Expire => Op::ReleaseExecuted,
        };
        let packet = self.packet(op, publishes && self.cluster.settings.wake_ups);
        let mut round = ReleaseRound::new(self.cluster.settings.quorum);
        for node in 0..self.may_hold.len() {
            if self.may_hold[node] {
                self.submit(node, &packet, votes);
            } else {
                round.on_release(node, &Answer::Replied(Reply::Released));
            }
        }
        round
    }

    fn submit(&self, node: usize, packet: &Arc<Packet>, votes: &VoteReceiver) {
        let request = Request::Command(Arc::clone(packet));
        self.cluster.nodes[node].submit(Job::new(request, votes.sender(node), self.gone_at));
    }

    fn packet(&self, op: Op, publishes: bool) -> Arc<Packet> {
        let command = Command {
            names: Arc::clone(&self.names),
            owner: self.owner.clone(),
            op,
        };
        let retention = self.names.first().and_then(KeyNames::intent_retention);
        let intent_until = match command.op {
            Op::Release => retention.map(|retention| self.gone_at + retention),
            _ => None,
        };
        Packet::taking_back(intent_until, command, publishes, self.trail.clone())
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        if !self.is_armed {
            return;
        }
        let is_held = self.lease.as_ref().is_some_and(|lease| lease.is_shared());
        if let Some(lease) = &self.lease {
            // No task is left to count the answers, so a drain must assume that there are none.
            let nodes = self.may_hold.iter().zip(self.cluster.names.iter());
            let names = nodes.filter(|(may_hold, _)| **may_hold);
            let names = names.map(|(_, name)| Arc::clone(name));
            let registry = &lease.registry;
            registry.set_unconfirmed(names, &lease.keys, self.gone_at);
        }
        let is_kept = match self.disposal() {
            Disposal::ReleaseUnused => false,
            Disposal::Release | Disposal::ReleaseExecuted => is_held,
            Disposal::Expire => true,
        };
        if !is_kept {
            let votes = VoteReceiver::new(&self.cluster.names);
            self.send_release(&votes, self.lease.is_some());
        }
    }
}
