//! Uncontended locks: one after the other, many concurrently, on five nodes and on one.

use std::time::Duration;

use futures_util::future::join_all;
use nix::sys::resource::{UsageWho, getrusage};
use support::{Cluster, Proxy, RedisServer};
use tokio::time::{Instant, sleep};

use crate::figures::{Figures, Metric, Samples, micros, percentile};
use crate::options::Options;
use crate::participants::{Participant, Who};
use crate::report::{Line, Target, print_figures};
use crate::same::NODES;

pub(crate) async fn w1(options: &Options, samples: &mut Samples) -> Vec<Line> {
    let name = at_once(1);
    let cluster = Cluster::start(NODES);
    let urls = cluster.urls();
    compare(options, samples, &[(name.clone(), 1)], &cluster, &urls).await;
    let pairs = [
        (Who::Ours, Who::ByHand),
        (Who::OursFenced, Who::ByHandFenced),
    ];
    let lines = pairs.map(|(who, to)| {
        let what = format!("W1 acquire p50, {}, x {}", who.short(), to.name());
        let times = samples.ratios(&name, Metric::AcquireP50, who, to);
        Line::new(what, Target::AtMost(1.05), times)
    });
    let mut lines = Vec::from(lines);
    lines.push(elsewhere("W1", &name, Metric::AcquireP50, samples));
    lines
}

/// Returns what a runtime of its own costs.
fn elsewhere(workload: &str, name: &str, metric: Metric, samples: &Samples) -> Line {
    let (who, to) = (Who::OursElsewhere, Who::Ours);
    let (metric_name, who_name) = (metric.title(), who.short());
    let what = format!("{workload} {metric_name}, {who_name}, x {}", to.name());
    Line::without_target(what, samples.ratios(name, metric, who, to))
}

pub(crate) async fn w2(options: &Options, samples: &mut Samples) -> Vec<Line> {
    let loads = W2_TARGETS.map(|(concurrency, _)| (at_once(concurrency), concurrency));
    let cluster = Cluster::start(NODES);
    compare(options, samples, &loads, &cluster, &cluster.urls()).await;
    let mut lines = Vec::new();
    for (name, concurrency) in &loads {
        let workload = format!("W2 c={concurrency}");
        lines.push(elsewhere(&workload, name, Metric::Rate, samples));
    }
    for (who, column) in [(Who::Ours, 0), (Who::OursFenced, 1)] {
        for (concurrency, targets) in W2_TARGETS {
            // Both columns relate to one loop, so that the costs of fences count, too.
            let what = format!(
                "W2 c={concurrency} locks/s, {}, x by hand without fencing",
                who.short()
            );
            let rates = samples.ratios(&at_once(concurrency), Metric::Rate, who, Who::ByHand);
            lines.push(Line::new(what, Target::AtLeast(targets[column]), rates));
        }
    }
    for (who, ceiling, least) in [
        (Who::Ours, Who::Batched, 3.0),
        (Who::OursFenced, Who::BatchedFenced, 1.9),
    ] {
        let ratios = |metric, to| samples.ratios(&at_once(64), metric, who, to);
        let what = |metric, to: Who| format!("W2 c=64 {metric}, {}, x {}", who.short(), to.name());
        lines.push(Line::new(
            what("locks/s", Who::Rslock),
            Target::AtLeast(least),
            ratios(Metric::Rate, Who::Rslock),
        ));
        lines.push(Line::new(
            what("client CPU per lock", ceiling),
            Target::AtMost(1.6),
            ratios(Metric::ClientCpu, ceiling),
        ));
        lines.push(Line::without_target(
            what("locks/s", ceiling),
            ratios(Metric::Rate, ceiling),
        ));
    }
    lines
}

pub(crate) async fn w6(options: &Options, samples: &mut Samples) -> Vec<Line> {
    let loads = [1, 64].map(|concurrency| (format!("one node, c={concurrency}"), concurrency));
    let cluster = Cluster::start(1);
    compare(options, samples, &loads, &cluster, &cluster.urls()).await;
    Vec::new()
}

