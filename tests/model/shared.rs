//! Readers and writers with time, and whole lives.
//!
//! Writers are unfenced, because readers have no number; tokens are the matter of the other models.

use crate::FAR_MORE;
use crate::spec::{May, Proposals, Role, Spec, Variant};
use crate::world::*;

/// The most clients, and the most requests of one: an `ACQUIRE`, three extensions and a release.
type Shared = World<3, 3, 5>;

/// These clients, and so many ticks.
fn sharing(clients: &[Role], horizon: u8) -> Spec {
    let spec = Spec {
        horizon,
        promises: &[EXCLUSION, FREE, LOSS, ASKED, GONE],
        ..Spec::of(clients, Proposals::None)
    };
    spec.may([May::Release]).reaches([WRITER])
}

/// A reader and a writer.
fn of_two(horizon: u8) -> Spec {
    sharing(&[Role::READER, Role::WRITER], horizon)
}

/// Two readers and a writer.
fn of_three(horizon: u8) -> Spec {
    sharing(&[Role::READER, Role::READER, Role::WRITER], horizon).reaches([READERS])
}

/// The first client extends by these.
fn extending(extends: &'static [u8], spec: Spec) -> Spec {
    spec.with(|it| it.extends = extends).reaches([PROLONGED])
}

/// A node forgets, and stays out for so long.
fn forgetful(window: u8, spec: Spec) -> Spec {
    spec.with(|it| (it.faults, it.window) = (1, window))
}

/// An `ACQUIRE` is carried out twice. What is repeated late may bring a reader back, until its ttl is over.
fn repeating(spec: Spec) -> Spec {
    spec.with(|it| {
        it.duplicates = 1;
        it.promises = &[EXCLUSION, FREE, LOSS, ASKED];
    })
}

/// Whole lives, of which one alone goes on until it is settled.
fn living(clients: &[Role]) -> Spec {
    let spec = Spec {
        promises: &[EXCLUSION, FREE, LOSS, ASKED, SETTLED, LEFT],
        reaches: vec![PROLONGED, REVOKED],
        ..sharing(clients, 3)
    };
    let settles = (clients.len() == 1).then_some(May::Settle);
    spec.may([May::Live, May::GiveUp]).may(settles)
}

// Rules: shared.exclusion
#[test]
fn readers_share_and_exclude_writers() {
    Shared::holds(of_three(3));
    Shared::holds(sharing(&[Role::READER, Role::WRITER, Role::WRITER], 3));
    let [long, short] = [3, 1].map(|ttl| Role::READER.for_ticks(ttl));
    let unlike = sharing(&[long, short, Role::WRITER], 2);
    Shared::holds(unlike.reaches([READERS]));
}

#[test]
fn repeated_requests_and_extensions_of_readers_exclude_writers() {
    Shared::holds(repeating(of_two(4)));
    Shared::holds(extending(&[3, 1], of_two(5)));
    Shared::holds(repeating(extending(&[3], of_two(3))));
    Shared::holds(extending(&[3], of_three(2)));
}

// Rules: shared.memory
#[test]
fn restart_guard_protects_readers() {
    Shared::holds(forgetful(2, of_two(4)));
    Shared::holds(forgetful(3, extending(&[3], of_two(4))));
}

#[test]
fn whole_lives_end_without_a_lock_and_ask_for_none_that_is_over() {
    Shared::holds(living(&[Role::WRITER]));
    Shared::holds(living(&[Role::READER]));
    Shared::holds(living(&[Role::WRITER.for_ticks(3), Role::WRITER]));
    Shared::holds(living(&[Role::READER, Role::WRITER]).reaches([WRITER]));
}

#[test]
fn wrong_rules_let_a_writer_in_beside_a_reader() {
    let finds = |variant, spec| Shared::breaks(variant, spec, &[EXCLUSION]);
    // The restart guard is a tick short, or shorter than an extension.
    finds(Variant::Shipped, forgetful(1, of_two(4)));
    let extended = forgetful(2, extending(&[3], of_two(4)));
    finds(Variant::Shipped, extended);
    finds(Variant::NoCompare, forgetful(2, of_two(4)));
    let extended = extending(&[1, 3], of_two(4));
    finds(Variant::CountsOldExtension, extended);
    finds(Variant::EndFromReply, of_two(4));
    finds(Variant::ReusesOwner, of_two(4));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_readers_and_writers_hold_too_when_asked_for() {
    Shared::holds(of_three(4).within(FAR_MORE));
    Shared::holds(repeating(of_three(3)).within(FAR_MORE));
    Shared::holds(extending(&[3], of_three(3)).within(FAR_MORE));
    Shared::holds(forgetful(2, of_three(3)).within(FAR_MORE));
}
