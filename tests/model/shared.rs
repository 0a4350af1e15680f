//! Readers and writers with time, and whole lives.
//!
//! Writers are unfenced, because readers have no number; tokens are the matter of the other models.

use crate::spec::{Proposals, Role, Spec, Variant};
use crate::world::{
    ASKED, EXCLUSION, FREE, GONE, LEFT, LOSS, PROLONGED, READERS, REVOKED, SETTLED, WRITER, World,
};
use crate::{FAR_MORE, breaks, holds, holds_within};

/// The most clients, and the most requests of one: an `ACQUIRE`, three extensions and a release.
type Shared = World<3, 3, 5>;

const WRITER_AND_READERS: &[Role] = &[Role::READER, Role::READER, Role::WRITER];
const READER_AND_WRITERS: &[Role] = &[Role::READER, Role::WRITER, Role::WRITER];
const READER_AND_WRITER: &[Role] = &[Role::READER, Role::WRITER];

/// These clients, and so many ticks.
fn sharing(clients: &[Role], horizon: u8) -> Spec {
    Spec {
        horizon,
        releases: true,
        promises: &[EXCLUSION, FREE, LOSS, ASKED, GONE],
        reaches: match clients {
            [Role::READER, Role::READER, ..] => &[READERS, WRITER],
            _ => &[WRITER],
        },
        ..Spec::of(clients, Proposals::None)
    }
}

/// The first client extends by these.
fn extending(extends: &'static [u8], spec: Spec) -> Spec {
    Spec {
        extends,
        reaches: match spec.clients[..] {
            [Role::READER, Role::READER, ..] => &[READERS, WRITER, PROLONGED],
            _ => &[WRITER, PROLONGED],
        },
        ..spec
    }
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
    Spec {
        lives: true,
        settles: clients.len() == 1,
        timeouts: true,
        promises: &[EXCLUSION, FREE, LOSS, ASKED, SETTLED, LEFT],
        reaches: match clients {
            READER_AND_WRITER => &[PROLONGED, REVOKED, WRITER],
            _ => &[PROLONGED, REVOKED],
        },
        ..sharing(clients, 3)
    }
}

#[test]
fn readers_share_and_exclude_writers() {
    let name = "shared: 1 writer, 2 readers";
    holds(name, Shared::new(sharing(WRITER_AND_READERS, 3)));
    let name = "shared: 2 writers, 1 reader";
    holds(name, Shared::new(sharing(READER_AND_WRITERS, 3)));
    let name = "shared: readers of ttl 3 and 1, 1 writer";
    let [long, short] = [3, 1].map(|ttl| Role::READER.for_ticks(ttl));
    let unlike = sharing(&[long, short, Role::WRITER], 2);
    let unlike = unlike.with(|it| it.reaches = &[READERS, WRITER]);
    holds(name, Shared::new(unlike));
}

#[test]
fn repeated_requests_and_extensions_of_readers_exclude_writers() {
    let of_two = |horizon| sharing(READER_AND_WRITER, horizon);
    let name = "shared: 1 writer, 1 reader, a repeated ACQUIRE";
    holds(name, Shared::new(repeating(of_two(4))));
    let name = "shared: 1 writer, 1 reader that extends by 3 and 1";
    holds(name, Shared::new(extending(&[3, 1], of_two(5))));
    let name = "shared: 1 writer, 1 reader that extends by 3, a repeated ACQUIRE";
    holds(name, Shared::new(repeating(extending(&[3], of_two(3)))));
    let name = "shared: 1 writer, 2 readers, one extends by 3";
    let of_three = sharing(WRITER_AND_READERS, 2);
    holds(name, Shared::new(extending(&[3], of_three)));
}

#[test]
fn restart_guard_protects_readers() {
    let of_two = || sharing(READER_AND_WRITER, 4);
    let name = "shared: 1 writer, 1 reader, a node forgets";
    holds(name, Shared::new(forgetful(2, of_two())));
    let name = "shared: 1 writer, 1 reader that extends by 3, a node forgets";
    holds(name, Shared::new(forgetful(3, extending(&[3], of_two()))));
}

#[test]
fn whole_lives_end_without_a_lock_and_ask_for_none_that_is_over() {
    let name = "lives: a writer that renews, until it is settled";
    holds(name, Shared::new(living(&[Role::WRITER])));
    let name = "lives: a reader that renews, until it is settled";
    holds(name, Shared::new(living(&[Role::READER])));
    let name = "lives: a writer that renews, another";
    let writers = [Role::WRITER.for_ticks(3), Role::WRITER];
    holds(name, Shared::new(living(&writers)));
    let name = "lives: a reader that renews, a writer";
    holds(name, Shared::new(living(READER_AND_WRITER)));
}

#[test]
fn wrong_rules_let_a_writer_in_beside_a_reader() {
    let of_two = || sharing(READER_AND_WRITER, 4);
    let finds = |name, variant, spec: Spec| {
        let spec = spec.with(|it| it.variant = variant);
        breaks(name, Shared::new(spec), &[EXCLUSION]);
    };
    let name = "shared: the restart guard is a tick short";
    finds(name, Variant::Shipped, forgetful(1, of_two()));
    let name = "shared: the restart guard is shorter than an extension";
    let extended = forgetful(2, extending(&[3], of_two()));
    finds(name, Variant::Shipped, extended);
    finds("T34 no compare", Variant::NoCompare, forgetful(2, of_two()));
    let extended = extending(&[1, 3], of_two());
    finds("T32 old extension", Variant::CountsOldExtension, extended);
    let name = "shared: the end counts from the reply";
    finds(name, Variant::EndFromReply, of_two());
    finds("T33 an owner comes again", Variant::ReusesOwner, of_two());
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_readers_and_writers_hold_too_when_asked_for() {
    let of_three = |horizon| sharing(WRITER_AND_READERS, horizon);
    let name = "shared: 1 writer, 2 readers, longer";
    holds_within(FAR_MORE, name, Shared::new(of_three(4)));
    let name = "shared: 1 writer, 2 readers, a repeated ACQUIRE";
    holds_within(FAR_MORE, name, Shared::new(repeating(of_three(3))));
    let name = "shared: 1 writer, 2 readers, one extends by 3, longer";
    let extended = extending(&[3], of_three(3));
    holds_within(FAR_MORE, name, Shared::new(extended));
    let name = "shared: 1 writer, 2 readers, a node forgets";
    let forgets = forgetful(2, of_three(3));
    holds_within(FAR_MORE, name, Shared::new(forgets));
}
