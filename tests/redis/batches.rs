//! Many locks at a time: what waits for a server shares calls, and each lock is granted or refused on its own.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::join_all;
use support::{Cluster, Deadline, MonitorLog, RedisServer, assert_matches, ms, secs, until_all_up};
use tokio::task::yield_now;
use tower_redlock::{LockError, LockGuard, Redlock, RedlockBuilder, Released, RestartGuard, Retry};

use crate::beside::Beside;
use crate::patient::{self, LONGEST, name_of};
use crate::server_limits::{fill, give_back, refusals};
use crate::wire::LONG_TTL;

/// More than a call holds.
const WAVE: usize = 96;

/// The settings that decide which scripts are used.
#[derive(Debug, Clone, Copy)]
struct Variant {
    nodes: usize,
    fencing: bool,
    guard: bool,
}

const VARIANTS: [Variant; 4] = [
    Variant::new(3, true, false),
    Variant::new(1, true, true),
    Variant::new(3, false, true),
    Variant::new(1, false, false),
];

impl Variant {
    const fn new(nodes: usize, fencing: bool, guard: bool) -> Self {
        Self {
            nodes,
            fencing,
            guard,
        }
    }

    fn builder(self, urls: impl IntoIterator<Item = String>) -> RedlockBuilder {
        let builder = patient::builder(urls).node_timeout(ms(800));
        let builder = builder.fencing(self.fencing).ttl(LONG_TTL);
        if !self.guard {
            return builder;
        }
        let guard = RestartGuard::For(secs(3));
        builder.ttl(secs(2)).restart_guard(guard)
    }

    /// Returns a cluster and what locks its keys, once all nodes may vote.
    async fn start(self) -> (Cluster, Redlock) {
        let cluster = Cluster::start(self.nodes);
        let redlock = self.connect(cluster.urls()).await;
        (cluster, redlock)
    }

    async fn connect(self, urls: Vec<String>) -> Redlock {
        let redlock = self.builder(urls).build().unwrap();
        until_all_up(&redlock, LONGEST).await;
        redlock
    }

    /// Checks that a majority refused, and why.
    #[track_caller]
    fn assert_refused(self, refused: &LockError, why: &str, key: &str) {
        let words = refusals(refused);
        assert!(words.len() > self.nodes / 2, "{key}: {words:?}");
        let all = words.iter().all(|words| words.contains(why));
        assert!(all, "{key}: {words:?}");
    }

    /// Whether a single lock is asked for by the plain command, which shares no call.
    fn is_plain(self) -> bool {
        !self.fencing && !self.guard
    }
}

fn keys(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|key| format!("{prefix} {key}")).collect()
}

/// Asks for all locks at once.
async fn lock_wave(redlock: &Redlock, keys: &[String]) -> Vec<Result<LockGuard, LockError>> {
    let ask = |key: &String| redlock.try_lock(key.clone()).into_future();
    join_all(keys.iter().map(ask)).await
}

/// Releases all locks at once.
async fn release_wave(guards: impl IntoIterator<Item = LockGuard>) {
    for released in join_all(guards.into_iter().map(LockGuard::release)).await {
        assert_eq!(released, Ok(Released::Freed));
    }
}

/// Returns how many of the servers have each lock.
fn held(cluster: &Cluster, keys: &[String]) -> Vec<usize> {
    let locks = cluster.servers.iter();
    let locks = locks.map(|server| BTreeSet::from_iter(server.keys("redlock:{*}")));
    let locks: Vec<_> = locks.collect();
    let count = |key: &String| locks.iter().filter(|it| it.contains(&name_of(key))).count();
    keys.iter().map(count).collect()
}

/// Checks that locks were granted and are there, on a majority at least.
#[track_caller]
fn granted(
    cluster: &Cluster,
    keys: &[String],
    outcomes: Vec<Result<LockGuard, LockError>>,
) -> Vec<LockGuard> {
    let guards: Vec<_> = outcomes.into_iter().map(Result::unwrap).collect();
    let majority = cluster.servers.len() / 2 + 1;
    assert!(held(cluster, keys).iter().all(|count| *count >= majority));
    guards
}

