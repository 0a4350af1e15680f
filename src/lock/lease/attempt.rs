//! One attempt at a lock: sends its requests, counts the votes, and ends granted or refused.
//!
//! # Implementation details
//!
//! An attempt drives a [`Round`], which knows the protocol and no clock, with the votes and the silence of the
//! nodes. It has a fresh owner token. It sends one `ACQUIRE` to every node, and a `CONFIRM` if the nodes answered
//! different fencing numbers; [`protocol`](crate::protocol) explains why.
//!
//! *Time.* In the first phase, each node has the node timeout, and before its first connection the connect timeout
//! too. All phases together have the longest of these times. A node that is silent for longer counts as failed; its
//! late grant is released like every other.
//!
//! *Wake-ups.* In the first phase, only a vote that may decide wakes the task. Votes that have arrived by then are
//! taken without another wake-up.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tokio::time::Instant;
use tracing::Span;

use crate::lock::backoff::AcquireError;
use crate::lock::cluster::Cluster;
use crate::lock::error::LockError;
use crate::lock::failures::Failures;
use crate::lock::lease::cleanup::Cleanup;
use crate::lock::lease::task::LeaseTask;
use crate::node::{NodeFailure, Threshold, Vote, next_proposal};
use crate::protocol::lease::Access;
use crate::protocol::message::{Op, SharedOp};
use crate::protocol::round::{AcquireRound, AcquireStep, Answer, Refusal, RefusalKind};
use crate::protocol::{FencingToken, OwnerToken, validity};

/// An acquisition round, as an attempt drives it.
///
/// Conclusions other than the steps of [`AcquireRound`] are returned as an error.
pub(crate) trait Round: Send {
    /// The conclusions other than those of [`AcquireRound`].
    type Other: Send;

    /// Returns the part of the round that acquires the lock.
    fn acquiring(&self) -> &AcquireRound;

    /// Takes the answer of a node to the `ACQUIRE`.
    fn on_acquire(&mut self, node: usize, answer: &Answer) -> Result<AcquireStep, Self::Other>;

    /// Takes the answer of a node to the current `CONFIRM`.
    fn on_confirm(&mut self, node: usize, answer: &Answer) -> Result<AcquireStep, Self::Other>;

    /// Counts a silent node as failed.
    fn on_silence(&mut self, node: usize) -> Result<AcquireStep, Self::Other> {
        if self.acquiring().step() == 0 {
            self.on_acquire(node, &Answer::Failed)
        } else {
            self.on_confirm(node, &Answer::Failed)
        }
    }

    /// Returns the silent nodes whose answers still matter.
    fn silent(&self) -> impl Iterator<Item = usize>;
}

/// An attempt under way.
pub(crate) struct Attempt<R> {
    pub(crate) cleanup: Cleanup,
    pub(crate) progress: Progress<R>,
}

/// The requests and answers of an attempt.
pub(crate) struct Progress<R> {
    pub(crate) round: R,
    pub(crate) failures: Failures,
    /// The time before the first request was sent.
    pub(crate) began: Instant,
    /// The phase of the `ACQUIRE`.
    pub(crate) acquiring: u32,
    /// The phase of the current `CONFIRM`.
    confirming: Option<u32>,
    /// The time until which the nodes may answer the `ACQUIRE`.
    due: Instant,
    /// The nodes that are not connected yet, which have until these later times.
    connecting: Vec<(usize, Instant)>,
    /// The deadline of all phases together.
    pub(crate) deadline: Instant,
}

/// A lock that a majority has granted.
pub(crate) struct GrantedLock {
    pub(crate) cleanup: Cleanup,
    pub(crate) token: Option<FencingToken>,
    /// The time before the first request was sent.
    pub(crate) began: Instant,
    pub(crate) valid_until: Instant,
}

/// The conclusion of an attempt's round.
pub(crate) enum Concluded<T> {
    /// A majority granted the lock with this fencing number.
    Granted(u64),
    Refused(Refusal),
    /// Another conclusion of this kind of round.
    Other(T),
    /// The caller went away before the round was decided.
    Abandoned,
}

impl LeaseTask {
    /// Sends the `ACQUIRE` of a new attempt to every node.
    pub(crate) fn begin_attempt<R: Round>(&self, round: R, owner: OwnerToken) -> Attempt<R> {
        let settings = &self.cluster.settings;
        let began = Instant::now();
        let mut cleanup = Cleanup::new(
            &self.cluster,
            &self.terms.names,
            owner,
            self.terms.access,
            began,
        );
        let due = began + settings.node_timeout;
        let patience = self.cluster.nodes.iter().map(|node| node.extra_patience());
        let connecting = patience.enumerate().filter(|(_, extra)| !extra.is_zero());
        let connecting: Vec<_> = connecting
            .map(|(node, extra)| (node, due + extra))
            .collect();
        let acquiring = self.votes.next_phase();
        let acquire = match self.terms.access {
            Access::Exclusive | Access::Slot(_) => Op::Acquire {
                proposal: self.terms.is_fenced.then(|| self.proposal()),
                ttl: self.terms.ttl,
                retention: settings.fence_retention,
            },
            Access::Shared => Op::Shared(SharedOp::Acquire {
                ttl: self.terms.ttl,
            }),
        };
        let nodes = 0..self.cluster.nodes.len();
        cleanup.send(acquire, self.terms.ttl, began, &self.votes, nodes);
        let progress = Progress {
            round,
            failures: Failures::default(),
            began,
            acquiring,
            confirming: None,
            deadline: connecting.iter().map(|(_, due)| *due).max().unwrap_or(due),
            due,
            connecting,
        };
        Attempt { cleanup, progress }
    }

