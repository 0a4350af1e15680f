//! Model checking of the protocol as it is shipped: every order of events, within bounds.
//!
//! Nodes are [`tower_redlock::protocol::Store`]s, which the embedded nodes run too; clients are
//! [`tower_redlock::protocol::lease::Lease`]s, as the lock drives them; what passes between them are the requests that it
//! sends. Written down here is only who may do what when, and what must then hold:
//!
//! * F1 tokens of different acquisitions differ;
//! * F2 an acquisition that began after another had completed has the higher token;
//! * F3 a storage that accepts `token >= highest` applies no older write after a newer;
//! * F4 an extension that succeeds proves that no higher token had completed before it began;
//! * and in the models with time: two acquisitions are never both within their validity;
//! * what is lost, revoked or over is neither extended nor asked for again, and what is released is not;
//! * a lease that has released, also one that was given up at any moment, leaves no lock where its requests have run,
//!   and one that is settled knows where its lock may be left.
//!
//! `once` says the same of requests whose outcome is recorded, `shared` of locks that readers share, and `layouts` of keys
//! that move from one group of nodes to another.
//!
//! All happens in one `world`. A model is a [`spec::Spec`]: its clients, what may happen to them and to the nodes, how
//! often, which rule is wrong, what is to hold and what is to be reached. `tokens`, `timed`, `shared`, `layouts` and `once`
//! have the rows.
//!
//! Models without a defect also assert that what they are about does happen: all complete, later
//! ones complete, the second phase is needed, extensions succeed.
//!
//! The wrong variants change one rule and share everything else, and each asserts that the checker
//! *finds* what goes wrong without that rule; so a model that could not see a defect fails too.
//!
//! # Running it
//!
//! `cargo test --release -p model --test model` explores what fits into a few minutes, and
//! says on standard error how many states that were. `TOWER_REDLOCK_MODEL=traces` also prints the
//! steps of each defect, and `TOWER_REDLOCK_MODEL=rows` goes on where the page of `protocol` has other numbers. The
//! tests named `far_more_…` are ignored unless they are asked for: they have more
//! acquisitions and nodes, and take half an hour, two at a time because of their memory:
//!
//! ```sh
//! cargo test --release -p model --test model far_more -- --ignored --test-threads 2
//! ```
//!
//! *Bounded* runs stop at a number of states, nearest ones first, and prove only that no shorter
//! trace goes wrong. Not modelled at all: how servers are asked what the restart guard's rules need
//! to know, clients' clocks that disagree, and hand-over.

use std::io::{self, Write};
use std::panic::Location;

use stateright::{Checker, HasDiscoveries, Model};
use tokio::time::Instant;

use crate::spec::{Spec, Variant};
use crate::world::World;

mod layouts;
mod leases;
mod once;
mod requests;
mod shared;
mod space;
mod spec;
mod timed;
mod tokens;
mod world;

impl<const N: usize, const C: usize, const K: usize> World<N, C, K> {
    /// Explores what the spec bounds; panics with a trace where a promise does not hold.
    #[track_caller]
    fn holds(spec: Spec) {
        let (caller, began) = (Location::caller(), Instant::now());
        let bound = spec.bound;
        let checker = Self::new(spec).checker();
        let mut checker = checker.finish_when(HasDiscoveries::AnyFailures);
        if let Some(states) = bound {
            checker = checker.target_state_count(states.get());
        }
        let checker = checker.spawn_bfs().join();
        // A bound that was not reached left nothing out.
        let stopped = bound.is_some_and(|states| checker.state_count() >= states.get());
        let extent = if stopped { "bounded" } else { "all" };
        let states = with_commas(checker.unique_state_count());
        let row = format!("| {extent} | {states} | {} |", checker.max_depth());
        let known = PAGE.lines().find(|line| line.contains(&row));
        let known = known.map(|line| line.trim_start_matches("//! "));
        say(&format!(
            "{caller}: {} {:.1?}",
            known.unwrap_or(&row),
            began.elapsed()
        ));
        checker.assert_properties();
        if known.is_none() {
            let lacks = "the documentation of `protocol` does not have this row";
            assert!(mode("rows"), "{caller}: {lacks}: {row}");
            say(lacks);
        }
    }

    /// Explores until each of these promises is broken; panics if one is not.
    #[track_caller]
    fn breaks(variant: Variant, spec: Spec, promises: &'static [&'static str]) {
        let (caller, began) = (Location::caller(), Instant::now());
        let spec = Spec {
            variant,
            promises,
            reaches: Vec::new(),
            ..spec
        };
        let checker = Self::new(spec).checker().spawn_bfs().join();
        let states = with_commas(checker.unique_state_count());
        let took = began.elapsed();
        say(&format!(
            "{caller}: {variant:?} found in {states} states, {took:.1?}"
        ));
        for promise in promises {
            let steps = checker.assert_any_discovery(promise).into_actions();
            say(&format!("{} steps to: not {promise}", steps.len()));
            if mode("traces") {
                say(&format!("{steps:#?}"));
            }
        }
    }
}

/// The page that has a row for each run.
const PAGE: &str = include_str!("../../src/protocol/mod.rs");

fn with_commas(number: usize) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(3).rev();
    let groups = groups.map(|group| String::from_utf8_lossy(group));
    groups.collect::<Vec<_>>().join(",")
}

/// Says something past the capture of the test harness: the numbers are part of the result. A run has no random choices, so
/// they are always the same.
fn say(text: &str) {
    writeln!(io::stderr(), "model: {text}").expect("standard error is open");
}

fn mode(wanted: &str) -> bool {
    std::env::var_os("TOWER_REDLOCK_MODEL").is_some_and(|mode| mode == wanted)
}

/// How many states the large runs explore, counting those met again.
pub(crate) const FAR_MORE: usize = 60_000_000;
