//! The Redis node: one server, spoken to over one kept connection: one from a deadpool-redis pool, or one
//! that redis-rs introduces us on and its lane drives, if the server is named by a TCP URL without TLS.

mod connection;
mod decode;
mod encode;
mod guard;
mod inbox;
mod lane;
mod link;
mod listener;
mod reader;
mod reply;
mod scripts;
mod socket;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use deadpool_redis::Pool;
use tokio::runtime::Handle;
use tokio::time::Instant;

use crate::node::job::Job;
use crate::node::redis::connection::{Address, TELLING};
use crate::node::redis::inbox::{Inbox, Posted};
use crate::node::redis::listener::Listener;
use crate::node::redis::reader::Reader;
use crate::node::{Node, NodeFailure, NodeState, ReleaseSignal, Subscription};

pub(crate) use connection::{Endpoint, pool_for};
pub(crate) use encode::Packed;
pub(crate) use guard::Guard;

/// A Redis server. Connects at first use; a dead server at start-up is no error.
pub(crate) struct RedisNode {
    shared: Arc<Shared>,
    /// Hears of releases, if there is an address to connect to.
    listener: Option<Arc<Listener>>,
    reader: Arc<Reader>,
}

/// What the node and its lane task have in common.
pub(crate) struct Shared {
    name: Arc<str>,
    pool: Pool,
    /// Where the server is, if it can be spoken to without the pool.
    address: Option<Address>,
    /// Whether the pool is the user's, and its connections as the user likes them.
    is_foreign: bool,
    timeouts: Timeouts,
    /// The restart guard, if it is on.
    guard: Option<Arc<Guard>>,
    reachability: Mutex<Reachability>,
    /// Whether requests are sent as they come, as far as the reachability goes: nearly always, and asked
    /// for with every request.
    is_open: AtomicBool,
    /// Whether a connection was opened, or could not be.
    is_tried: AtomicBool,
    /// What waits for the lane.
    inbox: Inbox,
    /// Whether it was said that nobody can be told of releases.
    warned: AtomicBool,
}

/// How long the parts of talking to a node may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timeouts {
    pub(crate) node: Duration,
    pub(crate) connect: Duration,
}

/// Whether a request that comes now has a chance.
#[derive(Debug, Clone)]
enum Reachability {
    /// Nothing is known yet: requests wait for the first connection.
    Untried,
    /// The node answers.
    Up,
    /// The node answers, but lost its memory not long ago: only releases are sent.
    Quarantined { until: Instant },
    /// The node does not answer; requests other than releases fail at once.
    Down { why: Arc<str>, since: Instant },
}

impl RedisNode {
    pub(crate) fn new(endpoint: Endpoint, timeouts: Timeouts, guard: Option<Arc<Guard>>) -> Self {
        let name = endpoint.name;
        let client = endpoint.client;
        Self {
            shared: Arc::new(Shared {
                name: Arc::clone(&name),
                pool: endpoint.pool,
                address: client.as_ref().and_then(Address::of),
                is_foreign: client.is_none(),
                timeouts,
                guard,
                reachability: Mutex::new(Reachability::Untried),
                is_open: AtomicBool::new(true),
                is_tried: AtomicBool::new(false),
                inbox: Inbox::default(),
                warned: AtomicBool::new(false),
            }),
            reader: Arc::new(Reader::new()),
            listener: client.map(|client| Listener::new(&name, client, timeouts.connect)),
        }
    }
}

impl fmt::Debug for RedisNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the pool: it would print the URL with its credentials.
        f.debug_struct("RedisNode")
            .field("name", &self.shared.name)
            .finish_non_exhaustive()
    }
}

/// Ends the lane.
impl Drop for RedisNode {
    fn drop(&mut self) {
        self.shared.inbox.close();
    }
}

impl Shared {
    fn reachability(&self) -> MutexGuard<'_, Reachability> {
        self.reachability
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn set_reachability(&self, now: Reachability) {
        let is_open = matches!(now, Reachability::Untried | Reachability::Up);
        let mut reachability = self.reachability();
        self.is_open.store(is_open, Ordering::Release);
        let is_tried = !matches!(now, Reachability::Untried);
        self.is_tried.store(is_tried, Ordering::Release);
        *reachability = now;
    }

