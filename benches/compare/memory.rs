//! The memory of a process that goes on locking while a node is stopped, or killed.

use std::fs;
use std::time::Duration;

use tokio::runtime::Runtime;

use crate::child;
use crate::faults::{flush, last};
use crate::figures::{Figures, Metric, Samples};
use crate::options::Options;
use crate::participants::Who;
use crate::report::{Line, Target, print_figures};
use crate::support::{Cluster, Deadline};
use crate::uncontended::{NODES, measure, warm_up};

/// Watches both kinds at once: what counts is not how fast they are.
pub(crate) fn watch(options: &Options, samples: &mut Samples) -> Vec<Line> {
    let mut lines = Vec::new();
    for (state, is_killed) in [("one stopped", false), ("one killed", true)] {
        let name = format!("memory, {state}, {:?}", options.watch);
        let mut cluster = Cluster::start(NODES);
        let kinds = [Who::Ours, Who::OursFenced];
        let urls = cluster.urls();
        let processes = kinds.map(|who| (who, child::start("memory", who, &urls)));
        for (_, (process, _)) in &processes {
            process.wait_for_line("ready", PATIENCE);
        }
        if is_killed {
            last(&mut cluster).kill();
        } else {
            last(&mut cluster).stop();
        }
        let deadline = Deadline::after(options.watch);
        while deadline.pause() {
            flush(&cluster);
        }
        for (who, (process, _)) in &processes {
            let output = process.stdout();
            let sizes = output.lines().filter_map(|line| line.strip_prefix("kib "));
            let sizes: Vec<f64> = sizes.map(child::parse).collect();
            // The first sixth is for finding out, and for buffers to grow to their size.
            let early = sizes.get(sizes.len() / 6).copied().unwrap_or_default();
            let late = sizes.last().copied().unwrap_or_default();
            let figures = [
                (Metric::Memory, late / 1024.0),
                (Metric::MemoryGrowth, late / early),
            ];
            samples.push(&name, *who, Figures::from(figures));
            let what = format!("{name}, {}: x after a sixth of the time", who.short());
            let growth = samples.of(&name, *who, Metric::MemoryGrowth);
            lines.push(Line::new(what, Target::AtMost(FLAT), growth));
        }
        print_figures(&name, samples);
    }
    lines
}

/// Locks until it is ended, and says twice a second how large it is.
pub(crate) fn run(who: Who, urls: &[String]) {
    let runtime = Runtime::new().expect("a runtime can be started");
    runtime.block_on(async {
        let participant = who.connect(urls).await;
        warm_up(&participant, CONCURRENCY).await;
        println!("ready");
        for _ in 0..MOST_SLICES {
            measure(&participant, CONCURRENCY, SLICE).await;
            println!("kib {}", resident_kib());
        }
    });
}

fn resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let size = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let size = size.and_then(|size| size.split_whitespace().next()?.parse().ok());
    size.unwrap_or_default()
}

const CONCURRENCY: usize = 64;
const SLICE: Duration = Duration::from_millis(450);

/// An hour's, should nobody end the process.
const MOST_SLICES: usize = 7200;

/// Allocators keep what they had; a leak at full speed is far beyond this.
const FLAT: f64 = 1.15;

const PATIENCE: Duration = Duration::from_secs(20);
