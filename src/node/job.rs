//! Jobs, which are requests on their way to one node, and the channel of their votes: many nodes send, one lease receives.
//!
//! # Implementation details
//!
//! The channel differs from an ordinary multi-producer channel in these ways.
//!
//! *Phases.* A lease asks its nodes several times: to acquire, to confirm, to release. Each time is a phase
//! with a number. A [`VoteSender`] belongs to the phase in which it was made. Votes of earlier phases are
//! still delivered, but a request whose phase is over, and which has not been sent yet, need not be sent:
//! [`VoteSender::is_open`] tells.
//!
//! *Thresholds.* Over five nodes, a phase is decided by the third vote at the earliest, so waking the lease's
//! task for an earlier one would be in vain. The receiver therefore says how many votes of which phase it
//! needs, and is woken once, by the vote that completes them.
//!
//! *Batches.* The votes that have arrived when one is taken are a batch. The receiver tells whether any of it are left, so
//! that one look at the clock serves all of them.
//!
//! *Trail.* The channel also knows the nodes to which the lease has sent requests, and those whose lane has taken its
//! release. An acquisition that was not sent needs no release, which is then called off. An acquisition must not be sent,
//! or sent again, once the lane has taken its release: nothing would release it. For each node, one task sends
//! acquisitions and takes releases, so no check races with an update.
//!
//! *Bound.* The queue holds at most one vote for each request of the lease that has not been answered, so the number of
//! its nodes and phases bounds it.
//!
//! Invariants: every sender sends exactly one vote (dropping it sends a failure), and no vote is lost unless
//! the receiver has been dropped. A release that a server refuses and a lane repeats has a sender for each answer.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
#[cfg(feature = "redis")]
use std::sync::OnceLock;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};
use tracing::Span;

use crate::node::failure::NodeFailure;
#[cfg(feature = "redis")]
use crate::node::redis::{EncodedCommand, GenerationCheck, Operation};
use crate::node::sync::Mutex;
use crate::node::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::protocol::OwnerToken;
use crate::protocol::lease::{Awaited, TICK};
use crate::protocol::message::{Command, Op, Reply};

/// A request on its way to one node.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) packet: Arc<Packet>,
    pub(crate) sender: VoteSender,
    /// When the request has become useless: for a release, when its lock has certainly expired, unless it also
    /// takes back an intent.
    pub(crate) useful_until: Instant,
}

/// A command, encoded once and shared by all nodes.
#[derive(Debug)]
pub(crate) struct Packet {
    pub(crate) command: Command,
    /// Whether a node does more than it must: it notifies the subscribers of a lock that it releases, or says what
    /// refuses an acquisition, which the plain `SET` does not.
    pub(crate) notifies: bool,
    /// When the intent has certainly expired, for a release that takes one back; until when the keys stay taken, for one
    /// that leaves them taken.
    pub(crate) until: Option<Instant>,
    /// The command as it goes over the wire.
    #[cfg(feature = "redis")]
    encoded: OnceLock<EncodedCommand>,
}

impl Packet {
    /// Creates the packet of a command. For some releases, a time counts; see [`until`](Self::until).
    pub(crate) fn new(command: Command, notifies: bool, until: Option<Instant>) -> Self {
        Self {
            command,
            notifies,
            until,
            #[cfg(feature = "redis")]
            encoded: OnceLock::new(),
        }
    }

    /// Creates the packet of a health check.
    pub(crate) fn ping() -> Arc<Self> {
        let command = Command {
            names: Arc::default(),
            owner: OwnerToken::from_random([0; 16]),
            op: Op::Ping,
        };
        Arc::new(Self::new(command, false, None))
    }
}

impl Job {
    pub(crate) fn new(packet: Arc<Packet>, sender: VoteSender, useful_until: Instant) -> Self {
        Self {
            packet,
            sender,
            useful_until,
        }
    }

    /// Returns the operation.
    pub(crate) fn op(&self) -> &Op {
        &self.packet.command.op
    }

    /// Returns whether this is a release, which must reach the node in any case.
    pub(crate) fn is_release(&self) -> bool {
        self.op().is_release()
    }