/// Runs over a slow network, where the number of pipelines on the wire matters.
pub(crate) async fn far(options: &Options, samples: &mut Samples) -> Vec<Line> {
    let cluster = Cluster::start(NODES);
    let servers = cluster.servers.iter();
    let proxies = join_all(servers.map(|server| Proxy::start(server.addr()))).await;
    let urls: Vec<_> = proxies.iter().map(Proxy::url).collect();
    let mut lines = Vec::new();
    for millis in [1, 20] {
        for proxy in &proxies {
            proxy.delay(Duration::from_millis(millis));
        }
        let loads = [16, 256].map(|concurrency| {
            let name = format!("{millis} ms away, c={concurrency}");
            (name, concurrency)
        });
        compare(options, samples, &loads, &cluster, &urls).await;
        for (name, _) in &loads {
            for (who, to) in [
                (Who::Ours, Who::ByHand),
                (Who::OursFenced, Who::ByHandFenced),
            ] {
                let what = format!("{name}: locks/s, {}, x {}", who.name(), to.name());
                let rates = samples.ratios(name, Metric::Rate, who, to);
                lines.push(Line::new(what, Target::AtLeast(1.0), rates));
            }
        }
    }
    lines
}

/// Counts the commands that the servers received.
pub(crate) async fn commands(options: &Options, samples: &mut Samples) -> Vec<Line> {
    let cluster = Cluster::start(NODES);
    let name = "sequential locks";
    let mut lines = Vec::new();
    for who in Who::ALL {
        let participant = who.connect(&cluster.urls()).await;
        warm_up(&participant, 1).await;
        for round in 0..options.rounds {
            // Wait for commands that a minority has not received yet.
            sleep(Duration::from_millis(100)).await;
            reset_counts(&cluster);
            for lock in 0..COUNTED {
                let held = participant
                    .acquire(&format!("counted-{round}-{lock}"))
                    .await;
                let held = held.expect("the lock is free");
                participant.release(held).await;
            }
            sleep(Duration::from_millis(100)).await;
            let sent = commands_sent(&cluster, who) as f64 / COUNTED as f64;
            samples.push(name, who, Figures::from([(Metric::Commands, sent)]));
        }
        if matches!(who, Who::Ours | Who::OursFenced) {
            let counts = samples.of(name, who, Metric::Commands);
            // Take the highest count: on a busy machine a lock may be decided before all nodes got its command.
            let most = counts.into_iter().fold(0.0, f64::max);
            let what = format!("commands per lock, {}", who.name());
            lines.push(Line::new(
                what,
                Target::Exactly((2 * NODES) as f64),
                vec![most],
            ));
        }
    }
    print_figures(name, samples);
    lines
}

/// Runs all participants in rounds.
async fn compare(
    options: &Options,
    samples: &mut Samples,
    loads: &[(String, usize)],
    cluster: &Cluster,
    urls: &[String],
) {
    let mut participants = Vec::new();
    for who in Who::ALL {
        let participant = who.connect(urls).await;
        warm_up(&participant, 64).await;
        participants.push((who, participant));
    }
    for (name, concurrency) in loads {
        for _ in 0..options.rounds {
            fastrand::shuffle(&mut participants);
            for (who, participant) in &participants {
                let figures = measure_cpu(cluster, participant, *concurrency, options.time).await;
                samples.push(name, *who, figures);
                // The fences would fill the memory of the nodes.
                for server in &cluster.servers {
                    server.command(&["FLUSHALL"]);
                }
            }
        }
        print_figures(name, samples);
    }
}

/// Opens connections, loads scripts and warms the code paths before a measurement.
pub(crate) async fn warm_up(participant: &Participant, concurrency: usize) {
    measure(participant, concurrency, Duration::from_millis(100)).await;
}

/// Measures, and adds the CPU time.
async fn measure_cpu(
    cluster: &Cluster,
    participant: &Participant,
    concurrency: usize,
    time: Duration,
) -> Figures {
    let (servers, own) = (servers_cpu(cluster), own_cpu());
    let (mut figures, locks) = run(participant, concurrency, time).await;
    figures.insert(Metric::ClientCpu, (own_cpu() - own) * 1e6 / locks as f64);
    let servers = servers_cpu(cluster) - servers;
    figures.insert(Metric::ServerCpu, servers * 1e6 / locks as f64);
    figures
}

