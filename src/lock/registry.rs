//! The registry of lease tasks, with which a process shuts down without leaving locks behind.
//!
//! # Implementation details
//!
//! Each lease task holds a [`Ticket`] from before its first request until it ends, with its releases sent.
//! [`Registry::enter`] issues tickets under a mutex, and [`Registry::drain`] ends that under the same mutex
//! before it waits. No task enters after that, and `drain` waits for all that entered before.
//!
//! Most releases are confirmed by a majority when the task ends, and the answers of the other nodes matter to none but
//! `drain`. So no task waits for them: the registry keeps the channel. Each one takes the place of another that is settled
//! by then, if the next one or two are. What an outage leaves goes with the tasks that end after it, until few more are kept
//! than tasks run.
//!
//! A lock that is held may [rest](crate::lock::rest) until something is due, such as its first renewal. One task, the keeper, looks then
//! for all locks of the registry. There is one while locks rest.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fmt;
use std::future::poll_fn;
use std::mem::swap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::lock::rest::{Left, Rest};
use crate::node::{Home, Mutex, Vote, VoteReceiver};
use crate::protocol::lease::Awaited;
use crate::protocol::message::Answer;
use crate::protocol::round::ReleaseRound;
use crate::protocol::{FencingToken, Holder, LockKeys};

/// The running lease tasks, and the stage of the shutdown.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    leases: Mutex<Leases>,
    /// Each running task has a receiver.
    running: watch::Sender<()>,
    /// Notified when the keeper must look earlier than it is about to.
    pub(super) sooner: Notify,
    stage: watch::Sender<DrainStage>,
    /// Whether a second request of one task for a lock that is still held was logged.
    has_warned: AtomicBool,
}

#[derive(Debug, Default)]
struct Leases {
    /// The locks of the running tasks that have handed out a guard, by the numbers of their tickets.
    held: Vec<Option<Held>>,
    /// The numbers that no ticket has.
    unused: Vec<usize>,
    released: usize,
    /// The releases of attempts and locks that have ended, which some node had not confirmed.
    unsettled: Vec<UnsettledRelease>,
    /// Which of them is looked at next.
    next: usize,
    /// When the keeper looks next; `None` if there is none.
    looks_at: Option<Instant>,
}

#[derive(Debug, Clone)]
struct Held {
    lock: Arc<dyn Listed>,
    since: Instant,
    /// When something is due for a lock that rests.
    due: Option<Instant>,
}

/// How much earlier than it is due a lock is woken, so that locks are woken together.
const SLACK: Duration = Duration::from_millis(20);

/// How many more releases than running tasks are kept without a look at whether they are settled.
const FEW: usize = 64;

/// A lock as the registry sees it.
pub(crate) trait Listed: fmt::Debug + Send + Sync {
    /// Returns its keys.
    fn keys(&self) -> &LockKeys;

    /// Returns what is to be told of it, if it was granted then and has not ended.
    fn show(&self, since: Instant) -> Option<HeldLock>;

    /// Takes its task, if that rests.
    fn take_rest(&self) -> Option<Rest>;

    /// Makes its task look at what is due.
    fn wake(&self);
}

/// A release that some node had not confirmed when its attempt or its lock ended.
#[derive(Debug)]
pub(crate) struct UnsettledRelease {
    /// Where later confirmations arrive, and in which phase.
    pub(crate) votes: VoteReceiver,
    pub(crate) phase: u32,
    /// The names of the nodes.
    pub(crate) names: Arc<[Arc<str>]>,
    pub(crate) keys: LockKeys,
    pub(crate) round: ReleaseRound,
    /// When the silent nodes count as failed.
    pub(crate) due: Instant,
    /// When the keys have expired on every node for certain.
    pub(crate) gone_at: Instant,
}

impl Leases {
    fn held(&self) -> impl Iterator<Item = &Held> {
        self.held.iter().flatten()
    }

