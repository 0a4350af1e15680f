//! Model checking of the protocol as it is shipped: every order of events, within bounds.
//!
//! Nodes are [`tower_redlock::protocol::Store`]s, which the embedded nodes run too; acquisitions
//! and extensions are driven by the `AcquireRound` and the `ExtendRound` that the lock drives; what
//! passes between them are the `Command`s that it sends. Written down here is only who may do what
//! when, and what must then hold:
//!
//! * F1 tokens of different acquisitions differ;
//! * F2 an acquisition that began after another had completed has the higher token;
//! * F3 a storage that accepts `token >= highest` applies no older write after a newer;
//! * F4 an extension that succeeds proves that no higher token had completed before it began;
//! * and in the model with time: two acquisitions are never both within their validity.
//!
//! `once` says the same of requests whose outcome is recorded, `shared` of locks that readers share, and `layouts` of keys
//! that move from one group of nodes to another.
//!
//! Models without a defect also assert that what they are about does happen: all complete, later
//! ones complete, the second phase is needed, extensions succeed.
//!
//! The wrong variants change one rule and share everything else, and each asserts that the checker
//! *finds* what goes wrong without that rule; so a model that could not see a defect fails too.
//!
//! # Running it
//!
//! `cargo test --release -p model --test model` explores what fits into a minute or two, and
//! says on standard error how many states that were. `TOWER_REDLOCK_MODEL=traces` also prints the
//! steps of each defect, and `TOWER_REDLOCK_MODEL=rows` goes on where the page of `protocol` has other numbers. The tests named `far_more_…` are ignored unless they are asked for: they have more
//! acquisitions and nodes, and take half an hour, two at a time because of their memory:
//!
//! ```sh
//! cargo test --release -p model --test model far_more -- --ignored --test-threads 2
//! ```
//!
//! *Bounded* runs stop at a number of states, nearest ones first, and prove only that no shorter
//! trace goes wrong. Not modelled at all: how servers are asked what the restart guard's rules need
//! to know, clients' clocks that disagree, and hand-over.

use std::fmt::Debug;
use std::hash::Hash;
use std::io::{self, Write};
use std::num::NonZero;

use stateright::{Checker, Expectation, HasDiscoveries, Model};
use tokio::time::Instant;

use crate::shared::{Role, Shared};
use crate::space::Variant;

mod asynchronous;
mod layouts;
#[allow(dead_code, reason = "the models turn to it one after the other")]
mod leases;
mod once;
mod records;
mod requests;
mod shared;
#[allow(dead_code, reason = "the models leave it one after the other")]
mod space;
mod timed;

/// What a model must be to be explored.
trait Explored:
    Model<
        State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
        Action: Clone + Debug + PartialEq + Send + Sync,
    > + Send
    + Sync
    + 'static
{
}

impl<M> Explored for M
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq + Send + Sync,
{
}

/// Explores every state; panics with a trace where a property does not hold.
fn holds(name: &str, model: impl Explored) {
    explore(name, model, None);
}

/// Explores only so many states, counting those met again; panics like [`holds`].
fn holds_within(states: usize, name: &str, model: impl Explored) {
    explore(name, model, NonZero::new(states));
}

fn explore<M: Explored>(name: &str, model: M, bound: Option<NonZero<usize>>) {
    let began = Instant::now();
    let mut checker = model.checker().finish_when(HasDiscoveries::AnyFailures);
    if let Some(states) = bound {
        checker = checker.target_state_count(states.get());
    }
    let checker = checker.spawn_bfs().join();
    // A bound that was not reached left nothing out.
    let stopped = bound.is_some_and(|states| checker.state_count() >= states.get());
    let extent = if stopped { "bounded" } else { "all" };
    report(
        name,
        extent,
        checker.unique_state_count(),
        checker.max_depth(),
        began,
    );
    let discoveries = checker.discoveries();
    let (reached, forbidden): (Vec<_>, Vec<_>) = checker
        .model()
        .properties()
        .into_iter()
        .partition(|property| property.expectation == Expectation::Sometimes);
    // What is violated comes first: what was not reached by then says nothing.
    for property in forbidden {
        if let Some(path) = discoveries.get(property.name) {
            panic!("{name}: violated: {}\n{path}", property.name);
        }
    }
    for property in reached {
        let found = discoveries.contains_key(property.name);
        assert!(found, "{name}: never: {}", property.name);
    }
    let row = format!(
        "| {extent} | {} | {} |",
        with_commas(checker.unique_state_count()),
        checker.max_depth()
    );
    if !PAGE.contains(&row) {
        let lacks = format!("{name}: the documentation of `protocol` does not have: {row}");
        assert!(mode("rows"), "{lacks}");
        say(&lacks);
    }
}