    /// Returns whether to send the job.
    ///
    /// An acquisition must not be sent once its attempt is decided: no release would follow it.
    pub(crate) fn is_wanted(&self, now: Instant) -> bool {
        if self.sender.is_called_off() {
            return false;
        }
        if self.is_release() {
            // Its lock or its intent may still be there.
            now < self.useful_until || self.packet.until.is_some_and(|until| now < until)
        } else {
            self.sender.is_open()
        }
    }

    /// Returns whether this is a release whose lock may still be there.
    pub(crate) fn may_unlock(&self, now: Instant) -> bool {
        self.is_release() && now < self.useful_until
    }

    /// Marks the job as sent. How long a release leaves the keys taken is counted from now on.
    pub(crate) fn mark_sent(&mut self) {
        self.sender.mark_sent();
        if let (Op::ReleaseAfter { .. }, Some(until)) = (self.op(), self.packet.until) {
            let left = until.saturating_duration_since(Instant::now());
            let op = Op::ReleaseAfter { left };
            self.packet = self.packet.with(op, self.packet.notifies);
        }
    }

    /// Returns whether the server may have executed it before, on a connection that is gone.
    pub(crate) fn is_repeated(&self) -> bool {
        self.sender.times_sent > 1
    }

    /// Answers the job and keeps it, to be sent again and answered once more.
    pub(crate) fn answer(&mut self, outcome: Result<Reply, NodeFailure>) {
        let again = VoteSender {
            channel: Arc::clone(&self.sender.channel),
            extras: None,
            ..self.sender
        };
        std::mem::replace(&mut self.sender, again).send(outcome);
    }

    /// Returns whether to send the job again after a server has refused it without executing it.
    pub(crate) fn may_be_repeated(&self, now: Instant) -> bool {
        let is_over = *self.op() == Op::Ping || self.sender.is_released();
        self.is_wanted(now) && (self.is_release() || !is_over)
    }

    /// Turns an acquisition that the plain `SET` refused, without a reason, into one by a script, which has one and
    /// recognises its owner. Returns whether this was one.
    pub(crate) fn ask_why(&mut self) -> bool {
        let is_plain =
            !self.packet.notifies && matches!(self.op(), Op::Acquire { proposal: None, .. });
        if is_plain {
            self.packet = self.packet.with(self.op().clone(), true);
        }
        is_plain
    }

    /// Returns whether to send the job again after the connection on which it was sent has broken: a release
    /// always, a record or a look while the caller waits for its reply. A record is written only once.
    pub(crate) fn is_sent_again(&self) -> bool {
        self.is_release() || self.is_record() && self.sender.is_open()
    }

    /// Returns whether this reads or writes a record. It may be repeated, and counts also at a node that has lost its
    /// memory.
    fn is_record(&self) -> bool {
        matches!(self.op(), Op::Record { .. } | Op::TopUp { .. } | Op::Look)
    }

    /// Returns what to send to a node in spite of this failure of the node. The error is a job that is not sent.
    ///
    /// Releases are always sent. A quarantined node is also sent records and asked for them: a record that it has
    /// counts, but it may have forgotten one that it does not have.
    pub(crate) fn despite(mut self, failure: &NodeFailure) -> Result<Self, Self> {
        let is_quarantined = matches!(failure, NodeFailure::Quarantined { .. });
        if self.is_release() || is_quarantined && self.is_record() {
            return Ok(self);
        }
        let acquires = matches!(self.op(), Op::Acquire { .. });
        let names = &self.packet.command.names;
        if !is_quarantined || !acquires || names.iter().all(|name| name.record.is_none()) {
            return Err(self);
        }
        self.packet = self.packet.with(Op::Look, false);
        let extras = self.sender.extras.get_or_insert_default();
        extras.without_record = Some(failure.clone());
        Ok(self)
    }
}

/// For nodes behind a connection.
#[cfg(feature = "redis")]
impl Job {
    /// Returns the request as it goes over the wire. It is encoded for the first node to which it is sent; the checks of all
    /// nodes have the same key.
    pub(crate) fn encoded(&self, check: &GenerationCheck) -> &EncodedCommand {
        let packet = &self.packet;
        let encode = || EncodedCommand::new(&packet.command, packet.notifies, check);
        packet.encoded.get_or_init(encode)
    }