    /// Notes that the keys of a ticket are released, if a guard of them was handed out. The lock is to be dropped without the
    /// mutex.
    #[must_use]
    fn set_released(&mut self, id: usize) -> Option<Held> {
        let released = self.held[id].take();
        self.released += usize::from(released.is_some());
        released
    }

    /// Looks at one of the releases, at another each time. Returns its place if it is settled.
    fn next_settled(&mut self, now: Instant) -> Option<usize> {
        let place = self.next.checked_rem(self.unsettled.len())?;
        self.next = place + 1;
        let is_open = self.unsettled[place].is_open(now);
        (!is_open).then_some(place)
    }

    /// Takes out releases that are settled by now, two at most, so that no lock pays for an outage before it. They are to be
    /// dropped without the mutex, because they may wake a task.
    #[must_use]
    fn take_settled(&mut self, now: Instant) -> Vec<UnsettledRelease> {
        let mut settled = Vec::new();
        for _ in 0..2 {
            let place = self.next_settled(now);
            settled.extend(place.map(|place| self.unsettled.swap_remove(place)));
        }
        if self.unsettled.capacity() > 4 * self.unsettled.len().max(FEW) {
            self.unsettled.shrink_to(2 * self.unsettled.len());
        }
        settled
    }

    /// Counts the answers that have arrived. Returns when the last node is overdue that has not answered a release, and is not
    /// yet; `None` if there is none. The task is woken by the next answer, unless another drain asks after it.
    fn last_due(&mut self, context: &Context<'_>) -> Option<Instant> {
        let now = Instant::now();
        let waits = |release: &mut UnsettledRelease| {
            let is_open = now < release.due && release.poll_answered(context).is_pending();
            is_open.then_some(release.due)
        };
        self.unsettled.iter_mut().filter_map(waits).max()
    }
}

impl UnsettledRelease {
    /// Counts the confirmations that have arrived, and returns whether a key may still be on some node.
    fn is_open(&mut self, now: Instant) -> bool {
        while let Some(vote) = self.votes.try_recv() {
            self.on_vote(vote);
        }
        now < self.gone_at && !self.round.unreleased().is_empty()
    }

    /// Polls until every node has answered.
    fn poll_answered(&mut self, context: &Context<'_>) -> Poll<()> {
        while !self.round.silent().is_empty() {
            let vote = ready!(self.votes.poll_recv(context, Awaited::default()));
            self.on_vote(vote);
        }
        Poll::Ready(())
    }

    fn on_vote(&mut self, vote: Vote) {
        if vote.phase == self.phase {
            let answer = vote.outcome.map_or(Answer::Failed, Answer::Replied);
            self.round.on_release(vote.node, &answer);
        }
    }
}

/// The stages of a shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) enum DrainStage {
    #[default]
    Open,
    /// No new locks; held locks are renewed.
    Draining,
    /// Locks that are still held are not renewed any more.
    TimedOut,
}

/// A lease task's entry, removed when it is dropped.
#[derive(Debug)]
pub(crate) struct Ticket {
    registry: Arc<Registry>,
    pub(crate) id: usize,
    /// Dropped last, after which a drain need not wait for it.
    _running: watch::Receiver<()>,
}

/// Report of [`Redlock::drain`](crate::Redlock::drain).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Drained {
    /// The number of held locks that ended while draining. A lock in several [groups](crate::RedlockBuilder::group) counts
    /// once for each.
    pub released: usize,
    /// The locks that were still held at the timeout. They are no longer renewed, never released under their
    /// holders, and end by their ttl. A lock in several groups has an entry for each.
    pub held: Vec<LockKeys>,
    /// The releases that no majority of the nodes has confirmed, with each node that has not. The keys end by their ttl,
    /// unless the node executes the release before.
    pub unconfirmed: Vec<Unconfirmed>,
    /// The nodes that have not confirmed a release that a majority has confirmed, each once. Such keys are free; what
    /// these nodes may still have of them ends by its ttl.
    pub lagging_nodes: Vec<Arc<str>>,
}

