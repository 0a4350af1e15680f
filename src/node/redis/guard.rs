//! The restart guard: keeps servers that were restarted or flushed from voting for a while.
//!
//! # Implementation details
//!
//! A server that has lost its memory has lost the locks that it granted, and could help a second client to one of
//! them. It must therefore not vote until those locks have expired. The rules are in
//! [`admission`](crate::protocol::admission); the guard provides what they need.
//!
//! *Generations.* A key in each server holds its generation: random bits, the server's time when the memory began,
//! and the run id of the server process. A new connection reads it, by a script that starts a new generation if
//! there is none or another process started it. Its age, by the server's own clock, is the age of the memory.
//!
//! *Connections.* A connection is admitted before it is used, on itself, because a second connection to the same
//! name may lead to another server. Each request for a vote names the generation, so that a server which was flushed
//! since then answers amnesia and not with a vote.
//!
//! *Duplicates.* Two nodes may lead to one server, at once or after one name changed its target, and its vote must
//! not count twice. `duplicate_of` refuses both nodes while both lead there. When a name leaves a memory for
//! which an attempt may have counted a vote, no other name may vote for that memory until the attempt has ended.
//!
//! *Off.* With the restart guard off, a server is asked for its run id only, for the duplicates. It has no generation
//! then, no quarantine, and is trusted if it does not tell its run id.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use deadpool_redis::redis::{Value, cmd, from_redis_value, pipe};
use tokio::time::Instant;

use crate::node::Mutex;
use crate::node::redis::describe::{ALL_SLOTS, describe_refusal};
use crate::node::redis::link::Link;
use crate::node::redis::table::{ADMIT, GenerationCheck};
use crate::node::system::{Epoch, unguessable};
use crate::protocol::OwnerToken;
use crate::protocol::admission::{Admissions, Generation, Introduction};

/// The restart guard of all nodes of one lock service. If it is off, it only finds nodes that are one server.
#[derive(Debug, Default)]
#[allow(unreachable_pub, reason = "a fuzz target calls it")]
pub struct Guard {
    /// The key of the generation; `None` if the guard is off.
    pub(super) generation_key: Option<Arc<[u8]>>,
    admissions: Mutex<Admissions>,
    /// The nodes of which it has been logged that they may evict keys.
    warned_of_eviction: Mutex<BTreeSet<Arc<str>>>,
    /// Whether any two nodes are one server. Almost never, but every request checks it.
    pub(super) has_duplicates: AtomicBool,
    /// Whether it has been logged that duplicates may go unnoticed.
    has_warned: AtomicBool,
    epoch: Epoch,
}

#[allow(unreachable_pub, reason = "a fuzz target calls it")]
impl Guard {
    /// Creates a guard, which is off without a generation key.
    #[must_use]
    pub fn new(window: Duration, generation_key: Option<Arc<[u8]>>) -> Arc<Self> {
        Arc::new(Self {
            generation_key,
            admissions: Mutex::new(Admissions::new(window)),
            ..Self::default()
        })
    }

    /// Returns how long a server is quarantined after it has lost its memory.
    pub(super) fn window(&self) -> Duration {
        self.admissions.lock().window()
    }