    /// Returns its row in the table of operations.
    pub(crate) fn operation(&self) -> &'static Operation {
        match self.packet.encoded.get() {
            Some(encoded) => encoded.operation,
            None => Operation::of(&self.packet.command, self.packet.notifies, false),
        }
    }
}

impl Packet {
    /// Returns the packet of another operation of the same attempt.
    fn with(&self, op: Op, notifies: bool) -> Arc<Self> {
        let command = Command {
            op,
            names: Arc::clone(&self.command.names),
            owner: self.command.owner.clone(),
        };
        Arc::new(Self::new(command, notifies, self.until))
    }
}

/// Receives the votes of one lease. Once it is dropped, votes are discarded.
#[derive(Debug)]
pub(crate) struct VoteReceiver {
    channel: Arc<Channel>,
    /// How many of the votes in the channel had arrived when the first of them was taken.
    batch: u32,
    /// The votes of nodes that have executed a command at once. They come first.
    executed: VecDeque<Vote>,
    /// Whether another receiver has the channel.
    is_taken: bool,
}

/// The right to send one vote. Dropped unused, it sends a failure.
#[derive(Debug)]
pub(crate) struct VoteSender {
    channel: Arc<Channel>,
    phase: u32,
    // A group has at most 64 nodes. Few bytes, because a request is moved from queue to queue.
    node: u8,
    /// How often its request was sent.
    times_sent: u8,
    is_used: bool,
    /// Boxed because it is rare, and every request carries a sender.
    extras: Option<Box<Extras>>,
    pub(crate) subscribers: Option<u32>,
}

/// What few requests carry.
#[derive(Debug, Default)]
struct Extras {
    /// The vote to send if the node has no record: it may be read from, but must not vote.
    without_record: Option<NodeFailure>,
    /// The span of the request, which ends with the vote.
    span: Option<Span>,
}

/// The outcome of a command at a node, and the number of subscribers that a release was published to.
pub(crate) type Executed = (Result<Reply, NodeFailure>, Option<u32>);

/// One node's vote in one phase of a lease.
#[derive(Debug, Clone)]
pub(crate) struct Vote {
    pub(crate) node: usize,
    pub(crate) phase: u32,
    pub(crate) outcome: Result<Reply, NodeFailure>,
    /// The number of subscribers that a release was published to.
    pub(crate) subscribers: Option<u32>,
}

#[derive(Debug)]
struct Channel {
    queue: Mutex<Queue>,
    /// The current phase; [`CLOSED`] once the receiver has been dropped, which is set under the mutex.
    phase: AtomicU32,
    /// The nodes' names, by number.
    names: Arc<[Arc<str>]>,
    /// The nodes to which the lease has sent requests, one bit for each.
    sent: AtomicU64,
    /// The nodes whose lane has taken its release.
    released: AtomicU64,
}

#[derive(Debug, Default)]
struct Queue {
    votes: VecDeque<Vote>,
    /// The receiver's task and what it waits for.
    waiting: Option<(Waker, Awaited)>,
}

/// A timer that is later than this fires in a process that stood still, as for want of processor time. What nodes answered
/// meanwhile is read by the tasks of their lanes, which may have their turn behind the task with the timer. So nodes get a
/// tick more.
pub(crate) const LATE: Duration = Duration::from_millis(3);

/// The phase of a channel whose receiver has been dropped. No sender has it.
const CLOSED: u32 = u32::MAX;

impl VoteReceiver {
    /// Makes a channel for the nodes with these names.
    pub(crate) fn new(names: &Arc<[Arc<str>]>) -> Self {
        Self {
            channel: Arc::new(Channel {
                queue: Mutex::default(),
                phase: AtomicU32::new(0),
                names: Arc::clone(names),
                sent: AtomicU64::new(0),
                released: AtomicU64::new(0),
            }),
            batch: 0,
            executed: VecDeque::new(),
            is_taken: false,
        }
    }

    /// Takes the channel, with all its votes, from a receiver that is about to be dropped.
    pub(crate) fn take(&mut self) -> Self {
        self.is_taken = true;
        // Its task does not wait any more. Dropped without the mutex.
        let waiting = self.channel.queue.lock().waiting.take();
        drop(waiting);
        Self {
            channel: Arc::clone(&self.channel),
            batch: self.batch,
            executed: std::mem::take(&mut self.executed),
            is_taken: false,
        }
    }

