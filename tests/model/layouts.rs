//! A key that moves from one group of nodes to another, with time, and the defects that must be found.
//!
//! What must hold: no two clients hold the lock at once; each holder has a higher token than all before it; and a client
//! that has gone, also because its second group refused it, releases what it may have. Between
//! holders that have no group in common, not even through holders between them, the wait and the clocks order the tokens.
//! A process that knows both layouts and locks the key in one group only is like a process that knows only that layout,
//! so the defects of such a process are those of [`OLD`] beside [`NEW`].

use crate::spec::{Proposals, Role, Spec, Variant};
use crate::world::{
    BOTH_HOLDS, CLOCK_ORDER, EXCLUSION, KEPT_ON, LEFT, NEW_HOLDS, OLD_HOLDS, ORDER, RAISED,
    REFUSED, REVERSED_HOLDS, World,
};
use crate::{FAR_MORE, breaks, holds, holds_within};

/// The most clients, and the most requests of one lease: `ACQUIRE`, three `CONFIRM`s, an extension, the raise, the
/// release.
type Moving<const N: usize> = World<N, 3, 7>;

/// A process of the present layout only, of both, of the next one only, and one that locks the next group first.
const OLD: Role = in_groups(&[0]);
const BOTH: Role = in_groups(&[0, 1]);
const NEW: Role = in_groups(&[1]);
const REVERSED: Role = in_groups(&[1, 0]);

const fn in_groups(groups: &'static [usize]) -> Role {
    Role {
        groups,
        ..Role::WRITER
    }
}

/// Clients of these roles, with one node in each group, and clocks a tick apart.
fn moving(clients: &[Role], reaches: &'static [&'static str]) -> Spec {
    Spec {
        horizon: 4,
        releases: true,
        present: Some(1),
        promises: &[EXCLUSION, ORDER, CLOCK_ORDER, LEFT],
        reaches,
        ..Spec::of(clients, Proposals::Clock(1))
    }
}

/// There are so many ticks.
fn lasting(horizon: u8, spec: Spec) -> Spec {
    spec.with(|it| it.horizon = horizon)
}

/// Clients of the next layout wait for so long.
fn waiting(ticks: u8, spec: Spec) -> Spec {
    spec.with(|it| it.wait = Some(ticks))
}

/// A client extends its lock in one group.
fn extended(spec: Spec) -> Spec {
    spec.with(|it| (it.extensions, it.max_hold) = (1, 2))
}

/// The next group has fences that are higher than those of the present one.
fn used_before(spec: Spec) -> Spec {
    spec.with(|it| it.fences = [0, 3])
}

/// Clocks differ by more than the wait makes up for. Tokens then need an order only between holders that have a group in
/// common, or that holders between them connect.
fn unequal(spec: Spec) -> Spec {
    spec.with(|it| it.promises = &[EXCLUSION, ORDER, LEFT])
}

/// The present group has three nodes.
fn of_three(spec: Spec) -> Spec {
    spec.with(|it| it.present = Some(3))
}

#[test]
fn moving_to_excludes_processes_of_either_layout_and_orders_tokens() {
    let name = "layouts: 1 of the old, 2 of both";
    let reaches = &[OLD_HOLDS, BOTH_HOLDS, RAISED, REFUSED];
    let spec = used_before(lasting(3, moving(&[OLD, BOTH, BOTH], reaches)));
    holds(name, Moving::<2>::new(spec));
    let name = "layouts: 2 of both, 1 of the new";
    let reaches = &[BOTH_HOLDS, NEW_HOLDS, RAISED, REFUSED];
    let spec = lasting(3, moving(&[BOTH, BOTH, NEW], reaches));
    holds(name, Moving::<2>::new(spec));
}

