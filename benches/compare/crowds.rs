//! Processes that compete for one key.

use std::io::Write;
use std::process::ChildStdin;
use std::time::Duration;

use support::{ChildProcess, Cluster};

use crate::child;
use crate::contended::{Burst, Waiters, millis, most_at_once, settled_commands, summary};
use crate::figures::{Figures, Metric, Samples, percentile, quotients};
use crate::options::Options;
use crate::participants::Who;
use crate::report::{Line, Target, print_figures};
use crate::same::{NODES, micros_since_epoch};
use crate::uncontended::reset_counts;

pub(crate) async fn w3b(options: &Options, samples: &mut Samples) -> Vec<Line> {
    let mut lines = Vec::new();
    for (processes, commands) in [(2, 20.0), (8, 30.0)] {
        let name = format!("burst of {WAITERS}, {processes} processes");
        let cluster = Cluster::start(NODES);
        for round in 0..options.rounds {
            let mut order = Who::WITHOUT_HANDWORK;
            fastrand::shuffle(&mut order);
            for who in order {
                let crowd = Crowd::start(&cluster, who, processes);
                reset_counts(&cluster);
                let key = format!("burst-{round}");
                let began = micros_since_epoch();
                let order = format!("burst {key} {WAITERS}");
                let waiters = crowd.run(&key, &order, PATIENCE).into_iter().collect();
                let sent = settled_commands(&cluster, who).await;
                samples.push(&name, who, summary(&[Burst { began, waiters }], sent));
            }
        }
        print_figures(&name, samples);
        for who in [Who::Ours, Who::OursFenced] {
            let mut line = |what, target, metric| {
                let what = format!("W3b {name}, {}: {what}", who.short());
                lines.push(Line::new(what, target, samples.of(&name, who, metric)));
            };
            line(
                "drained, x holds end to end",
                Target::AtMost(2.0),
                Metric::DrainOfIdeal,
            );
            line(
                "commands per lock",
                Target::AtMost(commands),
                Metric::Commands,
            );
            line("holders at once", Target::Exactly(1.0), Metric::Holders);
        }
    }
    lines
}

/// Runs once for each participant: fairness shows in one long run, not in many short ones.
pub(crate) async fn w3(options: &Options, samples: &mut Samples) -> Vec<Line> {
    let name = format!(
        "{PROCESSES} processes of {COMING_BACK} tasks, {:?}",
        options.storm
    );
    let mut lines = Vec::new();
    for who in Who::WITHOUT_HANDWORK {
        let cluster = Cluster::start(NODES);
        let crowd = Crowd::start(&cluster, who, PROCESSES);
        reset_counts(&cluster);
        let began = micros_since_epoch();
        let order = format!("storm storm {COMING_BACK} {}", options.storm.as_millis());
        let shares = crowd.run("storm", &order, options.storm + PATIENCE);
        let sent = settled_commands(&cluster, who).await;
        samples.push(&name, who, storm_summary(shares, began, sent));
    }
    print_figures(&name, samples);
    for who in [Who::Ours, Who::OursFenced] {
        let of = |metric| samples.of(&name, who, metric);
        let mut line = |what, target, values| {
            lines.push(Line::new(
                format!("W3 {}: {what}", who.short()),
                target,
                values,
            ));
        };
        line(
            "worst share, % off the mean",
            Target::AtMost(25.0),
            of(Metric::Unfairness),
        );
        let waits = quotients(&of(Metric::WaitP99), &of(Metric::WaitMean));
        line("wait p99 / mean", Target::AtMost(4.0), waits);
        line("holders at once", Target::Exactly(1.0), of(Metric::Holders));
    }
    lines
}

fn storm_summary(shares: Vec<Waiters>, began: u64, commands: u64) -> Figures {
    let counts: Vec<usize> = shares.iter().map(|share| share.holds.len()).collect();
    let all: Waiters = shares.into_iter().collect();
    let locks = all.holds.len().max(1) as f64;
    let mean = locks / counts.len() as f64;
    let off = counts
        .iter()
        .map(|count| (*count as f64 / mean - 1.0).abs());
    let seconds = millis(all.last().saturating_sub(began)) / 1000.0;
    let mut waits: Vec<u64> = all.waits().collect();
    let waited: u64 = waits.iter().sum();
    Figures::from([
        (Metric::Rate, locks / seconds),
        (Metric::WaitMean, millis(waited) / waits.len().max(1) as f64),
        (Metric::WaitP50, millis(percentile(&mut waits, 50))),
        (Metric::WaitP99, millis(percentile(&mut waits, 99))),
        (Metric::WaitWorst, millis(percentile(&mut waits, 100))),
        (Metric::Unfairness, off.fold(0.0, f64::max) * 100.0),
        (Metric::Commands, commands as f64 / locks),
        (Metric::Holders, most_at_once(&all.holds) as f64),
        (Metric::Errors, all.in_vain.len() as f64),
    ])
}

/// Processes that wait for an order with a key.
struct Crowd(Vec<(ChildProcess, ChildStdin)>);

impl Crowd {
    fn start(cluster: &Cluster, who: Who, processes: usize) -> Self {
        let start = |_| child::start("crowd", who, &cluster.urls());
        let crowd = Self((0..processes).map(start).collect());
        for (process, _) in &crowd.0 {
            process.wait_for_line("ready", PATIENCE);
        }
        crowd
    }

    /// Sends all processes the same order, and returns the results by process.
    fn run(mut self, key: &str, order: &str, limit: Duration) -> Vec<Waiters> {
        for (_, stdin) in &mut self.0 {
            writeln!(stdin, "{order}").expect("the process reads its orders");
        }
        let done = format!("done {key}");
        let shares = self.0.iter().map(|(process, _)| {
            process.wait_for_line(&done, limit);
            child::parse_waiters(&process.stdout())
        });
        shares.collect()
    }
}

const WAITERS: usize = 16;
const PROCESSES: usize = 8;

/// The tasks of each process that return to the key.
const COMING_BACK: usize = 4;

const PATIENCE: Duration = Duration::from_secs(60);
