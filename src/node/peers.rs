//! The nodes of one lock service, counted by whether they vote.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::protocol::Quorum;

/// How many nodes of one lock service do not vote, so that a log line can say what that means for locks.
#[derive(Debug)]
pub(crate) struct Peers {
    quorum: Quorum,
    silent: AtomicUsize,
}

impl Peers {
    pub(crate) fn new(quorum: Quorum) -> Self {
        Self {
            quorum,
            silent: AtomicUsize::new(0),
        }
    }

    /// Counts a node that votes no longer, or votes again.
    pub(crate) fn count(&self, votes: bool) {
        if votes {
            self.silent.fetch_sub(1, Ordering::Relaxed);
        } else {
            self.silent.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns what a node that does not vote means for locks.
    pub(crate) fn effect(&self) -> String {
        let (nodes, majority) = (self.quorum.nodes(), self.quorum.majority());
        let voting = nodes.saturating_sub(self.silent.load(Ordering::Relaxed));
        if voting >= majority {
            return format!("locks proceed on the other nodes ({voting} of {nodes} vote)");
        }
        format!("no locks are granted, because {voting} of {nodes} nodes vote and {majority} must")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effect_says_whether_a_majority_is_left() {
        let peers = Peers::new(Quorum::new(3).unwrap());
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
    }
}
