//! One attempt at a lock: its requests go out, its votes are counted, and it is granted or given up.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::Span;

use crate::lock::claim::Claim;
use crate::lock::error::LockError;
use crate::lock::once::NotGranted;
use crate::lock::task::acquire::{Acquired, Caller, Missed, Stopped};
use crate::lock::task::recording::Replay;
use crate::lock::task::state::{Failures, LeaseTask};
use crate::node::{Node, NodeFailure, Threshold, Vote, next_proposal, transit};
use crate::protocol::message::{Op, Reply};
use crate::protocol::once::{OnceRound, OnceStep};
use crate::protocol::round::{Answer, Refusal, RefusalKind};
use crate::protocol::{FencingToken, Record, validity};

/// An attempt under way.
struct Attempt {
    claim: Claim,
    inquiry: Inquiry,
}

/// What an attempt has asked and learned so far.
///
/// Of a key that keeps records it lives on while the grant waits for its execution to begin: a record that
/// comes in by then decides, and not the grant.
pub(super) struct Inquiry {
    round: OnceRound,
    failures: Failures,
    /// Before the first request was sent.
    began: Instant,
    stage: Stage,
    /// The number of the first phase in the tally.
    acquiring: u32,
    /// Until when each node may take to answer in the first phase.
    due: Vec<Instant>,
    /// Until when the attempt may take with all its phases (PROTOCOL, section 2.2.3).
    deadline: Instant,
    /// The rest of a record on its way, to be written to more nodes.
    reading: Option<Reading>,
    /// When the first of the nodes that have a record forgets it.
    expires_in: Duration,
}

/// Where an attempt stands, and of the later phases their number in the tally.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Acquiring,
    /// The second phase, with all of its steps.
    Confirming(u32),
    /// What is missing of a record is read since then, to be written to more nodes.
    Reading(Instant),
    /// A record is written to more nodes.
    Repairing(u32),
}

/// How an attempt ends.
enum End {
    Granted(u64),
    Replayed(Record),
    Missed(Missed),
}

/// What an attempt waits for.
enum Event {
    Gone,
    Voted(Vote),
    /// The rest of a record came in, or cannot be had.
    Read(Result<Record, LockError>),
    /// Nothing came by this time.
    Silence(Instant),
}

impl LeaseTask {
    /// One attempt: a fresh owner token, one `ACQUIRE` to every node, and the second phase if the
    /// numbers differ. Whatever a failed attempt may have locked is released on the way out.
    ///
    /// Of a key that keeps records, a record ends it: one that a majority has is the outcome, and one
    /// that a minority has is written to more nodes first.
    pub(super) async fn attempt(&mut self, caller: Caller<'_>) -> Result<Acquired, Missed> {
        let attempt = self.begin_attempt();
        self.pursue(attempt, OnceStep::Wait, caller).await
    }

    /// Takes up an attempt that was granted its key, and then heard of a record before anything was
    /// executed: repairs and replays the record, or gives up.
    pub(super) async fn resume(
        &mut self,
        claim: Claim,
        mut inquiry: Inquiry,
        step: OnceStep,
    ) -> Result<Acquired, Missed> {
        // The time that the execution took to begin is not the nodes'.
        inquiry.deadline = Instant::now() + self.inner.settings.node_timeout;
        let attempt = Attempt { claim, inquiry };
        self.pursue(attempt, step, Caller(None)).await
    }

    /// Drives an attempt to its end.
    async fn pursue(
        &mut self,
        mut attempt: Attempt,
        mut step: OnceStep,
        mut caller: Caller<'_>,
    ) -> Result<Acquired, Missed> {
        loop {
            if let OnceStep::Execute(_) = step
                && self.asked_for.is_some()
            {
                step = self.count_heard(&mut attempt, step);
            }
            if let Some(end) = self.follow(&mut attempt, step) {
                return self.concluded(attempt, end);
            }
            let event = match self.votes.try_recv() {
                // Woken once for several.
                Some(vote) => Event::Voted(vote),
                None => self.next_event(&mut attempt, &mut caller).await,
            };
            step = match event {
                Event::Gone => {
                    // Others may have been told nothing, because this process had somebody for it.
                    self.give_back(attempt.claim, true);
                    return Err(Missed::Stopped(Stopped::Abandoned));
                }
                Event::Voted(vote) => match self.count_release(vote) {
                    Some(vote) => attempt.inquiry.on_vote(vote, &mut attempt.claim),
                    None => OnceStep::Wait,
                },
                Event::Read(read) => {
                    attempt.inquiry.end_reading();
                    match read {
                        Ok(record) => OnceStep::Repair(record),
                        // What cannot be read is not written either.
                        Err(_) => self.on_silence(&mut attempt, Instant::now()),
                    }
                }
                Event::Silence(now) => self.on_silence(&mut attempt, now),
            };
        }
    }

