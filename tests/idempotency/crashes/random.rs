//! Servers that are killed at random moments; `KILLS` sets how often.

use std::collections::BTreeMap;
use std::env;
use std::iter;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream;
use support::http::Client;
use support::{Cluster, ms};
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use crate::crashes::KEY;
use crate::crashes::server::{Effects, Setup, Survivor, Told, Victim};

/// How many payments ended how.
type Cases = BTreeMap<&'static str, usize>;

/// How a payment ends, as far as the layer can tell.
const DECIDED: [&str; 5] = [
    // By the server before it was killed.
    "answered",
    // Recorded by it, and replayed by others.
    "replayed",
    // First, or after it was killed before it had begun.
    "executed by others",
    // 409 `outcome-unknown`, whether it had executed or not: that cannot be told.
    "unknown, executed",
    "unknown, not executed",
];

/// Kills a server under some payments, which two others are sent as well.
async fn kill_one(number: u64, setup: &Setup, others: &[Survivor; 2]) -> Vec<Ended> {
    let mut random = fastrand::Rng::with_seed(number);
    let start = setup.clone();
    let started = spawn_blocking(move || Victim::start(&start)).await;
    let mut victim = started.expect("it starts");
    let keys: Vec<String> = (0..PAYMENTS).map(|of| format!("{number}-{of}")).collect();
    let clients = join_all(keys.iter().map(|_| Client::connect(victim.addr))).await;
    let dying = iter::zip(clients, &keys).map(|(mut client, key)| {
        let [before, after] = [(); 2].map(|()| soon(&mut random) / 4);
        let (path, key) = (
            format!("/payments?before_us={before}&after_us={after}"),
            key.clone(),
        );
        tokio::spawn(async move { client.try_request("POST", &path, &[(KEY, &key)], b"").await })
    });
    let dying: Vec<_> = dying.collect();
    let told = keys.iter().map(|key| {
        let told = others.clone().map(|other| {
            let (key, later) = (key.clone(), 2 * soon(&mut random));
            tokio::spawn(async move {
                sleep(Duration::from_micros(later)).await;
                other.pay_in_the_end(&key, RETRY).await
            })
        });
        join_all(told)
    });
    let told: Vec<_> = told.collect();
    sleep(Duration::from_micros(soon(&mut random))).await;
    let who = victim.id().to_string();
    let killed = spawn_blocking(move || victim.kill()).await;
    killed.expect("it can be killed");
    let mut ended = Vec::new();
    for ((key, dying), told) in iter::zip(iter::zip(keys, dying), told) {
        let answer = dying.await.expect("the client does not panic").ok();
        let answer = answer.map(|answer| Told::of(&answer));
        let mut told = told.await.into_iter();
        let mut next = || {
            let told = told.next().expect("there are two");
            told.expect("the other server does not panic")
        };
        ended.push(Ended {
            answer,
            told: [next(), next()],
            who: who.clone(),
            key,
        });
    }
    ended
}

/// Draws a time in microseconds of which no magnitude is more likely than another: how fast the machine
/// is must not decide at which step servers are killed.
fn soon(random: &mut fastrand::Rng) -> u64 {
    let magnitude = random.u32(9..16);
    (1 << magnitude) + random.u64(..1 << magnitude)
}

/// What everybody was told about a payment.
struct Ended {
    key: String,
    /// The process that was killed.
    who: String,
    /// What it answered, if it did.
    answer: Option<Told>,
    /// What others answered in the end.
    told: [Told; 2],
}

/// Kills servers under payments, more of them while there is still a case to meet, and returns what became
/// of the payments.
async fn kill(times: u64, at_most_once: bool, cases_to_meet: &[&str]) -> Cases {
    let (cluster, effects) = (Cluster::start(3), Effects::new());
    let setup = Setup::new(&cluster, &effects, at_most_once, TTL);
    let others = [Survivor::start(&setup).await, Survivor::start(&setup).await];
    let (mut cases, mut killed) = (Cases::new(), 0);
    let met = |cases: &Cases| {
        let mut to_meet = cases_to_meet.iter();
        to_meet.all(|case| cases.get(case).is_some_and(|count| *count >= FEW))
    };
    while killed < times || (killed < 4 * times && !met(&cases)) {
        let kills = (killed..killed + times).map(|number| kill_one(number, &setup, &others));
        let ended = stream::iter(kills).buffer_unordered(AT_A_TIME);
        let ended: Vec<_> = ended.collect().await;
        killed += times;
        let lines = effects.lines();
        for payment in ended.iter().flatten() {
            let by = lines.iter().filter(|(key, _)| *key == payment.key);
            let by: Vec<&str> = by.map(|(_, who)| &**who).collect();
            *cases.entry(payment.case(&by, at_most_once)).or_default() += 1;
        }
    }
    let mode = format!("at most once: {at_most_once}");
    println!("{killed} kills under {PAYMENTS} payments each, {mode}: {cases:?}");
    assert!(met(&cases), "there are cases that were not met: {cases:?}");
    cases
}

impl Ended {
    /// Checks what was told about a payment against who has executed it.
    fn case(&self, executed_by: &[&str], at_most_once: bool) -> &'static str {
        let Self {
            key,
            who,
            answer,
            told,
        } = self;
        let what = format!("{key}: {executed_by:?}, {answer:?}, {told:?}");
        if at_most_once {
            assert!(executed_by.len() <= 1, "executed twice: {what}");
            // All answers of a payment are equal.
            let mut bodies: Vec<_> = answer.iter().chain(told).filter_map(Told::body).collect();
            bodies.dedup();
            assert!(bodies.len() <= executed_by.len(), "{what}");
        } else {
            assert!(told.iter().all(|told| told.body().is_some()), "{what}");
        }
        let answered = answer.as_ref().is_some_and(|it| it.body().is_some());
        let paid = told.iter().any(|told| told.body().is_some());
        match (paid, executed_by) {
            (_, [_, _, ..]) => "twice",
            (false, []) => "unknown, not executed",
            (false, [_]) => "unknown, executed",
            (true, _) if answered => "answered",
            (true, [by]) if by == who => "replayed",
            (true, _) => "executed by others",
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_most_once_never_executes_twice_under_random_kills() {
    let kills = kills();
    let cases = kill(kills, true, &DECIDED).await;
    assert!(!cases.contains_key("twice"), "{cases:?}");
    // What the same kills do to a layer that is not asked for it.
    let cases = kill(kills.div_ceil(4), false, &["twice"]).await;
    assert!(!cases.keys().any(|case| case.contains("unknown")));
}

/// `KILLS` asks for more.
fn kills() -> u64 {
    let kills = env::var("KILLS").ok();
    kills.map_or(100, |kills| kills.parse().expect("it is a number"))
}

/// Of each server that is killed.
const PAYMENTS: usize = 3;

/// So many servers are being killed at the same time.
const AT_A_TIME: usize = 10;

/// How soon a duplicate comes again.
const RETRY: Duration = ms(50);

/// Short, because what a killed server held is waited for.
const TTL: Duration = ms(400);

const FEW: usize = 3;
