//! Tokens, without time: F1 to F4.

use crate::spec::{Proposals, Role, Spec, Variant};
use crate::world::{ALL_COMPLETE, EXTENDED, F1, F2, F3, F4, LATER, SECOND_PHASE, World};
use crate::{FAR_MORE, breaks, holds, holds_within};

/// The most acquisitions, and the most requests of one: `ACQUIRE`, three second phases and an extension.
type Tokens<const N: usize> = World<N, 3, 5>;

/// {x,y}, {x} and {y}.
const SETS: [&[u8]; 3] = [&[0, 1], &[0], &[1]];

/// So many acquisitions of one key.
fn one_key(clients: usize, proposals: u8) -> Spec {
    of_sets(&vec![&[0][..]; clients], proposals)
}

fn of_sets(sets: &[&'static [u8]], proposals: u8) -> Spec {
    let clients: Vec<Role> = sets.iter().map(|set| Role::of(set)).collect();
    Spec {
        promises: &[F1, F2, F3, F4],
        reaches: &[ALL_COMPLETE, LATER, SECOND_PHASE],
        ..Spec::of(&clients, Proposals::UpTo(proposals))
    }
}

fn extended(spec: Spec) -> Spec {
    spec.with(|it| {
        it.extensions = 1;
        it.reaches = &[ALL_COMPLETE, LATER, SECOND_PHASE, EXTENDED];
    })
}

fn repeated(duplicates: u8, spec: Spec) -> Spec {
    spec.with(|it| it.duplicates = duplicates)
}

fn stored(spec: Spec) -> Spec {
    spec.with(|it| it.storage = true)
}

fn waiting(spec: Spec) -> Spec {
    spec.with(|it| it.timeouts = true)
}

#[test]
fn tokens_of_two_acquisitions_are_unique_and_ordered_and_protect_a_storage() {
    let name = "2 acquisitions of 1..2, storage";
    holds(name, Tokens::<3>::new(stored(waiting(one_key(2, 2)))));
    let name = "2 acquisitions of 1..3";
    holds(name, Tokens::<3>::new(waiting(one_key(2, 3))));
}

#[test]
fn repeated_acquire_keeps_tokens_unique_and_ordered() {
    let name = "2 acquisitions of 1..2, a duplicate";
    holds(name, Tokens::<3>::new(repeated(1, one_key(2, 2))));
}

#[test]
fn tokens_of_three_acquisitions_are_unique_and_ordered() {
    let name = "3 acquisitions, equal proposals";
    holds_within(6_000_000, name, Tokens::<3>::new(one_key(3, 1)));
}

#[test]
fn tokens_of_unequal_sets_are_unique_and_ordered_for_each_key() {
    let of = |proposals| of_sets(&SETS[..2], proposals);
    let name = "{x,y} {x} of 1..2, storage";
    holds(name, Tokens::<3>::new(stored(of(2))));
    let name = "{x,y} {x}, equal proposals, a duplicate";
    holds(name, Tokens::<3>::new(repeated(1, of(1))));
    let name = "{x,y} {x}, equal proposals, an extension";
    holds(name, Tokens::<3>::new(extended(of(1))));
    let name = "{x,y} {x} {y}, equal proposals";
    holds_within(4_000_000, name, Tokens::<3>::new(of_sets(&SETS, 1)));
}

#[test]
fn extension_proves_that_no_higher_token_completed_before_it() {
    let name = "2 acquisitions of 1..2, an extension";
    holds(name, Tokens::<3>::new(extended(one_key(2, 2))));
}

#[test]
fn tokens_from_five_nodes_are_unique_and_ordered() {
    let name = "5 nodes, 2 acquisitions, equal proposals";
    holds_within(4_000_000, name, Tokens::<5>::new(one_key(2, 1)));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_three_acquisitions_hold_too_when_asked_for() {
    let name = "3 acquisitions, equal proposals";
    holds_within(FAR_MORE, name, Tokens::<3>::new(one_key(3, 1)));
    let name = "3 acquisitions of 1..2";
    holds_within(FAR_MORE, name, Tokens::<3>::new(one_key(3, 2)));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_repeated_acquires_hold_too_when_asked_for() {
    let name = "2 acquisitions of 1..3, 2 duplicates, storage";
    let spec = repeated(2, stored(one_key(2, 3)));
    holds_within(FAR_MORE, name, Tokens::<3>::new(spec));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_unequal_sets_hold_too_when_asked_for() {
    let name = "{x,y} {x} {y}, equal proposals";
    holds_within(FAR_MORE, name, Tokens::<3>::new(of_sets(&SETS, 1)));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_five_nodes_hold_too_when_asked_for() {
    let name = "5 nodes, 2 acquisitions of 1..2";
    holds_within(FAR_MORE, name, Tokens::<5>::new(one_key(2, 2)));
}

#[test]
fn wrong_rules_for_tokens_are_found() {
    let finds = |name, variant, spec: Spec, promises: &[&'static str]| {
        let spec = spec.with(|it| it.variant = variant);
        breaks(name, Tokens::<3>::new(spec), promises);
    };
    let lost = || stored(one_key(2, 1)).with(|it| it.faults = 1);
    let new_fences = repeated(1, of_sets(&SETS[..2], 2));
    finds(
        "T1 every OK counts",
        Variant::CountsEveryOk,
        one_key(2, 2),
        &[F1],
    );
    finds(
        "T2 no write-back",
        Variant::NoWriteBack,
        one_key(3, 1),
        &[F2],
    );
    finds("T3 lost memory, tokens", Variant::Shipped, lost(), &[F1]);
    finds("T3 lost memory, storage", Variant::Shipped, lost(), &[F3]);
    let by_key = extended(one_key(2, 2));
    finds("T4 extension by key", Variant::ExtendsByKey, by_key, &[F4]);
    let variant = Variant::RaisesNewFencesOnly;
    finds("T10 new fences only", variant, new_fences, &[F1, F2]);
}
