//! The memory of a held lock and of a waiter, and the time of a lock beside many others.
//!
//! ```not_rust
//! cargo bench -p benches --bench scale
//! ```
//!
//! runs on embedded nodes, so that it measures this process and no servers. Each time is the best of several;
//! times are compared within one run.

#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::env;
use std::fs;
use std::future::IntoFuture;
use std::process::Command;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::task::{JoinSet, yield_now};
use tokio::time::Instant;
use tower_redlock::{LockGuard, Redlock};

fn main() {
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("the runtime starts");
    runtime.block_on(async {
        match env::args().nth(1).as_deref() {
            Some("held") => {
                let bytes = held().await;
                println!(
                    "a held lock: {bytes} bytes, including its keys on {NODES} embedded nodes"
                );
            }
            Some("waiting") => {
                let bytes = waiting().await;
                println!("a waiter, one of {MANY} on {KEYS} keys: {bytes} bytes");
            }
            _ => {
                // In a process of its own, without memory of an earlier measurement.
                for what in ["held", "waiting"] {
                    in_a_process_of_its_own(what);
                }
                beside_others().await;
                over_nodes().await;
            }
        }
    });
}

fn in_a_process_of_its_own(what: &str) {
    let program = env::current_exe().expect("the path of this program");
    let ended = Command::new(program).arg(what).status();
    assert!(ended.expect("the program starts").success());
}

async fn held() -> u64 {
    let redlock = service(NODES);
    drop(hold(&redlock, 1_000).await);
    let before = resident();
    let guards = hold(&redlock, MANY).await;
    let per_lock = (resident() - before) / MANY;
    drop(guards);
    settle(&redlock).await;
    per_lock
}

async fn waiting() -> u64 {
    let redlock = service(NODES);
    let guards = hold(&redlock, KEYS).await;
    let before = resident();
    let mut waiting = JoinSet::new();
    for number in 0..MANY {
        let asked = redlock.lock(name(number % KEYS)).wait(LONG);
        waiting.spawn(asked.into_future());
    }
    for _ in 0..10 {
        yield_now().await;
    }
    let per_waiter = (resident() - before) / MANY;
    let began = Instant::now();
    drop(guards);
    while let Some(granted) = waiting.join_next().await {
        let granted = granted
            .expect("no task panics")
            .expect("the queue moves on");
        drop(granted);
    }
    let each = began.elapsed() / u32::try_from(MANY).unwrap_or(u32::MAX);
    println!("the queue serves them one after the other: {each:?} each");
    per_waiter
}

async fn beside_others() {
    let redlock = service(NODES);
    let mut guards = Vec::new();
    for number in [1, 10, 100, 1_000, 10_000, MANY] {
        while (guards.len() as u64) < number {
            guards.extend(hold_from(&redlock, guards.len() as u64, 1).await);
        }
        println!(
            "a lock beside {number} held ones: {:?}",
            cycle(&redlock).await
        );
    }
}

async fn over_nodes() {
    for nodes in [1, 3, 5, 7, 9] {
        let took = cycle(&service(nodes)).await;
        let nodes_u32 = u32::try_from(nodes).unwrap_or(u32::MAX);
        println!(
            "a lock over {nodes} nodes: {took:?}, {:?} a node",
            took / nodes_u32
        );
    }
}

/// Returns the time of a lock from the request to the confirmed release.
async fn cycle(redlock: &Redlock) -> Duration {
    const LOCKS: u32 = 2_000;
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let began = Instant::now();
        for _ in 0..LOCKS {
            let guard = redlock.try_lock("measured").await;
            let released = guard.expect("the lock is free").release().await;
            released.expect("embedded nodes always answer");
        }
        best = best.min(began.elapsed() / LOCKS);
    }
    best
}

async fn hold(redlock: &Redlock, count: u64) -> Vec<LockGuard> {
    hold_from(redlock, 0, count).await
}

async fn hold_from(redlock: &Redlock, first: u64, count: u64) -> Vec<LockGuard> {
    let mut guards = Vec::new();
    for number in first..first + count {
        // A minority of the nodes may not have released an earlier lock yet.
        let guard = redlock.lock(name(number)).wait(LONG).await;
        guards.push(guard.expect("the lock is free"));
    }
    guards
}

async fn settle(redlock: &Redlock) {
    let drained = redlock.drain(LONG).await;
    assert!(drained.is_clean(), "{drained:?}");
}

fn service(nodes: usize) -> Redlock {
    // No renewal falls into the measurement.
    let builder = Redlock::builder().embedded(nodes).ttl(LONG);
    builder.build().expect("the settings are valid")
}

fn name(number: u64) -> String {
    format!("account {number}")
}

/// Returns the resident memory of this process in bytes.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("this runs on Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.expect("the kernel reports it") * 1_024
}

const NODES: usize = 5;
const MANY: u64 = 100_000;
const KEYS: u64 = 1_000;
/// Longer than the benchmark runs.
const LONG: Duration = Duration::from_secs(600);
