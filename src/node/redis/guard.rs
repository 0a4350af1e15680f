//! The restart guard: which server may vote, by what it says of itself on each new connection.
//!
//! A server that lost its memory may have forgotten locks that are still valid, so it must stay out
//! until all of them are over ("delayed restarts" in the Redlock description). Nobody has to see to
//! that: the client asks every server on every connection since when it has its memory.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use deadpool_redis::redis::aio::{ConnectionLike, MultiplexedConnection};
use deadpool_redis::redis::{RedisError, Value, cmd};
use tokio::time::Instant;

use crate::node::redis::scripts;
use crate::node::unguessable;
use crate::protocol::OwnerToken;

/// The guard of all servers of one lock service.
#[derive(Debug)]
pub(crate) struct Guard {
    /// How long a server that lost its memory stays out: longer than any lock lives.
    pub(super) window: Duration,
    /// The key that says since when a server has its memory.
    pub(super) generation_key: Arc<[u8]>,
    /// What is known of each server, by the name of its node.
    servers: Mutex<BTreeMap<Arc<str>, Server>>,
    /// Whether any two of them are one; almost never, and asked for with every request.
    has_twins: AtomicBool,
}

#[derive(Debug, Clone)]
struct Server {
    run_id: String,
    replication_id: String,
    generation: Arc<str>,
    /// When this client saw the server lose its memory, by its own clock.
    lost_memory: Option<Instant>,
    warned_of_eviction: bool,
}

/// What a server said of itself on one connection.
#[derive(Debug, Clone)]
pub(super) struct Admission {
    /// Since when it has its memory; to be sent with every request for a vote on this connection.
    pub(super) generation: Arc<str>,
    /// How long it may not vote yet.
    pub(super) left: Duration,
}

/// The part of `INFO` that matters.
#[derive(Debug, Default, PartialEq, Eq)]
struct Info {
    run_id: String,
    replication_id: String,
    role: String,
    loading: bool,
    uptime: Duration,
    /// The policy, if there is a memory limit.
    evicts: Option<String>,
}

impl Guard {
    pub(crate) fn new(window: Duration, generation_key: Arc<[u8]>) -> Arc<Self> {
        Arc::new(Self {
            window,
            generation_key,
            servers: Mutex::default(),
            has_twins: AtomicBool::new(false),
        })
    }

    /// Asks a server, on the very connection that is going to be used, whether it may vote.
    pub(super) async fn admit(
        &self,
        node: &Arc<str>,
        connection: &mut MultiplexedConnection,
    ) -> Result<Admission, Arc<str>> {
        let text = cmd("INFO").query_async::<String>(connection).await;
        let text = text.map_err(|error| refused("INFO", &error))?;
        let info = Info::parse(&text)?;
        let random = OwnerToken::from_random(unguessable());
        let admit = scripts::admit(&self.generation_key, random.as_str(), &info.run_id);
        let stamp = connection.req_packed_command(&admit).await;
        let stamp = stamp.map_err(|error| refused("the admission", &error))?;
        let (generation, age) = read_stamp(&stamp).ok_or_else(|| unreadable(&stamp))?;
        let left = self.quarantine(node, info, &generation, age);
        Ok(Admission { generation, left })
    }

    /// Whether another node is the same server, or a copy of it.
    pub(super) fn twin_of(&self, node: &str) -> Option<Arc<str>> {
        if !self.has_twins.load(Ordering::Relaxed) {
            return None;
        }
        let servers = self.servers();
        let server = servers.get(node)?;
        let mut others = servers.iter().filter(|(name, _)| &***name != node);
        let twin = others.find(|(_, other)| other.is_twin_of(server));
        twin.map(|(name, _)| Arc::clone(name))
    }

