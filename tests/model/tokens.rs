//! Tokens, without time: F1 to F4.

use crate::FAR_MORE;
use crate::spec::{May, Proposals, Role, Spec, Variant};
use crate::world::*;

/// The most acquisitions, and the most requests of one: `ACQUIRE`, three second phases and an extension.
type Tokens<const N: usize> = World<N, 3, 5>;

/// The sets of keys {x}, {y} and {x,y}.
const X: &[u8] = &[0];
const Y: &[u8] = &[1];
const XY: &[u8] = &[0, 1];

/// Acquisitions of these sets, which propose any number from 1 to the last.
fn acquiring(sets: &[&'static [u8]], proposals: u8) -> Spec {
    let clients: Vec<Role> = sets.iter().map(|set| Role::of(set)).collect();
    let spec = Spec::of(&clients, Proposals::UpTo(proposals));
    spec.with(|it| it.promises = &[F1, F2, F3, F4])
        .reaches([ALL_COMPLETE, LATER, SECOND_PHASE])
}

fn extended(spec: Spec) -> Spec {
    spec.with(|it| it.extensions = 1).reaches([EXTENDED])
}

#[test]
fn tokens_of_two_acquisitions_are_unique_and_ordered_and_protect_a_storage() {
    let waiting = |proposals| acquiring(&[X, X], proposals).may([May::GiveUp]);
    Tokens::<3>::holds(waiting(2).may([May::Store]));
    Tokens::<3>::holds(waiting(3));
}

#[test]
fn repeated_acquire_keeps_tokens_unique_and_ordered() {
    Tokens::<3>::holds(acquiring(&[X, X], 2).with(|it| it.duplicates = 1));
}

#[test]
fn tokens_of_three_acquisitions_are_unique_and_ordered() {
    Tokens::<3>::holds(acquiring(&[X, X, X], 1).within(6_000_000));
}

// Rules: node.set
#[test]
fn tokens_of_unequal_sets_are_unique_and_ordered_for_each_key() {
    Tokens::<3>::holds(acquiring(&[XY, X], 2).may([May::Store]));
    Tokens::<3>::holds(acquiring(&[XY, X], 1).with(|it| it.duplicates = 1));
    Tokens::<3>::holds(extended(acquiring(&[XY, X], 1)));
    Tokens::<3>::holds(acquiring(&[XY, X, Y], 1).within(4_000_000));
}

// Rules: lock.exact
#[test]
fn extension_proves_that_no_higher_token_completed_before_it() {
    Tokens::<3>::holds(extended(acquiring(&[X, X], 2)));
}

#[test]
fn tokens_from_five_nodes_are_unique_and_ordered() {
    Tokens::<5>::holds(acquiring(&[X, X], 1).within(4_000_000));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_two_acquisitions_hold_too_when_asked_for() {
    let stored = acquiring(&[X, X], 3).may([May::Store]);
    Tokens::<3>::holds(stored.with(|it| it.duplicates = 2).within(FAR_MORE));
    Tokens::<5>::holds(acquiring(&[X, X], 2).within(FAR_MORE));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_three_acquisitions_hold_too_when_asked_for() {
    Tokens::<3>::holds(acquiring(&[X, X, X], 1).within(FAR_MORE));
    Tokens::<3>::holds(acquiring(&[X, X, X], 2).within(FAR_MORE));
    Tokens::<3>::holds(acquiring(&[XY, X, Y], 1).within(FAR_MORE));
}

#[test]
fn wrong_rules_for_tokens_are_found() {
    let finds = Tokens::<3>::breaks;
    finds(Variant::CountsEveryOk, acquiring(&[X, X], 2), &[F1]);
    finds(Variant::NoWriteBack, acquiring(&[X, X, X], 1), &[F2]);
    // T3: the memory of a node is lost.
    let stored = acquiring(&[X, X], 1).may([May::Store]);
    let lost = stored.with(|it| it.faults = 1);
    finds(Variant::Shipped, lost, &[F1, F3]);
    let extends = extended(acquiring(&[X, X], 2));
    finds(Variant::ExtendsByKey, extends, &[F4]);
    let repeats = acquiring(&[XY, X], 2).with(|it| it.duplicates = 1);
    finds(Variant::RaisesNewFencesOnly, repeats, &[F1, F2]);
}
