//! Two acquisitions with time: their validity, and the age of a node's memory.

use crate::spec::{Fault, Guard, Proposals, Role, Spec, Variant};
use crate::world::{ALL_COMPLETE, EXCLUSION, F1, F2, LOSS, PROLONGED, VOTES_AGAIN, World};
use crate::{FAR_MORE, breaks, holds, holds_within};

/// The most requests of a client: an `ACQUIRE`, three second phases and two extensions.
type Timed = World<3, 2, 6>;

/// Two acquisitions with a ttl of two ticks.
fn plain() -> Spec {
    Spec {
        horizon: 4,
        promises: &[EXCLUSION, F1, F2, LOSS],
        reaches: &[ALL_COMPLETE],
        ..Spec::of(&[Role::WRITER; 2], Proposals::Clock(0))
    }
}

/// The first acquisition has this ttl, and is extended by these.
fn extending(ttl: u8, extends: &'static [u8]) -> Spec {
    Spec {
        clients: vec![Role::WRITER.for_ticks(ttl), Role::WRITER],
        extends,
        reaches: &[ALL_COMPLETE, PROLONGED],
        ..plain()
    }
}

/// One node loses its memory in one of these ways, and clients ask it no more for as long as a ttl.
fn guarded(kinds: &'static [Fault]) -> Spec {
    Spec {
        faults: 1,
        kinds,
        guard: Guard::Compared,
        window: 2,
        reaches: &[ALL_COMPLETE, VOTES_AGAIN],
        ..plain()
    }
}

/// One node loses its memory, and the clock of one jumps ahead.
fn jumping(window: u8) -> Spec {
    guarded(&[Fault::Flush]).with(|it| (it.jumps, it.window) = (1, window))
}

/// The node itself stays out for so long, as with a delayed restart.
fn delayed(window: u8) -> Spec {
    guarded(&[Fault::Restart]).with(|it| {
        (it.guard, it.window) = (Guard::Delayed, window);
        it.reaches = &[ALL_COMPLETE];
    })
}

#[test]
fn valid_locks_exclude_each_other_also_after_extensions() {
    holds("timed", Timed::new(plain()));
    let longer = extending(2, &[2, 3]);
    holds("timed, extensions longer and longer", Timed::new(longer));
    let shorter = extending(3, &[2]);
    holds("timed, a shorter extension", Timed::new(shorter));
}

#[test]
fn restart_guard_of_one_ttl_covers_every_way_in_which_a_node_loses_its_memory() {
    for (name, kinds) in [
        ("guard", &[Fault::Flush]),
        ("guard, restart", &[Fault::Restart]),
        ("guard, restart with old data", &[Fault::Rollback]),
    ] {
        holds(name, Timed::new(guarded(kinds)));
    }
    let name = "guard, copy of another node";
    holds_within(4_000_000, name, Timed::new(guarded(&[Fault::Copy])));
    let name = "guard longer by the clock step";
    holds_within(6_000_000, name, Timed::new(jumping(3)));
}

#[test]
fn restart_delayed_by_one_ttl_covers_lost_memory_if_validity_is_checked() {
    holds("delayed restart", Timed::new(delayed(2)));
    let late = delayed(3).with(|it| (it.variant, it.horizon) = (Variant::IgnoresValidity, 5));
    for (name, spec) in [
        ("delayed restart too short", delayed(1)),
        ("delayed restart without validity", late),
    ] {
        breaks(name, Timed::new(spec), &[F1, F2]);
    }
}

#[test]
fn wrong_rules_of_time_and_memory_give_two_valid_holders() {
    let finds = |name, variant, spec: Spec| {
        let spec = spec.with(|it| it.variant = variant);
        breaks(name, Timed::new(spec), &[EXCLUSION]);
    };
    let short = guarded(&[Fault::Flush]).with(|it| it.window = 1);
    let (flush, rollback) = (|| guarded(&[Fault::Flush]), || guarded(&[Fault::Rollback]));
    let copy = guarded(&[Fault::Copy]);
    finds("guard too short", Variant::Shipped, short);
    finds("T17 clock step", Variant::Shipped, jumping(2));
    let shorter = extending(3, &[2]);
    finds("T11 CONFIRM shortens", Variant::ConfirmShortens, shorter);
    let longer = extending(2, &[2, 3]);
    finds("T12 old extension", Variant::CountsOldExtension, longer);
    finds("T13 no compare", Variant::NoCompare, flush());
    finds("T14 age from notice", Variant::AgeFromNotice, flush());
    finds("T15 no uptime rule", Variant::NoUptimeRule, rollback());
    finds("T16 cached admission", Variant::CachesAdmission, rollback());
    finds("T18 stamp outside", Variant::StampOutside, flush());
    let name = "T19 generation of a copy";
    finds(name, Variant::GenerationOfAnyProcess, copy);
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_the_guard_hold_too_when_asked_for() {
    let all = &[Fault::Flush, Fault::Restart, Fault::Rollback];
    let twice = guarded(all).with(|it| it.faults = 2);
    for (name, spec) in [
        ("guard, copy of another node", guarded(&[Fault::Copy])),
        ("guard longer by the clock step", jumping(3)),
        ("guard, 2 of flush, restart, restart with old data", twice),
    ] {
        holds_within(FAR_MORE, name, Timed::new(spec));
    }
}