    /// Returns how long the server must stay out, by its own clocks and by what this client saw.
    fn quarantine(
        &self,
        node: &Arc<str>,
        info: Info,
        generation: &Arc<str>,
        age: Duration,
    ) -> Duration {
        let by_generation = self.window.saturating_sub(age);
        // In whole seconds, of which the first may be short.
        let least_uptime = self.window + Duration::from_nanos(999_999_999);
        let least_uptime = Duration::from_secs(least_uptime.as_secs() + 1);
        let by_uptime = least_uptime.saturating_sub(info.uptime);
        let now = Instant::now();
        let mut servers = self.servers();
        let known = servers.get(node);
        let forgot = known.is_some_and(|known| {
            known.run_id != info.run_id
                || known.replication_id != info.replication_id
                || known.generation != *generation
        });
        // A second line, against steps of the server's clock.
        let lost_memory = if forgot {
            Some(now)
        } else {
            known.and_then(|known| known.lost_memory)
        };
        let by_own_clock = lost_memory.map_or(Duration::ZERO, |at| {
            self.window
                .saturating_sub(now.saturating_duration_since(at))
        });
        let warned = known.is_some_and(|known| known.warned_of_eviction);
        if let Some(policy) = &info.evicts
            && !warned
        {
            tracing::warn!(
                node = &**node,
                %policy,
                "redlock node may evict locks and fences; set maxmemory-policy to noeviction"
            );
        }
        let server = Server {
            run_id: info.run_id,
            replication_id: info.replication_id,
            generation: Arc::clone(generation),
            lost_memory,
            warned_of_eviction: warned || info.evicts.is_some(),
        };
        servers.insert(Arc::clone(node), server);
        let twins = |server: &Server| {
            servers
                .values()
                .filter(|other| other.is_twin_of(server))
                .count()
                > 1
        };
        self.has_twins
            .store(servers.values().any(twins), Ordering::Relaxed);
        by_generation.max(by_uptime).max(by_own_clock)
    }

