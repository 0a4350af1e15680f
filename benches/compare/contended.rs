//! Tasks of this process that compete for one key, and their results.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::join_all;
use support::Cluster;
use tokio::time::{Instant, sleep};

use crate::figures::{Figures, Metric, Samples, percentile, quotients};
use crate::options::Options;
use crate::participants::{Participant, Who};
use crate::report::{Line, Target, print_figures};
use crate::same::{NODES, micros_since_epoch};
use crate::uncontended::{commands_sent, reset_counts, warm_up};

pub(crate) async fn w3b(options: &Options, samples: &mut Samples) -> Vec<Line> {
    let name = format!("burst of {TASKS}, one process");
    let cluster = Cluster::start(NODES);
    let mut participants = Vec::new();
    for who in Who::WITHOUT_BATCHED {
        let participant = who.connect(&cluster.urls()).await;
        warm_up(&participant, 64).await;
        participants.push((who, participant));
    }
    for round in 0..options.rounds {
        fastrand::shuffle(&mut participants);
        for (who, participant) in &participants {
            reset_counts(&cluster);
            let mut bursts = Vec::new();
            for number in 0..BURSTS {
                let key = format!("burst-{round}-{number}");
                bursts.push(Burst {
                    began: micros_since_epoch(),
                    waiters: burst(participant, &key, TASKS).await,
                });
            }
            let sent = settled_commands(&cluster, *who).await;
            samples.push(&name, *who, summary(&bursts, sent));
        }
    }
    print_figures(&name, samples);
    lines(&name, samples)
}

fn lines(name: &str, samples: &Samples) -> Vec<Line> {
    let pairs = [
        (Who::Ours, Who::ByHand),
        (Who::OursFenced, Who::ByHandFenced),
    ];
    let lines = pairs.into_iter().flat_map(|(who, to)| {
        let of = |metric| samples.of(name, who, metric);
        let line = |what, target, values| {
            Line::new(
                format!("W3b {name}, {}: {what}", who.short()),
                target,
                values,
            )
        };
        [
            line(
                "drained, x by hand with a queue",
                Target::AtMost(1.15),
                samples.ratios(name, Metric::Drain, who, to),
            ),
            line(
                "commands per lock",
                Target::AtMost(12.0),
                of(Metric::Commands),
            ),
            line(
                "wait p99 / p50",
                Target::AtMost(2.3),
                quotients(&of(Metric::WaitP99), &of(Metric::WaitP50)),
            ),
            line("holders at once", Target::Exactly(1.0), of(Metric::Holders)),
        ]
    });
    lines.collect()
}

/// The time of one hold, in microseconds of the clock that all processes share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hold {
    pub(crate) asked: u64,
    pub(crate) from: u64,
    pub(crate) to: u64,
}

/// The holds, and the waits of tasks that gave up.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    pub(crate) holds: Vec<Hold>,
    /// The waits of tasks that gave up, in microseconds.
    pub(crate) in_vain: Vec<u64>,
}

/// The results of one burst.
#[derive(Debug)]
pub(crate) struct Burst {
    pub(crate) began: u64,
    pub(crate) waiters: Waiters,
}

/// Runs tasks that each take the same lock once.
pub(crate) async fn burst(participant: &Participant, key: &str, tasks: usize) -> Waiters {
    compete(participant, key, tasks, None).await
}

/// Runs tasks that each take the same lock repeatedly.
pub(crate) async fn storm(
    participant: &Participant,
    key: &str,
    tasks: usize,
    time: Duration,
) -> Waiters {
    compete(participant, key, tasks, Some(Instant::now() + time)).await
}

async fn compete(
    participant: &Participant,
    key: &str,
    tasks: usize,
    end: Option<Instant>,
) -> Waiters {
    let tasks = (0..tasks).map(|_| {
        let (participant, key) = (participant.clone(), key.to_owned());
        tokio::spawn(async move {
            let mut waiters = Waiters::default();
            loop {
                match hold(&participant, &key).await {
                    Ok(hold) => waiters.holds.push(hold),
                    Err(waited) => waiters.in_vain.push(waited),
                }
                if end.is_none_or(|end| Instant::now() >= end) {
                    return waiters;
                }
            }
        })
    });
    let done = join_all(tasks).await.into_iter();
    done.map(|waiters| waiters.expect("no task panics"))
        .collect()
}

