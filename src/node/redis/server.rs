//! What the handle of a server's node, its lane and its reader share: whether the server can be reached, what callers, logs
//! and metrics are told about that, and the inbox, which is the bounded queue between the callers and the lane.
//!
//! # Implementation details
//!
//! An inbox is a multi-producer, single-consumer channel whose consumer, the lane, can be replaced. One short
//! critical section does everything that a job meets on its way in: a lock on five nodes submits ten jobs from
//! all threads of the runtime, and a channel, a counter of queued jobs and a slot for the waker, each with atomics
//! of its own, cost more.
//!
//! *Lane.* A lane lives in the home of its lock service. If that ends, the lane is dropped and detaches itself; the
//! next job starts another one.
//!
//! *Room.* The bound covers the queued jobs and those that the lane has taken and has not reported as finished. A
//! release is never refused: a lock whose acquisition was accepted must be released, and there is at most one release
//! for each acquisition.
//!
//! Invariants: jobs leave in the order of submission, those that a lane returns before all others. There is at most
//! one lane.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use deadpool::managed::Pool;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::node::failure::{NodeFailure, whole_seconds};
use crate::node::home::Home;
use crate::node::job::Job;
use crate::node::redis::describe::PUBLISH_PERMISSIONS;
use crate::node::redis::endpoint::{Connector, Endpoint};
use crate::node::redis::guard::Guard;
use crate::node::release_signal::Subscriber;
use crate::node::traits::NodeState;
use crate::node::{Mutex, Peers, telemetry};

/// The state of one server. Its lane reports whether it can be reached; every submitted request reads that, nearly always
/// from the atomics alone.
pub(crate) struct RedisServer {
    pub(super) name: Arc<str>,
    /// The connections for reading records. Its manager also makes those of lanes, which never enter the pool.
    pub(super) pool: Pool<Connector>,
    pub(super) timeouts: Timeouts,
    pub(super) guard: Arc<Guard>,
    pub(super) inbox: Inbox,
    /// The channel to the listener, which is closed while there is none. It has no bound of its own, because a command must
    /// not be lost. Its senders bound it: lease tasks of the same home, which rest when the listener rests. Each subscribes
    /// after an attempt that the lanes have answered, and unsubscribes once for that.
    pub(super) listener: Mutex<mpsc::UnboundedSender<ListenerCommand>>,
    /// Where its tasks live.
    pub(super) home: Arc<Home>,
    known: Mutex<Observation>,
    /// Whether requests are sent at once: the server answers and may vote, or has not been tried.
    is_open: AtomicBool,
    /// Whether anything is known. Before, requests wait for the first connection.
    is_tried: AtomicBool,
    /// The nodes of its group.
    peers: Arc<Peers>,
    /// Whether the missing permission to publish releases has been logged.
    has_warned: AtomicBool,
}

/// A lock, a subscriber of its releases, and whether it subscribes or unsubscribes.
pub(super) type ListenerCommand = (Arc<[u8]>, Subscriber, bool);

/// What the lane last observed.
#[derive(Default)]
struct Observation {
    /// The error of a server that does not answer, and since when it does not: only releases are sent.
    down: Option<(Arc<str>, Instant)>,
    /// The end of the quarantine, as far as it is known, of a server that was started or flushed recently: only
    /// releases and records are sent. The server is asked again then. Kept while it does not answer.
    quarantined_until: Option<Instant>,
    /// When the lane asks the server again, if it is down or quarantined.
    asked_at: Option<Instant>,
}

/// The timeouts of one node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timeouts {
    pub(crate) node: Duration,
    pub(crate) connect: Duration,
}

impl RedisServer {
    pub(crate) fn new(
        endpoint: Endpoint,
        timeouts: Timeouts,
        guard: Arc<Guard>,
        home: &Arc<Home>,
        peers: &Arc<Peers>,
    ) -> Self {
        Self {
            name: endpoint.name,
            pool: endpoint.pool,
            timeouts,
            guard,
            inbox: Inbox::default(),
            listener: Mutex::new(mpsc::unbounded_channel().0),
            home: Arc::clone(home),
            known: Mutex::default(),
            is_open: AtomicBool::new(true),
            is_tried: AtomicBool::new(false),
            peers: Arc::clone(peers),
            has_warned: AtomicBool::new(false),
        }
    }

