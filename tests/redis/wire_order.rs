//! The order of commands at a server: no release precedes its acquisition, and no lock outlives its ttl,
//! however slow the server is and whatever it forgets.

use std::collections::{BTreeMap, HashMap};
use std::pin::pin;
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::poll;
use support::{
    Cluster, Connection, Deadline, MonitorLog, RedisServer, Reply, ms, secs, until_all_up,
};
use tokio::time::{Instant, sleep, timeout};
use tower_redlock::{LockError, LockRequest, Redlock, RedlockBuilder};

use crate::beside::Beside;
use crate::wire::{BOTH, By, LONG_TTL, PATIENCE, SHORT_TTL, builder};

/// How long servers are disturbed.
const DISTURBANCE: Duration = secs(3);

/// What becomes of a lock that is asked for.
#[derive(Debug, Clone, Copy)]
enum Fate {
    Released,
    DroppedAfterOnePoll,
    DroppedAfter(Duration),
}

async fn lock(redlock: &Redlock, key: String, fate: Fate) {
    match fate {
        Fate::Released => {
            // Two nodes are healthy, but a machine that stands still makes them late.
            if let Ok(guard) = redlock.try_lock(key).await {
                guard.release().await.ok();
            }
        }
        Fate::DroppedAfterOnePoll => {
            let mut asked = pin!(redlock.try_lock(key).into_future());
            assert!(poll!(&mut asked).is_pending());
        }
        Fate::DroppedAfter(patience) => {
            // A guard that it may return is dropped, too.
            drop(timeout(patience, redlock.try_lock(key)).await);
        }
    }
}

async fn connected(builder: RedlockBuilder) -> Redlock {
    let redlock = builder.build().unwrap();
    until_all_up(&redlock, PATIENCE).await;
    redlock
}

/// Asks for many locks side by side.
async fn wave(redlock: &Redlock, number: usize) {
    let locks = (0..24).map(|index| {
        let fate = match index % 4 {
            0 | 1 => Fate::Released,
            2 => Fate::DroppedAfterOnePoll,
            _ => Fate::DroppedAfter(Duration::from_micros(index * 100)),
        };
        lock(redlock, format!("{number}-{index}"), fate)
    });
    join_all(locks).await;
}

/// What a server was asked about one owner, in its order: `true` for an acquisition.
fn by_owner(log: &MonitorLog) -> HashMap<String, Vec<bool>> {
    let mut owners: HashMap<_, Vec<bool>> = HashMap::new();
    for line in log.lines() {
        let words: Vec<_> = line.split('"').skip(1).step_by(2).collect();
        let (asked, acquires): (Vec<&str>, _) = match words.as_slice() {
            // In cluster mode, the keys are not declared.
            [evalsha, _hash, "0", keys, rest @ ..] | [evalsha, _hash, keys, rest @ ..]
                if evalsha.eq_ignore_ascii_case("evalsha") =>
            {
                let Ok(keys) = keys.parse() else { continue };
                let (keys, args) = rest.split_at(keys);
                // Also the confirmation of a token, which has no place behind a release either.
                let acquires = keys.iter().any(|key| key.ends_with(":fence"));
                match (keys.len(), acquires) {
                    (1, false) | (2, true) => (vec![args[0]], acquires),
                    // Calls for several locks have common arguments first.
                    (_, false) => (args[1..].to_vec(), false),
                    (_, true) => (args[3..].iter().copied().step_by(2).collect(), true),
                }
            }
            // What scripts run is not quoted from a client.
            [set, _lock, owner, "NX", ..]
                if set.eq_ignore_ascii_case("set") && !line.contains("lua]") =>
            {
                (vec![owner], true)
            }
            _ => continue,
        };
        for owner in asked {
            owners.entry(owner.to_owned()).or_default().push(acquires);
        }
    }
    owners
}

/// Checks that for no owner an acquisition follows a release, and returns how many had both.
#[track_caller]
fn assert_in_order(log: &MonitorLog) -> usize {
    let owners = by_owner(log);
    for (owner, commands) in &owners {
        assert!(
            commands.is_sorted_by(|before, after| before >= after),
            "{owner}: {commands:?} (true acquires, false releases)"
        );
    }
    let acquired = owners.values().filter(|commands| commands[0]);
    let acquired: Vec<_> = acquired.collect();
    for commands in &acquired {
        assert!(commands.contains(&false), "never released");
    }
    let (seen, count) = (owners.len(), acquired.len());
    println!("{seen} owners seen, {count} of them acquired and then released");
    count
}