#[tokio::test]
async fn foreign_data_refuses_only_its_own_lock() {
    for variant in VARIANTS {
        let (cluster, redlock) = variant.start().await;
        let mut keys = keys("k", WAVE);
        cluster.command(&["LPUSH", &name_of("k 7"), "theirs"]);
        let fence = format!("{}:fence", name_of("k 70"));
        cluster.command(&["HSET", &fence, "their", "field"]);
        let bad: &[usize] = if variant.fencing { &[7, 70] } else { &[7] };
        // The second time, with the fences of the first.
        for _ in 0..2 {
            let mut outcomes = lock_wave(&redlock, &keys).await;
            for place in bad.iter().rev() {
                let key = keys.remove(*place);
                let refused = outcomes.remove(*place).expect_err("it is not ours");
                variant.assert_refused(&refused, "WRONGTYPE", &key);
            }
            release_wave(granted(&cluster, &keys, outcomes)).await;
            for place in bad {
                keys.insert(*place, format!("k {place}"));
            }
        }
        for server in &cluster.servers {
            assert_eq!(server.command(&["LLEN", &name_of("k 7")]).as_int(), Some(1));
            assert!(!server.exists(&name_of("k 70")) || !variant.fencing);
            server.command(&["DEL", &name_of("k 7")]);
        }
        cluster.wait_until_free(secs(5)).await;
    }
}

/// Repeats `SCRIPT FLUSH` on a server, and counts it.
fn flush_scripts(server: &RedisServer) -> Beside<usize> {
    Beside::start(server.addr(), secs(30), |connection, flushed| {
        let reply = connection.call(&["SCRIPT", "FLUSH"]);
        assert_eq!(reply.expect("it answers").as_str(), Some("OK"));
        *flushed += 1;
    })
}

#[tokio::test]
async fn granted_locks_are_there_and_none_leaks_while_scripts_are_flushed() {
    for variant in VARIANTS {
        let (cluster, redlock) = variant.start().await;
        let majority = variant.nodes / 2 + 1;
        let flushers: Vec<_> = cluster.servers.iter().map(flush_scripts).collect();
        let deadline = Deadline::after(secs(2));
        let (mut count, mut refused) = (0, 0);
        for number in 0.. {
            let keys = keys(&format!("{number}"), WAVE);
            let outcomes = lock_wave(&redlock, &keys).await;
            let mut guards = Vec::new();
            for ((key, held), outcome) in keys.iter().zip(held(&cluster, &keys)).zip(outcomes) {
                match outcome {
                    Ok(guard) => {
                        assert!(held >= majority || !guard.is_valid(), "{key} is not there");
                        guards.push(guard);
                    }
                    Err(LockError::Unavailable { .. }) => refused += 1,
                    Err(other) => panic!("{key}: {other:?}"),
                }
            }
            count += guards.len();
            // The scripts may be gone again each time: then a release takes longer than it is waited for.
            join_all(guards.into_iter().map(LockGuard::release)).await;
            if deadline.is_over() {
                break;
            }
        }
        let flushed: usize = flushers.into_iter().map(Beside::finish).sum();
        println!("{variant:?}: {count} granted, {refused} refused, {flushed} times flushed");
        assert!(count >= WAVE && flushed > 10);
        cluster.wait_until_free(secs(5)).await;
        let keys = keys("after", WAVE);
        let outcomes = lock_wave(&redlock, &keys).await;
        release_wave(granted(&cluster, &keys, outcomes)).await;
        cluster.wait_until_free(secs(5)).await;
    }
}

#[tokio::test]
async fn full_servers_refuse_new_locks_of_a_wave_and_release_held_ones() {
    for variant in VARIANTS {
        let (cluster, redlock) = variant.start().await;
        for round in 0..3 {
            let ours = keys(&format!("held {round}"), WAVE / 2);
            let outcomes = lock_wave(&redlock, &ours).await;
            let guards = granted(&cluster, &ours, outcomes);
            cluster.servers.iter().for_each(fill);
            let new = keys(&format!("new {round}"), WAVE);
            // At the same time, so that they are sent together.
            let (refused, ()) = tokio::join!(lock_wave(&redlock, &new), release_wave(guards));
            for (key, refused) in new.iter().zip(refused) {
                variant.assert_refused(&refused.unwrap_err(), "OOM", key);
            }
            cluster.wait_until_free(secs(5)).await;
            cluster.servers.iter().for_each(give_back);
            let outcomes = lock_wave(&redlock, &new).await;
            release_wave(granted(&cluster, &new, outcomes)).await;
        }
        cluster.wait_until_free(secs(5)).await;
    }
}

