//! The nodes of one group, counted by whether they vote.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::protocol::Quorum;

/// How many nodes of one group do not vote, so that a log line can say what that means for locks.
#[derive(Debug)]
pub(crate) struct Peers {
    quorum: Quorum,
    /// The name of the group, if it is one of several.
    pub(crate) group: Option<Arc<str>>,
    silent: AtomicUsize,
}

impl Peers {
    /// Creates the count of a group, which has a name if it is one of several.
    pub(crate) fn new(quorum: Quorum, group: Option<&Arc<str>>) -> Self {
        Self {
            quorum,
            group: group.map(Arc::clone),
            silent: AtomicUsize::new(0),
        }
    }

    /// Counts a node that votes no longer, or votes again.
    pub(crate) fn count(&self, votes: bool) {
        if votes {
            // A count for log messages. Nothing else depends on it.
            self.silent.fetch_sub(1, Ordering::Relaxed);
        } else {
            self.silent.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns what a node that does not vote means for locks.
    pub(crate) fn effect(&self) -> String {
        let (nodes, majority) = (self.quorum.nodes(), self.quorum.majority());
        let voting = nodes.saturating_sub(self.silent.load(Ordering::Relaxed));
        let group = self.group.as_ref();
        let place = group.map_or_else(String::new, |group| format!(" in group {group}"));
        if voting >= majority {
            return format!("locks proceed on the other nodes{place} ({voting} of {nodes} vote)");
        }
        format!(
            "no locks are granted{place}, because {voting} of {nodes} nodes vote and {majority} must"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effect_says_whether_a_majority_is_left() {
        let peers = Peers::new(Quorum::new(3).unwrap(), None);
        peers.count(false);
        let one_down = "locks proceed on the other nodes (2 of 3 vote)";
        assert_eq!(peers.effect(), one_down);
        peers.count(false);
        assert_eq!(
            peers.effect(),
            "no locks are granted, because 1 of 3 nodes vote and 2 must"
        );
        peers.count(true);
        assert_eq!(peers.effect(), one_down);
        let peers = Peers::new(Quorum::new(3).unwrap(), Some(&"eu".into()));
        let none_down = "locks proceed on the other nodes in group eu (3 of 3 vote)";
        assert_eq!(peers.effect(), none_down);
    }
}