    fn servers(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Server>> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Server {
    fn is_twin_of(&self, other: &Self) -> bool {
        self.run_id == other.run_id || self.generation == other.generation
    }
}

impl Info {
    /// Reads what `INFO` answered. A server that must not vote at all is an error.
    fn parse(text: &str) -> Result<Self, Arc<str>> {
        let mut info = Self::default();
        let (mut uptime, mut limited, mut policy) = (None, false, "");
        for line in text.lines() {
            let Some((name, value)) = line.split_once(':') else {
                continue;
            };
            match name {
                "run_id" => info.run_id = value.to_owned(),
                "master_replid" => info.replication_id = value.to_owned(),
                "role" => info.role = value.to_owned(),
                "loading" => info.loading = value != "0",
                "uptime_in_seconds" => uptime = value.parse().ok(),
                "maxmemory" => limited = value != "0",
                "maxmemory_policy" => policy = value,
                _ => {}
            }
        }
        let (Some(uptime), false) = (uptime, info.run_id.is_empty()) else {
            return Err("INFO tells neither run_id nor uptime_in_seconds; is it a proxy? Name the server itself".into());
        };
        if info.role != "master" {
            let role = &info.role;
            return Err(format!("its role is `{role}`; nodes must be independent masters").into());
        }
        if info.loading {
            return Err("it is still loading its data".into());
        }
        info.uptime = Duration::from_secs(uptime);
        info.evicts = (limited && policy != "noeviction").then(|| policy.to_owned());
        Ok(info)
    }
}

/// Reads the answer of the admission script: the generation, and how old it is by the server's clock.
fn read_stamp(stamp: &Value) -> Option<(Arc<str>, Duration)> {
    let Value::Array(parts) = stamp else {
        return None;
    };
    let [generation, seconds, micros] = parts.as_slice() else {
        return None;
    };
    let text = |value: &Value| match value {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        _ => None,
    };
    let instant = |seconds: &str, micros: &str| {
        let seconds = Duration::from_secs(seconds.parse().ok()?);
        Some(seconds + Duration::from_micros(micros.parse().ok()?))
    };
    let generation = text(generation)?;
    let mut fields = generation.split(':').skip(1);
    let began = instant(fields.next()?, fields.next()?)?;
    let now = instant(&text(seconds)?, &text(micros)?)?;
    Some((generation.into(), now.saturating_sub(began)))
}

fn refused(what: &str, error: &RedisError) -> Arc<str> {
    format!(
        "{what} was refused ({error}); the restart guard needs INFO, EVALSHA, TIME, GET and SET"
    )
    .into()
}

fn unreadable(stamp: &Value) -> Arc<str> {
    match stamp {
        Value::ServerError(error) => {
            let why = error.details().unwrap_or_default();
            format!("the admission was refused ({} {why})", error.code()).into()
        }
        _ => "the generation key holds something else; set another namespace".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFO: &str = "# Server\r\nrun_id:abc\r\nuptime_in_seconds:30\r\nmaxmemory:0\r\n\
        maxmemory_policy:allkeys-lru\r\nloading:0\r\nrole:master\r\nmaster_replid:def\r\n";

    fn guard() -> Arc<Guard> {
        Guard::new(Duration::from_secs(20), Arc::from(b"g".as_slice()))
    }

    fn info(run_id: &str, uptime: u64) -> Info {
        Info {
            run_id: run_id.into(),
            uptime: Duration::from_secs(uptime),
            ..Info::default()
        }
    }

    #[test]
    fn info_tells_who_a_server_is_and_whether_it_evicts() {
        let read = Info::parse(INFO).unwrap();
        assert_eq!((&*read.run_id, read.uptime.as_secs()), ("abc", 30));
        assert_eq!(read.evicts, None);
        let limited = INFO.replace("maxmemory:0", "maxmemory:1");
        assert_eq!(
            Info::parse(&limited).unwrap().evicts.unwrap(),
            "allkeys-lru"
        );
    }

    #[test]
    fn replicas_and_loading_servers_may_not_vote() {
        for (from, to) in [
            ("role:master", "role:slave"),
            ("loading:0", "loading:1"),
            ("run_id", "x"),
        ] {
            assert!(Info::parse(&INFO.replace(from, to)).is_err(), "{to}");
        }
    }

    #[test]
    fn the_age_of_a_generation_is_by_the_servers_clock() {
        let bulk = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let stamp = Value::Array(vec![bulk("r:100:999999:run"), bulk("101"), bulk("1")]);
        let (generation, age) = read_stamp(&stamp).unwrap();
        assert_eq!(
            (&*generation, age),
            ("r:100:999999:run", Duration::from_micros(2))
        );
        assert!(read_stamp(&Value::Array(vec![bulk("x"), bulk("1"), bulk("1")])).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_votes_when_its_generation_its_uptime_and_this_client_say_so() {
        let (guard, node): (_, Arc<str>) = (guard(), "n".into());
        let (g, long) = (Arc::<str>::from("g1"), Duration::from_secs(100));
        let secs = Duration::from_secs;
        assert_eq!(guard.quarantine(&node, info("a", 100), &g, long), secs(0));
        assert_eq!(guard.quarantine(&node, info("a", 20), &g, long), secs(1));
        assert_eq!(
            guard.quarantine(&node, info("a", 100), &g, secs(5)),
            secs(15)
        );
        // Another process, whose clocks say that it is old: this client knows better.
        assert_eq!(guard.quarantine(&node, info("b", 100), &g, long), secs(20));
        tokio::time::advance(secs(19)).await;
        assert_eq!(guard.quarantine(&node, info("b", 100), &g, long), secs(1));
        tokio::time::advance(secs(1)).await;
        assert_eq!(guard.quarantine(&node, info("b", 100), &g, long), secs(0));
    }

    #[tokio::test]
    async fn one_server_under_two_names_is_noticed_under_both() {
        let guard = guard();
        let (a, b, c): (Arc<str>, Arc<str>, Arc<str>) = ("a".into(), "b".into(), "c".into());
        guard.quarantine(&a, info("same", 100), &"g1".into(), Duration::ZERO);
        assert_eq!(guard.twin_of("a"), None);
        guard.quarantine(&b, info("same", 100), &"g2".into(), Duration::ZERO);
        guard.quarantine(&c, info("other", 100), &"g2".into(), Duration::ZERO);
        assert_eq!(guard.twin_of("a"), Some(b));
        assert!(guard.twin_of("b").is_some() && guard.twin_of("c").is_some());
    }
}