// Rules: lock.release
#[tokio::test]
async fn release_follows_its_acquisition_to_a_late_node() {
    for (fencing, by) in [(true, By::Url), (false, By::Url), (true, By::Pool)] {
        let cluster = Cluster::start(3);
        let (proxy, urls) = cluster.behind_proxy(0).await;
        let redlock = connected(builder(by, &urls).ttl(LONG_TTL).fencing(fencing)).await;
        let log = MonitorLog::start(&cluster.servers[0]);
        for number in 0..12 {
            if number % 2 == 0 {
                // Only a node that is up is asked for its vote.
                proxy.pass();
                until_all_up(&redlock, PATIENCE).await;
                proxy.delay(ms(200));
            }
            wave(&redlock, number).await;
            sleep(ms(70)).await;
        }
        cluster.wait_until_free(secs(3)).await;
        assert!(assert_in_order(&log) >= 100);
    }
}

#[tokio::test]
async fn release_follows_its_acquisition_to_a_paused_node() {
    for by in BOTH {
        let cluster = Cluster::start(3);
        let redlock = connected(builder(by, &cluster.urls()).ttl(LONG_TTL)).await;
        let log = MonitorLog::start(&cluster.servers[0]);
        // Shorter than the node timeout, longer, and until the connection is about to be replaced.
        for (number, pause) in [20, 80, 130, 300, 600, 900].into_iter().enumerate() {
            cluster.servers[0].stop();
            wave(&redlock, 2 * number).await;
            sleep(ms(pause)).await;
            cluster.servers[0].cont();
            wave(&redlock, 2 * number + 1).await;
            until_all_up(&redlock, PATIENCE).await;
        }
        cluster.wait_until_free(secs(3)).await;
        assert!(assert_in_order(&log) >= 100);
    }
}

/// An acquisition that a server without its scripts has refused is sent again, but not behind its release.
#[tokio::test]
async fn release_follows_its_repeated_acquisition_to_a_node_with_flushed_scripts() {
    for by in BOTH {
        let cluster = Cluster::start(3);
        let (proxy, urls) = cluster.behind_proxy(0).await;
        let redlock = connected(builder(by, &urls).ttl(SHORT_TTL)).await;
        let log = MonitorLog::start(&cluster.servers[0]);
        let disturber = disturb(&cluster.servers[0], &["SCRIPT", "FLUSH"]);
        for number in 0..40 {
            // Its refusals arrive when the other two have decided, or before.
            proxy.delay(ms(10 * (number % 2)));
            wave(&redlock, usize::try_from(number).unwrap()).await;
            sleep(ms(20)).await;
        }
        disturber.finish();
        cluster.wait_until_free(secs(3)).await;
        let owners = by_owner(&log);
        let repeated = owners
            .values()
            .filter(|sent| sent.starts_with(&[true, true]));
        println!("{by:?}: {} acquisitions were repeated", repeated.count());
        assert!(assert_in_order(&log) >= 100);
    }
}

#[tokio::test]
async fn unsent_acquisition_is_not_released() {
    for by in BOTH {
        let cluster = Cluster::start(3);
        let redlock = connected(builder(by, &cluster.urls()).ttl(LONG_TTL)).await;
        let log = MonitorLog::start(&cluster.servers[0]);
        // More pipelines than may be on the wire, to a server that answers none, and not for long enough to be
        // given up.
        cluster.servers[0].stop();
        for number in 0..100 {
            let key = format!("unsent {number}");
            drop(timeout(Duration::from_micros(200), redlock.try_lock(key)).await);
        }
        sleep(ms(10)).await;
        cluster.servers[0].cont();
        until_all_up(&redlock, PATIENCE).await;
        cluster.wait_until_free(secs(3)).await;
        let owners = by_owner(&log);
        let only_released = owners.values().filter(|commands| !commands[0]).count();
        assert_eq!(only_released, 0, "of {}", owners.len());
        // How many a machine that stands still now and then puts into one pipeline is not known.
        assert!(owners.len() >= 10, "{} were sent", owners.len());
    }
}

/// Who had which lock, from when until when.
type Seen = BTreeMap<(String, String), (Instant, Instant)>;

/// Repeats a command on one server every 5 ms, and looks at its locks in between.
fn disturb(server: &RedisServer, command: &'static [&'static str]) -> Beside<Seen> {
    Beside::start(server.addr(), 2 * DISTURBANCE, |connection, seen| {
        let reply = connection.call(command).expect("it spares this connection");
        assert!(!matches!(reply, Reply::Error(_)), "{reply:?}");
        look(connection, seen);
    })
}