/// Holds the lock for a moment; returns the time of waiting if it was not granted.
async fn hold(participant: &Participant, key: &str) -> Result<Hold, u64> {
    let asked = micros_since_epoch();
    let Some(held) = participant.acquire_waiting(key, PATIENCE).await else {
        return Err(micros_since_epoch().saturating_sub(asked));
    };
    let from = micros_since_epoch();
    sleep(HOLD).await;
    let to = micros_since_epoch();
    participant.release(held).await;
    Ok(Hold { asked, from, to })
}

/// Summarises bursts.
pub(crate) fn summary(bursts: &[Burst], commands: u64) -> Figures {
    let waiters = || bursts.iter().map(|burst| &burst.waiters);
    let drains = bursts
        .iter()
        .map(|burst| burst.waiters.last().saturating_sub(burst.began));
    let (drained, held): (u64, u64) = (drains.sum(), waiters().map(Waiters::held).sum());
    let mut waits: Vec<u64> = waiters().flat_map(Waiters::waits).collect();
    let locks: usize = waiters().map(|waiters| waiters.holds.len()).sum();
    let in_vain: usize = waiters().map(|waiters| waiters.in_vain.len()).sum();
    let holders = waiters().map(|waiters| most_at_once(&waiters.holds)).max();
    Figures::from([
        (Metric::Drain, millis(drained) / bursts.len() as f64),
        (Metric::DrainOfIdeal, drained as f64 / held.max(1) as f64),
        (Metric::WaitP50, millis(percentile(&mut waits, 50))),
        (Metric::WaitP99, millis(percentile(&mut waits, 99))),
        (Metric::Commands, commands as f64 / locks.max(1) as f64),
        (Metric::Holders, holders.unwrap_or_default() as f64),
        (Metric::Errors, in_vain as f64),
    ])
}

impl Waiters {
    /// Returns the time of the last release.
    pub(crate) fn last(&self) -> u64 {
        let ends = self.holds.iter().map(|hold| hold.to);
        ends.max().unwrap_or_default()
    }

    /// Returns the wait of each task; for tasks that gave up, the wait until then.
    pub(crate) fn waits(&self) -> impl Iterator<Item = u64> {
        let waits = self.holds.iter();
        let waits = waits.map(|hold| hold.from.saturating_sub(hold.asked));
        waits.chain(self.in_vain.iter().copied())
    }

    fn held(&self) -> u64 {
        self.holds.iter().map(|hold| hold.to - hold.from).sum()
    }
}

impl FromIterator<Self> for Waiters {
    fn from_iter<I: IntoIterator<Item = Self>>(all: I) -> Self {
        let mut sum = Self::default();
        for waiters in all {
            sum.holds.extend(waiters.holds);
            sum.in_vain.extend(waiters.in_vain);
        }
        sum
    }
}

/// Returns the highest number of simultaneous holders.
pub(crate) fn most_at_once(holds: &[Hold]) -> i64 {
    // Within one microsecond, ends come before beginnings.
    let mut changes: BTreeMap<u64, (i64, i64)> = BTreeMap::new();
    for hold in holds {
        changes.entry(hold.from).or_default().1 += 1;
        changes.entry(hold.to).or_default().0 -= 1;
    }
    let (mut now, mut most) = (0, 0);
    for (ended, begun) in changes.into_values() {
        now += ended + begun;
        most = most.max(now);
    }
    most
}

/// Counts commands after the last have arrived.
pub(crate) async fn settled_commands(cluster: &Cluster, who: Who) -> u64 {
    sleep(Duration::from_millis(50)).await;
    commands_sent(cluster, who)
}

pub(crate) fn millis(micros: u64) -> f64 {
    micros as f64 / 1000.0
}

/// How long the lock is held, by tokio's clock, which rounds up to the next millisecond.
const HOLD: Duration = Duration::from_millis(2);

/// Long enough for each task to hold the lock.
const PATIENCE: Duration = Duration::from_secs(30);

const TASKS: usize = 32;
const BURSTS: usize = 4;
