//! What a lock that is held and a call that waits cost in memory, and what a lock costs in time beside many.
//!
//! ```not_rust
//! cargo bench --bench scale
//! ```
//!
//! runs on embedded nodes: what is measured is this process, not the servers. Times are compared inside one
//! run, each the best of several.

#![allow(
    clippy::print_stdout,
    reason = "a benchmark is there to print its figures"
)]

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
    let runtime = runtime.expect("a runtime can be started");
    runtime.block_on(async {
        match env::args().nth(1).as_deref() {
            Some("held") => {
                let bytes = held().await;
                println!("a held lock: {bytes} bytes, with its keys on {NODES} embedded nodes");
            }
            Some("waiting") => {
                let bytes = waiting().await;
                println!("a call that waits, of {MANY} on {KEYS} keys: {bytes} bytes");
            }
            _ => {
                // Each in a process of its own, which has no memory left over from another.
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
    let program = env::current_exe().expect("this program is there");
    let ended = Command::new(program).arg(what).status();
    assert!(ended.expect("it can be started").success());
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
        let granted = granted.expect("no task panics").expect("its turn comes");
        drop(granted);
    }
    let each = began.elapsed() / u32::try_from(MANY).unwrap_or(u32::MAX);
    println!("their turns come one after the other: {each:?} each");
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

/// Returns how long a lock takes from the question to the confirmed release.
async fn cycle(redlock: &Redlock) -> Duration {
    const LOCKS: u32 = 2_000;
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let began = Instant::now();
        for _ in 0..LOCKS {
            let guard = redlock.try_lock("measured").await;
            let released = guard.expect("nobody else wants it").release().await;
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
        // It may have been held before, and not be released everywhere yet.
        let guard = redlock.lock(name(number)).wait(LONG).await;
        guards.push(guard.expect("nobody keeps it"));
    }
    guards
}

async fn settle(redlock: &Redlock) {
    let drained = redlock.drain(LONG).await;
    assert!(drained.is_clean(), "{drained:?}");
}

fn service(nodes: usize) -> Redlock {
    // Nothing is renewed while it is measured.
    let builder = Redlock::builder().embedded(nodes).ttl(LONG);
    builder.build().expect("the settings make sense")
}

fn name(number: u64) -> String {
    format!("account {number}")
}

/// Returns how many bytes of memory this process has.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("this runs on Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.expect("the kernel says so") * 1_024
}

const NODES: usize = 5;
const MANY: u64 = 100_000;
const KEYS: u64 = 1_000;
/// Longer than this takes.
const LONG: Duration = Duration::from_secs(600);
