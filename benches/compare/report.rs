//! The tables, and the comparison with the targets.

use std::thread;

use crate::figures::{Metric, Samples, Spread};
use crate::options::Options;
use crate::participants::Who;

/// The figure of each round, and its target.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) what: String,
    /// `None` for a figure that is only shown.
    pub(crate) target: Option<Target>,
    pub(crate) values: Vec<f64>,
}

/// The target of a figure.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Target {
    AtLeast(f64),
    AtMost(f64),
    Exactly(f64),
}

impl Line {
    pub(crate) fn new(what: impl Into<String>, target: Target, values: Vec<f64>) -> Self {
        Self {
            target: Some(target),
            ..Self::without_target(what, values)
        }
    }

    pub(crate) fn without_target(what: impl Into<String>, values: Vec<f64>) -> Self {
        Self {
            what: what.into(),
            target: None,
            values,
        }
    }
}

impl Target {
    fn is_reached(self, spread: Spread) -> bool {
        match self {
            Self::AtLeast(least) => spread.median >= least,
            Self::AtMost(most) => spread.median <= most,
            // Each round must reach it.
            Self::Exactly(value) => [spread.lowest, spread.highest] == [value, value],
        }
    }

    fn text(self) -> String {
        match self {
            Self::AtLeast(least) => format!(">= {least:.2}"),
            Self::AtMost(most) => format!("<= {most:.2}"),
            Self::Exactly(value) => format!("== {value:.2}"),
        }
    }
}

pub(crate) fn print_head(options: &Options) {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    println!(
        "{cores} cores, which the servers share; tokio's default runtime with {cores} workers; \
         redis-rs's default socket options; default settings of each participant, but no restart \
         guard, which only tower-redlock has; {} shuffled rounds of {:?} each",
        options.rounds, options.time
    );
}

/// Prints the medians of all participants, and the spread of the rounds.
pub(crate) fn print_figures(workload: &str, samples: &Samples) {
    let metrics = samples.metrics(workload);
    print!("{workload:<32}");
    for metric in &metrics {
        print!("{:>25}", metric.title());
    }
    println!();
    for who in samples.participants(workload) {
        print!("  {:<30}", who.name());
        for metric in &metrics {
            print!("{:>25}", cell(samples, workload, who, *metric));
        }
        println!();
    }
}

fn cell(samples: &Samples, workload: &str, who: Who, metric: Metric) -> String {
    let Some(spread) = Spread::of(&samples.of(workload, who, metric)) else {
        return "-".to_owned();
    };
    let Spread {
        median,
        lowest,
        highest,
    } = spread;
    let digits = match highest {
        highest if highest == highest.trunc() && lowest == highest => 0,
        ..10.0 => 2,
        10.0..100.0 => 1,
        _ => 0,
    };
    if lowest == highest {
        return format!("{median:.digits$}");
    }
    format!("{median:.digits$} ({lowest:.digits$}..{highest:.digits$})")
}

/// Prints whether each target is reached: medians of ratios within a round, and their extremes.
pub(crate) fn print_lines(lines: &[Line]) {
    println!(
        "\n{:<12} {:<84} {:>8} {:>16} {:>10}",
        "", "medians over the rounds", "median", "spread", "target"
    );
    for line in lines {
        let Some(spread) = Spread::of(&line.values) else {
            println!("{:<12} {}", "no figures", line.what);
            continue;
        };
        let verdict = match line.target {
            Some(target) if target.is_reached(spread) => "reached",
            Some(_) => "not reached",
            None => "",
        };
        println!(
            "{verdict:<12} {:<84} {:>8.2} {:>16} {:>10}",
            line.what,
            spread.median,
            format!("{:.2}..{:.2}", spread.lowest, spread.highest),
            line.target.map_or_else(String::new, Target::text)
        );
    }
}