#[test]
fn moving_to_between_groups_of_unequal_size_excludes_and_orders_tokens() {
    let name = "layouts: from 1 to 3 nodes, 1 of the old, 1 of both";
    let spec = moving(&[OLD, BOTH], &[OLD_HOLDS, BOTH_HOLDS]);
    holds(name, Moving::<4>::new(spec));
    let name = "layouts: from 3 to 1 nodes, 1 of both, 1 of the new";
    let reaches = &[BOTH_HOLDS, NEW_HOLDS, RAISED, REFUSED];
    let spec = of_three(lasting(3, moving(&[BOTH, NEW], reaches)));
    holds(name, Moving::<4>::new(spec));
}

#[test]
fn moving_to_with_extensions_and_repeated_requests_excludes_and_orders_tokens() {
    let name = "layouts: 1 of both, 1 of the new, an extension";
    let reaches = &[BOTH_HOLDS, NEW_HOLDS, KEPT_ON, RAISED, REFUSED];
    let spec = extended(moving(&[BOTH, NEW], reaches));
    holds(name, Moving::<2>::new(spec));
    let name = "layouts: 1 of both, 1 of the new, a repeated ACQUIRE";
    let spec = moving(&[BOTH, NEW], &[BOTH_HOLDS, NEW_HOLDS, RAISED, REFUSED]);
    let repeated = spec.with(|it| {
        it.duplicates = 1;
        // A request that is repeated may come after the release.
        it.promises = &[EXCLUSION, ORDER, CLOCK_ORDER];
    });
    holds(name, Moving::<2>::new(repeated));
}

/// With a client of both between them, the wait exceeds the ttl by what clocks differ and by one for each grant, because
/// fences count ticks here.
#[test]
fn layouts_one_after_the_other_exclude_and_order_tokens_after_the_wait() {
    let name = "layouts: 1 of the old, 1 of the new after the ttl, clocks a tick apart";
    let spec = waiting(2, moving(&[OLD, NEW], &[OLD_HOLDS, NEW_HOLDS]));
    holds(name, Moving::<2>::new(spec));
    let of_all = |reaches| moving(&[OLD, BOTH, NEW], reaches);
    let name = "layouts: 1 of the old, 1 of both, 1 of the new after a wait";
    let longer = lasting(5, of_all(&[OLD_HOLDS, BOTH_HOLDS, NEW_HOLDS]));
    holds(name, Moving::<2>::new(waiting(4, longer)));
    let name = "layouts: 1 of the old, 1 of both, 1 of the new after the ttl";
    let spec = of_all(&[OLD_HOLDS, BOTH_HOLDS, NEW_HOLDS, RAISED]);
    holds(name, Moving::<2>::new(unequal(waiting(2, spec))));
}

/// As for the way back, while other processes still go forward.
#[test]
fn layouts_locked_in_opposite_orders_exclude_and_order_tokens() {
    let name = "layouts: 1 of the old, 1 reversed";
    let spec = moving(
        &[OLD, REVERSED],
        &[OLD_HOLDS, REVERSED_HOLDS, RAISED, REFUSED],
    );
    holds(name, Moving::<2>::new(spec));
    let name = "layouts: 1 of both, 1 reversed";
    let spec = moving(&[BOTH, REVERSED], &[BOTH_HOLDS, REVERSED_HOLDS, REFUSED]);
    holds(name, Moving::<2>::new(spec));
}

#[test]
fn layouts_without_a_process_of_both_disagree_if_they_do_not_wait_for_long_enough() {
    let finds = |name, spec, promise| breaks(name, Moving::<2>::new(spec), &[promise]);
    let together = || moving(&[OLD, NEW], &[]);
    finds("layouts: old and new together", together(), EXCLUSION);
    let name = "layouts: the wait is a tick short";
    finds(name, waiting(1, together()), EXCLUSION);
    let name = "layouts: the wait is shorter than max_hold and the ttl";
    finds(name, waiting(2, extended(together())), EXCLUSION);
    let name = "layouts: clocks differ by the wait";
    let skewed = together().with(|it| it.proposals = Proposals::Clock(2));
    finds(name, waiting(2, skewed), CLOCK_ORDER);
}

