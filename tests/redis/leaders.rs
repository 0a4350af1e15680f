//! Leaders on real servers: three processes, of which one leads, while they are killed, stopped and drained.

use std::future::IntoFuture;
use std::time::Duration;

use nix::sys::signal::Signal;
use support::{ChildProcess, Cluster, Random, ms, secs, wait_until};
use tokio::time::{Instant, sleep, timeout};
use tower_redlock::{LockGuard, Retry};

use crate::judge::{Inside, Judge, ROLE, urls};
use crate::patient;

const TTL: Duration = secs(2);

/// How long the test runs. Longer by `LEADERS_SECONDS`.
const DEFAULT: u64 = 8;

/// One process: leads when it may, until it is told to drain or is killed.
#[tokio::test]
#[ignore = "it is a candidate process of the tests below, which start and kill it"]
async fn candidate() {
    let name = std::env::var(ROLE).unwrap();
    let redlock = patient::builder(urls()).ttl(TTL).build().unwrap();
    let leading = tokio::spawn(redlock.lead("dispatcher", move |guard: LockGuard| {
        let name = name.clone();
        async move {
            assert!(guard.is_valid());
            let _inside = Inside::begin(&name);
            // Until it is cancelled.
            std::future::pending::<()>().await;
        }
    }));
    let mut terminate =
        tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()).unwrap();
    println!("ready");
    terminate.recv().await;
    println!("draining");
    let drained = redlock.drain(secs(5)).await;
    leading.await.unwrap().unwrap();
    println!("drained: {}", drained.is_clean());
}

fn candidate_process(judge: &Judge, cluster: &Cluster, number: usize) -> (String, ChildProcess) {
    let name = format!("candidate-{number}");
    let process = judge.start_process(&name, "leaders::candidate", &cluster.urls());
    process.wait_for_line("ready", secs(20));
    (name, process)
}

/// Waits for a leader other than the one with this name, and returns its name.
async fn next_leader(judge: &Judge, not: &str, within: Duration) -> Option<String> {
    let next = async {
        loop {
            let leader = judge.seen.lock().unwrap().inside.last().cloned();
            if let Some(leader) = leader.filter(|leader| leader != not) {
                return leader;
            }
            sleep(ms(5)).await;
        }
    };
    timeout(within, next).await.ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_three_processes_leads_while_leaders_are_killed_and_drained() {
    let cluster = Cluster::start(3);
    let judge = Judge::start().await;
    let seconds = std::env::var("LEADERS_SECONDS").map_or(DEFAULT, |text| text.parse().unwrap());
    let mut random = Random(7);
    let mut candidates: Vec<_> = (0..3)
        .map(|number| candidate_process(&judge, &cluster, number))
        .collect();
    let began = Instant::now();
    let mut leader = next_leader(&judge, "", secs(10)).await.unwrap();
    let (mut started, mut kills, mut drains) = (3, Vec::new(), Vec::new());
    while began.elapsed() < secs(seconds) {
        sleep(ms(random.below(500))).await;
        let place = candidates.iter().position(|(name, _)| *name == leader);
        let (_, mut process) = candidates.swap_remove(place.unwrap());
        let is_kill = random.below(2) == 0;
        let at = Instant::now();
        // A busy machine may add something.
        let (signal, patience) = match is_kill {
            true => (Signal::SIGKILL, TTL + secs(4)),
            false => (Signal::SIGTERM, secs(3)),
        };
        process.signal(signal);
        let next = next_leader(&judge, &leader, patience).await;
        let took = at.elapsed();
        leader = next.unwrap_or_else(|| panic!("no leader after {took:?}, killed: {is_kill}"));
        if is_kill { &mut kills } else { &mut drains }.push(took);
        process.wait(secs(10));
        let told = process.stdout();
        assert!(is_kill || told.contains("drained: true"), "{told}");
        candidates.push(candidate_process(&judge, &cluster, started));
        started += 1;
    }
    let seen = judge.seen.lock().unwrap();
    println!(
        "{} terms in {:?}; next leader after {} kills within {:?}, after {} drains within {:?}",
        seen.turns.len(),
        began.elapsed(),
        kills.len(),
        kills.iter().max(),
        drains.len(),
        drains.iter().max()
    );
    assert_eq!(seen.most, 1);
    assert!(!kills.is_empty() && !drains.is_empty());
}

/// A stopped leader is deposed, and when it goes on it does no more work than it had begun.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_was_stopped_is_deposed_and_becomes_a_candidate_again() {
    let cluster = Cluster::start(3);
    let judge = Judge::start().await;
    let candidates: Vec<_> = (0..2)
        .map(|number| candidate_process(&judge, &cluster, number))
        .collect();
    let first = next_leader(&judge, "", secs(10)).await.unwrap();
    let (_, stopped) = candidates.iter().find(|(name, _)| *name == first).unwrap();
    stopped.signal(Signal::SIGSTOP);
    let second = next_leader(&judge, &first, TTL + secs(4)).await;
    let second = second.expect("the other process leads");
    stopped.signal(Signal::SIGCONT);
    // Its work is dropped before it is polled again, and tells the judge so.
    wait_until("deposed", secs(5), || {
        judge.seen.lock().unwrap().inside == [second.clone()]
    })
    .await;
    let (_, other) = candidates.iter().find(|(name, _)| *name == second).unwrap();
    other.signal(Signal::SIGTERM);
    let again = next_leader(&judge, &second, secs(5)).await;
    assert_eq!(again.as_deref(), Some(first.as_str()));
}

/// One process that campaigns and watches twice: each has the releases of the key.
#[tokio::test]
async fn watches_take_no_wake_up_from_a_caller_that_waits_nor_from_each_other() {
    let cluster = Cluster::start(3);
    let [holder, redlock] = [(); 2].map(|()| {
        let builder = patient::builder(cluster.urls()).ttl(secs(60));
        let builder = builder.retry(Retry::default().poll_interval(secs(60)));
        builder.build().unwrap()
    });
    let guard = holder.lock("k").await.unwrap();
    let waiting = redlock.lock("k").wait(secs(50));
    let waiting = tokio::spawn(waiting.into_future());
    sleep(ms(500)).await;
    let mut watches = [redlock.leader("k"), redlock.leader("k")];
    let mut first = Vec::new();
    for watch in &mut watches {
        first.push(watch.changed().await.unwrap());
    }
    assert!(first[0].is_some() && first[0] == first[1], "{first:?}");
    // Ends one of three subscriptions of the process to the key.
    drop(redlock.leader("k").changed().await.unwrap());
    let hearing = watches.map(|mut watch| tokio::spawn(async move { watch.changed().await }));
    sleep(ms(500)).await;
    guard.release().await.unwrap();
    let soon = secs(20);
    let granted = timeout(soon, waiting).await.expect("it is woken");
    assert!(granted.unwrap().is_ok());
    for heard in hearing {
        let heard = timeout(soon, heard).await.expect("it is woken");
        assert!(heard.unwrap().unwrap() != first[0]);
    }
}
