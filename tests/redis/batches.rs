//! Many locks at a time: what waits for a server shares calls, and each lock is granted or refused on its own.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use support::{Cluster, MonitorLog, RedisServer, ms, secs, until_all_up};
use tower_redlock::{LockError, LockGuard, Redlock, Released, RestartGuard};

use crate::patient::{self, LONGEST, name_of};
use crate::server_limits::refusals;
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

    async fn connect(self, urls: Vec<String>) -> Redlock {
        let builder = patient::builder(urls).node_timeout(ms(800));
        let builder = builder.fencing(self.fencing).ttl(LONG_TTL);
        let guard = RestartGuard::For(secs(2));
        let builder = match self.guard {
            true => builder.ttl(ms(1_500)).restart_guard(guard),
            false => builder,
        };
        let redlock = builder.build().unwrap();
        until_all_up(&redlock, LONGEST).await;
        redlock
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
async fn key_that_the_user_must_not_touch_is_refused_alone() {
    for variant in VARIANTS {
        let cluster = Cluster::start(variant.nodes);
        let user = "ACL SETUSER some on >secret ~redlock:{ok* ~redlock:generation &* +@all";
        cluster.command(&user.split(' ').collect::<Vec<_>>());
        let urls = cluster.urls().into_iter();
        let urls: Vec<_> = urls
            .map(|url| url.replace("://", "://some:secret@"))
            .collect();
        for place in [0, 40, WAVE] {
            // A connection that has been refused a call uses none again.
            let redlock = variant.connect(urls.clone()).await;
            for round in 0..2 {
                let mut keys = keys(&format!("ok {place} {round}"), WAVE);
                keys.insert(place, "forbidden".into());
                let mut outcomes = lock_wave(&redlock, &keys).await;
                let refused = outcomes.remove(place).expect_err("it is forbidden");
                let words = refusals(&refused);
                let is_told = words.iter().all(|words| words.contains("its user needs"));
                assert!(
                    words.len() > variant.nodes / 2 && is_told,
                    "{variant:?}: {words:?}"
                );
                keys.remove(place);
                release_wave(granted(&cluster, &keys, outcomes)).await;
            }
            cluster.wait_until_free(secs(5)).await;
        }
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
        let cluster = Cluster::start(variant.nodes);
        let redlock = variant.connect(cluster.urls()).await;
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
