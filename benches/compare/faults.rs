//! Locks while one node of five is stopped or killed, compared with locks of the same participant before.

use std::time::Duration;

use support::{Cluster, RedisServer};
use tokio::time::sleep;

use crate::figures::{Metric, Samples, quotients};
use crate::options::Options;
use crate::participants::Who;
use crate::report::{Line, Target, print_figures};
use crate::same::NODES;
use crate::uncontended::{measure, warm_up};

pub(crate) async fn w4(options: &Options, samples: &mut Samples) -> Vec<Line> {
    let fault = Fault {
        name: "W4",
        state: "one stopped",
        strike: |server| server.stop(),
        mend: |server| server.cont(),
    };
    compare(options, samples, &fault).await
}

pub(crate) async fn w5(options: &Options, samples: &mut Samples) -> Vec<Line> {
    let fault = Fault {
        name: "W5",
        state: "one killed",
        strike: RedisServer::kill,
        mend: RedisServer::restart,
    };
    compare(options, samples, &fault).await
}

/// The fault of the last node.
pub(crate) struct Fault {
    name: &'static str,
    state: &'static str,
    strike: fn(&mut RedisServer),
    mend: fn(&mut RedisServer),
}

async fn compare(options: &Options, samples: &mut Samples, fault: &Fault) -> Vec<Line> {
    let mut cluster = Cluster::start(NODES);
    // Half as many rounds: each is four times as long, with pauses between the measurements.
    for _ in 0..options.rounds.div_ceil(2) {
        let mut order = Who::WITHOUT_BATCHED;
        fastrand::shuffle(&mut order);
        for who in order {
            // New for each round: the hand-written loops do not reconnect.
            let participant = who.connect(&cluster.urls()).await;
            warm_up(&participant, 64).await;
            for healthy in [true, false] {
                if !healthy {
                    (fault.strike)(last(&mut cluster));
                    // The first locks detect the fault.
                    measure(&participant, 64, SETTLING).await;
                }
                // rslock waits for the stopped node, twice for half a second with each lock.
                let is_slow = who == Who::Rslock && !healthy;
                let least = if is_slow { SLOW } else { Duration::ZERO };
                for concurrency in CONCURRENCIES {
                    let time = options.time.max(least);
                    let figures = measure(&participant, concurrency, time).await;
                    samples.push(&fault.label(healthy, concurrency), who, figures);
                    flush(&cluster);
                }
            }
            drop(participant);
            (fault.mend)(last(&mut cluster));
            // The node processes the commands that were sent while it was stopped.
            sleep(SETTLING).await;
        }
    }
    let mut lines = Vec::new();
    for concurrency in CONCURRENCIES {
        let [before, after] = [true, false].map(|healthy| fault.label(healthy, concurrency));
        print_figures(&before, samples);
        print_figures(&after, samples);
        for who in [Who::Ours, Who::OursFenced] {
            let ratios = |metric| {
                let before = samples.of(&before, who, metric);
                quotients(&samples.of(&after, who, metric), &before)
            };
            let what = |what| {
                format!(
                    "{} c={concurrency} {what}, {}, x healthy",
                    fault.name,
                    who.short()
                )
            };
            let p99 = ratios(Metric::AcquireP99);
            lines.push(Line::new(what("acquire p99"), Target::AtMost(2.0), p99));
            let rate = ratios(Metric::Rate);
            lines.push(Line::new(what("locks/s"), Target::AtLeast(0.8), rate));
        }
    }
    lines
}

impl Fault {
    fn label(&self, healthy: bool, concurrency: usize) -> String {
        let state = if healthy { "healthy" } else { self.state };
        format!("{}, {state}, c={concurrency}", self.name)
    }
}

/// Deletes the fences, which would fill the memory of the nodes.
pub(crate) fn flush(cluster: &Cluster) {
    for server in cluster.servers.iter().filter(|server| server.is_running()) {
        server.command(&["FLUSHALL"]);
    }
}

fn last(cluster: &mut Cluster) -> &mut RedisServer {
    cluster.servers.last_mut().expect("there are five")
}

const CONCURRENCIES: [usize; 2] = [1, 64];

const SLOW: Duration = Duration::from_millis(2500);

const SETTLING: Duration = Duration::from_millis(500);
