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
use crate::node::{Enough, Node, NodeFailure, Vote, next_proposal, transit};
use crate::protocol::message::{Op, Reply};
use crate::protocol::once::{OnceRound, OnceStep};
use crate::protocol::round::{Answer, Refusal, RefusalKind};
use crate::protocol::{FencingToken, Record, validity};

/// What an attempt has done and learned so far.
struct Attempt {
    claim: Claim,
    round: OnceRound,
    failures: Failures,
    /// Before the first request was sent.
    began: Instant,
    stage: Stage,
    /// The number of the first phase in the tally.
    acquiring: u32,
    /// Until when each node may take to answer in the first phase.
    due: Vec<Instant>,
    /// The rest of a record on its way, to be written to more nodes.
    reading: Option<Reading>,
    /// When the first of the nodes that have a record forgets it.
    expires_in: Duration,
}

/// Where an attempt stands, and of the later phases their number in the tally and when they are over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Acquiring,
    /// The second phase, with all of its steps.
    Confirming(u32, Instant),
    /// What is missing of a record is read, to be written to more nodes.
    Reading,
    /// A record is written to more nodes.
    Repairing(u32, Instant),
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
    pub(super) async fn attempt(&mut self, mut caller: Caller<'_>) -> Result<Acquired, Missed> {
        let mut attempt = self.begin_attempt();
        loop {
            let event = match self.votes.waiting() {
                // Woken once for several.
                Some(vote) => Event::Voted(vote),
                None => self.next_event(&mut attempt, &mut caller).await,
            };
            let step = match event {
                Event::Gone => {
                    // Others may have been told nothing, because this process had somebody for it.
                    self.give_back(attempt.claim, true);
                    return Err(Missed::Stopped(Stopped::Abandoned));
                }
                Event::Voted(vote) => match self.count_release(vote) {
                    Some(vote) => attempt.on_vote(vote),
                    None => OnceStep::Wait,
                },
                Event::Read(Ok(record)) => OnceStep::Repair(record),
                // What cannot be read is not written either.
                Event::Read(Err(_)) => self.on_silence(&mut attempt, Instant::now()),
                Event::Silence(now) => self.on_silence(&mut attempt, now),
            };
            if let Some(end) = self.follow(&mut attempt, step) {
                return self.concluded(attempt, end);
            }
        }
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
        let acquiring = self.tally.next_phase();
        let acquire = Op::Acquire {
            proposal: self.is_fenced().then(next_proposal),
            ttl: self.ttl,
            retention: settings.fence_retention,
        };
        claim.send(acquire, self.ttl, &self.tally, 0..due.len());
        Attempt {
            claim,
            round: OnceRound::new(settings.quorum, self.asked_for.unwrap_or_default()),
            failures: Failures::default(),
            began,
            stage: Stage::Acquiring,
            acquiring,
            due,
            reading: None,
            expires_in: Duration::MAX,
        }
    }

    /// Records are only written where their writer was the last to be granted the key, which the fence
    /// tells.
    fn is_fenced(&self) -> bool {
        self.inner.settings.fencing || self.asked_for.is_some()
    }

    async fn next_event(&mut self, attempt: &mut Attempt, caller: &mut Caller<'_>) -> Event {
        let enough = match attempt.stage {
            Stage::Acquiring => {
                let heard = self.inner.nodes.len() - attempt.round.unanswered().count();
                let decisive = self.inner.settings.quorum.decisive();
                Enough::of(attempt.acquiring, decisive.saturating_sub(heard))
            }
            Stage::Confirming(..) | Stage::Reading | Stage::Repairing(..) => Enough::any(),
        };
        let due = attempt.next_due();
        tokio::select! {
            biased;
            () = caller.gone() => Event::Gone,
            vote = self.votes.next(enough) => Event::Voted(vote),
            whole = poll_rest(&mut attempt.reading) => Event::Read(whole),
            () = self.alarm.at(due), if attempt.stage != Stage::Reading => match self.votes.waiting() {
                // Too few to wake for, but in time.
                Some(vote) => Event::Voted(vote),
                None => Event::Silence(due),
            }
        }
    }

    /// Counts nodes as failed that were silent until `now`.
    fn on_silence(&self, attempt: &mut Attempt, now: Instant) -> OnceStep {
        let after = attempt.began.elapsed();
        for node in attempt.late(now) {
            let name = Arc::clone(self.inner.nodes[node].name());
            let step = attempt.on_silence(node, NodeFailure::TimedOut { node: name, after });
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
            OnceStep::Refused(refusal) => Some(self.missed(refusal, &attempt.failures)),
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
                    round: attempt.round,
                    acquiring: attempt.acquiring,
                    due: attempt.due,
                    expires_in: attempt.expires_in,
                });
                return Err(Missed::Stopped(Stopped::Replayed(record, replay)));
            }
            End::Missed(missed) => missed,
        };
        // Releases what it may hold, which is nothing where it was refused.
        let Attempt {
            mut claim, round, ..
        } = attempt;
        for node in (0..self.inner.nodes.len()).filter(|node| round.refused_by(*node)) {
            claim.excuse(node);
        }
        self.give_up(claim);
        Err(missed)
    }

    fn confirm(&mut self, attempt: &mut Attempt, token: u64) {
        let settings = &self.inner.settings;
        let due = match attempt.stage {
            Stage::Confirming(_, due) => due,
            _ => Instant::now() + settings.node_timeout,
        };
        attempt.stage = Stage::Confirming(self.tally.next_phase(), due);
        let confirm = Op::Confirm {
            token: self.is_fenced().then_some(token),
            ttl: self.ttl,
            retention: settings.fence_retention,
        };
        let nodes = attempt.round.unconfirmed();
        attempt.claim.send(confirm, self.ttl, &self.tally, nodes);
    }

    fn repair(&mut self, attempt: &mut Attempt, record: Record) {
        if record.is_whole() {
            let retention = attempt.expires_in;
            let write = Op::Record { record, retention };
            let due = Instant::now() + self.inner.settings.node_timeout + transit(&write);
            attempt.stage = Stage::Repairing(self.tally.next_phase(), due);
            let nodes = attempt.round.repairers();
            attempt.claim.ask(write, &self.tally, nodes);
        } else {
            attempt.stage = Stage::Reading;
            let (inner, key) = (Arc::clone(&self.inner), self.recorded_key().clone());
            attempt.reading = Some(Box::pin(async move { inner.whole(&key, &record).await }));
        }
    }

    fn granted(&mut self, attempt: Attempt, number: u64) -> Result<Acquired, Missed> {
        let Attempt {
            claim,
            round,
            began,
            ..
        } = attempt;
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

impl Attempt {
    /// Returns when the next node has been silent for too long.
    fn next_due(&self) -> Instant {
        match self.stage {
            Stage::Acquiring => {
                let next = self.round.silent().map(|node| self.due[node]).min();
                // Without a silent node there is an answer that decides.
                next.unwrap_or(self.began)
            }
            Stage::Confirming(_, due) | Stage::Repairing(_, due) => due,
            // That has its own time limit.
            Stage::Reading => self.began,
        }
    }

    /// Returns the nodes that have been silent for too long.
    fn late(&self, now: Instant) -> Vec<usize> {
        let acquiring = self.stage == Stage::Acquiring;
        let late = |node: &usize| !acquiring || self.due[*node] <= now;
        self.round.silent().filter(late).collect()
    }

    fn on_vote(&mut self, vote: Vote) -> OnceStep {
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
                self.claim.excuse(node);
            }
            let answer = self.failures.note(node, outcome);
            return self.round.on_acquire(node, &answer);
        }
        match self.stage {
            Stage::Confirming(current, _) if phase == current => {
                let answer = self.failures.note(node, outcome);
                self.round.on_confirm(node, self.round.step(), &answer)
            }
            Stage::Repairing(current, _) if phase == current => {
                let answer = self.failures.note(node, outcome);
                if matches!(answer, Answer::Replied(Reply::Done { .. })) {
                    self.claim.excuse(node);
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
            Stage::Confirming(..) if !self.round.is_recorded() => {
                let step = self.round.step();
                self.round.on_confirm(node, step, &Answer::Failed)
            }
            Stage::Acquiring | Stage::Confirming(..) => {
                self.round.on_acquire(node, &Answer::Failed)
            }
            Stage::Reading | Stage::Repairing(..) => self.round.on_record(node, &Answer::Failed),
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
