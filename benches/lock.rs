//! Acquiring and releasing an uncontended lock on five real local nodes, next to `rslock`.
//!
//! ```not_rust
//! cargo bench -p benches --bench lock
//! ```
//!
//! starts the servers itself. After criterion's groups it prints a table of medians and ratios. The
//! contenders run one after the other in rounds, in an order that changes from round to round, so that
//! a machine that becomes slower affects all of them alike. `REDLOCK_BENCH_ROUNDS` sets the number of
//! rounds (default 7).

#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::env;
use std::sync::Arc;
use std::time::Duration;

use criterion::{Criterion, Throughput};
use futures_util::future::join_all;
use rslock::LockManager;
use support::Cluster;
use tokio::runtime::Runtime;
use tokio::time::Instant;
use tower_redlock::{Redlock, RestartGuard};

const NODES: usize = 5;
const CONCURRENCIES: [usize; 2] = [1, 64];

/// The locks that each task takes in a round of the table.
const OPS: [usize; 2] = [400, 50];

const TTL: Duration = Duration::from_secs(10);

/// Long, so that locks on a busy machine are slow instead of failing.
const NODE_TIMEOUT: Duration = Duration::from_secs(2);

/// The measured implementations.
#[derive(Clone)]
enum Contender {
    Ours(Redlock),
    Rslock(LockManager),
}

impl Contender {
    async fn acquire_and_release(&self, key: &str) {
        match self {
            Self::Ours(redlock) => {
                let guard = redlock.try_lock(key).await.expect("the lock is free");
                guard.release().await.expect("all nodes answer");
            }
            Self::Rslock(manager) => {
                let lock = manager.lock(key.as_bytes(), TTL).await;
                manager.unlock(&lock.expect("the lock is free")).await;
            }
        }
    }
}

struct Bench {
    runtime: Runtime,
    contenders: [(&'static str, Contender); 3],
    _cluster: Cluster,
}

impl Bench {
    fn start() -> Self {
        let runtime = Runtime::new().expect("the runtime starts");
        let cluster = Cluster::start(NODES);
        let ours = |fencing| {
            let builder = Redlock::builder().urls(cluster.urls()).fencing(fencing);
            let builder = builder.ttl(TTL).node_timeout(NODE_TIMEOUT);
            let built = builder.restart_guard(RestartGuard::Off).build();
            Contender::Ours(built.expect("the settings are valid"))
        };
        let contenders = [
            ("tower-redlock, fencing", ours(true)),
            ("tower-redlock, no fencing", ours(false)),
            (
                "rslock",
                Contender::Rslock(LockManager::new(cluster.urls())),
            ),
        ];
        let bench = Self {
            runtime,
            contenders,
            _cluster: cluster,
        };
        for (_, contender) in &bench.contenders {
            // Before the measurement, open connections, load scripts and warm the code paths.
            bench.measure(contender, 64, 20);
        }
        bench
    }

    /// Runs `concurrency` tasks that take `ops` locks each, on a key per task; returns the time of each lock,
    /// from the request to the confirmed release, and the total time.
    fn measure(
        &self,
        contender: &Contender,
        concurrency: usize,
        ops: usize,
    ) -> (Vec<Duration>, Duration) {
        self.runtime.block_on(async {
            let began = Instant::now();
            let tasks = (0..concurrency).map(|task| {
                let contender = contender.clone();
                let key: Arc<str> = format!("bench-{task}").into();
                tokio::spawn(async move {
                    let mut times = Vec::with_capacity(ops);
                    for _ in 0..ops {
                        let began = Instant::now();
                        contender.acquire_and_release(&key).await;
                        times.push(began.elapsed());
                    }
                    times
                })
            });
            let times = join_all(tasks).await.into_iter();
            let times = times.flat_map(|times| times.expect("no task panics"));
            (times.collect(), began.elapsed())
        })
    }

    fn groups(&self, criterion: &mut Criterion) {
        for concurrency in CONCURRENCIES {
            let name = format!("acquire+release, {NODES} nodes, {concurrency} at once");
            let mut group = criterion.benchmark_group(name);
            group.sample_size(20);
            group.warm_up_time(Duration::from_millis(500));
            group.measurement_time(Duration::from_secs(4));
            group.throughput(Throughput::Elements(concurrency as u64));
            for (name, contender) in &self.contenders {
                group.bench_function(*name, |bencher| {
                    bencher.iter_custom(|iterations| {
                        let ops = usize::try_from(iterations).expect("few iterations");
                        self.measure(contender, concurrency, ops).1
                    });
                });
            }
            group.finish();
        }
    }

    /// Prints the medians over all rounds, and the ratio to `rslock`.
    fn table(&self, rounds: usize) {
        println!("\nmedians of {rounds} interleaved rounds on {NODES} nodes, against rslock");
        println!(
            "{:>8}  {:<26} {:>12} {:>10} {:>9} {:>9}",
            "at once", "", "one lock", "locks/s", "latency", "locks/s"
        );
        for (concurrency, ops) in CONCURRENCIES.into_iter().zip(OPS) {
            let mut rows = self.contenders.each_ref().map(|_| (Vec::new(), Vec::new()));
            for round in 0..rounds {
                for contender in shuffled(round) {
                    let (_, which) = &self.contenders[contender];
                    let (times, total) = self.measure(which, concurrency, ops);
                    let rate = (concurrency * ops) as u128 * 1_000_000_000 / total.as_nanos();
                    rows[contender].0.push(median(times));
                    rows[contender].1.push(rate);
                }
            }
            let medians = rows.map(|(times, rates)| (median(times), median(rates)));
            let (their_time, their_rate) = medians[2];
            for ((name, _), (time, rate)) in self.contenders.iter().zip(medians) {
                println!(
                    "{concurrency:>8}  {name:<26} {time:>12.1?} {rate:>10} {:>9} {:>9}",
                    ratio(their_time.as_nanos(), time.as_nanos()),
                    ratio(rate, their_rate),
                );
            }
        }
    }
}

/// The contenders in an order that changes from round to round.
fn shuffled(round: usize) -> [usize; 3] {
    const ORDERS: [[usize; 3]; 6] = [
        [0, 1, 2],
        [2, 1, 0],
        [1, 2, 0],
        [0, 2, 1],
        [2, 0, 1],
        [1, 0, 2],
    ];
    ORDERS[round % ORDERS.len()]
}

fn median<T: Ord + Copy>(mut values: Vec<T>) -> T {
    values.sort_unstable();
    values[values.len() / 2]
}

/// Returns a quotient with two decimals.
fn ratio(of: u128, by: u128) -> String {
    let hundredths = of * 100 / by.max(1);
    format!("x{}.{:02}", hundredths / 100, hundredths % 100)
}

fn main() {
    // `cargo test -p benches --benches` only starts it.
    let is_bench = env::args().any(|arg| arg == "--bench");
    let rounds = env::var("REDLOCK_BENCH_ROUNDS").ok();
    let rounds = rounds.and_then(|rounds| rounds.parse().ok()).unwrap_or(7);
    let bench = Bench::start();
    let mut criterion = Criterion::default().configure_from_args();
    bench.groups(&mut criterion);
    criterion.final_summary();
    bench.table(if is_bench { rounds } else { 1 });
}
