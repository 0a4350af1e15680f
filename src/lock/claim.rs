//! A claim: the nodes that may hold a key for one attempt, and the duty to release them.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::lock::lease::{Effect, Lease};
use crate::lock::redlock::Inner;
use crate::node::{Job, Packet, Request, Trail, VoteReceiver, unguessable};
use crate::protocol::message::{Command, Op, Reply};
use crate::protocol::round::{Answer, ReleaseRound};
use crate::protocol::{Fingerprint, KeyNames, OwnerToken};

/// What one attempt may have left on the nodes.
///
/// Armed before the first request is sent and disarmed by [`Claim::release`]. Dropped otherwise,
/// because the lease task panicked, it releases by itself, unless a guard is alive or an execution has
/// begun: then the keys end by their ttl, because such a lock is never released. The right to execute is no
/// such guard: without the task, nothing can begin.
#[derive(Debug)]
pub(super) struct Claim {
    inner: Arc<Inner>,
    names: Arc<[KeyNames]>,
    owner: OwnerToken,
    /// Per node, whether it may hold the keys for this owner.
    may_hold: Vec<bool>,
    /// When the last request that could have locked a key has expired for certain. An intent lives longer.
    gone_at: Instant,
    /// Where its requests went out.
    trail: Trail,
    pub(super) lease: Option<Arc<Lease>>,
    released: bool,
}

impl Claim {
    pub(super) fn new(
        inner: &Arc<Inner>,
        names: &Arc<[KeyNames]>,
        asked_for: Option<Fingerprint>,
    ) -> Self {
        Self {
            inner: Arc::clone(inner),
            names: Arc::clone(names),
            owner: match asked_for {
                Some(fingerprint) => OwnerToken::asking_for(unguessable(), fingerprint),
                None => OwnerToken::from_random(unguessable()),
            },
            may_hold: vec![false; inner.nodes.len()],
            gone_at: Instant::now(),
            trail: Trail::default(),
            lease: None,
            released: false,
        }
    }

    /// Sends a request that may lock or extend the keys to some nodes, in the current phase.
    pub(super) fn send(
        &mut self,
        op: Op,
        ttl: Duration,
        votes: &VoteReceiver,
        nodes: impl IntoIterator<Item = usize>,
    ) {
        let packet = self.packet(op, false);
        // Twice: it may have been on its way for as long as it lives. And never sooner than before,
        // because no request shortens what an earlier one set.
        self.gone_at = self.gone_at.max(Instant::now() + 2 * ttl);
        for node in nodes {
            self.may_hold[node] = true;
            self.submit(node, &packet, votes);
        }
    }

    /// Sends a request that locks nothing to some nodes, in the current phase.
    pub(super) fn ask(&self, op: Op, votes: &VoteReceiver, nodes: impl IntoIterator<Item = usize>) {
        let tells = self.inner.settings.wake_ups && matches!(op, Op::Record { .. });
        let packet = self.packet(op, tells);
        for node in nodes {
            self.submit(node, &packet, votes);
        }
    }

    /// Gives up the duty to release: what was executed and not recorded stays locked until its ttl.
    /// Returns the nodes that may hold it.
    pub(super) fn leave(mut self) -> Vec<usize> {
        self.released = true;
        let nodes = self.may_hold.iter().enumerate();
        nodes
            .filter(|(_, may_hold)| **may_hold)
            .map(|(node, _)| node)
            .collect()
    }

    /// Notes that a node certainly holds nothing for this owner.
    pub(super) fn excuse(&mut self, node: usize) {
        self.may_hold[node] = false;
    }

    /// Returns when no lock of this attempt can be left on any node.
    pub(super) fn gone_at(&self) -> Instant {
        self.gone_at
    }

    /// Releases the keys on every node that may hold them, in the current phase, and tells those who wait
    /// for them.
    pub(super) fn release(mut self, votes: &VoteReceiver, tells: bool) -> ReleaseRound {
        self.send_release(votes, tells)
    }

    /// Returns what may have been executed under the lock.
    pub(super) fn effect(&self) -> Effect {
        let lease = self.lease.as_ref();
        lease.map_or(Effect::None, |lease| lease.effect())
    }

    fn keeps_records(&self) -> bool {
        self.names.first().is_some_and(|name| name.record.is_some())
    }

    fn send_release(&mut self, votes: &VoteReceiver, tells: bool) -> ReleaseRound {
        self.released = true;
        let op = match self.effect() {
            Effect::None => Op::Release,
            Effect::Possible | Effect::Denied => Op::ReleaseExecuted,
        };
        let packet = self.packet(op, tells && self.inner.settings.wake_ups);
        let mut round = ReleaseRound::new(self.inner.settings.quorum);
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
        self.inner.nodes[node].submit(Job::new(request, votes.sender(node), self.gone_at));
    }

    fn packet(&self, op: Op, tells: bool) -> Arc<Packet> {
        let command = Command {
            names: Arc::clone(&self.names),
            owner: self.owner.clone(),
            op,
        };
        let record = self.names.first().and_then(|name| name.record.as_ref());
        let intent = record.and_then(|record| record.intent.as_ref());
        let intent_until = match command.op {
            Op::Release => intent.map(|intent| self.gone_at + intent.retention),
            _ => None,
        };
        Packet::taking_back(intent_until, command, tells, self.trail.clone())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.released {
            return;
        }
        // No task is left to count the answers, so a drain must assume that there are none.
        if let Some(lease) = &self.lease {
            let nodes = self.may_hold.iter().zip(self.inner.names.iter());
            let names = nodes.filter(|(may_hold, _)| **may_hold);
            let names = names.map(|(_, name)| Arc::clone(name));
            let registry = &self.inner.registry;
            registry.set_unconfirmed(names, &lease.keys, self.gone_at);
        }
        let held = self.lease.as_ref().is_some_and(|lease| lease.is_shared());
        let is_kept = match self.effect() {
            // Only the lease task lets an execution begin, and it is gone.
            Effect::None => held && !self.keeps_records(),
            Effect::Denied => held,
            Effect::Possible => true,
        };
        if !is_kept {
            let votes = VoteReceiver::new(&self.inner.names);
            self.send_release(&votes, self.lease.is_some());
        }
    }
}