/// Explores until one of the properties is violated; panics if none is.
fn breaks<M: Explored>(name: &str, model: M, properties: &[&'static str]) {
    let began = Instant::now();
    let any = properties.iter().copied().collect();
    let finish = HasDiscoveries::AnyOf(any);
    let checker = model.checker().finish_when(finish).spawn_bfs().join();
    let discoveries = checker.discoveries();
    let found = properties
        .iter()
        .find_map(|property| discoveries.get(property));
    let Some(path) = found else {
        panic!("{name}: none of {properties:?} is violated, so the model misses the defect");
    };
    let steps = path.clone().into_actions();
    report(
        name,
        "found",
        checker.unique_state_count(),
        steps.len(),
        began,
    );
    if mode("traces") {
        say(&format!("{name}: {steps:#?}"));
    }
}

/// Says what was explored; a run has no random choices, so the figures are always the same.
const PAGE: &str = include_str!("../../src/protocol/mod.rs");

fn with_commas(number: usize) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(3).rev();
    let groups = groups.map(|group| String::from_utf8_lossy(group));
    groups.collect::<Vec<_>>().join(",")
}

fn report(name: &str, extent: &str, states: usize, depth: usize, began: Instant) {
    let seconds = began.elapsed().as_secs_f32();
    say(&format!(
        "model: {name}: {extent}, {states} states, depth {depth}, {seconds:.1} s"
    ));
}

/// Says something past the capture of the test harness: the numbers are part of the result.
fn say(text: &str) {
    writeln!(io::stderr(), "{text}").expect("standard error is open");
}

fn mode(wanted: &str) -> bool {
    std::env::var_os("TOWER_REDLOCK_MODEL").is_some_and(|mode| mode == wanted)
}

/// How many states the large runs explore, counting those met again.
pub(crate) const FAR_MORE: usize = 60_000_000;

const WRITER_AND_READERS: [Role; 3] = [Role::Reader, Role::Reader, Role::Writer];
const READER_AND_WRITERS: [Role; 3] = [Role::Reader, Role::Writer, Role::Writer];
const READER_AND_WRITER: [Role; 3] = [Role::Reader, Role::Writer, Role::Absent];

fn sharing(roles: [Role; 3], change: impl FnOnce(&mut shared::Bounds)) -> Shared {
    let mut bounds = shared::Bounds::of(roles);
    change(&mut bounds);
    Shared::new(bounds)
}

/// A change of what is shared breaks its promise.
fn breaks_sharing(name: &str, change: impl FnOnce(&mut shared::Bounds)) {
    let properties = [shared::EXCLUSION];
    breaks(name, sharing(READER_AND_WRITER, change), &properties);
}

#[test]
fn readers_share_and_exclude_writers() {
    let short = |bounds: &mut shared::Bounds| bounds.horizon = 3;
    let name = "shared: 1 writer, 2 readers";
    holds(name, sharing(WRITER_AND_READERS, short));
    let name = "shared: 2 writers, 1 reader";
    holds(name, sharing(READER_AND_WRITERS, short));
    let name = "shared: readers of ttl 3 and 1, 1 writer";
    let ttls = |bounds: &mut shared::Bounds| {
        bounds.horizon = 2;
        bounds.ttls = [3, 1, 2];
    };
    holds(name, sharing(WRITER_AND_READERS, ttls));
}

