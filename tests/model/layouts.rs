//! A key that moves from one group of nodes to another, with time, and the defects that must be found.
//!
//! What must hold: no two clients hold the lock at once; each holder has a higher token than all before it; and a client
//! that has gone, also because its second group refused it, releases what it may have. Between
//! holders that have no group in common, not even through holders between them, the wait and the clocks order the tokens.
//! A process that knows both layouts and locks the key in one group only is like a process that knows only that layout,
//! so the defects of such a process are those of [`OLD`] beside [`NEW`].

use crate::FAR_MORE;
use crate::spec::{GROUPS, May, Proposals, Role, Spec, Variant};
use crate::world::*;

/// The most clients, and the most requests of one lease: `ACQUIRE`, three `CONFIRM`s, an extension, the raise, the
/// release.
type Moving<const N: usize> = World<N, 3, 7>;

/// A process of the present layout only, of both, of the next one only, and one that locks the next group first.
const OLD: Role = in_groups(&[0]);
const BOTH: Role = in_groups(&[0, 1]);
const NEW: Role = in_groups(&[1]);
const REVERSED: Role = in_groups(&[1, 0]);

/// The next group was used before.
const HIGHER_FENCES: [u8; GROUPS] = [0, 3];

const fn in_groups(groups: &'static [usize]) -> Role {
    Role {
        groups,
        ..Role::WRITER
    }
}

/// Clients of these roles, with one node in each group, and clocks a tick apart.
fn moving(clients: &[Role]) -> Spec {
    let spec = Spec {
        horizon: 4,
        present: Some(1),
        promises: &[EXCLUSION, BY_GROUP, ORDER, LEFT],
        ..Spec::of(clients, Proposals::Clock(1))
    };
    let holds = clients.iter().map(|role| match role.groups {
        [0] => OLD_HOLDS,
        [1] => NEW_HOLDS,
        [0, 1] => BOTH_HOLDS,
        _ => REVERSED_HOLDS,
    });
    spec.may([May::Release]).reaches(holds)
}

/// Clients of the next layout wait for so long.
fn waiting(ticks: u8, clients: &[Role]) -> Spec {
    moving(clients).with(|it| it.wait = Some(ticks))
}

/// A client extends its lock in one group.
fn extended(spec: Spec) -> Spec {
    spec.with(|it| (it.extensions, it.max_hold) = (1, 2))
}

/// Clocks differ by more than the wait makes up for. Tokens then need an order only between holders that have a group in
/// common, or that holders between them connect.
fn unequal(spec: Spec) -> Spec {
    spec.with(|it| it.promises = &[EXCLUSION, BY_GROUP, LEFT])
}

#[test]
fn moving_to_excludes_processes_of_either_layout_and_orders_tokens() {
    let old = moving(&[OLD, BOTH, BOTH]).with(|it| it.fences = HIGHER_FENCES);
    for spec in [old, moving(&[BOTH, BOTH, NEW])] {
        let spec = spec.with(|it| it.horizon = 3);
        Moving::<2>::holds(spec.reaches([RAISED, REFUSED]));
    }
}

#[test]
fn moving_to_between_groups_of_unequal_size_excludes_and_orders_tokens() {
    Moving::<4>::holds(moving(&[OLD, BOTH]));
    let spec = moving(&[BOTH, NEW]).with(|it| (it.present, it.horizon) = (Some(3), 3));
    Moving::<4>::holds(spec.reaches([RAISED, REFUSED]));
}

#[test]
fn moving_to_with_extensions_and_repeated_requests_excludes_and_orders_tokens() {
    let spec = || moving(&[BOTH, NEW]).reaches([RAISED, REFUSED]);
    Moving::<2>::holds(extended(spec()).reaches([KEPT_ON]));
    Moving::<2>::holds(spec().with(|it| {
        it.duplicates = 1;
        // A request that is repeated may come after the release.
        it.promises = &[EXCLUSION, BY_GROUP, ORDER];
    }));
}

