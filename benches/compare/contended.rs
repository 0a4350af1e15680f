//! Tasks that want one key at once, and what came of it; in this process.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use crate::by_hand::micros_since_epoch;
use crate::figures::{Figures, Metric, Samples, percentile, quotients};
use crate::options::Options;
use crate::participants::{Participant, Who};
use crate::report::{Line, Target, print_figures};
use crate::support::Cluster;
use crate::uncontended::{NODES, commands_sent, reset_counts, warm_up};

pub(crate) async fn w3b(options: &Options, samples: &mut Samples) -> Vec<Line> {
    let name = format!("burst of {TASKS}, one process");
    let cluster = Cluster::start(NODES);
    let mut participants = Vec::new();
    for who in Who::ALL {
        let participant = who.connect(&cluster.urls()).await;
        warm_up(&participant, 64).await;
        participants.push((who, participant));
    }
    for round in 0..options.rounds {
        fastrand::shuffle(&mut participants);
        for (who, participant) in &participants {
            reset_counts(&cluster);
            let mut bursts = Vec::new();
            for burst in 0..BURSTS {
                let key = format!("burst-{round}-{burst}");
                bursts.push(Burst {
                    began: micros_since_epoch(),
                    holds: self::burst(participant, &key, TASKS).await,
                });
            }
            let sent = settled_commands(&cluster, *who).await;
            samples.push(&name, *who, summary(&bursts, TASKS, sent));
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

/// Somebody's time with the lock, in microseconds of the clock that all processes share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hold {
    pub(crate) asked: u64,
    pub(crate) from: u64,
    pub(crate) to: u64,
}

/// All that had the lock after one start.
#[derive(Debug)]
pub(crate) struct Burst {
    pub(crate) began: u64,
    pub(crate) holds: Vec<Hold>,
}

/// Lets so many tasks take the same lock once; those that gave up have no hold.
pub(crate) async fn burst(participant: &Participant, key: &str, tasks: usize) -> Vec<Hold> {
    let tasks = (0..tasks).map(|_| {
        let (participant, key) = (participant.clone(), key.to_owned());
        tokio::spawn(async move { hold(&participant, &key).await })
    });
    let holds = join_all(tasks).await.into_iter();
    holds
        .filter_map(|hold| hold.expect("no task panics"))
        .collect()
}

/// Lets so many tasks take the same lock again and again.
pub(crate) async fn storm(
    participant: &Participant,
    key: &str,
    tasks: usize,
    time: Duration,
) -> Vec<Hold> {
    let end = Instant::now() + time;
    let tasks = (0..tasks).map(|_| {
        let (participant, key) = (participant.clone(), key.to_owned());
        tokio::spawn(async move {
            let mut holds = Vec::new();
            while Instant::now() < end {
                holds.extend(hold(&participant, &key).await);
            }
            holds
        })
    });
    let holds = join_all(tasks).await.into_iter();
    holds
        .flat_map(|holds| holds.expect("no task panics"))
        .collect()
}

async fn hold(participant: &Participant, key: &str) -> Option<Hold> {
    let asked = micros_since_epoch();
    let held = participant.acquire_waiting(key, PATIENCE).await?;
    let from = micros_since_epoch();
    sleep(HOLD).await;
    let to = micros_since_epoch();
    participant.release(held).await;
    Some(Hold { asked, from, to })
}

/// Sums up bursts of so many tasks each.
pub(crate) fn summary(bursts: &[Burst], tasks: usize, commands: u64) -> Figures {
    let drains = bursts.iter().map(|burst| {
        let last = burst.holds.iter().map(|hold| hold.to).max();
        last.map_or(0, |last| last.saturating_sub(burst.began))
    });
    let (drained, held): (u64, u64) = (drains.sum(), bursts.iter().map(Burst::held).sum());
    let mut waits: Vec<u64> = bursts.iter().flat_map(Burst::waits).collect();
    let holders = bursts.iter().map(|burst| most_at_once(&burst.holds)).max();
    let locks = waits.len().max(1) as f64;
    Figures::from([
        (Metric::Drain, millis(drained) / bursts.len() as f64),
        (Metric::DrainOfIdeal, drained as f64 / held.max(1) as f64),
        (Metric::WaitP50, millis(percentile(&mut waits, 50))),
        (Metric::WaitP99, millis(percentile(&mut waits, 99))),
        (Metric::Commands, commands as f64 / locks),
        (Metric::Holders, holders.unwrap_or_default() as f64),
        (Metric::Errors, (tasks * bursts.len() - waits.len()) as f64),
    ])
}

impl Burst {
    fn held(&self) -> u64 {
        self.holds.iter().map(|hold| hold.to - hold.from).sum()
    }

    pub(crate) fn waits(&self) -> impl Iterator<Item = u64> {
        self.holds
            .iter()
            .map(|hold| hold.from.saturating_sub(hold.asked))
    }
}

/// Returns how many held the lock at the same time, at the worst time.
pub(crate) fn most_at_once(holds: &[Hold]) -> i64 {
    // Of what happens in one microsecond, the ends come first.
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

/// Counts commands after the last ones have arrived.
pub(crate) async fn settled_commands(cluster: &Cluster, who: Who) -> u64 {
    sleep(Duration::from_millis(50)).await;
    commands_sent(cluster, who)
}

pub(crate) fn millis(micros: u64) -> f64 {
    micros as f64 / 1000.0
}

/// How long the lock is held, by tokio's clock, which rounds up to the next millisecond.
const HOLD: Duration = Duration::from_millis(2);

/// Long enough for everybody to have a turn.
const PATIENCE: Duration = Duration::from_secs(30);

const TASKS: usize = 32;
const BURSTS: usize = 4;