#[test]
fn wrong_rules_of_moving_to_are_found() {
    let finds = |name, variant, spec: Spec, promise| {
        let spec = spec.with(|it| it.variant = variant);
        breaks(name, Moving::<2>::new(spec), &[promise]);
    };
    let (old, new) = (|| moving(&[OLD, BOTH], &[]), || moving(&[BOTH, NEW], &[]));
    let reversed = moving(&[OLD, REVERSED], &[]);
    let first = Variant::CountsFirstGroup;
    finds("layouts: the old group is enough", first, new(), EXCLUSION);
    finds(
        "layouts: the new group is enough",
        first,
        reversed,
        EXCLUSION,
    );
    let name = "layouts: validity of the last group";
    finds(name, Variant::ForgetsFirstValidity, old(), EXCLUSION);
    let name = "layouts: the first group is kept";
    finds(name, Variant::KeepsFirstGroup, new(), LEFT);
    let name = "layouts: no raise, the token of the first group";
    finds(name, Variant::NeverRaises, new(), ORDER);
    let name = "layouts: no raise, the higher token";
    finds(name, Variant::RaisesAlone, used_before(old()), ORDER);
    let name = "layouts: each group by the clock";
    finds(name, Variant::ProposesItsClock, new(), ORDER);
    let name = "layouts: each group by the clock, no raise";
    finds(name, Variant::KeepsTokensApart, new(), ORDER);
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_layouts_hold_too_when_asked_for() {
    let name = "layouts: 1 of the old, 2 of both, longer";
    let spec = moving(&[OLD, BOTH, BOTH], &[OLD_HOLDS, BOTH_HOLDS]);
    holds(name, Moving::<2>::new(spec));
    let name = "layouts: 2 of both, 1 of the new, longer";
    let spec = moving(&[BOTH, BOTH, NEW], &[BOTH_HOLDS, NEW_HOLDS]);
    holds(name, Moving::<2>::new(spec));
    let name = "layouts: 1 of both, 2 of the new";
    let spec = moving(&[BOTH, NEW, NEW], &[BOTH_HOLDS, NEW_HOLDS]);
    holds(name, Moving::<2>::new(spec));
    let name = "layouts: 3 of both";
    holds(name, Moving::<2>::new(moving(&[BOTH; 3], &[BOTH_HOLDS])));
    let name = "layouts: 1 of the old, 1 of both, 1 reversed";
    let reaches = &[OLD_HOLDS, BOTH_HOLDS, REVERSED_HOLDS];
    let spec = moving(&[OLD, BOTH, REVERSED], reaches);
    holds(name, Moving::<2>::new(spec));
    let name = "layouts: 1 of the old, 1 of both, 1 of the new after a wait, an extension";
    let spec = moving(&[OLD, BOTH, NEW], &[OLD_HOLDS, BOTH_HOLDS, NEW_HOLDS]);
    let spec = unequal(waiting(4, extended(lasting(6, spec))));
    holds(name, Moving::<2>::new(spec));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_layouts_of_more_nodes_hold_too_when_asked_for() {
    let old = || moving(&[OLD, BOTH], &[OLD_HOLDS, BOTH_HOLDS]);
    let new = || moving(&[BOTH, NEW], &[BOTH_HOLDS, NEW_HOLDS]);
    let two = || moving(&[BOTH; 2], &[BOTH_HOLDS]);
    let name = "layouts: from 3 to 1 nodes, 1 of the old, 1 of both";
    holds(name, Moving::<4>::new(of_three(old())));
    let name = "layouts: from 1 to 3 nodes, 1 of both, 1 of the new";
    holds(name, Moving::<4>::new(new()));
    let name = "layouts: from 3 to 1 nodes, 2 of both";
    holds(name, Moving::<4>::new(of_three(two())));
    let name = "layouts: from 1 to 3 nodes, 2 of both";
    holds(name, Moving::<4>::new(two()));
    let name = "layouts: from 3 to 3 nodes, 1 of the old, 1 of both";
    let spec = of_three(old());
    holds_within(FAR_MORE, name, Moving::<6>::new(spec));
}
