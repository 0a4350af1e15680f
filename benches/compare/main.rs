//! Compares this crate with `rslock`, with hand-written loops and with hand-written batches, on five real local
//! nodes; and several groups of nodes with one.
//!
//! ```not_rust
//! cargo bench -p benches --bench compare                  # everything, a few minutes
//! cargo bench -p benches --bench compare -- w1 w2         # some of the workloads
//! cargo bench -p benches --bench compare -- --list
//! ```
//!
//! starts the servers itself. The participants run one after the other in rounds, in a shuffled order, and
//! are compared within a round only, so that a machine that becomes slower affects all of them alike. The
//! ratios are more reliable than the figures.

#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]
#![allow(
    clippy::float_arithmetic,
    clippy::cast_precision_loss,
    reason = "figures are measured to three digits at best"
)]

use std::env;

use tokio::runtime::Runtime;

mod batched;
mod by_hand;
mod chart;
mod child;
mod contended;
mod crowds;
mod faults;
mod figures;
mod groups;
mod http_load;
mod http_server;
mod memory;
mod options;
mod participants;
mod report;
mod same;
mod slow_commands;
mod uncontended;

use crate::figures::Samples;
use crate::options::{Options, Workload};
use crate::report::Line;

fn main() {
    let args: Vec<String> = env::args().skip(1).collect();
    if let [flag, task @ ..] = args.as_slice()
        && flag == child::FLAG
    {
        return child::run(task);
    }
    match Options::parse(args.into_iter()) {
        Ok(options) => {
            // The runtime of `#[tokio::main]`, with one worker per core.
            let runtime = Runtime::new().expect("the runtime starts");
            runtime.block_on(compare(&options));
        }
        Err(help) => println!("{help}"),
    }
}

async fn compare(options: &Options) {
    report::print_head(options);
    let mut samples = Samples::default();
    let mut lines: Vec<Line> = Vec::new();
    for workload in &options.workloads {
        println!("\n{}", workload.title());
        let found = match workload {
            Workload::W1 => uncontended::w1(options, &mut samples).await,
            Workload::W2 => uncontended::w2(options, &mut samples).await,
            Workload::W3 => crowds::w3(options, &mut samples).await,
            Workload::W3b => {
                let mut lines = contended::w3b(options, &mut samples).await;
                lines.extend(crowds::w3b(options, &mut samples).await);
                lines
            }
            Workload::W4 => faults::w4(options, &mut samples).await,
            Workload::W5 => faults::w5(options, &mut samples).await,
            Workload::Slowlog => slow_commands::slowlog(options, &mut samples).await,
            Workload::Memory => memory::watch(options, &mut samples),
            Workload::W6 => uncontended::w6(options, &mut samples).await,
            Workload::Far => uncontended::far(options, &mut samples).await,
            Workload::W7 => http_server::w7(options, &mut samples).await,
            Workload::Groups => groups::groups(options, &mut samples).await,
            Workload::Commands => uncontended::commands(options, &mut samples).await,
        };
        lines.extend(found);
    }
    report::print_lines(&lines);
    if let Some(path) = &options.chart {
        let drawn = chart::draw(path, &samples);
        drawn.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}
