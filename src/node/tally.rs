//! Where the votes of the nodes go: one box per lock, whose owner is woken when enough are in it.
//!
//! A phase of a lock over five nodes is decided by the third answer at the earliest. Waking the lock's task
//! for each of the others costs more than all the rest of what the client does for the lock.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::node::failure::NodeFailure;
use crate::protocol::message::Reply;

/// Where the votes of one lease are collected.
#[derive(Debug)]
pub(crate) struct Tally {
    ballot_box: Mutex<BallotBox>,
    /// The phase that is being voted on. Votes of other phases are still delivered, but requests of
    /// other phases that have not been sent need not be.
    phase: AtomicU32,
    /// What the nodes are called, by their numbers.
    names: Arc<[Arc<str>]>,
}

#[derive(Debug, Default)]
struct BallotBox {
    votes: VecDeque<Vote>,
    /// Who waits for votes, and for how many of which phase.
    waiting: Option<(Waker, Enough)>,
    /// Nobody will ever look again.
    closed: bool,
}

/// How many votes it takes to wake whoever waits for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Enough {
    phase: u32,
    votes: usize,
}

/// The votes that come in; dropped, nobody has a use for more.
#[derive(Debug)]
pub(crate) struct Votes {
    tally: Arc<Tally>,
    /// Those that are there are being looked at, one by one.
    counting: bool,
}

/// One node's vote in one phase of a lease.
#[derive(Debug)]
pub(crate) struct Vote {
    pub(crate) node: usize,
    pub(crate) phase: u32,
    pub(crate) outcome: Result<Reply, NodeFailure>,
    /// To a release that was to be told of: how many processes listened.
    pub(crate) listeners: Option<usize>,
}

impl Enough {
    /// So many votes of a phase; and whatever else came in by then.
    pub(crate) fn of(phase: u32, votes: usize) -> Self {
        Self { phase, votes }
    }

    /// One vote, on whatever.
    pub(crate) fn any() -> Self {
        Self::of(0, 0)
    }
}

impl Tally {
    /// Makes a tally for the nodes that are called so.
    pub(crate) fn new(names: &Arc<[Arc<str>]>) -> (Arc<Self>, Votes) {
        let tally = Arc::new(Self {
            ballot_box: Mutex::new(BallotBox {
                // Of two phases: what is to be done is decided by fewer than all votes of one.
                votes: VecDeque::with_capacity(2 * names.len()),
                ..BallotBox::default()
            }),
            phase: AtomicU32::new(0),
            names: Arc::clone(names),
        });
        let votes = Votes {
            tally: Arc::clone(&tally),
            counting: false,
        };
        (tally, votes)
    }