#[test]
fn repeated_requests_and_extensions_of_readers_exclude_writers() {
    let name = "shared: 1 writer, 1 reader, a repeated ACQUIRE";
    let repeats = |bounds: &mut shared::Bounds| bounds.retries = 1;
    holds(name, sharing(READER_AND_WRITER, repeats));
    let name = "shared: 1 writer, 1 reader that extends by 3 and 1";
    let extends = |bounds: &mut shared::Bounds| {
        bounds.extensions = vec![3, 1];
        bounds.horizon = 5;
    };
    holds(name, sharing(READER_AND_WRITER, extends));
    let name = "shared: 1 writer, 1 reader that extends by 3, a repeated ACQUIRE";
    let both = |bounds: &mut shared::Bounds| {
        bounds.extensions = vec![3];
        bounds.horizon = 3;
        bounds.retries = 1;
    };
    holds(name, sharing(READER_AND_WRITER, both));
    let name = "shared: 1 writer, 2 readers, one extends by 3";
    let extends = |bounds: &mut shared::Bounds| {
        bounds.extensions = vec![3];
        bounds.horizon = 2;
    };
    holds(name, sharing(WRITER_AND_READERS, extends));
}

/// A node forgets, and one stays out for so long; a reader may extend.
fn forgetful(guard: u8, extensions: &[u8]) -> impl Fn(&mut shared::Bounds) {
    move |bounds| {
        bounds.wipes = 1;
        bounds.guard = guard;
        bounds.extensions = extensions.to_vec();
    }
}

#[test]
fn restart_guard_protects_readers() {
    let name = "shared: 1 writer, 1 reader, a node forgets";
    holds(name, sharing(READER_AND_WRITER, forgetful(2, &[])));
    let name = "shared: 1 writer, 1 reader that extends by 3, a node forgets";
    holds(name, sharing(READER_AND_WRITER, forgetful(3, &[3])));
    let name = "shared: the restart guard is a tick short";
    breaks_sharing(name, forgetful(1, &[]));
    let name = "shared: the restart guard is shorter than an extension";
    breaks_sharing(name, forgetful(2, &[3]));
    breaks_sharing("T34 no compare", |bounds| {
        forgetful(2, &[])(bounds);
        bounds.variant = Variant::NoCompare;
    });
}

#[test]
fn t32_counting_answers_to_an_older_extension_lets_a_writer_in_beside_a_reader() {
    breaks_sharing("T32 old extension", |bounds| {
        bounds.variant = Variant::CountsOldExtension;
        bounds.extensions = vec![1, 3];
    });
}

#[test]
fn validity_that_counts_from_the_reply_lets_a_writer_in_beside_a_reader() {
    breaks_sharing("shared: the end counts from the reply", |bounds| {
        bounds.variant = Variant::EndFromReply;
    });
}

#[test]
fn t33_a_reader_that_comes_again_as_the_same_owner_is_released_by_its_first_attempt() {
    breaks_sharing("T33 an owner comes again", |bounds| {
        bounds.variant = Variant::ReusesOwner;
    });
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_readers_and_writers_hold_too_when_asked_for() {
    let name = "shared: 1 writer, 2 readers, longer";
    holds_within(FAR_MORE, name, sharing(WRITER_AND_READERS, |_| {}));
    let name = "shared: 1 writer, 2 readers, a repeated ACQUIRE";
    let repeats = |bounds: &mut shared::Bounds| {
        bounds.horizon = 3;
        bounds.retries = 1;
    };
    holds_within(FAR_MORE, name, sharing(WRITER_AND_READERS, repeats));
    let name = "shared: 1 writer, 2 readers, one extends by 3, longer";
    let extends = |bounds: &mut shared::Bounds| {
        bounds.extensions = vec![3];
        bounds.horizon = 3;
    };
    holds_within(FAR_MORE, name, sharing(WRITER_AND_READERS, extends));
    let name = "shared: 1 writer, 2 readers, a node forgets";
    let wiped = |bounds: &mut shared::Bounds| {
        forgetful(2, &[])(bounds);
        bounds.horizon = 3;
    };
    holds_within(FAR_MORE, name, sharing(WRITER_AND_READERS, wiped));
}
