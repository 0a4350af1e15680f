//! The runs of the model of layouts in change, and the defects that it must find.
//!
//! What must hold: no two clients hold the lock at once; each holder has a higher token than all before it; and a client
//! that has gone, also because its second group refused it, releases what it may have. Between
//! holders that have no group in common, not even through holders between them, the wait and the clocks order the tokens.
//! A process that knows both layouts and locks the key in one group only is like a process that knows only that layout,
//! so the defects of such a process are those of [`Step::Old`] beside [`Step::New`].

mod bounds;
mod client;
mod moving;
mod promises;

use crate::layouts::bounds::Step::{Absent, Both, New, Old, Reversed};
use crate::layouts::bounds::{Bounds, CLIENTS, Rule, Step};
use crate::layouts::moving::Moving;
use crate::layouts::promises::{CLOCK_ORDER, EXCLUSION, EXTENDED, LEFT, ORDER, RAISED, REFUSED};
use crate::{FAR_MORE, breaks, holds, holds_within};

const OLD_AND_BOTH: [Step; CLIENTS] = [Old, Both, Absent];
const BOTH_AND_NEW: [Step; CLIENTS] = [Both, New, Absent];
const OLD_AND_NEW: [Step; CLIENTS] = [Old, New, Absent];

/// The next group has fences that are higher than those of the present one.
const USED_BEFORE: [u8; 2] = [0, 3];

fn moving(steps: [Step; CLIENTS], change: impl FnOnce(&mut Bounds)) -> Moving<2> {
    Moving::new(bounds(steps, change))
}

fn bounds(steps: [Step; CLIENTS], change: impl FnOnce(&mut Bounds)) -> Bounds {
    let mut bounds = Bounds::of(steps);
    change(&mut bounds);
    bounds
}

#[test]
fn moving_to_excludes_processes_of_either_layout_and_orders_tokens() {
    let name = "layouts: 1 of the old, 2 of both";
    let model = moving([Old, Both, Both], |bounds| {
        bounds.fences = USED_BEFORE;
        bounds.horizon = 3;
        bounds.reaches = &[RAISED, REFUSED];
    });
    holds(name, model);
    let name = "layouts: 2 of both, 1 of the new";
    let model = moving([Both, Both, New], |bounds| {
        bounds.horizon = 3;
        bounds.reaches = &[RAISED, REFUSED];
    });
    holds(name, model);
}

#[test]
fn moving_to_between_groups_of_unequal_size_excludes_and_orders_tokens() {
    let name = "layouts: from 1 to 3 nodes, 1 of the old, 1 of both";
    holds(name, Moving::<4>::new(bounds(OLD_AND_BOTH, |_| {})));
    let name = "layouts: from 3 to 1 nodes, 1 of both, 1 of the new";
    let model = bounds(BOTH_AND_NEW, |bounds| {
        bounds.present = 3;
        bounds.horizon = 3;
        bounds.reaches = &[RAISED, REFUSED];
    });
    holds(name, Moving::<4>::new(model));
}

#[test]
fn moving_to_with_extensions_and_repeated_requests_excludes_and_orders_tokens() {
    let name = "layouts: 1 of both, 1 of the new, an extension";
    let model = moving(BOTH_AND_NEW, |bounds| {
        bounds.extensions = 1;
        bounds.max_hold = 2;
        bounds.reaches = &[EXTENDED, RAISED, REFUSED];
    });
    holds(name, model);
    let name = "layouts: 1 of both, 1 of the new, a repeated ACQUIRE";
    let model = moving(BOTH_AND_NEW, |bounds| {
        bounds.repeats = 1;
        bounds.reaches = &[RAISED, REFUSED];
    });
    holds(name, model);
}

/// With a client of both between them, the wait exceeds the ttl by what clocks differ and by one for each grant, because
/// fences count ticks here.
#[test]
fn layouts_one_after_the_other_exclude_and_order_tokens_after_the_wait() {
    let name = "layouts: 1 of the old, 1 of the new after the ttl, clocks a tick apart";
    let waits = |bounds: &mut Bounds| bounds.wait = Some(2);
    holds(name, moving(OLD_AND_NEW, waits));
    let name = "layouts: 1 of the old, 1 of both, 1 of the new after a wait";
    let model = moving([Old, Both, New], |bounds| {
        bounds.wait = Some(4);
        bounds.horizon = 5;
    });
    holds(name, model);
    let name = "layouts: 1 of the old, 1 of both, 1 of the new after the ttl";
    let model = moving([Old, Both, New], |bounds| {
        bounds.wait = Some(2);
        bounds.has_unequal_clocks = true;
        bounds.reaches = &[RAISED];
    });
    holds(name, model);
}

/// As for the way back, while other processes still go forward.
#[test]
fn layouts_locked_in_opposite_orders_exclude_and_order_tokens() {
    let reaches = |bounds: &mut Bounds| bounds.reaches = &[RAISED, REFUSED];
    let name = "layouts: 1 of the old, 1 reversed";
    holds(name, moving([Old, Reversed, Absent], reaches));
    let name = "layouts: 1 of both, 1 reversed";
    let reaches = |bounds: &mut Bounds| bounds.reaches = &[REFUSED];
    holds(name, moving([Both, Reversed, Absent], reaches));
}