    /// Begins a new phase, which closes the senders of the one before, and returns its number.
    pub(crate) fn next_phase(&self) -> u32 {
        // Release, with the acquire in `is_open`: a lane that sees the new phase does not send a request of an older one that it
        // still has. One that does not see it yet sends it, and its answer is not counted.
        self.channel.phase.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Returns the sender of one node for the current phase.
    ///
    /// # Panics
    ///
    /// Panics if there are no such nodes.
    pub(crate) fn sender(&self, node: usize) -> VoteSender {
        VoteSender {
            channel: Arc::clone(&self.channel),
            // Relaxed: only the receiver changes it.
            phase: self.channel.phase.load(Ordering::Relaxed),
            node: u8::try_from(node).expect("a group has at most 64 nodes"),
            times_sent: 0,
            is_used: false,
            extras: None,
            subscribers: None,
        }
    }

    /// Returns the next vote, once there are as many as are awaited.
    ///
    /// # Cancel safety
    ///
    /// No vote is lost if the future is dropped.
    pub(crate) async fn recv(&mut self, awaited: Awaited) -> Vote {
        poll_fn(|context| self.poll_recv(context, awaited)).await
    }

    /// Returns the next vote, whichever it is; `None` if there is none by then, or a tick later where the process stood still.
    /// As cancel safe as [`recv`](Self::recv).
    pub(crate) async fn recv_until(&mut self, due: Instant) -> Option<Vote> {
        let in_time = timeout_at(due, self.recv(Awaited::default())).await;
        if in_time.is_ok() || Instant::now() <= due + LATE {
            return in_time.ok();
        }
        timeout(TICK, self.recv(Awaited::default())).await.ok()
    }

    /// Returns a vote that has arrived already.
    #[inline]
    pub(crate) fn try_recv(&mut self) -> Option<Vote> {
        if let Some(vote) = self.executed.pop_front() {
            return Some(vote);
        }
        let mut queue = self.channel.queue.lock();
        if self.batch == 0 {
            // One for each request to each node.
            self.batch = u32::try_from(queue.votes.len()).unwrap_or(u32::MAX);
        }
        self.batch = self.batch.saturating_sub(1);
        queue.votes.pop_front()
    }

    /// Returns whether votes are left that had arrived when the first one of their batch was taken.
    pub(crate) fn has_more(&self) -> bool {
        self.batch > 0 || !self.executed.is_empty()
    }

    /// Adds the vote of a node that has executed the command of this phase at once.
    pub(crate) fn push(&mut self, node: usize, phase: u32, (outcome, subscribers): Executed) {
        self.executed.push_back(Vote {
            node,
            phase,
            outcome,
            subscribers,
        });
    }

    /// Makes room for the votes of so many such nodes.
    pub(crate) fn reserve(&mut self, nodes: usize) {
        // Once: it grows by itself if votes are left when the lease asks again.
        if self.executed.capacity() == 0 {
            self.executed = VecDeque::with_capacity(nodes);
        }
    }

    /// Polls for the next vote; see [`recv`](Self::recv).
    pub(crate) fn poll_recv(&mut self, context: &Context<'_>, awaited: Awaited) -> Poll<Vote> {
        if !self.has_more() {
            let mut queue = self.channel.queue.lock();
            if !queue.has(awaited) {
                match &mut queue.waiting {
                    Some((waker, before)) => {
                        waker.clone_from(context.waker());
                        *before = awaited;
                    }
                    none => *none = Some((context.waker().clone(), awaited)),
                }
                return Poll::Pending;
            }
        }
        self.try_recv().map_or(Poll::Pending, Poll::Ready)
    }
}

impl Drop for VoteReceiver {
    fn drop(&mut self) {
        // Without a sender, the channel goes with the receiver.
        if self.is_taken || Arc::strong_count(&self.channel) == 1 {
            return;
        }
        let mut queue = self.channel.queue.lock();
        // Release, as for the next phase. The mutex orders it with `push`.
        self.channel.phase.store(CLOSED, Ordering::Release);
        let votes = std::mem::take(&mut queue.votes);
        drop(queue);
        drop(votes);
    }
}

impl VoteSender {
    /// Sends the vote.
    pub(crate) fn send(mut self, mut outcome: Result<Reply, NodeFailure>) {
        if let Some(extras) = self.extras.take() {
            let failure = extras.without_record;
            if let Some(failure) = failure.filter(|_| outcome == Ok(Reply::NotDone)) {
                outcome = Err(failure);
            }
            if let Some(span) = extras.span.filter(|_| outcome.is_err()) {
                span.record("otel.status_code", "ERROR");
            }
        }
        self.push(outcome);
    }

