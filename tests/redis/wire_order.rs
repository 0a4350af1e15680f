//! The order of commands at a server: no release precedes its acquisition, and no lock outlives its ttl,
//! however slow the server is and whatever it forgets.

use std::collections::HashMap;
use std::pin::pin;
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::poll;
use support::{Cluster, Deadline, MonitorLog, RedisServer, Reply, ms, secs, until_all_up};
use tokio::time::{sleep, timeout};
use tower_redlock::{LockError, LockRequest, Redlock, RedlockBuilder};

use crate::beside::Beside;
use crate::wire::{BOTH, By, LONG_TTL, PATIENCE, SHORT_TTL, builder};

/// How long servers are disturbed.
const DISTURBANCE: Duration = secs(2);

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

/// What makes the first of three nodes late, or ask again.
#[derive(Debug, Clone, Copy)]
enum Disturbance {
    Slow,
    Stopped,
    /// An acquisition that a server without its scripts has refused is sent again, but not behind its release.
    Flushed,
}

// Rules: lock.release
#[tokio::test]
async fn release_follows_its_acquisition_to_a_disturbed_node() {
    for (disturbance, fencing, by) in [
        (Disturbance::Slow, true, By::Url),
        (Disturbance::Slow, false, By::Url),
        (Disturbance::Slow, true, By::Pool),
        (Disturbance::Stopped, true, By::Url),
        (Disturbance::Stopped, true, By::Pool),
        (Disturbance::Flushed, true, By::Url),
        (Disturbance::Flushed, true, By::Pool),
    ] {
        println!("{disturbance:?}, fencing: {fencing}, {by:?}");
        let cluster = Cluster::start(3);
        let server = &cluster.servers[0];
        let (proxy, urls) = cluster.behind_proxy(0).await;
        let redlock = connected(builder(by, &urls).ttl(LONG_TTL).fencing(fencing)).await;
        let log = MonitorLog::start(server);
        match disturbance {
            Disturbance::Slow => {
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
            }
            Disturbance::Stopped => {
                // Shorter than the node timeout, longer, and until the connection is about to be replaced.
                for (number, pause) in [20, 80, 130, 300, 600, 900].into_iter().enumerate() {
                    server.stop();
                    wave(&redlock, 2 * number).await;
                    sleep(ms(pause)).await;
                    server.cont();
                    wave(&redlock, 2 * number + 1).await;
                    until_all_up(&redlock, PATIENCE).await;
                }
            }
            Disturbance::Flushed => {
                let flushes = disturb(server, &["SCRIPT", "FLUSH"]);
                for number in 0..40 {
                    // Its refusals arrive when the other two have decided, or before.
                    proxy.delay(ms(10 * (number % 2)));
                    wave(&redlock, usize::try_from(number).unwrap()).await;
                    sleep(ms(20)).await;
                }
                flushes.finish();
            }
        }
        cluster.wait_until_free(secs(3)).await;
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
        assert!(owners.len() >= 3, "{} were sent", owners.len());
    }
}

/// Repeats a command on one server every 5 ms, and checks that each of its locks ends by itself.
fn disturb(server: &RedisServer, command: &'static [&'static str]) -> Beside<()> {
    Beside::start(server.addr(), 2 * DISTURBANCE, |connection, ()| {
        let mut call = |command: &[&str]| {
            let reply = connection.call(command);
            let reply = reply.expect("the server runs, and spares this connection");
            assert!(!matches!(reply, Reply::Error(_)), "{reply:?}");
            reply
        };
        call(command);
        let names = call(&["KEYS", "redlock:*}"]);
        for name in names.as_array().unwrap().iter().filter_map(Reply::as_str) {
            let left = call(&["PTTL", name]).as_int().unwrap();
            let longest = i64::try_from(LONG_TTL.as_millis()).unwrap();
            assert!(
                left == -2 || (0..=longest).contains(&left),
                "{name}: {left}"
            );
        }
    })
}

/// Takes locks, each on keys of its own task and for a moment, until the deadline. Returns how many.
async fn load(redlock: Redlock, task: usize, deadline: Deadline) -> usize {
    let mut locked = 0;
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
                locked += 1;
                sleep(patience).await;
                // It may not be confirmed: the servers are being disturbed.
                guard.release().await.ok();
            }
            Err(LockError::Contended { .. } | LockError::Unavailable { .. }) => {}
            Err(other) => panic!("{other:?}"),
        }
        // Requests that are refused at once must not keep the others from running.
        sleep(ms(1)).await;
    }
    locked
}

/// Disturbs all servers under load; afterwards no lock is left and all can be had.
async fn locks_survive(by: By, command: &'static [&'static str]) {
    let cluster = Cluster::start(3);
    let redlock = connected(builder(by, &cluster.urls()).ttl(SHORT_TTL)).await;
    let servers = cluster.servers.iter();
    let disturbers: Vec<_> = servers.map(|server| disturb(server, command)).collect();
    let deadline = Deadline::after(DISTURBANCE);
    let tasks = (0..8).map(|task| tokio::spawn(load(redlock.clone(), task, deadline)));
    let locked = join_all(tasks).await.into_iter().map(Result::unwrap);
    let locked: usize = locked.sum();
    // First, because it may close the connections of this test, too.
    disturbers.into_iter().for_each(Beside::finish);
    println!("{by:?}, {command:?}: {locked} locks");
    assert!(locked > 0);
    cluster.wait_until_free(SHORT_TTL + ms(500)).await;

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
async fn no_lock_outlives_its_ttl_with_flushed_scripts_or_closing_connections() {
    for command in [
        &["SCRIPT", "FLUSH"][..],
        &["CLIENT", "KILL", "TYPE", "normal"],
    ] {
        for by in BOTH {
            locks_survive(by, command).await;
        }
    }
}
