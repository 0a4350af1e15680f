//! How the nodes are.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::lock::cluster::Cluster;
use crate::node::{Job, NodeState, Request, VoteReceiver};

/// What [`Redlock::health`](crate::Redlock::health) found.
///
/// A node counts as up if it answers and the restart guard lets it vote. Whether it would accept a
/// write is not asked: a server that is out of memory answers too.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    /// One entry per node, in the order they were configured.
    pub nodes: Vec<NodeHealth>,
    /// Nodes that make a majority.
    pub needed: usize,
}

/// How one node is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeHealth {
    /// The node's address, without credentials.
    pub node: Arc<str>,
    /// Whether it answers, and if not, why and since when.
    pub state: NodeState,
    /// How long it took to answer just now, if it did.
    pub latency: Option<Duration>,
}

/// Whether locks can be had, and if not, why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Readiness {
    /// All nodes may vote.
    Ready,
    /// A majority of the nodes may vote, but not all: locks are to be had, and a node needs a look.
    Degraded,
    /// A majority would be there, but some of it may not vote yet: see
    /// [`restart_guard`](crate::RedlockBuilder::restart_guard).
    Quarantined,
    /// A majority does not answer.
    Down,
}

impl fmt::Display for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ready => "ready",
            Self::Degraded => "degraded",
            Self::Quarantined => "quarantined",
            Self::Down => "down",
        })
    }
}

impl Health {
    /// Returns whether locks can be had, and if not, why.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        let quarantined = |node: &&NodeHealth| matches!(node.state, NodeState::Quarantined { .. });
        let quarantined = self.nodes.iter().filter(quarantined).count();
        if self.up() == self.nodes.len() {
            Readiness::Ready
        } else if self.has_quorum() {
            Readiness::Degraded
        } else if self.up() + quarantined >= self.needed {
            Readiness::Quarantined
        } else {
            Readiness::Down
        }
    }

    /// Returns whether a majority of the nodes may vote, so that locks can be had.
    #[must_use]
    pub fn has_quorum(&self) -> bool {
        self.up() >= self.needed
    }

    /// Returns how many nodes may vote.
    #[must_use]
    pub fn up(&self) -> usize {
        let up = |node: &&NodeHealth| node.state == NodeState::Up;
        self.nodes.iter().filter(up).count()
    }
}

pub(crate) async fn check(cluster: &Cluster) -> Health {
    let mut votes = VoteReceiver::new(&cluster.names);
    votes.next_phase();
    let asked = Instant::now();
    let node_timeout = cluster.settings.node_timeout;
    let mut due = asked;
    for (index, node) in cluster.nodes.iter().enumerate() {
        due = due.max(asked + node_timeout + node.extra_patience());
        let sender = votes.sender(index);
        node.submit(Job::new(Request::Ping, sender, asked));
    }
    let mut found: Vec<Option<Result<Duration, Arc<str>>>> = vec![None; cluster.nodes.len()];
    while found.iter().any(Option::is_none) {
        tokio::select! {
            biased;
            vote = votes.recv_any() => {
                let outcome = vote.outcome.map(|_| asked.elapsed());
                found[vote.node] = Some(outcome.map_err(|failure| failure.to_string().into()));
            }
            () = sleep_until(due) => break,
        }
    }
    let nodes = cluster.nodes.iter().zip(found).map(|(node, found)| {
        let (state, latency) = match found {
            Some(Ok(latency)) => (NodeState::Up, Some(latency)),
            Some(Err(why)) => (unreachable(node.state(), why), None),
            None => (unreachable(node.state(), "no answer in time".into()), None),
        };
        NodeHealth {
            node: Arc::clone(node.name()),
            state,
            latency,
        }
    });
    Health {
        nodes: nodes.collect(),
        needed: cluster.settings.quorum.majority(),
    }
}

/// What the node itself knows, or else that it has just failed.
fn unreachable(known: NodeState, why: Arc<str>) -> NodeState {
    match known {
        NodeState::Up => NodeState::Unreachable {
            why,
            since: Duration::ZERO,
        },
        known => known,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_tells_a_quorum_without_spares_from_none_and_why() {
        let quarantined = || NodeState::Quarantined {
            left: Duration::from_secs(1),
        };
        let down = || NodeState::Unreachable {
            why: "gone".into(),
            since: Duration::ZERO,
        };
        for (states, expected) in [
            (
                [NodeState::Up, NodeState::Up, NodeState::Up],
                Readiness::Ready,
            ),
            ([NodeState::Up, NodeState::Up, down()], Readiness::Degraded),
            (
                [NodeState::Up, NodeState::Up, quarantined()],
                Readiness::Degraded,
            ),
            (
                [NodeState::Up, down(), quarantined()],
                Readiness::Quarantined,
            ),
            (
                [quarantined(), quarantined(), quarantined()],
                Readiness::Quarantined,
            ),
            ([down(), down(), quarantined()], Readiness::Down),
            ([NodeState::Up, down(), down()], Readiness::Down),
        ] {
            let nodes = states.into_iter().map(|state| NodeHealth {
                node: "n".into(),
                state,
                latency: None,
            });
            let health = Health {
                nodes: nodes.collect(),
                needed: 2,
            };
            assert_eq!(health.readiness(), expected, "{health:?}");
        }
    }
}
