//! The health of the nodes, and whether locks can be acquired.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::lock::cluster::Cluster;
use crate::node::{NodeFailure, NodeState, Request};

/// Report of [`Redlock::health`](crate::Redlock::health).
///
/// A node is up if it answers and the restart guard lets it vote. The check writes nothing, so a server that is out
/// of memory counts as up too.
///
/// ```
/// use tower_redlock::{Readiness, Redlock};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let health = Redlock::in_memory(3).health().await;
/// assert_eq!(health.readiness(), Readiness::Ready);
/// for node in &health.nodes {
///     println!("{}: {:?}, answered in {:?}", node.node, node.state, node.latency);
/// }
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    /// One entry per node, in the order of the configuration.
    pub nodes: Vec<NodeHealth>,
    /// The number of nodes that make a majority.
    pub needed: usize,
}

/// The health of one node.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeHealth {
    /// The node's address, without credentials.
    pub node: Arc<str>,
    /// Whether the node may vote, and otherwise why not.
    pub state: NodeState,
    /// The time that the node took to answer, if it did.
    pub latency: Option<Duration>,
}

/// Whether locks can be acquired, and otherwise why not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Readiness {
    /// All nodes may vote.
    Ready,
    /// A majority of the nodes may vote, but not all: locks can be acquired, but some node needs attention.
    Degraded,
    /// Too few nodes may vote until the quarantine of others ends; see
    /// [`restart_guard`](crate::RedlockBuilder::restart_guard).
    Quarantined,
    /// Too few nodes answer.
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
    /// Returns whether locks can be acquired, and otherwise why not.
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

    /// Returns whether a majority of the nodes may vote, so that locks can be acquired.
    #[must_use]
    pub fn has_quorum(&self) -> bool {
        self.up() >= self.needed
    }

    /// Returns the number of nodes that may vote.
    #[must_use]
    pub fn up(&self) -> usize {
        let up = |node: &&NodeHealth| node.state == NodeState::Up;
        self.nodes.iter().filter(up).count()
    }
}

/// Pings every node, and waits until all have answered or are overdue.
pub(crate) async fn check(cluster: &Cluster) -> Health {
    let found = cluster.ask_all(|_| Some(Request::Ping)).await;
    let nodes = cluster.nodes.iter().zip(found).map(|(node, found)| {
        let latency = found.as_ref().map(|asked| asked.latency);
        let (state, latency) = match found.map(|asked| asked.outcome) {
            Some(Ok(_)) => (NodeState::Up, latency),
            // A node that keeps no state of its own, such as a simulated one, says so in its answer.
            Some(Err(NodeFailure::Quarantined { left, .. })) => {
                (NodeState::Quarantined { left }, None)
            }
            Some(Err(failure)) => (unreachable(node.state(), failure.to_string().into()), None),
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

/// Returns the state that the node itself knows. A node that counts as up has failed just now.
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
