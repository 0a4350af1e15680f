//! Two acquisitions with time: their validity, and the age of a node's memory.

use crate::FAR_MORE;
use crate::spec::{Fault, Guard, Proposals, Role, Spec, Variant};
use crate::world::*;

/// The most requests of a client: an `ACQUIRE`, three second phases and two extensions.
type Timed = World<3, 2, 6>;

/// Two acquisitions with a ttl of two ticks.
fn plain() -> Spec {
    let spec = Spec {
        horizon: 4,
        promises: &[EXCLUSION, F1, F2, LOSS],
        ..Spec::of(&[Role::WRITER; 2], Proposals::Clock(0))
    };
    spec.reaches([ALL_COMPLETE])
}

/// The first acquisition has this ttl, and is extended by these.
fn extending(ttl: u8, extends: &'static [u8]) -> Spec {
    plain().reaches([PROLONGED]).with(|it| {
        it.clients[0] = Role::WRITER.for_ticks(ttl);
        it.extends = extends;
    })
}

/// One node loses its memory in one of these ways, and clients ask it no more for as long as a ttl.
fn guarded(kinds: &'static [Fault]) -> Spec {
    plain().reaches([VOTES_AGAIN]).with(|it| {
        (it.faults, it.kinds) = (1, kinds);
        (it.guard, it.window) = (Guard::Compared, 2);
    })
}

/// One node loses its memory, and the clock of one jumps ahead.
fn jumping(window: u8) -> Spec {
    guarded(&[Fault::Flush]).with(|it| (it.jumps, it.window) = (1, window))
}

/// The node itself stays out for so long, as with a delayed restart.
fn delayed(window: u8) -> Spec {
    plain().with(|it| {
        (it.faults, it.kinds) = (1, &[Fault::Restart]);
        (it.guard, it.window) = (Guard::Delayed, window);
    })
}

#[test]
fn valid_locks_exclude_each_other_also_after_extensions() {
    Timed::holds(plain());
    Timed::holds(extending(2, &[2, 3]));
    Timed::holds(extending(3, &[2]));
}

// Rules: guard.model
#[test]
fn restart_guard_of_one_ttl_covers_every_way_in_which_a_node_loses_its_memory() {
    Timed::holds(guarded(&[Fault::Flush]));
    Timed::holds(guarded(&[Fault::Restart]));
    Timed::holds(guarded(&[Fault::Rollback]));
    Timed::holds(guarded(&[Fault::Copy]).within(4_000_000));
    Timed::holds(jumping(3).within(6_000_000));
}

#[test]
fn restart_delayed_by_one_ttl_covers_lost_memory_if_validity_is_checked() {
    Timed::holds(delayed(2));
    // It is too short.
    Timed::breaks(Variant::Shipped, delayed(1), &[F1, F2]);
    let late = delayed(3).with(|it| it.horizon = 5);
    Timed::breaks(Variant::IgnoresValidity, late, &[F1, F2]);
}

#[test]
fn wrong_rules_of_time_and_memory_give_two_valid_holders() {
    let finds = |variant, spec| Timed::breaks(variant, spec, &[EXCLUSION]);
    let flush = || guarded(&[Fault::Flush]);
    let rollback = || guarded(&[Fault::Rollback]);
    // The guard is a tick short: as it is, and T17 for a clock that is ahead.
    finds(Variant::Shipped, flush().with(|it| it.window = 1));
    finds(Variant::Shipped, jumping(2));
    finds(Variant::ConfirmShortens, extending(3, &[2]));
    finds(Variant::CountsOldExtension, extending(2, &[2, 3]));
    finds(Variant::NoCompare, flush());
    finds(Variant::AgeFromNotice, flush());
    finds(Variant::NoUptimeRule, rollback());
    finds(Variant::CachesAdmission, rollback());
    finds(Variant::StampOutside, flush());
    let copy = guarded(&[Fault::Copy]);
    finds(Variant::GenerationOfAnyProcess, copy);
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_the_guard_hold_too_when_asked_for() {
    let all = &[Fault::Flush, Fault::Restart, Fault::Rollback];
    Timed::holds(guarded(&[Fault::Copy]).within(FAR_MORE));
    Timed::holds(jumping(3).within(FAR_MORE));
    let twice = guarded(all).with(|it| it.faults = 2);
    Timed::holds(twice.within(FAR_MORE));
}