    /// Counts the votes that are here already before a grant is concluded from some of them: one may have
    /// a record, which decides instead.
    fn count_heard(&mut self, attempt: &mut Attempt, granted: OnceStep) -> OnceStep {
        while let Some(vote) = self.votes.try_recv() {
            if let Some(vote) = self.count_release(vote) {
                let step = attempt.inquiry.on_vote(vote, &mut attempt.claim);
                if attempt.inquiry.round.is_recorded() {
                    return step;
                }
            }
        }
        granted
    }

    fn begin_attempt(&self) -> Attempt {
        let settings = &self.inner.settings;
        let mut claim = Claim::new(&self.inner, &self.names, self.asked_for);
        let began = Instant::now();
        let patience = |node: &Arc<dyn Node>| settings.node_timeout + node.extra_patience();
        let due: Vec<Instant> = self
            .inner
            .nodes
            .iter()
            .map(|node| began + patience(node))
            .collect();
        let acquiring = self.votes.next_phase();
        let acquire = Op::Acquire {
            proposal: self.is_fenced().then(next_proposal),
            ttl: self.ttl,
            retention: settings.fence_retention,
        };
        claim.send(acquire, self.ttl, &self.votes, 0..due.len());
        let inquiry = Inquiry {
            round: OnceRound::new(settings.quorum, self.asked_for.unwrap_or_default()),
            failures: Failures::default(),
            began,
            stage: Stage::Acquiring,
            acquiring,
            deadline: due.iter().copied().max().unwrap_or(began),
            due,
            reading: None,
            expires_in: Duration::MAX,
        };
        Attempt { claim, inquiry }
    }

    /// Records are only written where their writer was the last to be granted the key, which the fence
    /// tells.
    fn is_fenced(&self) -> bool {
        self.inner.settings.fencing || self.asked_for.is_some()
    }

    async fn next_event(&mut self, attempt: &mut Attempt, caller: &mut Caller<'_>) -> Event {
        let enough = match attempt.inquiry.stage {
            Stage::Acquiring => {
                let heard = self.inner.nodes.len() - attempt.inquiry.round.unanswered().count();
                let decisive = self.inner.settings.quorum.decisive();
                Threshold::new(attempt.inquiry.acquiring, decisive.saturating_sub(heard))
            }
            Stage::Confirming(_) | Stage::Reading(_) | Stage::Repairing(_) => Threshold::any(),
        };
        let due = attempt.inquiry.next_due();
        tokio::select! {
            biased;
            () = caller.gone() => Event::Gone,
            vote = self.votes.recv(enough) => Event::Voted(vote),
            whole = poll_rest(&mut attempt.inquiry.reading) => Event::Read(whole),
            () = self.alarm.at(due), if !matches!(attempt.inquiry.stage, Stage::Reading(_)) => match self.votes.try_recv() {
                // Too few to wake for, but in time.
                Some(vote) => Event::Voted(vote),
                None => Event::Silence(due),
            }
        }
    }

    /// Counts nodes as failed that were silent until `now`.
    fn on_silence(&self, attempt: &mut Attempt, now: Instant) -> OnceStep {
        let after = attempt.inquiry.began.elapsed();
        for node in attempt.inquiry.late(now) {
            let name = Arc::clone(self.inner.nodes[node].name());
            let step = attempt
                .inquiry
                .on_silence(node, NodeFailure::TimedOut { node: name, after });
            if step != OnceStep::Wait {
                return step;
            }
        }
        OnceStep::Wait
    }