    /// Begins a new phase, which closes the ballots of the one before, and returns its number.
    pub(crate) fn next_phase(&self) -> u32 {
        self.phase.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Makes the ballot of one node for the current phase.
    pub(crate) fn ballot(self: &Arc<Self>, node: usize) -> Ballot {
        Ballot(Some(Open {
            tally: Arc::clone(self),
            phase: self.phase.load(Ordering::Acquire),
            node,
            without_record: None,
            listeners: None,
        }))
    }

    fn cast(&self, vote: Vote) {
        let mut ballot_box = self.ballot_box();
        // A lease that has ended has no use for late votes.
        if ballot_box.closed {
            return;
        }
        ballot_box.votes.push_back(vote);
        let woken = ballot_box.awaken();
        // Not under the lock: the woken may look at once.
        drop(ballot_box);
        if let Some(waker) = woken {
            waker.wake();
        }
    }

    fn ballot_box(&self) -> MutexGuard<'_, BallotBox> {
        self.ballot_box
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl BallotBox {
    /// Whether the votes that are here are enough.
    fn has(&self, enough: Enough) -> bool {
        let of_phase = self.votes.iter().filter(|vote| vote.phase == enough.phase);
        !self.votes.is_empty() && of_phase.count() >= enough.votes
    }

    fn awaken(&mut self) -> Option<Waker> {
        let (_, enough) = self.waiting.as_ref()?;
        if !self.has(*enough) {
            return None;
        }
        self.waiting.take().map(|(waker, _)| waker)
    }
}

impl Votes {
    /// Returns the next vote, once there are enough of them.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point; no vote is lost.
    pub(crate) async fn next(&mut self, enough: Enough) -> Vote {
        poll_fn(|context| self.poll_next(context, enough)).await
    }

    /// Returns the next vote, whichever it is.
    pub(crate) async fn any(&mut self) -> Vote {
        self.next(Enough::any()).await
    }

    /// Returns a vote that is there already.
    pub(crate) fn waiting(&mut self) -> Option<Vote> {
        self.tally.ballot_box().votes.pop_front()
    }

    fn poll_next(&mut self, context: &Context<'_>, enough: Enough) -> Poll<Vote> {
        let mut ballot_box = self.tally.ballot_box();
        if self.counting || ballot_box.has(enough) {
            self.counting = true;
            if let Some(vote) = ballot_box.votes.pop_front() {
                return Poll::Ready(vote);
            }
            self.counting = false;
        }
        match &mut ballot_box.waiting {
            Some((waker, of)) => {
                waker.clone_from(context.waker());
                *of = enough;
            }
            none => *none = Some((context.waker().clone(), enough)),
        }
        Poll::Pending
    }
}

impl Drop for Votes {
    fn drop(&mut self) {
        let mut ballot_box = self.tally.ballot_box();
        ballot_box.closed = true;
        let votes = std::mem::take(&mut ballot_box.votes);
        drop(ballot_box);
        drop(votes);
    }
}

/// The right to cast one vote. Dropped without a vote, it casts a failure.
#[derive(Debug)]
pub(crate) struct Ballot(Option<Open>);

#[derive(Debug)]
struct Open {
    tally: Arc<Tally>,
    phase: u32,
    node: usize,
    /// The vote if the node has no record: it may be read, and not vote. Boxed, like all that is rare in
    /// what every request carries.
    without_record: Option<Box<NodeFailure>>,
    listeners: Option<u32>,
}

impl Ballot {
    /// One that was cast.
    #[cfg(feature = "redis")]
    pub(crate) fn spent() -> Self {
        Self(None)
    }

    pub(crate) fn cast(mut self, outcome: Result<Reply, NodeFailure>) {
        self.deliver(|open| match &open.without_record {
            Some(failure) if outcome == Ok(Reply::NotDone) => Err((**failure).clone()),
            _ => outcome,
        });
    }

    /// Returns the number of its node.
    #[cfg(feature = "redis")]
    pub(crate) fn node(&self) -> usize {
        self.0.as_ref().map_or(usize::MAX, |open| open.node)
    }

    /// Notes how many processes the node told of the release.
    pub(crate) fn set_listeners(&mut self, listeners: usize) {
        if let Some(open) = &mut self.0 {
            open.listeners = Some(u32::try_from(listeners).unwrap_or(u32::MAX));
        }
    }

    /// Makes "there is no record" count as this failure: the node may be read, and not vote.
    #[cfg(feature = "redis")]
    pub(crate) fn cast_without_record(&mut self, failure: NodeFailure) {
        if let Some(open) = &mut self.0 {
            open.without_record = Some(Box::new(failure));
        }
    }

    /// Whether the phase of this ballot is still being voted on.
    #[cfg(any(feature = "redis", feature = "test-util"))]
    pub(crate) fn is_open(&self) -> bool {
        self.0.as_ref().is_some_and(|open| {
            let tally = &open.tally;
            tally.phase.load(Ordering::Acquire) == open.phase && !tally.ballot_box().closed
        })
    }

    fn deliver(&mut self, outcome: impl FnOnce(&Open) -> Result<Reply, NodeFailure>) {
        if let Some(open) = self.0.take() {
            open.tally.cast(Vote {
                node: open.node,
                phase: open.phase,
                outcome: outcome(&open),
                listeners: open.listeners.and_then(|count| usize::try_from(count).ok()),
            });
        }
    }
}

impl Drop for Ballot {
    fn drop(&mut self) {
        self.deliver(|open| {
            Err(NodeFailure::Disconnected {
                node: open.tally.names.get(open.node).cloned().unwrap_or_default(),
                why: "the request was dropped unanswered".into(),
            })
        });
    }
}

#[cfg(test)]
mod tests {
    use tokio_test::task::spawn;
    use tokio_test::{assert_pending, assert_ready};

    use super::*;

    #[test]
    fn whoever_waits_is_woken_once_by_the_vote_that_may_decide() {
        let names = vec![Arc::from("n"); 5].into();
        let (tally, mut votes) = Tally::new(&names);
        let earlier = tally.ballot(0);
        let phase = tally.next_phase();
        let mut ballots: Vec<_> = (0..5).map(|node| tally.ballot(node)).collect();
        let vote = |ballot: Ballot| ballot.cast(Ok(Reply::Released));
        let mut waiting = spawn(votes.next(Enough::of(phase, 3)));
        assert_pending!(waiting.poll());
        vote(earlier);
        vote(ballots.pop().unwrap());
        vote(ballots.pop().unwrap());
        assert!(!waiting.is_woken());
        vote(ballots.pop().unwrap());
        assert!(waiting.is_woken());
        assert_eq!(assert_ready!(waiting.poll()).phase, 0);
        drop(waiting);
        // All that are there, without waiting for more.
        for node in [4, 3, 2] {
            let next = assert_ready!(spawn(votes.next(Enough::of(phase, 5))).poll());
            assert_eq!((next.phase, next.node), (phase, node));
        }
        let mut waiting = spawn(votes.next(Enough::of(phase, 2)));
        assert_pending!(waiting.poll());
        vote(ballots.pop().unwrap());
        assert!(!waiting.is_woken());
        drop(waiting);
        assert_eq!(votes.waiting().unwrap().node, 1);
    }

    #[cfg(feature = "redis")]
    #[test]
    fn a_ballot_is_closed_by_the_next_phase_and_by_the_end_of_its_lease() {
        let names = vec![Arc::from("n"); 5].into();
        let (tally, votes) = Tally::new(&names);
        let first = tally.ballot(0);
        assert!(first.is_open());
        tally.next_phase();
        assert!(!first.is_open());
        let second = tally.ballot(0);
        drop(votes);
        assert!(!second.is_open());
        drop(first);
        drop(second);
        assert!(tally.ballot_box().votes.is_empty());
    }
}
