//! One attempt at the key of an execution: acquires the key, or repairs the record that it meets.
//!
//! # Implementation details
//!
//! Until a node answers with a record, this is the acquisition of a plain lock. With a record, the round waits for
//! all nodes and decides by the number of copies. The record of a majority is replayed. The record of a minority is
//! written to the nodes that granted the key to this attempt, if that makes a majority. A large record is read from
//! a node first. [`protocol::once`](crate::protocol::once) has the rules.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;

use tokio::time::Instant;

use crate::lock::{AcquireError, Attempt, Cleanup, Concluded, GrantedLock, Progress};
use crate::node::{Vote, transit, unguessable};
use crate::once::error::Denied;
use crate::once::fetch::fetch;
use crate::once::replay::Replay;
use crate::once::round::{RecordedRound, Step};
use crate::once::task::OnceTask;
use crate::protocol::message::{Op, Reply};
use crate::protocol::once::{OnceRound, OnceStep};
use crate::protocol::round::{AcquireStep, Answer};
use crate::protocol::{OwnerToken, Record};

/// A granted key whose execution has not begun. The round still takes answers, because a record that arrives before
/// the beginning decides.
pub(super) struct GrantedExecution {
    pub(super) acquired: GrantedLock,
    pub(super) progress: Progress<RecordedRound>,
}

/// Error of an attempt that did not end in a grant.
pub(super) enum AttemptError {
    /// The error of a plain lock.
    Lock(AcquireError),
    /// Some node has a record, which may be replayed when more nodes answer.
    Undecided,
    /// The request is not executed; no further attempt is made.
    Denied(Denied),
    /// A majority has this record, and the remaining nodes get it in the background.
    Recorded(Record, Box<Replay>),
}

impl From<AcquireError> for AttemptError {
    fn from(error: AcquireError) -> Self {
        Self::Lock(error)
    }
}

impl OnceTask {
    /// Makes one attempt. Keys that a failed attempt may hold are released.
    pub(super) async fn attempt(
        &mut self,
        abandoned: impl Future<Output = ()> + Send,
    ) -> Result<GrantedExecution, AttemptError> {
        let quorum = self.lease.cluster.quorum;
        let round = RecordedRound::new(OnceRound::new(quorum, self.fingerprint));
        let owner = OwnerToken::with_fingerprint(unguessable(), self.fingerprint);
        let attempt = self.lease.begin_attempt(round, owner);
        self.pursue(attempt, Ok(AcquireStep::Wait), pin!(abandoned))
            .await
    }

    /// Resumes a granted attempt that met a record before its execution began.
    pub(super) async fn resume(
        &mut self,
        cleanup: Cleanup,
        mut progress: Progress<RecordedRound>,
        step: Step,
    ) -> Result<GrantedExecution, AttemptError> {
        // The time between the grant and the beginning does not count.
        progress.deadline = Instant::now() + self.lease.cluster.settings.node_timeout;
        let attempt = Attempt { cleanup, progress };
        let abandoned = pin!(std::future::pending());
        self.pursue(attempt, step, abandoned).await
    }

    async fn pursue(
        &mut self,
        mut attempt: Attempt<RecordedRound>,
        mut step: Step,
        mut abandoned: Pin<&mut (impl Future<Output = ()> + Send)>,
    ) -> Result<GrantedExecution, AttemptError> {
        loop {
            let pursued = self.lease.pursue(&mut attempt, step, abandoned.as_mut());
            let other = match pursued.await {
                Concluded::Granted(number) => match self.take_received(&mut attempt) {
                    Some(decided) => {
                        step = decided;
                        continue;
                    }
                    None => {
                        let (acquired, progress) = self.lease.granted(attempt, number)?;
                        return Ok(GrantedExecution { acquired, progress });
                    }
                },
                Concluded::Refused(refusal) => {
                    return Err(self.lease.refused(attempt, refusal).into());
                }
                Concluded::Abandoned => return Err(self.lease.abandoned(attempt).into()),
                Concluded::Other(other) => other,
            };
            step = match other {
                OnceStep::Repair(record) => {
                    match self.repair(&mut attempt, record, abandoned.as_mut()).await {
                        Some(step) => step,
                        None => return Err(self.lease.abandoned(attempt).into()),
                    }
                }
                OnceStep::Replay(record) => {
                    let replay = Box::new(Replay::new(attempt));
                    return Err(AttemptError::Recorded(record, replay));
                }
                other => {
                    self.lease.end_attempt(attempt);
                    return Err(other.into());
                }
            };
        }
    }

    /// Takes the votes that have arrived by the time of a grant. A record among them decides instead.
    fn take_received(&mut self, attempt: &mut Attempt<RecordedRound>) -> Option<Step> {
        while let Some(vote) = self.lease.votes.try_recv() {
            if let Some(vote) = self.lease.count_release(vote) {
                let step = attempt.on_vote(vote);
                if attempt.progress.round.round.is_recorded() {
                    return Some(step);
                }
            }
        }
        None
    }

