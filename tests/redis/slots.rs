//! Slots on real servers: many clients of two processes, and never more of them inside than there are slots.

use std::future::IntoFuture;
use std::time::Duration;

use support::{Cluster, assert_matches, ms, secs};
use tokio::time::{Instant, sleep};
use tower_redlock::{LockError, Retry};

use crate::judge::{Inside, Judge, ROLE, urls};
use crate::patient;

const SLOTS: usize = 5;
const CLIENTS: usize = 100;
const HOLD: Duration = ms(100);

/// The clients of one process: each waits for a slot, holds it for a moment, and waits again, until it is killed.
#[tokio::test]
#[ignore = "it is a client process of the test below, which starts and ends it"]
async fn clients() {
    let name = std::env::var(ROLE).unwrap();
    let redlock = patient::builder(urls()).build().unwrap();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let (redlock, name) = (redlock.clone(), format!("{name}-{number}"));
            tokio::spawn(async move {
                loop {
                    let lock = redlock.lock("hall").slots(SLOTS);
                    match lock.wait(secs(60)).await {
                        Ok(guard) => {
                            let inside = Inside::begin(&name);
                            sleep(HOLD).await;
                            drop(inside);
                            assert!(guard.is_valid());
                            drop(guard);
                        }
                        Err(LockError::Contended { .. }) => {}
                        Err(error) => eprintln!("{error}"),
                    }
                }
            })
        })
        .collect();
    futures_util::future::join_all(clients).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_clients_of_two_processes_use_five_slots_and_never_six() {
    let cluster = Cluster::start(3);
    let judge = Judge::start().await;
    let processes =
        ["a", "b"].map(|name| judge.start_process(name, "slots::clients", &cluster.urls()));
    // Each has connected to all nodes, and waits.
    while judge.seen.lock().unwrap().turns.len() < 50 {
        sleep(ms(10)).await;
    }
    judge.seen.lock().unwrap().restart();
    let calls = |cluster: &Cluster| {
        let counts = cluster.servers.iter().map(|server| server.call_counts());
        let acquisitions = counts.map(|counts| counts.get("evalsha").copied().unwrap_or(0));
        acquisitions.sum::<u64>()
    };
    let (began, before) = (Instant::now(), calls(&cluster));
    sleep(secs(4)).await;
    let (average, after) = (judge.average(began), calls(&cluster));
    drop(processes);
    let seen = judge.seen.lock().unwrap();
    let turns = seen.turns.len();
    println!(
        "{turns} turns of {} clients in {:?}, on average {average} / 100 inside, {} scripts on each node for ten turns",
        seen.begun.len(),
        began.elapsed(),
        10 * (after - before) / 3 / u64::try_from(turns).unwrap()
    );
    assert_eq!(seen.most, SLOTS);
    // 4.8 on an idle machine. The slots are not left free while clients wait.
    assert!(average > 400, "{average}");
    assert!(turns > 80, "{turns}");
    for process in ["a", "b"] {
        let of_it = seen.begun.keys().filter(|name| name.starts_with(process));
        assert!(of_it.count() > CLIENTS / 10, "{:?}", seen.begun);
    }
}

/// Each number has its place in the answer of a server, also at the ends of what fits into one number.
#[tokio::test]
async fn the_only_free_slot_is_found_whatever_its_number() {
    const ALL: usize = 64;
    let cluster = Cluster::start(1);
    let [holder, other] = [(); 2].map(|()| patient::builder(cluster.urls()).build().unwrap());
    let mut held = Vec::new();
    for _ in 0..ALL {
        held.push(holder.try_lock("hall").slots(ALL).await.unwrap());
    }
    for slot in [0, 1, 31, 32, 52, 53, 62, 63] {
        let place = held.iter().position(|guard| guard.slot() == Some(slot));
        held.swap_remove(place.unwrap()).release().await.unwrap();
        // The first request is for a slot at random.
        for _ in 0..4 {
            let guard = other.try_lock("hall").slots(ALL).await.unwrap();
            assert_eq!(guard.slot(), Some(slot));
            guard.release().await.unwrap();
        }
        held.push(holder.try_lock("hall").slots(ALL).await.unwrap());
    }
}

/// Each has a channel of its own, to which the process subscribes apart.
#[tokio::test]
async fn a_waiter_for_a_slot_is_woken_after_one_for_a_key_that_looks_like_it_has_gone() {
    let cluster = Cluster::start(3);
    let hour = secs(3_600);
    let [holder, waiter] = [(); 2].map(|()| {
        let builder = patient::builder(cluster.urls()).ttl(secs(60));
        let builder = builder.retry(Retry::default().poll_interval(hour));
        builder.build().unwrap()
    });
    let slot = holder.lock("k").slots(1).await.unwrap();
    let key = holder.lock(("k", "slot")).await.unwrap();
    let waiting = waiter.lock("k").slots(1).wait(secs(30));
    let waiting = tokio::spawn(waiting.into_future());
    sleep(ms(500)).await;
    let refused = waiter.lock(("k", "slot")).wait(ms(300)).await;
    assert_matches!(refused, Err(LockError::Contended { .. }));
    sleep(ms(300)).await;
    let released = Instant::now();
    slot.release().await.unwrap();
    drop(waiting.await.unwrap().unwrap());
    // On an idle machine 30 ms; a poll would come after its wait.
    assert!(released.elapsed() < secs(10), "{:?}", released.elapsed());
    drop(key);
}