/// With a client of both between them, the wait exceeds the ttl by what clocks differ and by one for each grant, because
/// fences count ticks here.
#[test]
fn layouts_one_after_the_other_exclude_and_order_tokens_after_the_wait() {
    Moving::<2>::holds(waiting(2, &[OLD, NEW]));
    Moving::<2>::holds(waiting(4, &[OLD, BOTH, NEW]).with(|it| it.horizon = 5));
    let spec = unequal(waiting(2, &[OLD, BOTH, NEW]));
    Moving::<2>::holds(spec.reaches([RAISED]));
}

/// As for the way back, while other processes still go forward.
#[test]
fn layouts_locked_in_opposite_orders_exclude_and_order_tokens() {
    Moving::<2>::holds(moving(&[OLD, REVERSED]).reaches([RAISED, REFUSED]));
    Moving::<2>::holds(moving(&[BOTH, REVERSED]).reaches([REFUSED]));
}

#[test]
fn layouts_without_a_process_of_both_disagree_if_they_do_not_wait_for_long_enough() {
    let finds = |spec, promise| Moving::<2>::breaks(Variant::Shipped, spec, promise);
    finds(moving(&[OLD, NEW]), &[EXCLUSION]);
    // A tick short.
    finds(waiting(1, &[OLD, NEW]), &[EXCLUSION]);
    // Shorter than `max_hold` and the ttl.
    finds(extended(waiting(2, &[OLD, NEW])), &[EXCLUSION]);
    // No longer than what clocks differ by.
    let clocks = Proposals::Clock(2);
    let skewed = waiting(2, &[OLD, NEW]).with(|it| it.proposals = clocks);
    finds(skewed, &[ORDER]);
}

#[test]
fn wrong_rules_of_moving_to_are_found() {
    let finds = Moving::<2>::breaks;
    let (old, new) = (|| moving(&[OLD, BOTH]), || moving(&[BOTH, NEW]));
    let reversed = moving(&[OLD, REVERSED]);
    finds(Variant::CountsFirstGroup, new(), &[EXCLUSION]);
    finds(Variant::CountsFirstGroup, reversed, &[EXCLUSION]);
    finds(Variant::ForgetsFirstValidity, old(), &[EXCLUSION]);
    finds(Variant::KeepsFirstGroup, new(), &[LEFT]);
    finds(Variant::NeverRaises, new(), &[BY_GROUP]);
    let used = old().with(|it| it.fences = HIGHER_FENCES);
    finds(Variant::RaisesAlone, used, &[BY_GROUP]);
    finds(Variant::ProposesItsClock, new(), &[BY_GROUP]);
    finds(Variant::KeepsTokensApart, new(), &[BY_GROUP]);
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_layouts_hold_too_when_asked_for() {
    Moving::<2>::holds(moving(&[OLD, BOTH, BOTH]));
    Moving::<2>::holds(moving(&[BOTH, BOTH, NEW]));
    Moving::<2>::holds(moving(&[BOTH, NEW, NEW]));
    Moving::<2>::holds(moving(&[BOTH; 3]));
    Moving::<2>::holds(moving(&[OLD, BOTH, REVERSED]));
    let spec = unequal(extended(waiting(4, &[OLD, BOTH, NEW])));
    Moving::<2>::holds(spec.with(|it| it.horizon = 6));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_layouts_of_more_nodes_hold_too_when_asked_for() {
    let from_three = |clients| moving(clients).with(|it| it.present = Some(3));
    Moving::<4>::holds(from_three(&[OLD, BOTH]));
    Moving::<4>::holds(moving(&[BOTH, NEW]));
    Moving::<4>::holds(from_three(&[BOTH; 2]));
    Moving::<4>::holds(moving(&[BOTH; 2]));
    Moving::<6>::holds(from_three(&[OLD, BOTH]).within(FAR_MORE));
}
