//! The lock as an engineer would write it by hand with redis-rs.
//!
//! It has one multiplexed connection per node, sends the same commands as this crate, and decides at the
//! first majority. A task of its own awaits the remaining answers, because redis-rs does not send a command
//! whose caller has dropped its future.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::time::{Instant, sleep};
use tower_redlock::deadpool_redis::redis::aio::{ConnectionLike, MultiplexedConnection};
use tower_redlock::deadpool_redis::redis::{Client, Cmd, Script, Value, cmd};

use crate::same::{ACQUIRE_FENCED, RELEASE_FENCED, RETENTION_MS, millis, next_proposal};

/// A hand-written lock service.
#[derive(Clone)]
pub(crate) struct ByHand {
    nodes: Arc<[MultiplexedConnection]>,
    acquire: Arc<str>,
    release: Arc<str>,
    fencing: bool,
    /// One mutex for all keys: the waiters of a benchmark share one key.
    queue: Arc<Mutex<()>>,
}

/// A held lock.
pub(crate) struct Claim {
    name: String,
    owner: String,
    /// The guard of the local mutex, dropped after the release.
    _turn: Option<OwnedMutexGuard<()>>,
}

impl ByHand {
    pub(crate) async fn connect(urls: &[String], fencing: bool) -> Self {
        let release = if fencing { RELEASE_FENCED } else { RELEASE };
        let mut nodes = Vec::with_capacity(urls.len());
        for url in urls {
            let client = Client::open(url.as_str()).expect("the harness makes valid URLs");
            let node = client.get_multiplexed_async_connection().await;
            let mut node = node.expect("the server runs");
            for code in [ACQUIRE_FENCED, release] {
                let mut load = cmd("SCRIPT");
                load.arg("LOAD").arg(code);
                let loaded = node.req_packed_command(&load).await;
                loaded.expect("the server takes scripts");
            }
            nodes.push(node);
        }
        let hash = |code| Arc::from(Script::new(code).get_hash());
        Self {
            nodes: nodes.into(),
            acquire: hash(ACQUIRE_FENCED),
            release: hash(release),
            fencing,
            queue: Arc::default(),
        }
    }

    /// Waits for the local mutex, then tries until the key is free.
    pub(crate) async fn acquire_in_turn(&self, key: &str, patience: Duration) -> Option<Claim> {
        let deadline = Instant::now() + patience;
        let turn = Arc::clone(&self.queue).lock_owned().await;
        while Instant::now() < deadline {
            if let Some(claim) = self.acquire(key).await {
                let _turn = Some(turn);
                return Some(Claim { _turn, ..claim });
            }
            sleep(Duration::from_millis(fastrand::u64(5..15))).await;
        }
        None
    }

    /// Tries every node once, and releases the key if only a minority granted it.
    pub(crate) async fn acquire(&self, key: &str) -> Option<Claim> {
        let claim = Claim {
            name: format!("by-hand:{{{key}}}"),
            owner: format!("{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..)),
            _turn: None,
        };
        let granted = if self.fencing {
            self.acquire_fenced(&claim).await
        } else {
            let mut set = cmd("SET");
            set.arg(&claim.name).arg(&claim.owner);
            set.arg("NX").arg("PX").arg(millis());
            self.ask(set, |answer| matches!(answer, Value::Okay).then_some(0))
                .await
        };
        if granted {
            return Some(claim);
        }
        self.release(&claim).await;
        None
    }

    pub(crate) async fn release(&self, claim: &Claim) -> bool {
        let mut eval = cmd("EVALSHA");
        eval.arg(&*self.release)
            .arg(1)
            .arg(&claim.name)
            .arg(&claim.owner);
        if self.fencing {
            // Publishes the release to subscribers, as this crate does.
            eval.arg(1);
        }
        // The number of deleted keys, or of notified processes.
        let ours = |answer| match answer {
            Value::Int(number) if number >= 0 => Some(1),
            _ => None,
        };
        self.ask(eval, ours).await
    }

    async fn acquire_fenced(&self, claim: &Claim) -> bool {
        let mut eval = cmd("EVALSHA");
        eval.arg(&*self.acquire).arg(2);
        eval.arg(&claim.name).arg(format!("{}:fence", claim.name));
        eval.arg(&claim.owner).arg(next_proposal());
        eval.arg(millis()).arg(RETENTION_MS);
        let number = |answer| match answer {
            Value::Int(fence) => u64::try_from(fence).ok(),
            _ => None,
        };
        self.ask(eval, number).await
    }

    /// Sends a command to all nodes; returns true as soon as a majority answered the same number.
    async fn ask(&self, command: Cmd, number: impl Fn(Value) -> Option<u64>) -> bool {
        let command = Arc::new(command);
        let mut answers: FuturesUnordered<_> = self
            .nodes
            .iter()
            .map(|node| {
                let (mut node, command) = (node.clone(), Arc::clone(&command));
                async move { node.req_packed_command(&command).await }
            })
            .collect();
        let majority = self.nodes.len() / 2 + 1;
        let (mut numbers, mut answered) = (Vec::with_capacity(self.nodes.len()), 0);
        let mut most = 0;
        while let Some(answer) = answers.next().await {
            answered += 1;
            if let Some(number) = answer.ok().and_then(&number) {
                numbers.push(number);
                most = most.max(numbers.iter().filter(|known| **known == number).count());
            }
            let possible = most + self.nodes.len() - answered >= majority;
            if most >= majority || !possible {
                break;
            }
        }
        if !answers.is_empty() {
            tokio::spawn(async move { while answers.next().await.is_some() {} });
        }
        most >= majority
    }
}

/// The script of the Redlock specification.
const RELEASE: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) \
    else return 0 end";
