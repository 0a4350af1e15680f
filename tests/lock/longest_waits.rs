//! How long a caller waits beside a stream of others that are easier to serve.

use std::env;
use std::time::Duration;

use support::{ms, secs};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tower_redlock::{LockKey, LockRequest, Redlock};

use crate::groups::{builder, with_keys};

type Request = fn(&Redlock, &[LockKey]) -> LockRequest;

/// What waits, and what the others ask for: one of the two keys each.
const CASES: [(&str, Request, fn(&Redlock, &LockKey) -> LockRequest); 2] = [
    (
        "a set over two groups",
        |redlock, keys| redlock.lock_all(keys),
        |redlock, key| redlock.lock(key),
    ),
    (
        "one of 4 slots",
        |redlock, keys| redlock.lock(&keys[0]).slots(4),
        |redlock, key| redlock.lock(key).slots(4),
    ),
];

const HOLD: Duration = ms(100);

/// Each key is wanted by half of them at any time.
const OTHERS: usize = 16;

/// Returns the waits of so many calls, the shortest first. The others are in the process of the caller, or in four more.
async fn waits(runs: u64, case: usize, processes: usize) -> Vec<Duration> {
    let (_, request, other) = CASES[case];
    let (groups, redlock, keys) = with_keys::<2>().await;
    let mut stream = JoinSet::new();
    let others: Vec<Redlock> = match processes {
        1 => vec![redlock.clone()],
        _ => (0..processes)
            .map(|_| builder(&groups).build().unwrap())
            .collect(),
    };
    for number in 0..OTHERS {
        let redlock = others[number % others.len()].clone();
        let key = keys[number / others.len() % 2].clone();
        stream.spawn(async move {
            loop {
                let guard = other(&redlock, &key).wait(secs(60)).await.unwrap();
                sleep(HOLD).await;
                guard.release().await.unwrap();
            }
        });
    }
    let mut waits = Vec::new();
    for run in 0..runs {
        sleep(ms(500 + run * 7)).await;
        let asked = Instant::now();
        let guard = request(&redlock, &keys).wait(secs(60)).await.unwrap();
        waits.push(asked.elapsed());
        guard.release().await.unwrap();
    }
    stream.shutdown().await;
    waits.sort();
    waits
}

/// `WAITS` asks for more calls, and prints their waits.
#[tokio::test(start_paused = true)]
async fn caller_beside_a_stream_of_others_is_granted() {
    let runs = env::var("WAITS").ok();
    let runs = runs.map_or(3, |runs| runs.parse().unwrap());
    let beside = [
        (0, 1, "others of its process", secs(2)),
        (0, 4, "others of four processes", secs(60)),
        (1, 1, "others of its process", ms(200)),
    ];
    for (case, processes, others, bound) in beside {
        let waits = waits(runs, case, processes).await;
        let (median, longest) = (waits[waits.len() / 2], waits[waits.len() - 1]);
        let what = CASES[case].0;
        println!("{what}, beside {others}: {median:?}, at most {longest:?}");
        assert!(longest <= bound, "{what}, {others}: {waits:?}");
    }
}
