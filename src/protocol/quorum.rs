//! Quorum arithmetic, and sets of nodes.

use std::iter;

/// The number of nodes, and the sizes of their majorities.
///
/// A majority is one of the *configured* nodes, never of the nodes that answer: a client that
/// reaches only a few nodes needs as many votes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Quorum {
    nodes: usize,
}

impl Quorum {
    /// Creates a quorum over `nodes` nodes; returns `None` for zero, and for more than [`NodeSet::MAX`].
    pub const fn new(nodes: usize) -> Option<Self> {
        if nodes == 0 || nodes > NodeSet::MAX {
            None
        } else {
            Some(Self { nodes })
        }
    }

    /// Returns the number of configured nodes.
    pub const fn nodes(self) -> usize {
        self.nodes
    }

    /// Returns the smallest size for which any two groups of nodes share one node: `n / 2 + 1`.
    pub const fn majority(self) -> usize {
        self.nodes / 2 + 1
    }

    /// Returns the smallest number of answers that can decide anything, for or against.
    pub const fn decisive(self) -> usize {
        // This many refusals leave no majority; with an even number of nodes it is one less than a majority.
        self.nodes - self.majority() + 1
    }
}

/// A set of the nodes of one quorum, by their numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct NodeSet(u64);

impl NodeSet {
    /// The largest number of nodes.
    pub const MAX: usize = 64;

    /// Returns the set of all nodes of a quorum.
    pub const fn all(quorum: Quorum) -> Self {
        Self(u64::MAX >> (Self::MAX - quorum.nodes))
    }

    /// Returns whether the set has this node.
    pub const fn contains(self, node: usize) -> bool {
        node < Self::MAX && self.0 >> node & 1 == 1
    }

    /// Returns the number of its nodes.
    pub const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Returns whether the set has no node.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Adds a node.
    ///
    /// # Panics
    ///
    /// Panics if its number is not below [`MAX`](Self::MAX).
    pub const fn insert(&mut self, node: usize) {
        assert!(node < Self::MAX, "a quorum has no more nodes");
        self.0 |= 1 << node;
    }

    /// Removes a node, and returns whether the set had it.
    pub const fn remove(&mut self, node: usize) -> bool {
        let had = self.contains(node);
        if had {
            self.0 &= !(1 << node);
        }
        had
    }

    /// Returns the nodes of both sets together.
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the nodes that both sets have.
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the nodes of this set that the other one does not have.
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns the numbers of the nodes, in ascending order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        let mut rest = self.0;
        iter::from_fn(move || {
            let next = rest.trailing_zeros() as usize;
            // Clears the lowest bit.
            rest &= rest.checked_sub(1)?;
            Some(next)
        })
    }
}

impl FromIterator<usize> for NodeSet {
    fn from_iter<I: IntoIterator<Item = usize>>(nodes: I) -> Self {
        let mut set = Self::default();
        for node in nodes {
            set.insert(node);
        }
        set
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
        assert_eq!(Quorum::new(NodeSet::MAX + 1), None);
    }

    #[test]
    fn sets_have_the_nodes_that_were_added_and_not_removed() {
        for nodes in [1, 5, NodeSet::MAX] {
            let all = NodeSet::all(Quorum::new(nodes).unwrap());
            assert!(all.iter().eq(0..nodes));
            assert_eq!(all.len(), nodes);
            assert!(!all.contains(nodes));
        }
        let mut set: NodeSet = [0, 63, 5].into_iter().collect();
        set.insert(7);
        set.insert(7);
        assert!(set.remove(63) && !set.remove(63) && !set.remove(64));
        assert!(set.iter().eq([0, 5, 7]));
        let other = [5, 6].into_iter().collect();
        assert!(set.union(other).iter().eq([0, 5, 6, 7]));
        assert!(set.without(other).iter().eq([0, 7]));
        assert!(set.intersection(other).iter().eq([5]));
        assert!(set.without(set).is_empty() && !set.is_empty());
    }
}
