//! What a lease task knows in all of its parts.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

use crate::lock::front::Rivals;
use crate::lock::redlock::Inner;
use crate::lock::registry::Ticket;
use crate::node::{NodeFailure, VoteReceiver};
use crate::protocol::message::Reply;
use crate::protocol::round::{Answer, ReleaseRound};
use crate::protocol::{Fingerprint, KeyNames, LockKey, LockKeys};

/// Resolution of tokio's timers: what is to happen by an instant is armed this much earlier.
pub(super) const TICK: Duration = Duration::from_millis(1);

/// The task that owns one lock.
pub(super) struct LeaseTask {
    pub(super) inner: Arc<Inner>,
    pub(super) keys: LockKeys,
    pub(super) names: Arc<[KeyNames]>,
    pub(super) ttl: Duration,
    pub(super) votes: VoteReceiver,
    /// Releases that some node has not confirmed yet, of failed attempts and of the lock itself.
    pub(super) releases: Vec<Release>,
    pub(super) ticket: Ticket,
    pub(super) label: &'static str,
    /// What is asked for, if the key keeps records.
    pub(super) asked_for: Option<Fingerprint>,
    /// By key, the other processes that want it.
    pub(super) rivals: Vec<Arc<Rivals>>,
    pub(super) alarm: Alarm,
}

/// The one timer of a task.
///
/// It is set anew only to go off sooner, and when it went off too early: a lock that is held for a moment
/// would else register and remove several that never go off.
#[derive(Debug, Default)]
pub(super) struct Alarm(Option<Pin<Box<Sleep>>>);

/// A release under way.
pub(super) struct Release {
    pub(super) phase: u32,
    pub(super) round: ReleaseRound,
    /// When the silent nodes are given up on; `None` once they are.
    pub(super) due: Option<Instant>,
    pub(super) failures: Failures,
    /// When nothing can be left to release.
    pub(super) gone_at: Instant,
}

/// Why nodes did not vote in a phase.
#[derive(Debug, Default)]
pub(super) struct Failures(BTreeMap<usize, NodeFailure>);

impl LeaseTask {
    /// Returns the key of a record; a set keeps none.
    pub(super) fn recorded_key(&self) -> &LockKey {
        &self.keys.as_slice()[0]
    }

    pub(super) fn timed_out(&self, node: usize) -> NodeFailure {
        NodeFailure::TimedOut {
            node: Arc::clone(self.inner.nodes[node].name()),
            after: self.inner.settings.node_timeout,
        }
    }
}

impl Alarm {
    /// Waits until an instant.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point, and waited for again.
    pub(super) async fn at(&mut self, due: Instant) {
        poll_fn(|context| self.poll_at(context, due)).await;
    }

    fn poll_at(&mut self, context: &mut Context<'_>, due: Instant) -> Poll<()> {
        let timer = self.0.get_or_insert_with(|| Box::pin(sleep_until(due)));
        if timer.deadline() > due {
            timer.as_mut().reset(due);
        }
        loop {
            ready!(timer.as_mut().poll(context));
            if timer.deadline() >= due {
                return Poll::Ready(());
            }
            timer.as_mut().reset(due);
        }
    }
}

impl Failures {
    /// Notes why a node did not vote, and returns its vote as the rounds take it.
    pub(super) fn note(&mut self, node: usize, outcome: Result<Reply, NodeFailure>) -> Answer {
        match outcome {
            Ok(reply) => {
                self.0.remove(&node);
                Answer::Replied(reply)
            }
            Err(failure) => {
                self.set(node, failure);
                Answer::Failed
            }
        }
    }

    pub(super) fn set(&mut self, node: usize, failure: NodeFailure) {
        self.0.insert(node, failure);
    }

    pub(super) fn list(&self) -> Vec<NodeFailure> {
        self.0.values().cloned().collect()
    }
}