    /// Returns the name of its group, if that is one of several.
    pub(super) fn group(&self) -> Option<&Arc<str>> {
        self.peers.group.as_ref()
    }

    /// Returns whether requests are sent at once: the server answers and may vote, or has not been tried. Read before what
    /// takes the lock, because it is nearly always so.
    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    /// Returns whether it is known if the server can be reached. Not before the first attempt to connect, and not after
    /// the time at which the lane was to ask the server again: the home may not be run meanwhile.
    pub(super) fn is_known(&self) -> bool {
        // A running lane may be late by as much as the node timeout.
        let is_late = |at| at + self.timeouts.node < Instant::now();
        self.is_tried.load(Ordering::Relaxed)
            && (self.is_open() || !self.known.lock().asked_at.is_some_and(is_late))
    }

    /// Returns the failure of a request that is not sent because the node is down or must not vote, as far as that is
    /// known. Otherwise, the request waits until the lane knows more; if there is no lane, it starts one.
    pub(super) fn failure(&self) -> Option<NodeFailure> {
        if self.is_open() && !self.has_duplicates() {
            return None;
        }
        self.is_known().then(|| self.last_failure()).flatten()
    }

    /// Returns the same as the lane has just found it, or found it last.
    pub(super) fn last_failure(&self) -> Option<NodeFailure> {
        match self.state() {
            NodeState::Up => None,
            NodeState::Quarantined { left } => Some(self.quarantined(left)),
            NodeState::Unreachable { why, .. } => Some(self.unreachable(why)),
        }
    }

    /// Returns what is known about the node.
    pub(super) fn state(&self) -> NodeState {
        if self.is_tried.load(Ordering::Relaxed)
            && let Some(why) = self.duplicate()
        {
            let since = Duration::ZERO;
            return NodeState::Unreachable { why, since };
        }
        if self.is_open() {
            return NodeState::Up;
        }
        let known = self.known.lock();
        match (&known.down, known.quarantined_until) {
            (Some((why, since)), _) => NodeState::Unreachable {
                why: Arc::clone(why),
                since: since.elapsed(),
            },
            (None, Some(until)) => NodeState::Quarantined {
                left: until.saturating_duration_since(Instant::now()),
            },
            (None, None) => NodeState::Up,
        }
    }

    pub(super) fn is_down(&self) -> bool {
        self.known.lock().down.is_some()
    }

    /// Returns when a quarantined server is asked again.
    pub(super) fn quarantined_until(&self) -> Option<Instant> {
        self.known.lock().quarantined_until
    }

    /// Returns whether any two nodes are one server.
    fn has_duplicates(&self) -> bool {
        // A hint that saves the lock. The lane of the later one of the two has stored it, under the lock, when the server was
        // admitted, so that one never votes meanwhile; the other may, for a moment.
        self.guard.has_duplicates.load(Ordering::Relaxed)
    }

    /// Returns why the node must not vote if another node leads to the same server.
    pub(super) fn duplicate(&self) -> Option<Arc<str>> {
        let has_duplicates = self.has_duplicates();
        let other = has_duplicates.then(|| self.guard.duplicate_of(&self.name))??;
        let why = format!("{} and {other} are one server; list it once", self.name);
        Some(why.into())
    }

    /// Returns the failure of a request to a server that must not vote for this time.
    pub(super) fn quarantined(&self, left: Duration) -> NodeFailure {
        let node = Arc::clone(&self.name);
        NodeFailure::Quarantined { node, left }
    }