/// Returns the CPU seconds of this process so far.
pub(crate) fn own_cpu() -> f64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("a process may read its own usage");
    [usage.user_time(), usage.system_time()]
        .into_iter()
        .map(|time| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6)
        .sum()
}

fn servers_cpu(cluster: &Cluster) -> f64 {
    cluster.servers.iter().map(RedisServer::cpu_seconds).sum()
}

/// Measures tasks that take one lock after the other, each time of another key.
pub(crate) async fn measure(
    participant: &Participant,
    concurrency: usize,
    time: Duration,
) -> Figures {
    run(participant, concurrency, time).await.0
}

/// Returns the figures, and the number of all locks: the first locks do not count in the figures.
pub(crate) async fn run(
    participant: &Participant,
    concurrency: usize,
    time: Duration,
) -> (Figures, u64) {
    // The first locks run on empty queues and idle cores, and do not count.
    let began = Instant::now() + time / 8;
    let end = began + time;
    let tasks = (0..concurrency).map(|task| {
        let participant = participant.clone();
        tokio::spawn(async move {
            let (mut times, mut locks, mut errors) = (Vec::new(), 0_u64, 0_u64);
            let mut asked = Instant::now();
            while asked < end {
                let key = format!("bench-{task}-{}", locks + errors);
                asked = Instant::now();
                let Some(held) = participant.acquire(&key).await else {
                    errors += 1;
                    continue;
                };
                let took = asked.elapsed();
                if !participant.release(held).await {
                    errors += 1;
                }
                locks += 1;
                if asked >= began {
                    times.push(took);
                }
                asked = Instant::now();
            }
            (times, locks, errors)
        })
    });
    let done = join_all(tasks).await;
    let took = began.elapsed();
    let (mut times, mut locks, mut errors) = (Vec::new(), 0, 0);
    for task in done {
        let (own, taken, failed) = task.expect("no task panics");
        times.extend(own);
        locks += taken;
        errors += failed;
    }
    let figures = Figures::from([
        (Metric::Rate, times.len() as f64 / took.as_secs_f64()),
        (Metric::AcquireP50, micros(percentile(&mut times, 50))),
        (Metric::AcquireP99, micros(percentile(&mut times, 99))),
        (Metric::Errors, errors as f64),
    ]);
    (figures, locks)
}

/// Resets the servers' counts of commands.
pub(crate) fn reset_counts(cluster: &Cluster) {
    for server in &cluster.servers {
        server.command(&["CONFIG", "RESETSTAT"]);
    }
}

/// Returns the commands that a participant has sent, and the messages that its scripts have published.
///
/// The servers also count the commands of scripts, so this counts only commands that clients send.
pub(crate) fn commands_sent(cluster: &Cluster, who: Who) -> u64 {
    let counts = cluster.servers.iter().map(|server| server.call_counts());
    counts
        .flatten()
        .filter(|(name, _)| {
            // With fencing, scripts call `SET`.
            SENT.contains(&name.as_str()) || (name == "set" && !who.is_fenced())
        })
        .map(|(_, count)| count)
        .sum()
}

pub(crate) fn at_once(concurrency: usize) -> String {
    format!("{NODES} nodes, c={concurrency}")
}

/// The locks that are taken to count their commands.
const COUNTED: u64 = 200;

const SENT: [&str; 10] = [
    "eval",
    "evalsha",
    "fcall",
    "ping",
    "publish",
    "spublish",
    "ssubscribe",
    "subscribe",
    "sunsubscribe",
    "unsubscribe",
];

/// The target ratios for each number of concurrent locks, with fencing off and on.
const W2_TARGETS: [(usize, [f64; 2]); 3] =
    [(16, [1.45, 0.9]), (64, [1.8, 1.2]), (256, [2.6, 1.35])];