    /// Returns the failure of a request that is not sent because the node is down or may not vote.
    fn unreachable(&self) -> Option<NodeFailure> {
        if !self.is_tried.load(Ordering::Acquire) {
            // There is no connection to send it on, so it waits, and the next lane starts with it.
            return None;
        }
        if let Some(why) = self.twin() {
            let node = Arc::clone(&self.name);
            return Some(NodeFailure::Unreachable { node, why });
        }
        if self.is_open.load(Ordering::Acquire) {
            return None;
        }
        match &*self.reachability() {
            Reachability::Down { why, .. } => Some(NodeFailure::Unreachable {
                node: Arc::clone(&self.name),
                why: Arc::clone(why),
            }),
            Reachability::Quarantined { until } => Some(NodeFailure::Quarantined {
                node: Arc::clone(&self.name),
                left: until.saturating_duration_since(Instant::now()),
            }),
            Reachability::Untried | Reachability::Up => None,
        }
    }

    /// Whether the node is a server that another node is too.
    fn is_twin(&self) -> bool {
        let guard = self.guard.as_ref();
        guard.is_some_and(|guard| guard.twin_of(&self.name).is_some())
    }

    /// Returns why the node may not vote if it is a server that another node is too.
    fn twin(&self) -> Option<Arc<str>> {
        let twin = self.guard.as_ref()?.twin_of(&self.name)?;
        Some(format!("it is the same server as {twin}, or a copy; list every server once").into())
    }

    /// Returns the failure of a request to a server that lost its memory since it was admitted.
    fn forgot(&self) -> NodeFailure {
        let window = self.guard.as_ref().map(|guard| guard.window());
        NodeFailure::Quarantined {
            node: Arc::clone(&self.name),
            left: window.unwrap_or_default(),
        }
    }

    /// Notes to how many processes a release was told; that it must not be, it says once.
    fn note_listeners(&self, job: &mut Job, told: i64) {
        if let Ok(listeners) = usize::try_from(told) {
            job.sender.set_subscribers(listeners);
        } else if told == -1 && !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                node = &*self.name,
                "redlock node's user may not tell of releases: it needs {TELLING}"
            );
        }
    }

    fn is_down(&self) -> bool {
        matches!(*self.reachability(), Reachability::Down { .. })
    }
}

impl Node for RedisNode {
    fn name(&self) -> &Arc<str> {
        &self.shared.name
    }

    fn submit(&self, job: Job) {
        // A node that is down costs a request nothing, not even a wake-up of its lane. A release
        // goes on all the same: its acquisition may have got through.
        let job = match self.shared.unreachable() {
            Some(failure) => match job.despite(&failure) {
                Some(job) => job,
                None => return,
            },
            None => job,
        };
        match self.shared.inbox.post(job) {
            Posted::Accepted => {}
            Posted::NeedsLane(runtime) => lane::spawn(&runtime, Arc::clone(&self.shared)),
            // There is no way to reach the server; the vote says so when dropped.
            Posted::Stranded(job) => drop(job),
            Posted::Full(job) => job.sender.send(Err(NodeFailure::Unreachable {
                node: Arc::clone(&self.shared.name),
                why: "too many requests wait for it already".into(),
            })),
        }
    }

    fn fetch(&self, job: Job) {
        if let Some(failure @ NodeFailure::Unreachable { .. }) = self.shared.unreachable() {
            job.sender.send(Err(failure));
            return;
        }
        // Without a runtime there is no way to reach the server; the vote says so when dropped.
        if let Ok(runtime) = Handle::try_current() {
            let (shared, reader) = (Arc::clone(&self.shared), Arc::clone(&self.reader));
            runtime.spawn(async move { reader.run(&shared, job).await });
        }
    }

    fn subscribe(
        &self,
        lock: &Arc<[u8]>,
        signal: &Arc<ReleaseSignal>,
        node: usize,
    ) -> Option<Subscription> {
        let listener = self.listener.as_ref()?;
        Some(listener.listen(lock, signal, node))
    }

    fn extra_patience(&self) -> Duration {
        match self.shared.is_tried.load(Ordering::Acquire) {
            false => self.shared.timeouts.connect,
            true => Duration::ZERO,
        }
    }

    fn state(&self) -> NodeState {
        if !self.shared.is_tried.load(Ordering::Acquire) {
            return NodeState::Up;
        }
        if let Some(why) = self.shared.twin() {
            let since = Duration::ZERO;
            return NodeState::Unreachable { why, since };
        }
        match &*self.shared.reachability() {
            Reachability::Untried | Reachability::Up => NodeState::Up,
            Reachability::Quarantined { until } => NodeState::Quarantined {
                left: until.saturating_duration_since(Instant::now()),
            },
            Reachability::Down { why, since } => NodeState::Unreachable {
                why: Arc::clone(why),
                since: since.elapsed(),
            },
        }
    }
}