/// Returns the servers' URLs for a new user with these rights.
fn urls_of_user(cluster: &Cluster, rights: &[&str]) -> Vec<String> {
    let made = cluster.servers.iter().map(|server| {
        let user = ["ACL", "SETUSER", "some", "reset", "on", ">secret"];
        let reply = server.command(&[&user[..], rights].concat());
        assert_eq!(reply.as_str(), Some("OK"), "{reply:?}");
        server.url().replace("redis://", "redis://some:secret@")
    });
    made.collect()
}

#[tokio::test]
async fn key_that_the_user_must_not_touch_is_refused_alone() {
    for variant in VARIANTS {
        let cluster = Cluster::start(variant.nodes);
        let rights = ["~redlock:{ok*", "~redlock:generation", "&*", "+@all"];
        let urls = urls_of_user(&cluster, &rights);
        for place in [0, 40, WAVE] {
            // A connection that has been refused a call uses none again.
            let redlock = variant.connect(urls.clone()).await;
            for round in 0..2 {
                let mut keys = keys(&format!("ok {place} {round}"), WAVE);
                keys.insert(place, "forbidden".into());
                let mut outcomes = lock_wave(&redlock, &keys).await;
                let refused = outcomes.remove(place).expect_err("it is forbidden");
                variant.assert_refused(&refused, "its user needs", "forbidden");
                keys.remove(place);
                release_wave(granted(&cluster, &keys, outcomes)).await;
            }
            cluster.wait_until_free(secs(5)).await;
        }
    }
}

/// Single releases need fewer rights than those that share a call.
#[tokio::test]
async fn locks_are_released_without_the_right_to_read_several_keys() {
    for variant in VARIANTS.into_iter().filter(|variant| !variant.fencing) {
        let cluster = Cluster::start(variant.nodes);
        let urls = urls_of_user(&cluster, &["~*", "&*", "+@all", "-mget"]);
        let redlock = variant.connect(urls).await;
        for round in 0..2 {
            let keys = keys(&format!("{round}"), WAVE);
            let outcomes = lock_wave(&redlock, &keys).await;
            release_wave(granted(&cluster, &keys, outcomes)).await;
            cluster.wait_until_free(secs(5)).await;
        }
    }
}

#[tokio::test]
async fn waves_of_two_clients_for_the_same_keys_never_have_two_holders() {
    for variant in VARIANTS {
        let (cluster, ours) = variant.start().await;
        let theirs = variant.connect(cluster.urls()).await;
        let holders: Vec<_> = (0..24).map(|_| AtomicUsize::new(0)).collect();
        let grants = AtomicUsize::new(0);
        let rounds = 12;
        let (holders, grants) = (&holders, &grants);
        let take = |redlock: Redlock, key: usize, client: usize| async move {
            for round in 0..rounds {
                let lock = redlock.lock(format!("k {key}")).wait(LONGEST);
                let guard = lock.await.expect("the other one releases it");
                assert_eq!(holders[key].fetch_add(1, Ordering::SeqCst), 0, "key {key}");
                grants.fetch_add(1, Ordering::Relaxed);
                for _ in 0..(round + key + client) % 3 {
                    yield_now().await;
                }
                assert_eq!(holders[key].fetch_sub(1, Ordering::SeqCst), 1, "key {key}");
                // A release that is not waited for is sent together with the next acquisition.
                if (round + client).is_multiple_of(2) {
                    drop(guard);
                } else {
                    assert_eq!(guard.release().await, Ok(Released::Freed));
                }
            }
        };
        let clients = [&ours, &theirs].into_iter().enumerate();
        let all = clients.flat_map(|(client, redlock)| {
            (0..holders.len()).map(move |key| take(redlock.clone(), key, client))
        });
        join_all(all).await;
        assert_eq!(grants.load(Ordering::Relaxed), 2 * rounds * holders.len());
        cluster.wait_until_free(secs(5)).await;
    }
}