    /// Returns the number to propose.
    ///
    /// Where the caller has a lock in another group, it proposes the token of that one, so that both have the same token
    /// unless a fence is higher here.
    fn proposal(&self) -> u64 {
        let earlier = self.terms.earlier.and_then(|earlier| earlier.token);
        earlier.map_or_else(next_proposal, FencingToken::as_u64)
    }

    /// Drives an attempt from a step of its round until the round concludes.
    pub(crate) async fn pursue<R: Round>(
        &mut self,
        attempt: &mut Attempt<R>,
        mut step: Result<AcquireStep, R::Other>,
        mut abandoned: Pin<&mut (impl Future<Output = ()> + Send)>,
    ) -> Concluded<R::Other> {
        loop {
            match step {
                Ok(AcquireStep::Wait) => {}
                Ok(AcquireStep::Confirm(token)) => self.confirm(attempt, token),
                Ok(AcquireStep::Granted(number)) => return Concluded::Granted(number),
                Ok(AcquireStep::Refused(refusal)) => return Concluded::Refused(refusal),
                Err(other) => return Concluded::Other(other),
            }
            let vote = match self.votes.try_recv() {
                Some(vote) => Some(vote),
                None => {
                    let threshold = attempt.progress.threshold(&self.cluster);
                    let due = attempt.progress.next_due();
                    tokio::select! {
                        biased;
                        () = abandoned.as_mut() => return Concluded::Abandoned,
                        vote = self.votes.recv(threshold) => Some(vote),
                        // Votes below the threshold have arrived in time.
                        () = self.timer.at(due) => self.votes.try_recv(),
                    }
                }
            };
            step = match vote.map(|vote| self.count_release(vote)) {
                Some(Some(vote)) => attempt.on_vote(vote),
                Some(None) => Ok(AcquireStep::Wait),
                None => self.on_silence(&mut attempt.progress),
            };
        }
    }

    /// Counts overdue nodes as failed.
    fn on_silence<R: Round>(&self, progress: &mut Progress<R>) -> Result<AcquireStep, R::Other> {
        let after = progress.began.elapsed();
        let late = progress.late(Instant::now());
        for node in &late {
            let failure = self.cluster.timed_out(*node, after);
            progress.failures.set(*node, failure);
        }
        for node in late {
            let step = progress.round.on_silence(node)?;
            if step != AcquireStep::Wait {
                return Ok(step);
            }
        }
        Ok(AcquireStep::Wait)
    }

    fn confirm<R: Round>(&mut self, attempt: &mut Attempt<R>, token: u64) {
        let Attempt { cleanup, progress } = attempt;
        progress.confirming = Some(self.votes.next_phase());
        let token = self.terms.is_fenced.then_some(token);
        let retention = self.cluster.settings.fence_retention;
        let confirm = self.terms.access.confirm(token, self.terms.ttl, retention);
        let nodes = progress.round.acquiring().unconfirmed();
        cleanup.send(confirm, self.terms.ttl, Instant::now(), &self.votes, nodes);
    }

    /// Concludes an attempt that a majority granted, with an error if the grant came too late.
    pub(crate) fn granted<R: Round>(
        &mut self,
        attempt: Attempt<R>,
        number: u64,
    ) -> Result<(GrantedLock, Progress<R>), AcquireError> {
        let Attempt { cleanup, progress } = attempt;
        let acknowledged = progress.round.acquiring().acknowledged(number);
        Span::current().record("quorum.granted", acknowledged);
        // Measured after the last answer that counts, by the monotonic clock.
        let elapsed = progress.began.elapsed();
        let Some(left) = validity::remaining(self.terms.ttl, elapsed) else {
            self.give_up(cleanup);
            let ttl = self.terms.ttl;
            return Err(LockError::Expired { ttl, elapsed }.into());
        };
        let token = self.terms.is_fenced.then(|| FencingToken::try_from(number));
        let acquired = GrantedLock {
            cleanup,
            // Cannot fail: the nodes never exceed the largest token.
            token: token.transpose().unwrap_or_default(),
            began: progress.began,
            valid_until: progress.began + elapsed + left,
        };
        Ok((acquired, progress))
    }

