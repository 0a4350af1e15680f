//! Announcing: a caller that waits to hold a key alone keeps new readers out of it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::lock::cluster::Cluster;
use crate::node::{Job, Packet, Request, VoteReceiver, unguessable};
use crate::protocol::message::{Command, Op, SharedOp};
use crate::protocol::{KeyNames, OwnerToken};

/// The announcement of one waiting caller, at every node; taken back when it is dropped.
///
/// It serves fairness and not safety, so nothing depends on its answers.
#[derive(Debug)]
pub(crate) struct Announcement {
    cluster: Arc<Cluster>,
    names: Arc<[KeyNames]>,
    owner: OwnerToken,
    /// Receives the answers, which are not read. While it is there, the requests are sent.
    votes: VoteReceiver,
    /// When it has lapsed on every node for certain.
    gone_at: Instant,
}

impl Announcement {
    /// Creates an announcement that no node knows yet.
    pub(crate) fn new(cluster: &Arc<Cluster>, names: &[KeyNames]) -> Self {
        let namespace = &cluster.settings.namespace;
        let names = names.iter().cloned();
        Self {
            cluster: Arc::clone(cluster),
            names: names.map(|name| namespace.with_shared(name)).collect(),
            owner: OwnerToken::from_random(unguessable()),
            votes: VoteReceiver::new(&cluster.names),
            gone_at: Instant::now(),
        }
    }

    /// Keeps new readers out for this long, at every node where readers hold the keys.
    pub(crate) fn renew(&mut self, patience: Duration) {
        // Requests of before that are not sent yet are not needed any more, nor are their answers.
        self.votes.next_phase();
        while self.votes.try_recv().is_some() {}
        // Twice, because a request may be on its way for as long.
        self.gone_at = Instant::now() + 2 * patience;
        self.send(SharedOp::Announce { patience }, Cluster::submit);
    }

    fn send(&self, op: SharedOp, submit: fn(&Cluster, usize, Job)) {
        let command = Command {
            names: Arc::clone(&self.names),
            owner: self.owner.clone(),
            op: Op::Shared(op),
        };
        let packet = Packet::new(command, false, None);
        for node in 0..self.cluster.nodes.len() {
            let request = Request::Command(Arc::clone(&packet));
            let job = Job::new(request, self.votes.sender(node), self.gone_at);
            submit(&self.cluster, node, job);
        }
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        self.send(SharedOp::Withdraw, Cluster::submit_in_drop);
    }
}