    /// Adds the number of subscribers that the node published the release to.
    pub(crate) fn set_subscribers(&mut self, subscribers: usize) {
        self.subscribers = Some(u32::try_from(subscribers).unwrap_or(u32::MAX));
    }

    /// Sets the span of the request.
    pub(crate) fn set_span(&mut self, span: Span) {
        self.extras.get_or_insert_default().span = Some(span);
    }

    /// Returns whether the receiver still waits for votes of this phase.
    pub(crate) fn is_open(&self) -> bool {
        self.channel.phase.load(Ordering::Acquire) == self.phase
    }

    /// Marks its node as one that has received a request of the lease.
    pub(crate) fn mark_sent(&mut self) {
        self.times_sent = self.times_sent.saturating_add(1);
        // Relaxed here and below: a node's bits are set and read by its lane only.
        self.channel.sent.fetch_or(self.bit(), Ordering::Relaxed);
    }

    /// Marks its node as one whose lane has taken the release. Returns whether nothing was sent before it.
    pub(crate) fn mark_released(&self) -> bool {
        let released = &self.channel.released;
        released.fetch_or(self.bit(), Ordering::Relaxed);
        self.is_called_off()
    }

    /// Returns whether the lane has taken the release.
    pub(crate) fn is_released(&self) -> bool {
        self.channel.released.load(Ordering::Relaxed) & self.bit() != 0
    }

    /// Returns whether the lane has taken the release, and nothing was sent before it.
    pub(crate) fn is_called_off(&self) -> bool {
        let was_sent = self.channel.sent.load(Ordering::Relaxed) & self.bit() != 0;
        self.is_released() && !was_sent
    }

    /// Returns the bit of its node.
    fn bit(&self) -> u64 {
        1 << self.node
    }

    fn push(&mut self, outcome: Result<Reply, NodeFailure>) {
        self.is_used = true;
        let channel = &*self.channel;
        let mut queue = channel.queue.lock();
        // Relaxed, because the lock of the queue orders it with the store in the receiver's drop.
        if channel.phase.load(Ordering::Relaxed) == CLOSED {
            return;
        }
        if queue.votes.is_empty() {
            // At once for two phases, as the last answers of one may come with the first ones of the next.
            queue.votes.reserve(2 * channel.names.len());
        }
        queue.votes.push_back(Vote {
            node: usize::from(self.node),
            phase: self.phase,
            outcome,
            subscribers: self.subscribers,
        });
        let is_due = queue
            .waiting
            .as_ref()
            .is_some_and(|(_, awaited)| queue.has(*awaited));
        let woken = queue.waiting.take_if(|_| is_due);
        // Woken without the mutex, which the receiver's task locks at once.
        drop(queue);
        if let Some((waker, _)) = woken {
            waker.wake();
        }
    }
}

impl Drop for VoteSender {
    fn drop(&mut self) {
        if !self.is_used {
            let node = self.channel.names.get(usize::from(self.node));
            self.push(Err(NodeFailure::Disconnected {
                node: node.cloned().unwrap_or_default(),
                why: "the request was dropped unanswered".into(),
            }));
        }
    }
}

impl Queue {
    fn has(&self, awaited: Awaited) -> bool {
        // Asked first, because most votes are pushed before enough have come.
        if self.votes.len() < awaited.answers.max(1) {
            return false;
        }
        let of_phase = self.votes.iter();
        let of_phase = of_phase.filter(|vote| vote.phase == awaited.number);
        of_phase.count() >= awaited.answers
    }
}

#[cfg(test)]
mod tests;