    /// Concludes an attempt that cannot get a majority, and returns the reason.
    pub(crate) fn refused<R: Round>(
        &mut self,
        mut attempt: Attempt<R>,
        refusal: Refusal,
    ) -> AcquireError {
        match refusal.kind {
            RefusalKind::Contended { expires_in } => {
                self.end_attempt(attempt);
                AcquireError::Contended {
                    retry_after: expires_in,
                    is_split: refusal.is_split,
                    is_shared: refusal.is_shared,
                    free: refusal.free,
                }
            }
            RefusalKind::Unavailable => {
                self.take_further_failures(&mut attempt);
                let Progress {
                    round, failures, ..
                } = self.end_attempt(attempt);
                let round = round.acquiring();
                let voted = (0..self.cluster.nodes.len()).filter(|node| round.has_voted(*node));
                let names = voted.map(|node| Arc::clone(&self.cluster.names[node]));
                let voted: Vec<Arc<str>> = names.collect();
                AcquireError::Failed(LockError::Unavailable {
                    reached: voted.len(),
                    needed: self.cluster.quorum.majority(),
                    voted,
                    nodes: failures.list(&self.cluster, round.unanswered()),
                })
            }
        }
    }

    /// Takes the votes that have arrived since the refusal, so that the error names every node.
    ///
    /// The round takes no further step, because its refusal is final.
    fn take_further_failures<R: Round>(&mut self, attempt: &mut Attempt<R>) {
        while let Some(vote) = self.votes.try_recv() {
            if let Some(vote) = self.count_release(vote) {
                drop(attempt.on_vote(vote));
            }
        }
    }

    /// Concludes an attempt whose caller has gone away.
    pub(crate) fn abandoned<R: Round>(&mut self, attempt: Attempt<R>) -> AcquireError {
        // Publishes: our last release may not have been published, because this caller waited.
        self.begin_release(attempt.cleanup, true);
        AcquireError::Abandoned
    }

    /// Ends a failed attempt, and releases the keys that it may hold. A node that refused it holds none.
    pub(crate) fn end_attempt<R: Round>(&mut self, attempt: Attempt<R>) -> Progress<R> {
        let Attempt {
            mut cleanup,
            progress,
        } = attempt;
        let round = progress.round.acquiring();
        for node in (0..self.cluster.nodes.len()).filter(|node| round.is_refused_by(*node)) {
            cleanup.mark_not_held(node);
        }
        self.give_up(cleanup);
        progress
    }
}

impl<R: Round> Attempt<R> {
    /// Takes a vote on the `ACQUIRE` or the current `CONFIRM`. Other votes belong to earlier attempts or phases.
    pub(crate) fn on_vote(&mut self, vote: Vote) -> Result<AcquireStep, R::Other> {
        self.progress.on_vote(vote, &mut self.cleanup)
    }
}

impl<R: Round> Progress<R> {
    /// Takes a vote; see [`Attempt::on_vote`].
    pub(crate) fn on_vote(
        &mut self,
        vote: Vote,
        cleanup: &mut Cleanup,
    ) -> Result<AcquireStep, R::Other> {
        let Vote {
            node,
            phase,
            outcome,
            ..
        } = vote;
        if phase == self.acquiring {
            if outcome.as_ref().is_err_and(NodeFailure::never_sent) {
                cleanup.mark_not_held(node);
            }
            let answer = self.failures.note(node, outcome);
            self.round.on_acquire(node, &answer)
        } else if Some(phase) == self.confirming {
            let answer = self.failures.note(node, outcome);
            self.round.on_confirm(node, &answer)
        } else {
            Ok(AcquireStep::Wait)
        }
    }

    /// Returns whether votes of this phase answer the current requests of the attempt.
    pub(crate) fn is_current(&self, phase: u32) -> bool {
        phase == self.acquiring || Some(phase) == self.confirming
    }

    /// Returns the number of votes that may decide the round.
    fn threshold(&self, cluster: &Cluster) -> Threshold {
        if self.confirming.is_some() {
            return Threshold::any();
        }
        let answered = cluster.nodes.len() - self.round.acquiring().unanswered().count();
        let decisive = cluster.quorum.decisive();
        Threshold::new(self.acquiring, decisive.saturating_sub(answered))
    }

    /// Returns the time until which the last node may answer the `ACQUIRE`.
    pub(crate) fn last_due(&self) -> Instant {
        let connecting = self.connecting.iter().map(|(_, due)| *due);
        connecting.max().unwrap_or(self.due)
    }

    /// Returns the time until which a node may answer the `ACQUIRE`.
    fn due(&self, node: usize) -> Instant {
        let mut connecting = self.connecting.iter();
        let connecting = connecting.find(|(number, _)| *number == node);
        connecting.map_or(self.due, |(_, due)| *due)
    }

    /// Returns when the next silent node is overdue.
    fn next_due(&self) -> Instant {
        if self.confirming.is_some() {
            return self.deadline;
        }
        let next = self.round.silent().map(|node| self.due(node)).min();
        // Without a silent node, a vote that decides has arrived.
        next.unwrap_or(self.began)
    }

    /// Returns the overdue nodes.
    fn late(&self, now: Instant) -> Vec<usize> {
        let is_confirming = self.confirming.is_some();
        let is_late = |node: &usize| is_confirming || self.due(*node) <= now;
        self.round.silent().filter(is_late).collect()
    }
}
