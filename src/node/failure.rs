//! The reasons for which a node gave no vote.

use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

/// The reason for which one node did not vote on a lock. Names the node by its address, without credentials.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NodeFailure {
    /// The node could not be reached, or did not answer before and is not asked until it does.
    #[error("{node} {}", match why.contains("; ") {
        // It names its own remedy. Advice for servers that do not run would contradict it.
        true => format!("gives no votes: {why}"),
        false => format!("is unreachable ({why}); check that it runs and that its URL is right"),
    })]
    Unreachable {
        /// The node.
        node: Arc<str>,
        /// The error of the last attempt to reach it.
        why: Arc<str>,
    },
    /// The connection broke before the reply arrived; the request may have been executed.
    #[error(
        "the connection to {node} broke before its reply ({why}); check the network and the server's log"
    )]
    Disconnected {
        /// The node.
        node: Arc<str>,
        /// The error of the connection.
        why: Arc<str>,
    },
    /// The node did not answer in time; it may execute the request later.
    #[error(
        "{node} did not answer within {after:?}; check that it does not hang, or raise node_timeout above its \
         round-trip time"
    )]
    TimedOut {
        /// The node.
        node: Arc<str>,
        /// How long the caller waited.
        after: Duration,
    },
    /// The node answered with an error instead of a vote.
    #[error("{node} answered with an error: {why}")]
    Refused {
        /// The node.
        node: Arc<str>,
        /// The error of the server.
        why: Arc<str>,
    },
    /// The node was started, restarted or flushed recently and must not vote yet.
    #[error(
        "{node} was started or flushed recently; quarantined for another {} s (see restart_guard)",
        whole_seconds(*left)
    )]
    Quarantined {
        /// The node.
        node: Arc<str>,
        /// The remaining time of the quarantine.
        left: Duration,
    },
    /// The node had not answered when the answers of the other nodes decided. It may be up.
    #[error("{node} was not waited for, because the other nodes decided")]
    Unanswered {
        /// The node.
        node: Arc<str>,
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
            | Self::Quarantined { node, .. }
            | Self::Unanswered { node } => node,
        }
    }

    /// Returns the failure of a node on which a fence is at its maximum.
    pub(crate) fn overflow(node: &Arc<str>) -> Self {
        let why = "the fence of this key has reached its largest value; delete the fence key on this node";
        Self::refused(node, why)
    }

    /// Creates the failure of a node that answered with an error.
    pub(crate) fn refused(node: &Arc<str>, why: impl Into<Arc<str>>) -> Self {
        let (node, why) = (Arc::clone(node), why.into());
        Self::Refused { node, why }
    }

    /// Returns whether the node answered, with an error.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused { .. })
    }

    /// Returns whether the request certainly never left this process, so that nothing has to be undone.
    pub(crate) fn never_sent(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Quarantined { .. })
    }
}

/// Returns a time in whole seconds, rounded up.
pub(crate) fn whole_seconds(time: Duration) -> u64 {
    let rounding = Duration::from_nanos(999_999_999);
    time.saturating_add(rounding).as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreachable_adds_a_remedy_only_to_a_reason_without_one() {
        let text = |why: &str| {
            let (node, why) = ("redis-a:6379".into(), why.into());
            NodeFailure::Unreachable { node, why }.to_string()
        };
        assert_eq!(
            text("Connection refused (os error 111)"),
            "redis-a:6379 is unreachable (Connection refused (os error 111)); check that it runs and that its URL \
             is right"
        );
        let twin = "it is the same server as redis-b:6379, or a copy; list every server once";
        assert_eq!(text(twin), format!("redis-a:6379 gives no votes: {twin}"));
    }

    #[test]
    fn unanswered_names_the_node() {
        let node = "redis-a:6379".into();
        assert_eq!(
            NodeFailure::Unanswered { node }.to_string(),
            "redis-a:6379 was not waited for, because the other nodes decided"
        );
    }
}