    /// Asks a server, on the connection that is about to be used, whether it may vote. Returns what requests on this connection
    /// have beside their commands, and the remaining time of the quarantine, or zero. An attempt to acquire a lock takes no
    /// longer than `attempt`.
    ///
    /// # Errors
    ///
    /// The server must never vote.
    pub async fn admit(
        &self,
        node: &Arc<str>,
        link: &mut Link,
        attempt: Duration,
    ) -> Result<(GenerationCheck, Duration), Arc<str>> {
        let is_guarded = self.generation_key.is_some();
        let (mut replies, answered) = link.exchange(pipe().cmd("INFO")).await;
        answered?;
        let reply = replies.pop().unwrap_or(Value::Nil);
        let refusal = describe_refusal(&reply);
        let info: String = from_redis_value(reply).unwrap_or_default();
        let identity = match refusal {
            Some(why) if is_guarded => Err(refused("INFO", &why)),
            Some(why) => Err(why),
            None => identity(&info, is_guarded),
        };
        let (run_id, uptime) = match identity {
            Err(why) if !is_guarded => {
                self.forget(node);
                // Relaxed: one swap decides who logs. A `Once` would stay poisoned by a subscriber that panics.
                if !self.has_warned.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        node = &**node,
                        %why,
                        "redlock node does not tell its run_id, so a server that is listed twice, or is in cluster mode, \
                         is not noticed; permit INFO, or make sure that every server is listed once and is not in \
                         cluster mode"
                    );
                }
                return Ok(Default::default());
            }
            identity => identity?,
        };
        let mut run_id = run_id.to_owned();
        let in_cluster_mode = cluster_mode(&info, &mut run_id, link).await?;
        let (generation, now) = self.stamp(&run_id, link).await?;
        if let Some(policy) = eviction_policy(&info).filter(|_| is_guarded)
            && self.warned_of_eviction.lock().insert(Arc::clone(node))
        {
            tracing::warn!(
                node = &**node,
                %policy,
                "redlock node may evict locks and fences; set its maxmemory-policy to noeviction"
            );
        }
        let replication_id = match is_guarded {
            true => field(&info, "master_replid").unwrap_or_default(),
            false => &run_id,
        };
        let introduction = Introduction {
            run_id: (&*run_id).into(),
            replication_id: replication_id.into(),
            uptime,
            generation: generation.clone(),
            now,
        };
        let check = GenerationCheck {
            key: self.generation_key.clone(),
            generation: Some(generation.as_str().into()),
            in_cluster_mode,
        };
        Ok((check, self.meet(node, introduction, attempt)))
    }

    /// Asks a server for its generation and its clock. With the guard off, the generation is that of any memory of the
    /// process, because none is known.
    async fn stamp(
        &self,
        run_id: &str,
        link: &mut Link,
    ) -> Result<(Generation, Duration), Arc<str>> {
        let Some(generation_key) = &self.generation_key else {
            let any = OwnerToken::from_random([0; 16]);
            let generation = Generation::new(&any, Duration::ZERO, run_id);
            return Ok((generation, Duration::ZERO));
        };
        let random = OwnerToken::from_random(unguessable());
        let mut admit = cmd("EVALSHA");
        admit.arg(ADMIT.word(false)).arg(1).arg(&**generation_key);
        admit.arg(random.to_value()).arg(run_id);
        let stamp = link.call(admit).await;
        let stamp = stamp.map_err(|why| refused("the admission", &why))?;
        read_stamp(stamp).ok_or_else(|| FOREIGN_GENERATION.into())
    }

    /// Stores the introduction of a server, and returns for how long it must not vote.
    pub(super) fn meet(&self, node: &Arc<str>, said: Introduction, took: Duration) -> Duration {
        let now = self.epoch.at(Instant::now());
        let mut admissions = self.admissions.lock();
        let left = admissions.admit(node, said, now);
        self.has_duplicates
            .store(admissions.has_twins(), Ordering::Relaxed);
        left.max(admissions.moved(node, took, now))
    }

    /// Forgets a node, to which there is no connection any more and none about to be used.
    pub(super) fn forget(&self, node: &Arc<str>) {
        let mut admissions = self.admissions.lock();
        admissions.disconnect(node, self.epoch.at(Instant::now()));
        self.has_duplicates
            .store(admissions.has_twins(), Ordering::Relaxed);
    }

    /// Returns the other node that is the same server, or a copy of it.
    #[must_use]
    pub fn duplicate_of(&self, node: &str) -> Option<Arc<str>> {
        let admissions = self.admissions.lock();
        let twin = admissions.twin_of(node).cloned();
        debug_assert!(twin.is_none() || self.has_duplicates.load(Ordering::Relaxed));
        twin
    }
}

/// Returns whether a server runs in cluster mode, and adds the epoch of its slots to its run id: a slot that was another server's
/// meanwhile has lost its keys. A server without all hash slots is an error: it refuses the other keys.
async fn cluster_mode(info: &str, run_id: &mut String, link: &mut Link) -> Result<bool, Arc<str>> {
    // Valkey has another name for it.
    let mode = field(info, "redis_mode").or_else(|| field(info, "server_mode"));
    if mode != Some("cluster") {
        return Ok(false);
    }
    let nodes = link.call(cmd("CLUSTER").arg("NODES").clone()).await?;
    let nodes: String = from_redis_value(nodes).unwrap_or_default();
    let mut lines = nodes.lines();
    let own = lines.find(|line| line.contains("myself,master") && line.ends_with(" 0-16383"));
    let Some(epoch) = own.and_then(|line| line.split(' ').nth(6)) else {
        return Err(format!("it has not all hash slots of its Redis Cluster; {ALL_SLOTS}").into());
    };
    *run_id += "-";
    *run_id += epoch;
    Ok(true)
}

