//! Answers of nodes, and all their assignments and orders, for oracles of rounds.

use std::collections::BTreeSet;

use proptest::prelude::*;
use tower_redlock::protocol::Quorum;
use tower_redlock::protocol::acquire::AcquireRound;
use tower_redlock::protocol::message::{Answer, Reply};

pub(crate) const fn granted(number: u64) -> Answer {
    Answer::Replied(Reply::Granted(number))
}

pub(crate) const fn at(number: u64) -> Answer {
    Answer::Replied(Reply::At(number))
}

pub(crate) const HELD: Answer = Answer::Replied(Reply::Held {
    expires_in: None,
    shown: None,
});

pub(crate) const LOST: Answer = Answer::Replied(Reply::Lost);

pub(crate) const AMNESIA: Answer = Answer::Replied(Reply::Amnesia);

pub(crate) fn quorum(nodes: usize) -> Quorum {
    Quorum::new(nodes).expect("at least one node")
}

/// Failures are printed, shrunk; there is no file of them to keep.
pub(crate) fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// More than half; spelled differently from the code under test.
pub(crate) fn majority(nodes: usize) -> usize {
    (1..=nodes).find(|group| 2 * group > nodes).expect("one is")
}

/// All ways to give each of `nodes` nodes one of `kinds`.
pub(crate) fn assignments<T: Clone>(kinds: &[T], nodes: usize) -> Vec<Vec<T>> {
    let mut all = vec![Vec::new()];
    for _ in 0..nodes {
        let longer = |start: &Vec<T>| {
            let with = |kind: &T| [start.as_slice(), std::slice::from_ref(kind)].concat();
            kinds.iter().map(with).collect::<Vec<_>>()
        };
        all = all.iter().flat_map(longer).collect();
    }
    all
}

/// Checks all answers of up to five nodes in all orders.
pub(crate) fn for_all<T: Clone>(kinds: &[T], check: impl Fn(&[T], &[usize])) {
    for nodes in 1..=5 {
        let orders = orders(nodes);
        for answers in assignments(kinds, nodes) {
            orders.iter().for_each(|order| check(&answers, order));
        }
    }
}

/// All orders of up to four nodes; of more, the rotations and the reverse.
pub(crate) fn orders(nodes: usize) -> Vec<Vec<usize>> {
    let straight: Vec<usize> = (0..nodes).collect();
    if nodes <= 4 {
        let mut orders = assignments(&straight, nodes);
        orders.retain(|order| BTreeSet::from_iter(order).len() == nodes);
        return orders;
    }
    let rotations = (0..nodes).map(|by| {
        let mut order = straight.clone();
        order.rotate_left(by);
        order
    });
    let reverse = straight.iter().rev().copied().collect();
    rotations.chain([reverse]).collect()
}

pub(crate) fn asked(round: &AcquireRound) -> Vec<usize> {
    round.unconfirmed().iter().collect()
}