/// A lock that this process holds; see [`Redlock::held`](crate::Redlock::held).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct HeldLock {
    /// The keys. That of a slot is the key `(key, "slot", i)`.
    pub keys: LockKeys,
    /// Whether other readers may hold the keys, too.
    pub is_shared: bool,
    /// The number of the slot, counted from zero; `None` if the lock was requested without
    /// [`slots`](crate::LockRequest::slots).
    pub slot: Option<usize>,
    /// The fencing token; `None` only if fencing is off.
    pub fencing_token: Option<FencingToken>,
    /// The time since the grant.
    pub held_for: Duration,
    /// How much longer the lock is certainly held if it is not renewed.
    pub valid_for: Duration,
    /// The [`label`](crate::LockRequest::label) of the request in spans and metrics.
    pub resource: &'static str,
    /// What refused callers hear of it, if the process has a label or the lock a note.
    pub holder: Option<Holder>,
}

/// A release that a node has not confirmed, and no majority either.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unconfirmed {
    /// The node's address, without credentials.
    pub node: Arc<str>,
    /// The keys that the node may still have.
    pub keys: LockKeys,
}

impl Drained {
    /// Returns whether other processes can lock every key of this process: none is held, and a majority of the nodes has
    /// confirmed each release.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.held.is_empty() && self.unconfirmed.is_empty()
    }
}

impl Registry {
    /// Returns the stage of the shutdown.
    pub(crate) fn stage(&self) -> DrainStage {
        *self.stage.borrow()
    }

