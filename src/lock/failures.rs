//! The failures of nodes, for the error that the caller gets.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::lock::cluster::Cluster;
use crate::node::NodeFailure;
use crate::protocol::message::Reply;
use crate::protocol::round::Answer;

/// The failures of nodes in one phase, by node number.
#[derive(Debug, Clone, Default)]
pub(crate) struct Failures(BTreeMap<usize, NodeFailure>);

impl Failures {
    /// Keeps the outcome of a node if it is a failure, and returns it as an answer for the rounds.
    pub(crate) fn note(&mut self, node: usize, outcome: Result<Reply, NodeFailure>) -> Answer {
        match outcome {
            Ok(reply) => {
                if !self.0.is_empty() {
                    self.0.remove(&node);
                }
                Answer::Replied(reply)
            }
            Err(failure) => {
                self.set(node, failure);
                Answer::Failed
            }
        }
    }

    pub(crate) fn set(&mut self, node: usize, failure: NodeFailure) {
        self.0.insert(node, failure);
    }

    /// Returns the failures, and those of the nodes that had not answered when the others decided.
    pub(crate) fn list(
        mut self,
        cluster: &Cluster,
        silent: impl Iterator<Item = usize>,
    ) -> Vec<NodeFailure> {
        for number in silent {
            let node = Arc::clone(&cluster.names[number]);
            let unanswered = NodeFailure::Unanswered { node };
            self.0.entry(number).or_insert(unanswered);
        }
        self.0.into_values().collect()
    }
}