#[test]
fn layouts_without_a_process_of_both_give_two_holders() {
    let name = "layouts: old and new together";
    breaks(name, moving(OLD_AND_NEW, |_| {}), &[EXCLUSION]);
    let name = "layouts: the wait is a tick short";
    let short = |bounds: &mut Bounds| bounds.wait = Some(1);
    breaks(name, moving(OLD_AND_NEW, short), &[EXCLUSION]);
    let name = "layouts: the wait is shorter than max_hold and the ttl";
    let extended = |bounds: &mut Bounds| {
        bounds.wait = Some(2);
        bounds.extensions = 1;
        bounds.max_hold = 2;
    };
    breaks(name, moving(OLD_AND_NEW, extended), &[EXCLUSION]);
}

#[test]
fn layouts_whose_clocks_differ_by_the_wait_disorder_tokens_of_a_key_that_no_process_of_both_locked()
{
    let name = "layouts: clocks differ by the wait";
    let skewed = |bounds: &mut Bounds| {
        bounds.wait = Some(2);
        bounds.skew = 2;
    };
    breaks(name, moving(OLD_AND_NEW, skewed), &[CLOCK_ORDER]);
}

#[test]
fn moving_to_that_holds_after_its_first_group_gives_two_holders() {
    let first = |bounds: &mut Bounds| bounds.rule = Rule::CountsFirstGroup;
    let name = "layouts: the old group is enough";
    breaks(name, moving(BOTH_AND_NEW, first), &[EXCLUSION]);
    let name = "layouts: the new group is enough";
    breaks(name, moving([Old, Reversed, Absent], first), &[EXCLUSION]);
}

#[test]
fn moving_to_that_forgets_the_validity_of_its_first_group_gives_two_holders() {
    let name = "layouts: validity of the last group";
    let forgets = |bounds: &mut Bounds| bounds.rule = Rule::ForgetsFirstValidity;
    breaks(name, moving(OLD_AND_BOTH, forgets), &[EXCLUSION]);
}

#[test]
fn moving_to_that_keeps_its_first_group_when_the_second_refuses_leaves_a_lock() {
    let name = "layouts: the first group is kept";
    let keeps = |bounds: &mut Bounds| bounds.rule = Rule::KeepsFirstGroup;
    breaks(name, moving(BOTH_AND_NEW, keeps), &[LEFT]);
}

#[test]
fn moving_to_without_a_raise_disorders_tokens() {
    let name = "layouts: no raise, the token of the first group";
    let never = |bounds: &mut Bounds| bounds.rule = Rule::NeverRaises;
    breaks(name, moving(BOTH_AND_NEW, never), &[ORDER]);
    let name = "layouts: no raise, the higher token";
    let alone = |bounds: &mut Bounds| {
        bounds.rule = Rule::RaisesAlone;
        bounds.fences = USED_BEFORE;
    };
    breaks(name, moving(OLD_AND_BOTH, alone), &[ORDER]);
}

#[test]
fn moving_to_that_proposes_no_earlier_token_disorders_tokens() {
    let name = "layouts: each group by the clock";
    let clock = |bounds: &mut Bounds| bounds.rule = Rule::ProposesItsClock;
    breaks(name, moving(BOTH_AND_NEW, clock), &[ORDER]);
    let name = "layouts: each group by the clock, no raise";
    let apart = |bounds: &mut Bounds| bounds.rule = Rule::KeepsTokensApart;
    breaks(name, moving(BOTH_AND_NEW, apart), &[ORDER]);
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_layouts_hold_too_when_asked_for() {
    let name = "layouts: 1 of the old, 2 of both, longer";
    holds(name, moving([Old, Both, Both], |_| {}));
    let name = "layouts: 2 of both, 1 of the new, longer";
    holds(name, moving([Both, Both, New], |_| {}));
    let name = "layouts: 1 of both, 2 of the new";
    holds(name, moving([Both, New, New], |_| {}));
    let name = "layouts: 3 of both";
    holds(name, moving([Both; CLIENTS], |_| {}));
    let name = "layouts: 1 of the old, 1 of both, 1 reversed";
    holds(name, moving([Old, Both, Reversed], |_| {}));
    let name = "layouts: 1 of the old, 1 of both, 1 of the new after a wait, an extension";
    let extended = |bounds: &mut Bounds| {
        bounds.wait = Some(4);
        bounds.horizon = 6;
        bounds.extensions = 1;
        bounds.max_hold = 2;
        bounds.has_unequal_clocks = true;
    };
    holds(name, moving([Old, Both, New], extended));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_layouts_of_more_nodes_hold_too_when_asked_for() {
    let of_three = |bounds: &mut Bounds| bounds.present = 3;
    let name = "layouts: from 3 to 1 nodes, 1 of the old, 1 of both";
    holds(name, Moving::<4>::new(bounds(OLD_AND_BOTH, of_three)));
    let name = "layouts: from 1 to 3 nodes, 1 of both, 1 of the new";
    holds(name, Moving::<4>::new(bounds(BOTH_AND_NEW, |_| {})));
    let two = [Both, Both, Absent];
    let name = "layouts: from 3 to 1 nodes, 2 of both";
    holds(name, Moving::<4>::new(bounds(two, of_three)));
    let name = "layouts: from 1 to 3 nodes, 2 of both";
    holds(name, Moving::<4>::new(bounds(two, |_| {})));
    let name = "layouts: from 3 to 3 nodes, 1 of the old, 1 of both";
    let model = Moving::<6>::new(bounds(OLD_AND_BOTH, of_three));
    holds_within(FAR_MORE, name, model);
}