    /// Waits until the shutdown reaches a stage.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(crate) async fn reached(&self, stage: DrainStage) {
        // The sender is `self.stage`, so the channel is open.
        drop(self.stage.subscribe().wait_for(|now| *now >= stage).await);
    }

    /// Returns a ticket for a lease task, unless the shutdown has begun.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<Ticket> {
        let mut leases = self.leases.lock();
        // Under the mutex under which a drain ends this: a task is either refused, or found among the running ones.
        if self.stage() != DrainStage::Open {
            return None;
        }
        let id = leases.unused.pop().unwrap_or_else(|| {
            leases.held.push(None);
            leases.held.len() - 1
        });
        Some(Ticket {
            registry: Arc::clone(self),
            id,
            _running: self.running.subscribe(),
        })
    }

    /// Issues no more tickets, and waits until all lease tasks have ended or the timeout is over.
    pub(crate) async fn drain(&self, timeout: Duration) -> Drained {
        {
            let mut leases = self.leases.lock();
            // Wakes those that wait, which do not need the mutex to see the stage.
            self.stage
                .send_modify(|now| *now = DrainStage::Draining.max(*now));
            leases.released = 0;
        }
        let ended = tokio::time::timeout(timeout, async {
            // Each ticket has a receiver, so the channel is closed when no task is left that may send a release.
            self.running.closed().await;
            self.answered().await;
        });
        if ended.await.is_err() {
            self.stage.send_modify(|now| *now = DrainStage::TimedOut);
        }
        let (mut leases, now) = (self.leases.lock(), Instant::now());
        leases
            .unsettled
            .retain_mut(|unsettled| unsettled.is_open(now));
        let (mut unconfirmed, mut lagging) = (Vec::new(), BTreeSet::new());
        for release in &leases.unsettled {
            let UnsettledRelease { names, keys, .. } = release;
            let nodes = release.round.unreleased();
            let is_minority = 2 * nodes.len() < names.len();
            let nodes = nodes.iter().map(|node| Arc::clone(&names[node]));
            if is_minority {
                lagging.extend(nodes);
            } else {
                let keys = || keys.clone();
                unconfirmed.extend(nodes.map(|node| Unconfirmed { node, keys: keys() }));
            }
        }
        Drained {
            released: leases.released,
            held: leases.held().map(|held| held.lock.keys().clone()).collect(),
            unconfirmed,
            lagging_nodes: lagging.into_iter().collect(),
        }
    }

    /// Returns the locks that are held now, those that are held for longest first.
    pub(crate) fn held(&self) -> Vec<HeldLock> {
        // Looked at without the mutex, which every lock of the process needs to begin and to end.
        let granted: Vec<_> = self.leases.lock().held().cloned().collect();
        let held = granted.iter().filter_map(|held| held.lock.show(held.since));
        let mut held: Vec<HeldLock> = held.collect();
        held.sort_by_key(|lock| Reverse(lock.held_for));
        held
    }

    /// Keeps the release of an attempt or a lock that ends, until every node has confirmed it or the keys have ended by their
    /// ttl.
    pub(crate) fn keep_unsettled(&self, mut unsettled: UnsettledRelease) {
        let now = Instant::now();
        if unsettled.is_open(now) {
            let mut leases = self.leases.lock();
            let settled = leases.next_settled(now);
            match settled.or_else(|| leases.next_settled(now)) {
                // Changes places with this one, which is dropped below, without the mutex.
                Some(place) => swap(&mut leases.unsettled[place], &mut unsettled),
                None => leases.unsettled.push(unsettled),
            }
        }
    }

    /// Waits until the nodes have answered all releases of what has ended, or are overdue. Of several drains beside each other,
    /// some wait until the nodes are overdue.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    async fn answered(&self) {
        let last_due = poll_fn(|context| Poll::Ready(self.leases.lock().last_due(context)));
        if let Some(due) = last_due.await {
            // Where they are, because another drain may report them meanwhile.
            let answered = poll_fn(|context| match self.leases.lock().last_due(context) {
                Some(_) => Poll::Pending,
                None => Poll::Ready(()),
            });
            drop(timeout_at(due, answered).await);
        }
    }

    /// Logs, once, that a task requests a lock which it requested before and which is still held: it may wait for
    /// itself.
    pub(crate) fn warn_of_reentry(&self, resource: &'static str) {
        // Relaxed: one swap decides who logs.
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                resource,
                "a task requests a lock again that it acquired and that is still held; redlock locks are not re-entrant, \
                 so it gets the lock only after its release"
            );
        }
    }

    /// Has the lock with this ticket woken then, if it still rests.
    pub(crate) fn wake_at(self: &Arc<Self>, id: usize, due: Instant, home: &Home) {
        let mut leases = self.leases.lock();
        if let Some(held) = &mut leases.held[id] {
            held.due = Some(due);
        }
        let looks_at = leases.looks_at;
        // Mostly: the keeper looks earlier for another lock, and finds the time of this one then.
        if looks_at.is_some_and(|at| at <= due) {
            return;
        }
        leases.looks_at = Some(due);
        drop(leases);
        match looks_at {
            Some(_) => self.sooner.notify_one(),
            None => home.spawn(self.keeper()),
        }
    }

    /// Returns the keeper, which wakes each lock when something is due for it, until no lock rests.
    fn keeper(self: &Arc<Self>) -> impl Future<Output = ()> + Send + use<> {
        // Before it is polled: the runtime may end at once, and with it the tasks of all locks, also of those that rest.
        let end = |registry: Arc<Self>| registry.drop_rests();
        let mut ended = Left(Some(Arc::clone(self)), end);
        let registry = Arc::clone(self);
        async move {
            while let Some(next) = registry.wake_due() {
                tokio::select! {
                    biased;
                    () = registry.sooner.notified() => {}
                    () = sleep_until(next) => {}
                }
            }
            drop(ended.0.take());
        }
    }

    /// Wakes the locks for which something is due, and returns when it is for the next one.
    fn wake_due(&self) -> Option<Instant> {
        let (mut leases, mut due) = (self.leases.lock(), Vec::new());
        let by = Instant::now() + SLACK;
        let later = leases.held.iter_mut().flatten().filter_map(|held| {
            if held.due.take_if(|at| *at <= by).is_some() {
                due.push(Arc::clone(&held.lock));
            }
            held.due
        });
        let next = later.min();
        leases.looks_at = next;
        drop(leases);
        // Without the mutex: a task that cannot be spawned is dropped at once, and gives its ticket back under it.
        due.iter().for_each(|lock| lock.wake());
        next
    }

    fn drop_rests(&self) {
        let mut leases = self.leases.lock();
        leases.looks_at = None;
        let held: Vec<_> = leases.held().map(|held| Arc::clone(&held.lock)).collect();
        drop(leases);
        // Here too: the drop of a task is the end of its ticket.
        held.iter().for_each(|lock| drop(lock.take_rest()));
    }
}