/// Returns a field of the reply to `INFO`.
fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    let of_line = |line: &'a str| line.strip_prefix(name)?.strip_prefix(':');
    info.lines().find_map(of_line)
}

/// Returns the run id and the uptime in the reply to `INFO`. A server that must never vote is an error. With the guard off,
/// the run id is enough, and no server is quarantined.
fn identity(info: &str, is_guarded: bool) -> Result<(&str, Duration), Arc<str>> {
    let run_id = field(info, "run_id").filter(|run_id| !run_id.is_empty());
    if !is_guarded {
        return Ok((run_id.ok_or("INFO has no run_id")?, Duration::MAX));
    }
    let uptime = field(info, "uptime_in_seconds").and_then(|seconds| seconds.parse().ok());
    let (Some(run_id), Some(uptime)) = (run_id, uptime) else {
        return Err("INFO has no run_id or uptime_in_seconds; if it is a proxy, use the URL of the server itself".into());
    };
    let role = field(info, "role").unwrap_or_default();
    if role != "master" {
        return Err(format!("its role is `{role}`, but nodes must be independent masters").into());
    }
    if field(info, "loading").is_some_and(|loading| loading != "0") {
        return Err("it is still loading its data".into());
    }
    Ok((run_id, Duration::from_secs(uptime)))
}

/// Returns the eviction policy in the reply to `INFO`, if the server has a memory limit and may evict.
fn eviction_policy(info: &str) -> Option<&str> {
    let is_limited = field(info, "maxmemory").is_some_and(|limit| limit != "0");
    let policy = field(info, "maxmemory_policy").filter(|_| is_limited)?;
    (policy != "noeviction").then_some(policy)
}

/// Parses the reply of the admission script: the generation, and the server's clock.
fn read_stamp(stamp: Value) -> Option<(Generation, Duration)> {
    let (generation, seconds, micros): (String, String, String) = from_redis_value(stamp).ok()?;
    let seconds = Duration::from_secs(seconds.parse().ok()?);
    let micros = Duration::from_micros(micros.parse().ok()?);
    let generation = Generation::parse(&generation)?;
    Some((generation, seconds.checked_add(micros)?))
}

fn refused(what: &str, why: &str) -> Arc<str> {
    format!("{what} was refused ({why}); the restart guard needs it").into()
}

const FOREIGN_GENERATION: &str =
    "the generation key holds foreign data; delete it there, or choose another namespace";

#[cfg(test)]
mod tests {
    use super::*;

    const INFO: &str = "# RedisServer\r\nrun_id:abc\r\nuptime_in_seconds:30\r\nmaxmemory:0\r\n\
        maxmemory_policy:allkeys-lru\r\nloading:0\r\nrole:master\r\nmaster_replid:def\r\n";

    #[test]
    fn info_has_the_identity_of_a_server_and_its_eviction_policy() {
        let (run_id, uptime) = identity(INFO, true).unwrap();
        assert_eq!((run_id, uptime.as_secs()), ("abc", 30));
        assert_eq!(eviction_policy(INFO), None);
        let limited = INFO.replace("maxmemory:0", "maxmemory:1");
        assert_eq!(eviction_policy(&limited), Some("allkeys-lru"));
    }

    #[test]
    fn info_refuses_replicas_loading_servers_and_proxies() {
        for (from, to) in [
            ("role:master", "role:slave"),
            ("loading:0", "loading:1"),
            ("run_id", "x"),
        ] {
            assert!(identity(&INFO.replace(from, to), true).is_err(), "{to}");
        }
    }

    #[test]
    fn read_stamp_returns_the_generation_and_the_servers_clock() {
        let bulk = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let stamp = Value::Array(vec![bulk("r:100:999999:run"), bulk("101"), bulk("1")]);
        let (generation, now) = read_stamp(stamp).unwrap();
        assert_eq!(generation.as_str(), "r:100:999999:run");
        assert_eq!(generation.age(now), Duration::from_micros(2));
        // redis-rs would read a negative number as a huge one, by which the server would look old.
        for (generation, seconds) in [("x", "1"), ("r:100:999999:run", "-1")] {
            let stamp = Value::Array(vec![bulk(generation), bulk(seconds), bulk("1")]);
            assert!(read_stamp(stamp).is_none());
        }
    }
}