/// Each of them announces itself to readers, as one that asks alone does.
#[tokio::test]
async fn writers_of_a_wave_that_readers_refuse_announce_themselves() {
    for variant in VARIANTS.into_iter().filter(|variant| !variant.is_plain()) {
        let (cluster, readers) = variant.start().await;
        // They ask at the beginning and at the end of their wait, so that all ask at once.
        let hour = secs(3_600);
        let retry = Retry::new(hour, hour).poll_interval(hour);
        let writers = variant.builder(cluster.urls()).retry(retry);
        let writers = writers.build().unwrap();
        until_all_up(&writers, LONGEST).await;
        let keys = keys("k", 16);
        let read = |key: &String| readers.try_lock(key.clone()).shared().into_future();
        let held = join_all(keys.iter().map(read)).await;
        assert!(held.iter().all(Result::is_ok), "{held:?}");
        let logs: Vec<_> = cluster.servers.iter().map(MonitorLog::start).collect();
        let waits = keys.iter().map(|key| {
            let lock = writers.lock(key.clone()).wait(ms(700));
            lock.into_future()
        });
        for refused in join_all(waits).await {
            assert_matches!(refused, Err(LockError::Contended { .. }));
        }
        for log in &logs {
            let lines = log.lines();
            let by_scripts = || lines.iter().filter(|line| line.contains("lua]"));
            let sent = lines.iter().filter(|line| !line.contains("lua]"));
            let is_wave = |line: &String| line.contains("{k 0}") && line.contains("{k 15}");
            assert!(sent.into_iter().any(is_wave), "they shared no call");
            let announced = keys.iter().filter(|key| {
                let writer = format!("\"SET\" \"{}:writer\"", name_of(key));
                by_scripts().any(|line| line.contains(&writer))
            });
            assert_eq!(announced.count(), keys.len(), "{variant:?}: {lines:#?}");
        }
        drop(held);
        cluster.wait_until_free(secs(5)).await;
    }
}

/// Returns how many commands about locks a server was sent.
fn commands(log: &MonitorLog) -> usize {
    let is_sent = |line: &&String| !line.contains("lua]") && line.contains("redlock:{");
    log.lines().iter().filter(is_sent).count()
}

#[tokio::test]
async fn wave_takes_few_commands_and_one_lock_takes_two() {
    for variant in VARIANTS {
        let (cluster, redlock) = variant.start().await;
        let (count, alone) = (64, 10);
        let start_logs = || -> Vec<_> { cluster.servers.iter().map(MonitorLog::start).collect() };
        let logs = start_logs();
        for number in 0..alone {
            let guard = redlock.try_lock(format!("alone {number}")).await.unwrap();
            assert_eq!(guard.release().await, Ok(Released::Freed));
        }
        cluster.wait_until_free(secs(5)).await;
        for log in &logs {
            assert_eq!(commands(log), 2 * alone, "{variant:?}");
        }
        let logs = start_logs();
        let keys = keys("wave", count);
        let outcomes = lock_wave(&redlock, &keys).await;
        release_wave(granted(&cluster, &keys, outcomes)).await;
        cluster.wait_until_free(secs(5)).await;
        for log in &logs {
            let commands = commands(log);
            let acquisitions = if variant.is_plain() { count } else { 0 };
            println!("{variant:?}: {commands} commands for {count} locks");
            let expected = acquisitions + 2..=acquisitions + count / 4;
            assert!(expected.contains(&commands), "{variant:?}: {commands}");
        }
    }
}

/// Also for users who may not ask what the server is, so that their first call is refused.
#[tokio::test]
async fn locks_of_a_wave_share_calls_on_a_server_in_cluster_mode() {
    let server = RedisServer::start_in_cluster_mode(0..16_384);
    let user = [
        "ACL", "SETUSER", "blind", "on", ">secret", "~*", "&*", "+@all", "-info",
    ];
    server.command(&user);
    let cluster = Cluster {
        servers: vec![server],
    };
    let server = &cluster.servers[0];
    let blind = server.url().replace("://", "://blind:secret@");
    for (fencing, guard, is_blind) in [
        (true, true, false),
        (true, false, false),
        (false, true, false),
        (false, false, false),
        (true, false, true),
    ] {
        let variant = Variant::new(1, fencing, guard);
        let url = if is_blind {
            blind.clone()
        } else {
            server.url()
        };
        let redlock = variant.connect(vec![url]).await;
        server.command(&["CONFIG", "RESETSTAT"]);
        let keys = keys(&format!("{fencing} {guard} {is_blind}"), WAVE);
        let outcomes = lock_wave(&redlock, &keys).await;
        release_wave(granted(&cluster, &keys, outcomes)).await;
        cluster.wait_until_free(secs(5)).await;
        let calls = server.call_counts().get("evalsha").copied().unwrap_or(0);
        let errors = server.command(&["INFO", "errorstats"]);
        let is_refused = errors.as_str().unwrap().contains("CROSSSLOT");
        assert_eq!(is_refused, is_blind, "{errors:?}");
        assert_eq!(calls > 50, is_blind, "{variant:?}: {calls} calls");
    }
}