impl Ticket {
    /// Notes that a guard of this lock, which was granted then, is handed out.
    pub(crate) fn set_held(&self, lock: Arc<dyn Listed>, since: Instant) {
        let mut leases = self.registry.leases.lock();
        leases.held[self.id] = Some(Held {
            lock,
            since,
            due: None,
        });
    }

    /// Notes that a majority has released them, although the task goes on.
    pub(crate) fn set_released(&self) {
        let released = self.registry.leases.lock().set_released(self.id);
        drop(released);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut leases = self.registry.leases.lock();
        let released = leases.set_released(self.id);
        leases.unused.push(self.id);
        // Rarely: each one that is kept takes the place of another.
        let has_many = leases.unsettled.len() + leases.unused.len() > leases.held.len() + FEW;
        let settled = has_many.then(|| leases.take_settled(Instant::now()));
        drop(leases);
        drop((released, settled));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::message::Reply;
    use crate::protocol::{LockKey, NodeSet, Quorum};

    const SECOND: Duration = Duration::from_secs(1);

    /// Returns a release that no node has confirmed, whose keys are gone after this time.
    fn unsettled(gone_in: Duration) -> UnsettledRelease {
        let (names, quorum) = ([(); 3].map(|()| "n".into()), Quorum::new(3).unwrap());
        let names = Arc::from(names);
        UnsettledRelease {
            votes: VoteReceiver::new(&names),
            phase: 0,
            names,
            keys: LockKey::from("k").into(),
            round: ReleaseRound::new(quorum, NodeSet::all(quorum)),
            due: Instant::now(),
            gone_at: Instant::now() + gone_in,
        }
    }

    /// Otherwise an outage would leave them behind where the later releases are confirmed at once.
    #[tokio::test(start_paused = true)]
    async fn tasks_that_leave_nothing_behind_take_away_what_is_settled() {
        let registry = Arc::<Registry>::default();
        let ends = || drop(registry.enter().unwrap());
        let left = || registry.leases.lock().unsettled.len();
        (0..1_000).for_each(|_| registry.keep_unsettled(unsettled(SECOND)));
        (0..1_000).for_each(|_| ends());
        assert_eq!(left(), 1_000);
        tokio::time::advance(2 * SECOND).await;
        (0..500).for_each(|_| ends());
        assert_eq!(left(), FEW);
        assert!(registry.leases.lock().unsettled.capacity() < 1_000);
    }

    /// As many as one process may leave behind in an outage, behind one with a long ttl.
    #[tokio::test(start_paused = true)]
    async fn registry_keeps_about_what_is_unconfirmed() {
        let registry = Arc::<Registry>::default();
        let mut late = Vec::new();
        let mut most = 0;
        for lock in 0..1_000 {
            let ticket = registry.enter().unwrap();
            let release = unsettled(if lock == 0 { 2_000 } else { 10 } * SECOND);
            // Half of them are confirmed later, the others end by their ttl.
            if lock % 2 == 0 {
                late.extend((0..3).map(|node| release.votes.sender(node)));
            }
            registry.keep_unsettled(release);
            drop(ticket);
            if late.len() >= 9 {
                late.drain(3..)
                    .for_each(|vote| vote.send(Ok(Reply::Released)));
            }
            tokio::time::advance(SECOND).await;
            most = most.max(registry.leases.lock().unsettled.len());
        }
        assert!(most < 30, "{most}");
        let drained = registry.drain(Duration::ZERO).await;
        assert_eq!(drained.unconfirmed.len(), 21, "{drained:?}");
    }
}