    /// Does what follows from the votes so far, and returns how the attempt ends, if it does.
    fn follow(&mut self, attempt: &mut Attempt, step: OnceStep) -> Option<End> {
        match step {
            OnceStep::Wait => return None,
            OnceStep::Confirm(token) => {
                self.confirm(attempt, token);
                return None;
            }
            OnceStep::Repair(record) => {
                self.repair(attempt, record);
                return None;
            }
            OnceStep::Execute(number) => return Some(End::Granted(number)),
            OnceStep::Replay(record) => return Some(End::Replayed(record)),
            OnceStep::Refused(refusal) => Some(self.missed(refusal, &attempt.inquiry.failures)),
            OnceStep::Undecided => Some(Missed::Undecided),
            OnceStep::OtherRequest => Some(Missed::not_granted(NotGranted::OtherRequest)),
            OnceStep::Conflicting => Some(Missed::not_granted(NotGranted::Conflicting)),
            OnceStep::Unknown => Some(Missed::not_granted(NotGranted::Unknown)),
        }
        .map(End::Missed)
    }

    fn concluded(&mut self, attempt: Attempt, end: End) -> Result<Acquired, Missed> {
        let missed = match end {
            End::Granted(number) => return self.granted(attempt, number),
            End::Replayed(record) => {
                let replay = Box::new(Replay {
                    claim: attempt.claim,
                    round: attempt.inquiry.round,
                    acquiring: attempt.inquiry.acquiring,
                    due: attempt.inquiry.due,
                    expires_in: attempt.inquiry.expires_in,
                });
                return Err(Missed::Stopped(Stopped::Replayed(record, replay)));
            }
            End::Missed(missed) => missed,
        };
        // Releases what it may hold, which is nothing where it was refused.
        let Attempt { mut claim, inquiry } = attempt;
        for node in (0..self.inner.nodes.len()).filter(|node| inquiry.round.refused_by(*node)) {
            claim.excuse(node);
        }
        self.give_up(claim);
        Err(missed)
    }

    fn confirm(&mut self, attempt: &mut Attempt, token: u64) {
        let settings = &self.inner.settings;
        attempt.inquiry.stage = Stage::Confirming(self.votes.next_phase());
        let confirm = Op::Confirm {
            token: self.is_fenced().then_some(token),
            ttl: self.ttl,
            retention: settings.fence_retention,
        };
        let nodes = attempt.inquiry.round.unconfirmed();
        attempt.claim.send(confirm, self.ttl, &self.votes, nodes);
    }

    fn repair(&mut self, attempt: &mut Attempt, record: Record) {
        if record.is_whole() {
            let retention = attempt.inquiry.expires_in;
            let write = Op::Record { record, retention };
            // What it carries takes its time on the wire, whatever the votes took.
            attempt.inquiry.deadline += transit(&write);
            attempt.inquiry.stage = Stage::Repairing(self.votes.next_phase());
            let nodes = attempt.inquiry.round.repairers();
            attempt.claim.ask(write, &self.votes, nodes);
        } else {
            attempt.inquiry.stage = Stage::Reading(Instant::now());
            let (inner, key) = (Arc::clone(&self.inner), self.recorded_key().clone());
            attempt.inquiry.reading =
                Some(Box::pin(async move { inner.whole(&key, &record).await }));
        }
    }

    fn granted(&mut self, attempt: Attempt, number: u64) -> Result<Acquired, Missed> {
        let Attempt { claim, inquiry } = attempt;
        let (round, began) = (&inquiry.round, inquiry.began);
        Span::current().record("quorum.granted", round.acknowledged(number));
        // After the last counted answer, and by the monotonic clock.
        let elapsed = began.elapsed();
        let Some(left) = validity::remaining(self.ttl, elapsed) else {
            self.give_up(claim);
            let ttl = self.ttl;
            return Err(Missed::not_granted(LockError::Expired { ttl, elapsed }));
        };
        let token = self.is_fenced().then(|| FencingToken::try_from(number));
        Ok(Acquired {
            claim,
            // The nodes never go beyond the largest token.
            token: token.transpose().unwrap_or_default(),
            began,
            valid_until: began + elapsed + left,
            inquiry: self.asked_for.is_some().then(|| Box::new(inquiry)),
        })
    }

    fn missed(&self, refusal: Refusal, failures: &Failures) -> Missed {
        match refusal.kind {
            RefusalKind::Contended { expires_in } => Missed::Contended {
                retry_after: expires_in,
                split: refusal.split,
            },
            RefusalKind::Unavailable => Missed::not_granted(LockError::Unavailable {
                reached: refusal.reached,
                needed: self.inner.settings.quorum.majority(),
                nodes: failures.list(),
            }),
        }
    }
}

