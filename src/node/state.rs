//! The state of a node.

use std::sync::Arc;
use std::time::Duration;

/// The state of a node, as far as this process knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum NodeState {
    /// The node answers, or has not been asked yet.
    Up,
    /// The node answers, but must not vote: it was started, restarted or flushed recently.
    Quarantined {
        /// The remaining time of the quarantine.
        left: Duration,
    },
    /// The node does not answer.
    Unreachable {
        /// The last error, without credentials.
        why: Arc<str>,
        /// How long it has not answered.
        since: Duration,
    },
}
