//! The restart guard: asks a server, on each new connection, what the rules of admission need.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use deadpool_redis::redis::aio::{ConnectionLike, MultiplexedConnection};
use deadpool_redis::redis::{RedisError, Value, cmd};
use tokio::time::Instant;

use crate::node::redis::connection::{describe, with_remedy};
use crate::node::redis::scripts;
use crate::node::unguessable;
use crate::protocol::OwnerToken;
use crate::protocol::admission::{Admissions, Generation, Introduction};

/// The guard of all servers of one lock service.
#[derive(Debug)]
pub(crate) struct Guard {
    /// The key that says since when a server has its memory.
    pub(super) generation_key: Arc<[u8]>,
    known: Mutex<Known>,
    /// Whether any two servers are one; almost never, and asked for with every request.
    has_twins: AtomicBool,
    /// Set at first use: the guard may be built before the runtime whose clock it follows.
    epoch: OnceLock<Instant>,
}

#[derive(Debug)]
struct Known {
    admissions: Admissions,
    /// Which memory each name led to last, and which until when before that.
    memories: BTreeMap<Arc<str>, Memory>,
    former: Vec<(Arc<str>, Memory, Duration)>,
    warned_of_eviction: BTreeSet<Arc<str>>,
}

#[derive(Debug, Clone)]
struct Memory {
    run_id: Arc<str>,
    generation: Generation,
}

/// What follows from what a server said of itself on one connection.
#[derive(Debug, Clone)]
pub(super) struct Admission {
    /// Which memory it has; to be sent with every request for a vote on this connection.
    pub(super) generation: Generation,
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
        let known = Known {
            admissions: Admissions::new(window),
            memories: BTreeMap::new(),
            former: Vec::new(),
            warned_of_eviction: BTreeSet::new(),
        };
        Arc::new(Self {
            generation_key,
            known: Mutex::new(known),
            has_twins: AtomicBool::new(false),
            epoch: OnceLock::new(),
        })
    }

    /// Returns how long a server that lost its memory stays out.
    pub(super) fn window(&self) -> Duration {
        self.known().admissions.window()
    }

    /// Asks a server, on the very connection that is going to be used, whether it may vote. An attempt at a
    /// lock takes no longer than `attempt`.
    pub(super) async fn admit(
        &self,
        node: &Arc<str>,
        connection: &mut MultiplexedConnection,
        attempt: Duration,
    ) -> Result<Admission, Arc<str>> {
        let text = cmd("INFO").query_async::<String>(connection).await;
        let text = text.map_err(|error| refused("INFO", &error))?;
        let info = Info::parse(&text)?;
        let random = OwnerToken::from_random(unguessable());
        let admit = scripts::admit(&self.generation_key, random.as_str(), &info.run_id);
        let stamp = connection.req_packed_command(&admit).await;
        let stamp = stamp.map_err(|error| refused("the admission", &error))?;
        let (generation, now) = read_stamp(&stamp).ok_or_else(|| unreadable(&stamp))?;
        let mut known = self.known();
        if let Some(policy) = &info.evicts
            && known.warned_of_eviction.insert(Arc::clone(node))
        {
            tracing::warn!(
                node = &**node,
                %policy,
                "redlock node may evict locks and fences; set maxmemory-policy to noeviction"
            );
        }
        let said = Introduction {
            run_id: info.run_id.into(),
            replication_id: info.replication_id.into(),
            uptime: info.uptime,
            generation: generation.clone(),
            now,
        };
        let now = self.now();
        let memory = Memory {
            run_id: Arc::clone(&said.run_id),
            generation: generation.clone(),
        };
        let moved = known.note_memory(node, &memory, attempt, now);
        let left = known.admissions.admit(node, said, now).max(moved);
        self.has_twins
            .store(known.admissions.has_twins(), Ordering::Relaxed);
        Ok(Admission { generation, left })
    }

    /// Notes that there is no connection to a node any more, and none that is going to be used.
    pub(super) fn leave(&self, node: &str) {
        let now = self.now();
        let mut known = self.known();
        known.admissions.disconnect(node);
        if let Some((name, memory)) = known.memories.remove_entry(node) {
            known.former.push((name, memory, now));
        }
        self.has_twins
            .store(known.admissions.has_twins(), Ordering::Relaxed);
    }

    /// Returns the other node that is the same server, or a copy of it.
    pub(super) fn twin_of(&self, node: &str) -> Option<Arc<str>> {
        if !self.has_twins.load(Ordering::Relaxed) {
            return None;
        }
        self.known().admissions.twin_of(node).cloned()
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        let now = Instant::now();
        now.saturating_duration_since(*self.epoch.get_or_init(|| now))
    }
}

impl Known {
    /// Notes which memory a name leads to. Returns how long it must not vote because another name led there:
    /// an attempt may have a vote of it under that name, and would count a second.
    fn note_memory(
        &mut self,
        node: &Arc<str>,
        memory: &Memory,
        attempt: Duration,
        now: Duration,
    ) -> Duration {
        let left = |until: Duration| attempt.saturating_sub(now.saturating_sub(until));
        self.former.retain(|(_, _, until)| !left(*until).is_zero());
        let others = self
            .memories
            .iter()
            .map(|(name, memory)| (name, memory, now));
        let former = self.former.iter();
        let former = former.map(|(name, memory, until)| (name, memory, *until));
        let same = others.chain(former);
        let same = same.filter(|(name, other, _)| *name != node && other.is_of(memory));
        let left = same.map(|(_, _, until)| left(until)).max();
        if let Some(before) = self.memories.insert(Arc::clone(node), memory.clone())
            && !before.is_of(memory)
        {
            self.former.push((Arc::clone(node), before, now));
        }
        left.unwrap_or_default()
    }
}

impl Memory {
    fn is_of(&self, other: &Self) -> bool {
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

/// Reads the answer of the admission script: the generation, and the server's clock.
fn read_stamp(stamp: &Value) -> Option<(Generation, Duration)> {
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
    let seconds = Duration::from_secs(text(seconds)?.parse().ok()?);
    let micros = Duration::from_micros(text(micros)?.parse().ok()?);
    let generation = Generation::parse(&text(generation)?)?;
    Some((generation, seconds.checked_add(micros)?))
}

fn refused(what: &str, error: &RedisError) -> Arc<str> {
    let why = describe(error);
    format!("{what} was refused ({why}); the restart guard needs it").into()
}

fn unreadable(stamp: &Value) -> Arc<str> {
    match stamp {
        Value::ServerError(error) => {
            let details = error.details().unwrap_or_default();
            let why = with_remedy(format!("{} {details}", error.code()));
            format!("the admission was refused ({why})").into()
        }
        _ => "the generation key holds something else; set another namespace".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFO: &str = "# Server\r\nrun_id:abc\r\nuptime_in_seconds:30\r\nmaxmemory:0\r\n\
        maxmemory_policy:allkeys-lru\r\nloading:0\r\nrole:master\r\nmaster_replid:def\r\n";

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
    fn the_stamp_is_a_generation_and_the_servers_clock() {
        let bulk = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let stamp = Value::Array(vec![bulk("r:100:999999:run"), bulk("101"), bulk("1")]);
        let (generation, now) = read_stamp(&stamp).unwrap();
        assert_eq!(generation.as_str(), "r:100:999999:run");
        assert_eq!(generation.age(now), Duration::from_micros(2));
        assert!(read_stamp(&Value::Array(vec![bulk("x"), bulk("1"), bulk("1")])).is_none());
    }
}