    /// Returns the failure of a request that is not sent for this reason.
    pub(super) fn unreachable(&self, why: impl Into<Arc<str>>) -> NodeFailure {
        let (node, why) = (Arc::clone(&self.name), why.into());
        NodeFailure::Unreachable { node, why }
    }

    /// Returns the failure of a request whose caller no longer waited when it was about to be sent.
    pub(super) fn given_up(&self) -> NodeFailure {
        self.unreachable("the caller gave up before the request was sent")
    }

    /// Returns the failure of a request that was sent on a connection which is gone.
    pub(super) fn disconnected(&self, why: &Arc<str>) -> NodeFailure {
        let (node, why) = (Arc::clone(&self.name), Arc::clone(why));
        NodeFailure::Disconnected { node, why }
    }

    /// Forgets what is known, because no lane observes the server any more.
    pub(super) fn reset(&self) {
        self.set(false, |known| *known = Observation::default());
    }

    /// Reports that the server answers, and until when it must not vote.
    pub(super) fn set_answering(&self, quarantined_until: Option<Instant>) {
        let (down, before) = self.set(true, |known| {
            let before = std::mem::replace(&mut known.quarantined_until, quarantined_until);
            (known.down.take(), before)
        });
        let node = &*self.name;
        if let Some((_, since)) = down {
            tracing::warn!(node, down_for = ?since.elapsed(), "redlock node is up again");
        }
        telemetry::node_up(&self.name, self.group(), self.is_open());
        match (before, quarantined_until, self.duplicate()) {
            (Some(_), None, _) => tracing::warn!(node, "redlock node votes again"),
            (None, Some(_), Some(why)) => tracing::warn!(node, %why, "redlock node gives no votes"),
            (None, Some(until), None) => tracing::warn!(
                node,
                seconds_left = whole_seconds(until.saturating_duration_since(Instant::now())),
                "redlock node was started or flushed recently and is quarantined; see restart_guard"
            ),
            _ => {}
        }
    }

    /// Reports that the server does not answer.
    pub(super) fn set_down(&self, why: &Arc<str>) {
        let was_down = self.set(true, |known| {
            let before = known.down.take();
            let since = before.as_ref().map(|(_, since)| *since);
            known.down = Some((Arc::clone(why), since.unwrap_or_else(Instant::now)));
            before.is_some()
        });
        telemetry::node_up(&self.name, self.group(), false);
        if !was_down {
            let (node, effect) = (&*self.name, self.peers.effect());
            tracing::warn!(node, %why, "redlock node is down; {effect}");
        }
    }

    /// Notes when the lane asks the server again, or when an attempt to do so ends.
    pub(super) fn set_asked_at(&self, at: Option<Instant>) {
        self.known.lock().asked_at = at;
    }

    fn set<T>(&self, is_tried: bool, change: impl FnOnce(&mut Observation) -> T) -> T {
        let mut known = self.known.lock();
        let changed = change(&mut known);
        let is_open = known.down.is_none() && known.quarantined_until.is_none();
        // Relaxed, and so are the other uses: the lock orders the writers. Readers that need only this one answer take no lock,
        // and read nothing else that depends on it; a stale one costs a request that fails, or one that a lane refuses
        // although its server is back.
        let was_open = self.is_open.swap(is_open, Ordering::Relaxed);
        if is_open != was_open {
            self.peers.count(is_open);
        }
        self.is_tried.store(is_tried, Ordering::Relaxed);
        changed
    }

    /// Passes the number of subscribers that a release was published to on to its vote. Logs once if the server's
    /// user must not publish.
    pub(super) fn set_subscribers(&self, release: &mut Job, published: i64) {
        if let Ok(subscribers) = usize::try_from(published) {
            release.sender.set_subscribers(subscribers);
        // Relaxed: one swap decides who logs.
        } else if published == -1 && !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                node = &*self.name,
                "redlock node's user must not publish releases, so waiters poll; it needs {PUBLISH_PERMISSIONS}"
            );
        }
    }
}

/// The jobs that are queued for a lane, in the order of submission.
#[derive(Debug, Default)]
pub(super) struct Inbox(Mutex<Queued>);

