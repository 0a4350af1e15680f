//! The votes channel: many nodes send, one lease receives.
//!
//! # Implementation details
//!
//! It differs from an ordinary multi-producer channel in three ways.
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
use std::task::{Context, Poll, Waker};

use crate::node::failure::NodeFailure;
use crate::node::sync::Mutex;
#[cfg(feature = "redis")]
use crate::node::sync::atomic::AtomicU64;
use crate::node::sync::atomic::{AtomicU32, Ordering};
use crate::protocol::lease::Awaited;
use crate::protocol::message::Reply;

/// Receives the votes of one lease. Once it is dropped, votes are discarded.
#[derive(Debug)]
pub(crate) struct VoteReceiver {
    channel: Arc<Channel>,
    /// Whether a threshold was reached and the votes behind it are being taken one by one.
    is_draining: bool,
}

/// The right to send one vote. Dropped unused, it sends a failure.
#[derive(Debug)]
pub(crate) struct VoteSender {
    channel: Arc<Channel>,
    phase: u32,
    node: usize,
    is_used: bool,
    /// The vote to send if the node has no record: it may be read from, but must not vote. Boxed because it
    /// is rare, and every request carries a sender.
    without_record: Option<Box<NodeFailure>>,
    subscribers: Option<u32>,
}

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
    #[cfg(feature = "redis")]
    sent: AtomicU64,
    /// The nodes whose lane has taken its release.
    #[cfg(feature = "redis")]
    released: AtomicU64,
}

#[derive(Debug, Default)]
struct Queue {
    votes: VecDeque<Vote>,
    /// The receiver's task and what it waits for.
    waiting: Option<(Waker, Awaited)>,
}

/// The phase of a channel whose receiver has been dropped. No sender has it.
const CLOSED: u32 = u32::MAX;

impl VoteReceiver {
    /// Makes a channel for the nodes with these names.
    pub(crate) fn new(names: &Arc<[Arc<str>]>) -> Self {
        let queue = Queue {
            // One phase fits. The votes of a minority rarely arrive when those of the next phase do.
            votes: VecDeque::with_capacity(names.len()),
            ..Queue::default()
        };
        Self {
            channel: Arc::new(Channel {
                queue: Mutex::new(queue),
                phase: AtomicU32::new(0),
                names: Arc::clone(names),
                #[cfg(feature = "redis")]
                sent: AtomicU64::new(0),
                #[cfg(feature = "redis")]
                released: AtomicU64::new(0),
            }),
            is_draining: false,
        }
    }