impl Inquiry {
    /// Returns when the next node has been silent for too long.
    fn next_due(&self) -> Instant {
        match self.stage {
            Stage::Acquiring => {
                let next = self.round.silent().map(|node| self.due[node]).min();
                // Without a silent node there is an answer that decides.
                next.unwrap_or(self.began)
            }
            Stage::Confirming(_) | Stage::Repairing(_) => self.deadline,
            // That has its own time limit.
            Stage::Reading(_) => self.began,
        }
    }

    /// Returns the nodes that have been silent for too long.
    fn late(&self, now: Instant) -> Vec<usize> {
        let acquiring = self.stage == Stage::Acquiring;
        let late = |node: &usize| !acquiring || self.due[*node] <= now;
        self.round.silent().filter(late).collect()
    }

    /// Notes that what was read is in, or cannot be had: the time for that does not count.
    fn end_reading(&mut self) {
        if let Stage::Reading(since) = self.stage {
            self.deadline += since.elapsed();
        }
    }

    /// Whether votes of this phase are on what the attempt asks now.
    pub(super) fn asked_in(&self, phase: u32) -> bool {
        let later = match self.stage {
            Stage::Confirming(later) | Stage::Repairing(later) => Some(later),
            Stage::Acquiring | Stage::Reading(_) => None,
        };
        phase == self.acquiring || later == Some(phase)
    }

    /// Whether some node has a record.
    pub(super) fn is_recorded(&self) -> bool {
        self.round.is_recorded()
    }

    /// Takes a record that a node answered to an extension of the granted lock.
    pub(super) fn on_extension(
        &mut self,
        node: usize,
        outcome: &Result<Reply, NodeFailure>,
    ) -> OnceStep {
        match outcome {
            Ok(reply) => {
                if let Reply::Done { expires_in, .. } = reply {
                    self.expires_in = self.expires_in.min(*expires_in);
                }
                let answer = Answer::Replied(reply.clone());
                self.round.on_extension(node, &answer)
            }
            Err(_) => OnceStep::Wait,
        }
    }

    pub(super) fn on_vote(&mut self, vote: Vote, claim: &mut Claim) -> OnceStep {
        let Vote {
            node,
            phase,
            outcome,
            ..
        } = vote;
        if let Ok(Reply::Done { expires_in, .. }) = &outcome {
            self.expires_in = self.expires_in.min(*expires_in);
        }
        if phase == self.acquiring {
            if outcome.as_ref().is_err_and(NodeFailure::never_sent) {
                claim.excuse(node);
            }
            let answer = self.failures.note(node, outcome);
            return self.round.on_acquire(node, &answer);
        }
        match self.stage {
            Stage::Confirming(current) if phase == current => {
                let answer = self.failures.note(node, outcome);
                self.round.on_confirm(node, self.round.step(), &answer)
            }
            Stage::Repairing(current) if phase == current => {
                let answer = self.failures.note(node, outcome);
                if matches!(answer, Answer::Replied(Reply::Done { .. })) {
                    claim.excuse(node);
                }
                self.round.on_record(node, &answer)
            }
            // Of an earlier attempt or phase.
            _ => OnceStep::Wait,
        }
    }

    /// Counts a node as failed that has been silent for too long.
    fn on_silence(&mut self, node: usize, failure: NodeFailure) -> OnceStep {
        self.failures.set(node, failure);
        match self.stage {
            Stage::Confirming(_) if !self.round.is_recorded() => {
                let step = self.round.step();
                self.round.on_confirm(node, step, &Answer::Failed)
            }
            Stage::Acquiring | Stage::Confirming(_) => self.round.on_acquire(node, &Answer::Failed),
            Stage::Reading(_) | Stage::Repairing(_) => self.round.on_record(node, &Answer::Failed),
        }
    }
}

/// Waits for the rest of a record that is being read; for ever, if none is.
async fn poll_rest(reading: &mut Option<Reading>) -> Result<Record, LockError> {
    match reading {
        Some(rest) => {
            let whole = rest.await;
            *reading = None;
            whole
        }
        None => std::future::pending().await,
    }
}

type Reading = Pin<Box<dyn Future<Output = Result<Record, LockError>> + Send>>;
