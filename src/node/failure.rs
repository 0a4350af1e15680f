//! The reasons for which a node gave no vote.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::protocol::message::Reply;

/// The reason for which one node did not vote on a lock. Names the node by its address, without credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum NodeFailure {
    /// The node could not be reached, or did not answer before and is not asked until it does.
    Unreachable {
        /// The node.
        node: Arc<str>,
        /// The error of the last attempt to reach it.
        why: Arc<str>,
    },
    /// The connection broke before the reply arrived; the request may have been executed.
    Disconnected {
        /// The node.
        node: Arc<str>,
        /// The error of the connection.
        why: Arc<str>,
    },
    /// The node did not answer in time; it may execute the request later.
    TimedOut {
        /// The node.
        node: Arc<str>,
        /// How long the caller waited.
        after: Duration,
    },
    /// The node answered with an error instead of a vote.
    Refused {
        /// The node.
        node: Arc<str>,
        /// The error of the server.
        why: Arc<str>,
    },
    /// The node was restarted or flushed recently and must not vote yet.
    Quarantined {
        /// The node.
        node: Arc<str>,
        /// The remaining time of the quarantine.
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

    /// Returns a node's reply as its vote. A fence at its maximum is a failure.
    pub(crate) fn vote(node: &Arc<str>, reply: Reply) -> Result<Reply, Self> {
        match reply {
            Reply::Overflow => Err(Self::Refused {
                node: Arc::clone(node),
                why: "the fence of this key has reached its largest value; delete the fence key on this node"
                    .into(),
            }),
            reply => Ok(reply),
        }
    }

    /// Returns whether the request certainly never left this process, so that nothing has to be undone.
    pub(crate) fn never_sent(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Quarantined { .. })
    }
}

impl fmt::Display for NodeFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable { node, why } => write!(
                f,
                "{node} is unreachable ({why}); check that it runs and that its URL is right"
            ),
            Self::Disconnected { node, why } => write!(
                f,
                "the connection to {node} broke before its reply ({why}); check the network and the server's log"
            ),
            Self::TimedOut { node, after } => write!(
                f,
                "{node} did not answer within {after:?}; check that it does not hang, or raise node_timeout \
                 above its round-trip time"
            ),
            Self::Refused { node, why } => write!(f, "{node} answered with an error: {why}"),
            Self::Quarantined { node, left } => {
                let seconds = left.as_secs() + u64::from(left.subsec_nanos() > 0);
                write!(
                    f,
                    "{node} was restarted or flushed recently; quarantined for another {seconds} s (see restart_guard)"
                )
            }
        }
    }
}

impl std::error::Error for NodeFailure {}