#[derive(Debug, Default)]
struct Queued {
    jobs: VecDeque<Job>,
    /// The [`weight`] of these jobs and of those that the lane has taken and not finished.
    weight: usize,
    /// Whether there is a lane whose home has not ended.
    has_lane: bool,
    /// Wakes the lane. `None` while it is awake: it looks into the inbox before it sleeps, or after the next reply.
    asleep: Option<Waker>,
    /// Whether the handle of the node has been dropped.
    is_closed: bool,
}

/// The maximum weight of the jobs. Beyond it, a server is so slow that no more of them would be answered in time.
const MAX_WEIGHT: usize = 64 << 20;
/// The weight of a job without a record: there may be at most 65,536 of them.
const JOB: usize = 1 << 10;

/// Returns how much of the room of an inbox a job takes: its own size, roughly, and that of its record. It does not change
/// while the job is with the lane.
pub(super) fn weight(job: &Job) -> usize {
    JOB + job.op().record_bytes()
}

impl Inbox {
    /// Appends a job to the queue, and returns whether the caller must start a lane.
    ///
    /// # Errors
    ///
    /// Returns the job if there is no room for it. A release is never refused.
    pub(super) fn post(&self, job: Job) -> Result<bool, Job> {
        let weight = weight(&job);
        let mut queued = self.0.lock();
        if queued.weight + weight > MAX_WEIGHT && !job.is_release() {
            return Err(job);
        }
        queued.weight += weight;
        queued.jobs.push_back(job);
        // Both are claimed together with the push: one of several callers starts the lane, or wakes it, and a lane that goes
        // to sleep has looked for jobs after that.
        let needs_lane = !std::mem::replace(&mut queued.has_lane, true);
        let asleep = queued.asleep.take();
        // Woken without the mutex, which the lane locks at once.
        drop(queued);
        if let Some(lane) = asleep {
            lane.wake();
        }
        Ok(needs_lane)
    }

    /// Waits until there are jobs to take, and returns false if there never will be. The lane reports the weight of the jobs
    /// that it has `finished` since it reported last.
    pub(super) fn poll_ready(&self, context: &Context<'_>, finished: &mut usize) -> Poll<bool> {
        let mut queued = self.0.lock();
        // Taken out, because the lane may be polled again before it finishes more.
        queued.weight -= std::mem::take(finished);
        if !queued.jobs.is_empty() {
            return Poll::Ready(true);
        }
        if queued.is_closed {
            return Poll::Ready(false);
        }
        match &mut queued.asleep {
            Some(lane) => lane.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }

    /// Moves up to `most` jobs to `jobs`, which is empty. They keep their room.
    pub(super) fn take(&self, most: usize, jobs: &mut VecDeque<Job>) {
        let mut queued = self.0.lock();
        if queued.jobs.len() <= most {
            // Swapped, so that the buffer of the jobs taken before serves the next ones.
            std::mem::swap(&mut queued.jobs, jobs);
        } else {
            jobs.extend(queued.jobs.drain(..most));
        }
    }

    /// Lets the lane end once it has nothing left to do.
    pub(super) fn close(&self) {
        let mut queued = self.0.lock();
        queued.is_closed = true;
        let asleep = queued.asleep.take();
        drop(queued);
        if let Some(lane) = asleep {
            lane.wake();
        }
    }

    /// Removes the lane, and takes its unfinished jobs back before the queued ones.
    pub(super) fn detach(&self, unfinished: Vec<Job>) {
        // In one critical section: the next job starts another lane, which must find these jobs before that job.
        let mut queued = self.0.lock();
        queued.has_lane = false;
        queued.asleep = None;
        for job in unfinished.into_iter().rev() {
            queued.jobs.push_front(job);
        }
        // Counted anew: the jobs that the lane has answered as it ended were not reported.
        queued.weight = queued.jobs.iter().map(weight).sum();
    }
}

#[cfg(test)]
pub(super) mod tests;
