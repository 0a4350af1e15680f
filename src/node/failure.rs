//! Why a node gave no vote.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::protocol::message::Reply;

/// Why one node did not vote on a lock. Names the node by its address, without credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum NodeFailure {
    /// The node could not be reached, or has not been answering and is not asked until it does.
    Unreachable {
        /// The node.
        node: Arc<str>,
        /// What went wrong when it was last tried.
        why: Arc<str>,
    },
    /// The connection broke before the answer came; the request may have been carried out.
    Disconnected {
        /// The node.
        node: Arc<str>,
        /// What the connection reported.
        why: Arc<str>,
    },
    /// The node did not answer in time; the request may be carried out later.
    TimedOut {
        /// The node.
        node: Arc<str>,
        /// How long it was waited for.
        after: Duration,
    },
    /// The node answered an error instead of a vote.
    Refused {
        /// The node.
        node: Arc<str>,
        /// The error as the server put it.
        why: Arc<str>,
    },
    /// The node lost its memory not long ago and may not vote yet.
    Quarantined {
        /// The node.
        node: Arc<str>,
        /// How long it is kept out from now.
        left: Duration,
    },
}

impl NodeFailure {
    /// Returns the name of the node: its address, without credentials.
    #[must_use]
    pub fn node(&self) -> &str {
        match self {
            Self::Unreachable { node, .. }
            | Self::Disconnected { node, .. }
            | Self::TimedOut { node, .. }
            | Self::Refused { node, .. }
            | Self::Quarantined { node, .. } => node,
        }
    }

    /// What a node said, as its vote: a fence at its end is no vote, and says why.
    pub(crate) fn vote(node: &Arc<str>, reply: Reply) -> Result<Reply, Self> {
        match reply {
            Reply::Overflow => Err(Self::Refused {
                node: Arc::clone(node),
                why: "the fence of this key has reached its largest value; delete it there".into(),
            }),
            reply => Ok(reply),
        }
    }

    /// Whether the request certainly never left this process, so there is nothing to undo.
    pub(crate) fn never_sent(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Quarantined { .. })
    }
}

impl fmt::Display for NodeFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable { node, why } => {
                write!(
                    f,
                    "{node} is unreachable ({why}); check that it runs and that its URL is right"
                )
            }
            Self::Disconnected { node, why } => write!(f, "the connection to {node} broke ({why})"),
            Self::TimedOut { node, after } => write!(
                f,
                "{node} did not answer within {after:?}; it hangs, or node_timeout is below its round trip"
            ),
            Self::Refused { node, why } => write!(f, "{node} answered an error: {why}"),
            Self::Quarantined { node, left } => {
                let seconds = left.as_secs() + u64::from(left.subsec_nanos() > 0);
                write!(
                    f,
                    "{node} has not had its memory for long enough and may not vote for another {seconds} s; see restart_guard"
                )
            }
        }
    }
}

impl std::error::Error for NodeFailure {}
