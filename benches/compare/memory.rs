//! The memory of a process that locks while a node is stopped or killed.

use std::fs;
use std::process::ChildStdin;
use std::time::Duration;

use support::{ChildProcess, Cluster, Deadline};
use tokio::runtime::Runtime;

use crate::child;
use crate::faults::flush;
use crate::figures::{Figures, Metric, Samples};
use crate::options::Options;
use crate::participants::Who;
use crate::report::{Line, Target, print_figures};
use crate::same::NODES;
use crate::uncontended::{measure, warm_up};

/// Watches all processes at the same time, because their speed does not matter.
pub(crate) fn watch(options: &Options, samples: &mut Samples) -> Vec<Line> {
    let stopped = Watched::start(format!("memory, one stopped, {:?}", options.watch));
    let mut killed = Watched::start(format!("memory, one killed, {:?}", options.watch));
    killed.cluster.servers[NODES - 1].kill();
    stopped.cluster.servers[NODES - 1].stop();
    let deadline = Deadline::after(options.watch);
    while deadline.pause() {
        flush(&stopped.cluster);
        flush(&killed.cluster);
    }
    let lines = [stopped, killed].map(|watched| watched.sum_up(samples));
    lines.into_iter().flatten().collect()
}

/// Servers, and one process of each participant that locks on them.
struct Watched {
    name: String,
    cluster: Cluster,
    processes: [(Who, (ChildProcess, ChildStdin)); 2],
}

impl Watched {
    fn start(name: String) -> Self {
        let cluster = Cluster::start(NODES);
        let urls = cluster.urls();
        let kinds = [Who::Ours, Who::OursFenced];
        let processes = kinds.map(|who| (who, child::start("memory", who, &urls)));
        for (_, (process, _)) in &processes {
            process.wait_for_line("ready", PATIENCE);
        }
        Self {
            name,
            cluster,
            processes,
        }
    }

    fn sum_up(self, samples: &mut Samples) -> Vec<Line> {
        let mut lines = Vec::new();
        for (who, (process, _)) in &self.processes {
            let output = process.stdout();
            let sizes = output.lines().filter_map(|line| line.strip_prefix("kib "));
            let sizes: Vec<f64> = sizes.map(child::parse).collect();
            // Buffers and the allocator's heaps grow in steps up to the worst backlog; a leak continues to
            // grow after that.
            let (first, second) = sizes.split_at(sizes.len() / 2);
            let early = first.iter().copied().fold(0.0, f64::max);
            let late = second.iter().copied().fold(0.0, f64::max);
            let figures = [
                (Metric::Memory, late / 1024.0),
                (Metric::MemoryGrowth, late / early),
            ];
            samples.push(&self.name, *who, Figures::from(figures));
            let name = &self.name;
            let what = format!("{name}, {}: second half, x first half", who.short());
            let growth = samples.of(name, *who, Metric::MemoryGrowth);
            lines.push(Line::new(what, Target::AtMost(FLAT), growth));
        }
        print_figures(&self.name, samples);
        lines
    }
}

/// Locks until it is killed, and prints its size twice a second.
pub(crate) fn run(who: Who, urls: &[String]) {
    let runtime = Runtime::new().expect("the runtime starts");
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

/// The slices of an hour: the process ends by itself if its parent does not kill it.
const MOST_SLICES: usize = 7200;

/// A leak that adds a quarter to a process in this time exceeds it.
const FLAT: f64 = 1.1;

const PATIENCE: Duration = Duration::from_secs(20);
