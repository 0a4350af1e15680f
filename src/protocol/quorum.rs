//! Quorum arithmetic.

/// The number of nodes, and the sizes of their majorities.
///
/// A majority is one of the *configured* nodes, never of the nodes that answer: a client that
/// reaches only a few nodes needs as many votes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Quorum {
    nodes: usize,
}

impl Quorum {
    /// Creates a quorum over `nodes` nodes; returns `None` for zero.
    #[must_use]
    pub const fn new(nodes: usize) -> Option<Self> {
        if nodes == 0 {
            None
        } else {
            Some(Self { nodes })
        }
    }

    /// Returns the number of configured nodes.
    #[must_use]
    pub const fn nodes(self) -> usize {
        self.nodes
    }

    /// Returns the smallest size for which any two groups of nodes share one node: `n / 2 + 1`.
    #[must_use]
    pub const fn majority(self) -> usize {
        self.nodes / 2 + 1
    }

    /// Returns the smallest number of answers that can decide anything, for or against.
    #[must_use]
    pub const fn decisive(self) -> usize {
        // This many refusals leave no majority; with an even number of nodes it is one less than a majority.
        self.nodes - self.majority() + 1
    }
}

/// Returns the numbers of the nodes whose state matches.
pub(super) fn which<T>(nodes: &[T], matches: impl Fn(&T) -> bool) -> impl Iterator<Item = usize> {
    let nodes = nodes.iter().enumerate();
    nodes.filter_map(move |(number, node)| matches(node).then_some(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn majorities_always_share_a_node() {
        for n in 1..=9 {
            let quorum = Quorum::new(n).unwrap();
            assert!(quorum.majority() * 2 > n);
            assert!((quorum.majority() - 1) * 2 <= n);
            assert!(n - quorum.decisive() < quorum.majority());
            assert!(quorum.decisive() <= quorum.majority());
        }
        assert_eq!(Quorum::new(0), None);
    }
}