/// Notes who has which lock, and that each lock ends by itself.
fn look(connection: &mut Connection, seen: &mut Seen) {
    let mut call = |command: &[&str]| connection.call(command).expect("the server runs");
    let names = call(&["KEYS", "redlock:*"]);
    let names = names.as_array().expect("KEYS answers an array");
    for name in names.iter().filter_map(Reply::as_str) {
        if name.ends_with(":fence") {
            continue;
        }
        let owner = call(&["GET", name]);
        let left = call(&["PTTL", name]).as_int();
        let left = left.expect("PTTL answers a number");
        let longest = i64::try_from(SHORT_TTL.as_millis()).expect("it is short");
        let ends = left == -2 || (0..=longest).contains(&left);
        assert!(ends, "{name}: {left}");
        if let Some(owner) = owner.as_str() {
            let now = Instant::now();
            let entry = seen.entry((name.to_owned(), owner.to_owned()));
            entry.or_insert((now, now)).1 = now;
        }
    }
}

#[derive(Debug, Default)]
struct Tally {
    locked: usize,
    contended: usize,
    unavailable: usize,
    other: Vec<LockError>,
}

/// Takes locks, each on keys of its own task and for a moment, until the deadline.
async fn load(redlock: Redlock, task: usize, deadline: Deadline) -> Tally {
    let mut tally = Tally::default();
    for number in 0.. {
        if deadline.is_over() {
            break;
        }
        let key = format!("{task}-{}", number % 4);
        let patience = ms(1 + number % 7);
        if number % 5 == 4 {
            drop(timeout(patience, redlock.try_lock(key)).await);
            continue;
        }
        match redlock.try_lock(key).await {
            Ok(guard) => {
                tally.locked += 1;
                sleep(patience).await;
                // It may not be confirmed: the servers are being disturbed.
                guard.release().await.ok();
            }
            Err(LockError::Contended { .. }) => tally.contended += 1,
            Err(LockError::Unavailable { .. }) => tally.unavailable += 1,
            Err(other) => tally.other.push(other),
        }
        // Requests that are refused at once must not keep the others from running.
        sleep(ms(1)).await;
    }
    tally
}

/// Disturbs all servers under load; afterwards no lock is left and all can be had.
async fn locks_survive(by: By, command: &'static [&'static str]) {
    let cluster = Cluster::start(3);
    let redlock = connected(builder(by, &cluster.urls()).ttl(SHORT_TTL)).await;

    let servers = cluster.servers.iter();
    let disturbers: Vec<_> = servers.map(|server| disturb(server, command)).collect();
    let deadline = Deadline::after(DISTURBANCE);
    let tasks = (0..8).map(|task| tokio::spawn(load(redlock.clone(), task, deadline)));
    let tallies = join_all(tasks).await;
    // First, because it may close the connections of this test, too.
    let seen: Vec<_> = disturbers.into_iter().map(Beside::finish).collect();
    let lives = seen.iter().flat_map(BTreeMap::values);
    let lives = lives.map(|(first, last)| *last - *first);
    let longest = lives.max().unwrap_or_default();
    let left = cluster.lock_keys().len();
    let ended = Instant::now();
    cluster.wait_until_free(SHORT_TTL + ms(500)).await;
    let free_after = ended.elapsed();

    let mut sum = Tally::default();
    for tally in tallies {
        let tally = tally.expect("the load does not panic");
        sum.locked += tally.locked;
        sum.contended += tally.contended;
        sum.unavailable += tally.unavailable;
        sum.other.extend(tally.other);
    }
    println!(
        "{by:?}, {command:?}: {sum:?}; longest life of a lock {longest:?}; {left} left at the end, none after {free_after:?}"
    );
    assert!(sum.locked > 0, "{sum:?}");
    assert!(sum.other.is_empty(), "{sum:?}");
    assert!(longest <= SHORT_TTL + ms(500));

    // Several tries: connections may have to be opened first.
    let deadline = Deadline::after(secs(3));
    let keys = || (0..8).map(|task| format!("{task}-0"));
    lock_soon(deadline, || redlock.lock_all(keys())).await;
    for key in keys() {
        lock_soon(deadline, || redlock.try_lock(key.clone())).await;
    }
    cluster.wait_until_free(secs(1)).await;
}

async fn lock_soon(deadline: Deadline, ask: impl Fn() -> LockRequest) {
    loop {
        match ask().await {
            Ok(guard) => {
                guard.release().await.ok();
                return;
            }
            Err(error) => assert!(!deadline.is_over(), "the disturbance is over, but {error}"),
        }
        sleep(ms(20)).await;
    }
}

// Rules: lock.scripts
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_lock_outlives_its_ttl_with_flushed_scripts() {
    for by in BOTH {
        locks_survive(by, &["SCRIPT", "FLUSH"]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_lock_outlives_its_ttl_with_closing_connections() {
    for by in BOTH {
        locks_survive(by, &["CLIENT", "KILL", "TYPE", "normal"]).await;
    }
}