    /// Writes the record of a minority to the nodes that granted the key. Returns the next step; `None` if the caller
    /// went away.
    async fn repair(
        &mut self,
        attempt: &mut Attempt<RecordedRound>,
        record: Record,
        mut abandoned: Pin<&mut (impl Future<Output = ()> + Send)>,
    ) -> Option<Step> {
        let record = match record.is_whole() {
            true => record,
            false => {
                let began = Instant::now();
                match self.read(attempt, &record, abandoned.as_mut()).await? {
                    Ok(record) => {
                        // The time of the read does not count, because the read has a limit of its own.
                        attempt.progress.deadline += began.elapsed();
                        record
                    }
                    Err(step) => return Some(step),
                }
            }
        };
        let Attempt { cleanup, progress } = &mut *attempt;
        let retention = progress.round.expires_in;
        let write = Op::Record { record, retention };
        // A large record needs additional time on the wire.
        progress.deadline += transit(&write);
        let asked = self.ask(cleanup, write, progress.round.round.repairers());
        loop {
            let deadline = attempt.progress.deadline;
            let vote = tokio::select! {
                biased;
                () = abandoned.as_mut() => return None,
                vote = self.lease.votes.recv_any() => Some(vote),
                () = self.lease.timer.at(deadline) => self.lease.votes.try_recv(),
            };
            let step = match vote {
                Some(vote) => self.on_repair_vote(attempt, vote, asked.phase),
                None => fail_silent(attempt),
            };
            if step != Ok(AcquireStep::Wait) {
                return Some(step);
            }
        }
    }

    /// Reads a large record, and counts the votes that arrive meanwhile. Returns the record, or the next step without
    /// it; `None` if the caller went away.
    async fn read(
        &mut self,
        attempt: &mut Attempt<RecordedRound>,
        head: &Record,
        mut abandoned: Pin<&mut (impl Future<Output = ()> + Send)>,
    ) -> Option<Result<Record, Step>> {
        let (group, key) = (Arc::clone(&self.group), self.key().clone());
        let mut fetched = pin!(fetch(&group, &key, head));
        loop {
            let vote = tokio::select! {
                biased;
                () = abandoned.as_mut() => return None,
                vote = self.lease.votes.recv_any() => vote,
                whole = fetched.as_mut() => {
                    // A record that cannot be read cannot be written either.
                    return Some(whole.map_err(|_| fail_silent(attempt)));
                }
            };
            let Some(vote) = self.lease.count_release(vote) else {
                continue;
            };
            let step = on_acquire_vote(attempt, vote);
            if step != Ok(AcquireStep::Wait) {
                return Some(Err(step));
            }
        }
    }

    fn on_repair_vote(
        &mut self,
        attempt: &mut Attempt<RecordedRound>,
        vote: Vote,
        repairing: u32,
    ) -> Step {
        let Some(vote) = self.lease.count_release(vote) else {
            return Ok(AcquireStep::Wait);
        };
        if vote.phase != repairing {
            return on_acquire_vote(attempt, vote);
        }
        let Attempt { cleanup, progress } = attempt;
        let answer = progress.failures.note(vote.node, vote.outcome);
        if matches!(answer, Answer::Replied(Reply::Done { .. })) {
            cleanup.mark_not_held(vote.node);
        }
        progress.round.on_record(vote.node, &answer)
    }
}

/// Takes a vote on the `ACQUIRE`, which may bring one more copy of the record.
fn on_acquire_vote(attempt: &mut Attempt<RecordedRound>, vote: Vote) -> Step {
    if vote.phase == attempt.progress.acquiring {
        attempt.on_vote(vote)
    } else {
        Ok(AcquireStep::Wait)
    }
}

/// Counts the nodes that have not answered the repair as failed.
fn fail_silent(attempt: &mut Attempt<RecordedRound>) -> Step {
    let silent: Vec<usize> = attempt.progress.round.round.silent().collect();
    for node in silent {
        let step = attempt.progress.round.on_record(node, &Answer::Failed)?;
        if step != AcquireStep::Wait {
            return Ok(step);
        }
    }
    Ok(AcquireStep::Wait)
}

/// Converts a step that ends an attempt without a grant or a replay.
impl From<OnceStep> for AttemptError {
    fn from(step: OnceStep) -> Self {
        match step {
            OnceStep::OtherRequest => Self::Denied(Denied::OtherRequest),
            OnceStep::Conflicting => Self::Denied(Denied::Conflicting),
            OnceStep::Unknown => Self::Denied(Denied::Unknown),
            _ => Self::Undecided,
        }
    }
}
