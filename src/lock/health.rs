//! The health of the nodes, and whether locks can be acquired.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::lock::layout::Group;
use crate::node::{NodeFailure, NodeState, Packet};

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
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Health {
    #[cfg_attr(
        not(feature = "axum"),
        expect(dead_code, reason = "only the views over HTTP tell it")
    )]
    pub(crate) is_draining: bool,
    /// One entry per node of all groups, in the order of the configuration.
    pub nodes: Vec<NodeHealth>,
    /// The number of nodes that make a majority; of several groups, the sum of their majorities.
    pub needed: usize,
    /// One entry per group, in the order of the configuration. Last come those that the service
    /// [moves to](crate::RedlockBuilder::moving_to).
    pub groups: Vec<GroupHealth>,
}

/// The health of one group of nodes, which decides on the keys that belong to it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GroupHealth {
    /// The name of the group; `0` if there is only one.
    pub name: Arc<str>,
    /// One entry per node of the group, in the order of the configuration.
    pub nodes: Vec<NodeHealth>,
    /// The number of nodes that make a majority.
    pub needed: usize,
}

/// The health of one node.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NodeHealth {
    /// The node's address, without credentials.
    pub node: Arc<str>,
    /// Whether the node may vote, and otherwise why not.
    pub state: NodeState,
    /// The time that the node took to answer, if it did.
    pub latency: Option<Duration>,
}

/// Whether locks can be acquired, and otherwise why not. From the best to the worst; shown in lower case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Readiness {
    /// All nodes may vote.
    Ready,
    /// A majority of the nodes may vote, but not all: locks can be acquired, but some node needs attention. Of several
    /// groups, also if some cannot lock their keys at present.
    Degraded,
    /// Too few nodes may vote until the quarantine of others ends; see
    /// [`restart_guard`](crate::RedlockBuilder::restart_guard).
    Quarantined,
    /// Too few nodes answer.
    Down,
}

impl fmt::Display for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

impl Health {
    pub(super) fn new(groups: Vec<GroupHealth>, is_draining: bool) -> Self {
        let nodes = groups.iter().flat_map(|group| &group.nodes);
        Self {
            nodes: nodes.cloned().collect(),
            needed: groups.iter().map(|group| group.needed).sum(),
            groups,
            is_draining,
        }
    }

    /// Returns whether locks can be acquired, and otherwise why not. Of several groups, one that can lock its keys is
    /// enough not to be down.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        let of_groups = || self.groups.iter().map(GroupHealth::readiness);
        match of_groups().min_by_key(|readiness| *readiness as u8) {
            Some(Readiness::Ready)
                if of_groups().any(|readiness| readiness != Readiness::Ready) =>
            {
                Readiness::Degraded
            }
            best => best.unwrap_or(Readiness::Down),
        }
    }

    /// Returns whether a majority of the nodes of some group may vote, so that locks can be acquired.
    #[must_use]
    pub fn has_quorum(&self) -> bool {
        self.groups.iter().any(GroupHealth::has_quorum)
    }

    /// Returns the number of nodes that may vote.
    #[must_use]
    pub fn up(&self) -> usize {
        self.groups.iter().map(GroupHealth::up).sum()
    }
}

impl GroupHealth {
    /// Returns whether keys of this group can be locked, and otherwise why not.
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

    /// Returns whether a majority of the nodes may vote, so that keys of this group can be locked.
    #[must_use]
    pub fn has_quorum(&self) -> bool {
        self.up() >= self.needed
    }

    fn up(&self) -> usize {
        let up = |node: &&NodeHealth| node.state == NodeState::Up;
        self.nodes.iter().filter(up).count()
    }
}

/// Pings every node of a group at once, and waits until all have answered or are overdue.
pub(super) async fn check_group(group: &Group) -> GroupHealth {
    let cluster = &group.cluster;
    let found = cluster.ask_all(Packet::ping()).await;
    let nodes = cluster.nodes.iter().zip(found).map(|(node, found)| {
        let is_up = found.outcome.is_ok();
        NodeHealth {
            node: Arc::clone(node.name()),
            state: match found.outcome {
                Ok(_) => NodeState::Up,
                // A node that keeps no state of its own, such as a simulated one, says so in its answer.
                Err(NodeFailure::Quarantined { left, .. }) => NodeState::Quarantined { left },
                Err(failure) => unreachable(node.state(), failure.to_string().into()),
            },
            latency: is_up.then_some(found.latency),
        }
    });
    GroupHealth {
        name: Arc::clone(&group.name),
        nodes: nodes.collect(),
        needed: cluster.quorum.majority(),
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
            let group = GroupHealth {
                name: "0".into(),
                nodes: nodes.collect(),
                needed: 2,
            };
            assert_eq!(group.readiness(), expected, "{group:?}");
            let health = Health::new(vec![group], false);
            assert_eq!(health.readiness(), expected, "{health:?}");
        }
    }

    #[test]
    fn readiness_of_several_groups_is_down_only_if_no_group_locks() {
        let group = |up: usize| GroupHealth {
            name: "g".into(),
            nodes: (0..3)
                .map(|node| NodeHealth {
                    node: "n".into(),
                    state: match node < up {
                        true => NodeState::Up,
                        false => NodeState::Quarantined {
                            left: Duration::from_secs(1),
                        },
                    },
                    latency: None,
                })
                .collect(),
            needed: 2,
        };
        for (up, expected) in [
            ([3, 3], Readiness::Ready),
            ([3, 2], Readiness::Degraded),
            ([3, 0], Readiness::Degraded),
            ([2, 0], Readiness::Degraded),
            ([0, 0], Readiness::Quarantined),
        ] {
            let health = Health::new(up.map(group).into(), false);
            assert_eq!(health.readiness(), expected, "{health:?}");
            assert_eq!((health.up(), health.needed), (up.iter().sum(), 4));
        }
        let mut down = group(0);
        for node in &mut down.nodes {
            node.state = unreachable(NodeState::Up, "gone".into());
        }
        let health = |groups: [GroupHealth; 2]| Health::new(groups.into(), false).readiness();
        assert_eq!(health([down.clone(), group(0)]), Readiness::Quarantined);
        assert_eq!(health([down.clone(), group(2)]), Readiness::Degraded);
        assert_eq!(health([down.clone(), down]), Readiness::Down);
    }

    #[test]
    fn a_node_that_does_not_answer_is_in_the_state_that_is_known_of_it() {
        let gone = |why: &str, seconds| NodeState::Unreachable {
            why: why.into(),
            since: Duration::from_secs(seconds),
        };
        let quarantined = NodeState::Quarantined {
            left: Duration::from_secs(1),
        };
        for (known, state) in [
            (NodeState::Up, gone("no answer", 0)),
            (gone("refused", 7), gone("refused", 7)),
            (quarantined.clone(), quarantined),
        ] {
            assert_eq!(unreachable(known, "no answer".into()), state);
        }
    }
}
