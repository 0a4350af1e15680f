//! The figures, and their summaries.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::participants::Who;

/// A kind of figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Metric {
    /// Locks acquired and released per second.
    Rate,
    /// Microseconds of CPU per lock: of this process, of all servers together, and of the one that used most.
    ClientCpu,
    ServerCpu,
    BusiestServerCpu,
    /// Microseconds from the request of a lock to its grant.
    AcquireP50,
    AcquireP99,
    /// Milliseconds until each task has held the lock.
    Drain,
    /// The same, relative to the sum of the holds.
    DrainOfIdeal,
    /// Milliseconds of waiting for the lock.
    WaitMean,
    WaitP50,
    WaitP99,
    /// The longest wait, which percentiles hide: few tasks starve, because each waits for long.
    WaitWorst,
    /// The largest distance of a process from the mean, in percent of the mean.
    Unfairness,
    /// Responses per second, and microseconds until each.
    Requests,
    ResponseP50,
    ResponseP99,
    /// Commands that all nodes received, and messages of their scripts, per lock.
    Commands,
    /// Commands per lock that the busiest server carried out, with those of scripts.
    BusiestServerCommands,
    /// Entries in the slow logs of all servers, and the microseconds of the longest.
    SlowCommands,
    SlowestCommand,
    /// The highest number of simultaneous holders.
    Holders,
    /// Mebibytes at the end, and their ratio to the beginning.
    Memory,
    MemoryGrowth,
    Errors,
}

impl Metric {
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Rate => "locks/s",
            Self::AcquireP50 => "acquire p50 us",
            Self::AcquireP99 => "acquire p99 us",
            Self::ClientCpu => "client CPU us/lock",
            Self::ServerCpu => "servers' CPU us/lock",
            Self::BusiestServerCpu => "busiest server us/lock",
            Self::Drain => "drained ms",
            Self::DrainOfIdeal => "x ideal",
            Self::WaitMean => "wait mean ms",
            Self::WaitP50 => "wait p50 ms",
            Self::WaitP99 => "wait p99 ms",
            Self::WaitWorst => "wait worst ms",
            Self::Unfairness => "unfairness %",
            Self::Requests => "requests/s",
            Self::ResponseP50 => "response p50 us",
            Self::ResponseP99 => "response p99 us",
            Self::Commands => "commands/lock",
            Self::BusiestServerCommands => "busiest server cmds/lock",
            Self::SlowCommands => "slow commands",
            Self::SlowestCommand => "slowest us",
            Self::Holders => "holders",
            Self::Memory => "memory MiB",
            Self::MemoryGrowth => "x before",
            Self::Errors => "errors",
        }
    }
}

/// The figures of one participant in one round.
pub(crate) type Figures = BTreeMap<Metric, f64>;

/// All figures, by workload and participant, in the order of the rounds.
#[derive(Debug, Default)]
pub(crate) struct Samples(BTreeMap<(String, Who), Vec<Figures>>);

impl Samples {
    pub(crate) fn push(&mut self, workload: &str, who: Who, figures: Figures) {
        let key = (workload.to_owned(), who);
        self.0.entry(key).or_default().push(figures);
    }

    /// Returns a figure of a participant in each of the rounds.
    pub(crate) fn of(&self, workload: &str, who: Who, metric: Metric) -> Vec<f64> {
        let rounds = self.0.get(&(workload.to_owned(), who));
        let rounds = rounds.into_iter().flatten();
        rounds
            .filter_map(|round| round.get(&metric).copied())
            .collect()
    }

    /// Returns the ratio of two participants' figures, round by round.
    pub(crate) fn ratios(&self, workload: &str, metric: Metric, who: Who, to: Who) -> Vec<f64> {
        let own = self.of(workload, who, metric);
        quotients(&own, &self.of(workload, to, metric))
    }

    pub(crate) fn metrics(&self, workload: &str) -> Vec<Metric> {
        let rounds = self.0.iter().filter(|((name, _), _)| name == workload);
        let mut metrics: Vec<_> = rounds
            .flat_map(|(_, rounds)| rounds.iter().flat_map(BTreeMap::keys).copied())
            .collect();
        metrics.sort_unstable();
        metrics.dedup();
        metrics
    }

    pub(crate) fn participants(&self, workload: &str) -> Vec<Who> {
        let keys = self.0.keys().filter(|(name, _)| name == workload);
        keys.map(|(_, who)| *who).collect()
    }
}

/// The median and the extremes of a figure over the rounds.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) lowest: f64,
    pub(crate) highest: f64,
}

impl Spread {
    pub(crate) fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        Some(Self {
            median: *sorted.get(sorted.len() / 2)?,
            lowest: *sorted.first()?,
            highest: *sorted.last()?,
        })
    }
}

/// Divides round by round.
pub(crate) fn quotients(of: &[f64], by: &[f64]) -> Vec<f64> {
    of.iter().zip(by).map(|(of, by)| of / by).collect()
}

/// Returns a percentile; sorts the values.
pub(crate) fn percentile<T: Ord + Copy + Default>(values: &mut [T], percent: usize) -> T {
    values.sort_unstable();
    let at = values.len() * percent / 100;
    let value = values.get(at.min(values.len().saturating_sub(1)));
    value.copied().unwrap_or_default()
}

pub(crate) fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