    /// Begins a new phase, which closes the senders of the one before, and returns its number.
    pub(crate) fn next_phase(&self) -> u32 {
        // Release, with the acquire in `is_open`: a lane that sees the new phase does not send a request of an older one that it
        // still has. One that does not see it yet sends it, and its answer is not counted.
        self.channel.phase.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Returns the number of the current phase.
    fn phase(&self) -> u32 {
        // Relaxed: only the receiver changes it.
        self.channel.phase.load(Ordering::Relaxed)
    }

    /// Returns the sender of one node for the current phase.
    pub(crate) fn sender(&self, node: usize) -> VoteSender {
        VoteSender {
            channel: Arc::clone(&self.channel),
            phase: self.phase(),
            node,
            is_used: false,
            without_record: None,
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

    /// Returns the next vote, whichever it is. As cancel safe as [`recv`](Self::recv).
    pub(crate) async fn recv_any(&mut self) -> Vote {
        self.recv(Awaited::default()).await
    }

    /// Returns a vote that has arrived already.
    pub(crate) fn try_recv(&mut self) -> Option<Vote> {
        self.try_recv_of_several().map(|(vote, _)| vote)
    }

    /// Returns a vote that has arrived already, and how many others have.
    pub(crate) fn try_recv_of_several(&mut self) -> Option<(Vote, usize)> {
        let votes = &mut self.channel.queue.lock().votes;
        let vote = votes.pop_front()?;
        Some((vote, votes.len()))
    }

    fn poll_recv(&mut self, context: &Context<'_>, awaited: Awaited) -> Poll<Vote> {
        let mut queue = self.channel.queue.lock();
        if self.is_draining || queue.has(awaited) {
            self.is_draining = true;
            if let Some(vote) = queue.votes.pop_front() {
                return Poll::Ready(vote);
            }
            self.is_draining = false;
        }
        match &mut queue.waiting {
            Some((waker, before)) => {
                waker.clone_from(context.waker());
                *before = awaited;
            }
            none => *none = Some((context.waker().clone(), awaited)),
        }
        Poll::Pending
    }
}

impl Drop for VoteReceiver {
    fn drop(&mut self) {
        let mut queue = self.channel.queue.lock();
        // Release, as for the next phase. The mutex orders it with `push`.
        self.channel.phase.store(CLOSED, Ordering::Release);
        let votes = std::mem::take(&mut queue.votes);
        drop(queue);
        drop(votes);
    }
}

impl VoteSender {
    /// Returns a sender of the same node and phase, for the next answer to a release that is repeated.
    #[cfg(feature = "redis")]
    pub(crate) fn again(&self) -> Self {
        Self {
            channel: Arc::clone(&self.channel),
            without_record: None,
            ..*self
        }
    }

    /// Sends the vote.
    pub(crate) fn send(mut self, outcome: Result<Reply, NodeFailure>) {
        let failure = self.without_record.take();
        self.push(match failure.filter(|_| outcome == Ok(Reply::NotDone)) {
            Some(failure) => Err(*failure),
            None => outcome,
        });
    }

    /// Adds the number of subscribers that the node published the release to.
    pub(crate) fn set_subscribers(&mut self, subscribers: usize) {
        self.subscribers = Some(u32::try_from(subscribers).unwrap_or(u32::MAX));
    }

    /// Turns "there is no record" into this failure: the node may be read from, but must not vote.
    #[cfg(feature = "redis")]
    pub(crate) fn fail_without_record(&mut self, failure: NodeFailure) {
        self.without_record = Some(Box::new(failure));
    }

    /// Returns whether the receiver still waits for votes of this phase.
    #[cfg(any(feature = "redis", feature = "test-util"))]
    pub(crate) fn is_open(&self) -> bool {
        self.channel.phase.load(Ordering::Acquire) == self.phase
    }

    /// Marks its node as one that has received a request of the lease.
    #[cfg(feature = "redis")]
    pub(crate) fn mark_sent(&self) {
        // Relaxed here and below: a node's bits are set and read by its lane only.
        self.channel.sent.fetch_or(self.bit(), Ordering::Relaxed);
    }

    /// Marks its node as one whose lane has taken the release. Returns whether nothing was sent before it.
    #[cfg(feature = "redis")]
    pub(crate) fn mark_released(&self) -> bool {
        let released = &self.channel.released;
        released.fetch_or(self.bit(), Ordering::Relaxed);
        self.is_called_off()
    }

    /// Returns whether the lane has taken the release.
    #[cfg(feature = "redis")]
    pub(crate) fn is_released(&self) -> bool {
        self.channel.released.load(Ordering::Relaxed) & self.bit() != 0
    }

    /// Returns whether the lane has taken the release, and nothing was sent before it.
    #[cfg(feature = "redis")]
    pub(crate) fn is_called_off(&self) -> bool {
        let was_sent = self.channel.sent.load(Ordering::Relaxed) & self.bit() != 0;
        self.is_released() && !was_sent
    }

    /// Returns the bit of its node. A group has at most 64 nodes.
    #[cfg(feature = "redis")]
    fn bit(&self) -> u64 {
        1 << self.node
    }

    fn push(&mut self, outcome: Result<Reply, NodeFailure>) {
        self.is_used = true;
        self.channel.push(Vote {
            node: self.node,
            phase: self.phase,
            outcome,
            subscribers: self.subscribers,
        });
    }
}

impl Drop for VoteSender {
    fn drop(&mut self) {
        if !self.is_used {
            let node = self.channel.names.get(self.node);
            self.push(Err(NodeFailure::Disconnected {
                node: node.cloned().unwrap_or_default(),
                why: "the request was dropped unanswered".into(),
            }));
        }
    }
}

impl Channel {
    fn push(&self, vote: Vote) {
        let mut queue = self.queue.lock();
        // Relaxed, because the lock of the queue orders it with the store in the receiver's drop.
        if self.phase.load(Ordering::Relaxed) == CLOSED {
            return;
        }
        queue.votes.push_back(vote);
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
mod tests {
    use tokio_test::task::spawn;
    use tokio_test::{assert_pending, assert_ready};

    use super::*;

    #[cfg(shuttle)]
    mod schedules;

    /// This many votes of a phase.
    fn at_least(answers: usize, number: u32) -> Awaited {
        Awaited { number, answers }
    }

    #[test]
    fn recv_wakes_once_by_the_vote_that_reaches_the_threshold() {
        let names = vec![Arc::from("n"); 5].into();
        let mut votes = VoteReceiver::new(&names);
        let earlier = votes.sender(0);
        let phase = votes.next_phase();
        let mut senders: Vec<_> = (0..5).map(|node| votes.sender(node)).collect();
        let send = |sender: VoteSender| sender.send(Ok(Reply::Released));
        let mut waiting = spawn(votes.recv(at_least(3, phase)));
        assert_pending!(waiting.poll());
        send(earlier);
        send(senders.pop().unwrap());
        send(senders.pop().unwrap());
        assert!(!waiting.is_woken());
        send(senders.pop().unwrap());
        assert!(waiting.is_woken());
        assert_eq!(assert_ready!(waiting.poll()).phase, 0);
        drop(waiting);
        // The votes behind the threshold come without waiting for more.
        for node in [4, 3, 2] {
            let next = assert_ready!(spawn(votes.recv(at_least(5, phase))).poll());
            assert_eq!((next.phase, next.node), (phase, node));
        }
        let mut waiting = spawn(votes.recv(at_least(2, phase)));
        assert_pending!(waiting.poll());
        send(senders.pop().unwrap());
        assert!(!waiting.is_woken());
        drop(waiting);
        assert_eq!(votes.try_recv().unwrap().node, 1);
    }

    /// Otherwise its lease would wait for the node until the node timeout.
    #[test]
    fn a_dropped_sender_sends_a_failure_at_once() {
        let names = ["a", "b"].map(Arc::from).to_vec().into();
        let mut votes = VoteReceiver::new(&names);
        let phase = votes.next_phase();
        let [answered, dropped] = [votes.sender(0), votes.sender(1)];
        let mut waiting = spawn(votes.recv(at_least(2, phase)));
        assert_pending!(waiting.poll());
        answered.send(Ok(Reply::Released));
        assert!(!waiting.is_woken());
        drop(dropped);
        assert!(waiting.is_woken());
        assert_eq!(assert_ready!(waiting.poll()).node, 0);
        drop(waiting);
        let Vote { node, outcome, .. } = votes.try_recv().unwrap();
        assert_eq!(node, 1);
        let failure = outcome.unwrap_err();
        let is_of_node =
            matches!(&failure, NodeFailure::Disconnected { node, .. } if &**node == "b");
        assert!(is_of_node, "{failure:?}");
        assert!(votes.try_recv().is_none());
    }

    #[cfg(feature = "redis")]
    #[test]
    fn a_sender_is_closed_by_the_next_phase_and_by_dropping_the_receiver() {
        let names = vec![Arc::from("n"); 5].into();
        let votes = VoteReceiver::new(&names);
        let first = votes.sender(0);
        assert!(first.is_open());
        votes.next_phase();
        assert!(!first.is_open());
        let second = votes.sender(0);
        let channel = Arc::clone(&votes.channel);
        drop(votes);
        assert!(!second.is_open());
        drop(first);
        drop(second);
        assert!(channel.queue.lock().votes.is_empty());
    }
}
