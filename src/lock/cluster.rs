//! The nodes of a group.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::lock::settings::Settings;
use crate::node::{Home, Job, Node, NodeFailure, Packet, ReleaseSubscription, VoteReceiver};
use crate::protocol::message::Reply;
use crate::protocol::{NodeSet, Quorum};

/// The nodes of a group, their names, and the settings of the lock service.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) nodes: Vec<Arc<dyn Node>>,
    /// Those that live in this process.
    pub(crate) embedded: NodeSet,
    /// The names of the nodes, by number.
    pub(crate) names: Arc<[Arc<str>]>,
    pub(crate) quorum: Quorum,
    pub(crate) settings: Arc<Settings>,
    /// The runtime of all background work.
    pub(crate) home: Arc<Home>,
}

/// Submits a job from a `Drop`, out of which no panic may come: while another panic unwinds the task, it would
/// abort the process.
pub(crate) fn submit_in_drop(node: &dyn Node, job: Job) {
    // The hook has reported the panic, and the job has failed by its drop.
    drop(catch_unwind(AssertUnwindSafe(|| node.submit(job))));
}

/// The outcome of a request at one node.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) outcome: Result<Reply, NodeFailure>,
    /// How long the node took to answer.
    pub(crate) latency: Duration,
}

impl Cluster {
    pub(crate) fn new(
        nodes: Vec<Arc<dyn Node>>,
        quorum: Quorum,
        settings: &Arc<Settings>,
        home: &Arc<Home>,
    ) -> Arc<Self> {
        // Whether a node executes requests at once never changes, so it is asked here and not for each request.
        let (all, ping) = (NodeSet::all(quorum).iter(), Packet::ping());
        let executes = |node: &usize| nodes[*node].execute(&ping, Duration::ZERO).is_some();
        Arc::new(Self {
            embedded: all.filter(executes).collect(),
            names: nodes.iter().map(|node| Arc::clone(node.name())).collect(),
            nodes,
            quorum,
            settings: Arc::clone(settings),
            home: Arc::clone(home),
        })
    }

    /// Subscribes to the releases of a lock.
    pub(crate) fn subscribe(&self, lock: &Arc<[u8]>) -> Arc<ReleaseSubscription> {
        ReleaseSubscription::new(self.quorum, |subscriber| {
            self.nodes[subscriber.node].subscribe(lock, subscriber)
        })
    }

    /// Sends all nodes the same request, as [`ask`](Self::ask) does.
    pub(crate) async fn ask_all(&self, packet: Arc<Packet>) -> Vec<Asked> {
        let nodes = 0..self.nodes.len();
        let asked = self.ask(nodes.map(|node| (node, Arc::clone(&packet))));
        asked.await.into_iter().flatten().collect()
    }

    /// Sends some nodes a request each, and waits until all have answered or are overdue. The outcomes are in the order of
    /// the nodes; `None` for a node that was not asked.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point; a request that a node's connection has not sent yet is then not sent.
    pub(crate) async fn ask(
        &self,
        requests: impl Iterator<Item = (usize, Arc<Packet>)>,
    ) -> Vec<Option<Asked>> {
        let mut votes = VoteReceiver::new(&self.names);
        votes.next_phase();
        let asked = Instant::now();
        let mut found = vec![None; self.nodes.len()];
        let (mut due, mut silent) = (asked, NodeSet::default());
        for (number, packet) in requests {
            let node = &self.nodes[number];
            due = due.max(asked + self.settings.node_timeout + node.extra_patience());
            silent.insert(number);
            node.submit(Job::new(packet, votes.sender(number), asked));
        }
        while !silent.is_empty()
            && let Some(vote) = votes.recv_until(due).await
        {
            silent.remove(vote.node);
            let (outcome, latency) = (vote.outcome, asked.elapsed());
            found[vote.node] = Some(Asked { outcome, latency });
        }
        let latency = asked.elapsed();
        // The answers may be there unread: a home that is not run reads none, and the node is not to blame.
        let is_idle = !silent.is_empty() && self.home.is_idle().await;
        for node in silent.iter() {
            let outcome = Err(match is_idle {
                true => self.not_run(node),
                false => self.timed_out(node, latency),
            });
            found[node] = Some(Asked { outcome, latency });
        }
        found
    }

    /// Has a new home send what the one that has ended left, such as releases.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(crate) async fn resume(&self) {
        for _ in 0..2 {
            // At first, a connection of the former home may not have noticed yet that it has ended.
            let asked = self.ask_all(Packet::ping()).await;
            let is_open = |asked: &Asked| match &asked.outcome {
                Err(NodeFailure::TimedOut { .. } | NodeFailure::Disconnected { .. }) => true,
                Ok(_) | Err(_) => false,
            };
            if !asked.iter().any(is_open) {
                return;
            }
        }
    }

    /// Returns the failure of a node that has not answered for `after`.
    pub(crate) fn timed_out(&self, node: usize, after: Duration) -> NodeFailure {
        let node = Arc::clone(&self.names[node]);
        NodeFailure::TimedOut { node, after }
    }

    /// Returns the failure of a node whose connection lives in a home that is not run.
    fn not_run(&self, node: usize) -> NodeFailure {
        let why = "the runtime of its connection is not run at present; give RedlockBuilder one that always runs \
                   with .runtime(..)";
        NodeFailure::Unreachable {
            node: Arc::clone(&self.names[node]),
            why: why.into(),
        }
    }

    /// Returns the failures of all nodes if the home is not run.
    pub(crate) fn all_not_run(&self) -> Vec<NodeFailure> {
        let nodes = 0..self.nodes.len();
        nodes.map(|node| self.not_run(node)).collect()
    }

    /// Returns the failures of all nodes if a task of the home has ended without a report.
    pub(crate) fn all_ended(&self) -> Vec<NodeFailure> {
        let ended = |node: &Arc<str>| NodeFailure::Disconnected {
            node: Arc::clone(node),
            why: "the task of the lock has ended, with its runtime or by a panic".into(),
        };
        self.names.iter().map(ended).collect()
    }
}
