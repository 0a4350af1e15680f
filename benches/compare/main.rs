//! Compares this crate with `rslock` and with loops written by hand, on five real local nodes.
//!
//! ```not_rust
//! cargo bench --bench compare                  # everything, a few minutes
//! cargo bench --bench compare -- w1 w2         # some of the workloads
//! cargo bench --bench compare -- --list
//! ```
//!
//! starts the servers itself. The participants are measured one after the other in rounds, in an order
//! that is shuffled in each, and compared inside a round only: a machine that gets slower or busier
//! meets all of them alike. What the figures say about each other is worth more than the figures.

#![allow(
    clippy::print_stdout,
    reason = "a benchmark is there to print its figures"
)]
#![allow(
    clippy::float_arithmetic,
    clippy::cast_precision_loss,
    reason = "figures are measured to three digits at best"
)]

use std::env;

#[path = "../../tests/support/mod.rs"]
mod support;

mod by_hand;
mod figures;
mod options;
mod participants;
mod report;
mod uncontended;

use crate::figures::Samples;
use crate::options::{Options, Workload};
use crate::report::Line;

/// Runs on `#[tokio::main]`'s runtime, as services do: one worker per core.
#[tokio::main]
async fn main() {
    let options = match Options::parse(env::args().skip(1)) {
        Ok(options) => options,
        Err(help) => {
            println!("{help}");
            return;
        }
    };
    report::print_head(&options);
    let mut samples = Samples::default();
    let mut lines: Vec<Line> = Vec::new();
    for workload in &options.workloads {
        println!("\n{}", workload.title());
        let found = match workload {
            Workload::W1 => uncontended::w1(&options, &mut samples).await,
            Workload::W2 => uncontended::w2(&options, &mut samples).await,
            Workload::W6 => uncontended::w6(&options, &mut samples).await,
            Workload::Commands => uncontended::commands(&mut samples).await,
        };
        lines.extend(found);
    }
    report::print_lines(&lines);
}
