//! Acquiring: attempts until a majority grants the lock, or none will.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};
use tracing::Span;

use crate::lock::claim::Claim;
use crate::lock::error::LockError;
use crate::lock::once::NotGranted;
use crate::lock::registry;
use crate::lock::task::recording::Replay;
use crate::lock::task::run::Grant;
use crate::lock::task::state::{Failures, LeaseTask, TICK, reached};
use crate::lock::waiters::Waiting;
use crate::node::{NodeFailure, Vote, next_proposal, random_u64, sha256};
use crate::protocol::message::{Op, Reply};
use crate::protocol::once::{OnceRound, OnceStep};
use crate::protocol::round::{Answer, Refusal, RefusalKind};
use crate::protocol::{FencingToken, Record, Retry, validity};

/// A lock that a majority has granted.
pub(super) struct Acquired {
    pub(super) claim: Claim,
    pub(super) token: Option<FencingToken>,
    /// Before the first request was sent.
    pub(super) began: Instant,
    pub(super) valid_until: Instant,
}

/// Why a single attempt did not end in a lock.
pub(super) enum Missed {
    /// Others hold it, or as many got some nodes as we did; trying again makes sense.
    Contended {
        retry_after: Option<Duration>,
        split: bool,
    },
    Stopped(Stopped),
    /// A minority has a record; when more nodes answer it may be replayed.
    Undecided,
}

/// Why the task stops trying.
pub(super) enum Stopped {
    NotGranted(NotGranted),
    /// There is a record, and what is left to do about it.
    Replayed(Record, Box<Replay>),
    /// The caller went away.
    Abandoned,
}

/// Where an attempt stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Acquiring,
    /// The second phase: its number in the tally, and when all of its steps must be over.
    Confirming {
        phase: u32,
        due: Instant,
    },
    /// What is missing of a record is read, to be written to more nodes.
    Reading {
        phase: u32,
        due: Instant,
    },
    /// A record is written to more nodes.
    Repairing {
        phase: u32,
        due: Instant,
    },
}

/// Who waits for an attempt; nobody, if it is for the record alone.
pub(super) struct Caller<'a>(pub(super) Option<&'a mut Grant>);

impl Caller<'_> {
    /// Waits until the caller has gone away.
    async fn gone(&mut self) {
        match &mut self.0 {
            Some(grant) => grant.closed().await,
            None => std::future::pending().await,
        }
    }
}

impl Missed {
    fn not_granted(reason: impl Into<NotGranted>) -> Self {
        Self::Stopped(Stopped::NotGranted(reason.into()))
    }
}

/// Whether this is the record of which the head is known, undamaged.
fn is_rest(record: &Record, head: &Option<Record>) -> bool {
    let completes = head.as_ref().is_some_and(|head| record.completes(head));
    completes && sha256(record.rest()) == record.digest()
}

impl LeaseTask {
    pub(super) async fn acquire(
        &mut self,
        deadline: Instant,
        mut waiting: Waiting,
        grant: &mut Grant,
    ) -> Result<Acquired, Stopped> {
        let settings = &Arc::clone(&self.inner).settings;
        let began = Instant::now();
        let (mut splits, mut polls) = (0, 0);
        loop {
            let asked = Instant::now();
            let (retry_after, split) = match self.attempt(Caller(Some(&mut *grant))).await {
                Ok(acquired) => return Ok(acquired),
                Err(Missed::Stopped(stopped)) => return Err(stopped),
                Err(Missed::Contended { retry_after, split }) => (retry_after, split),
                Err(Missed::Undecided) if asked < deadline => (None, false),
                Err(Missed::Undecided) => return Err(Stopped::NotGranted(NotGranted::Undecided)),
            };
            let now = Instant::now();
            let delay = if split && now < began + settings.node_timeout {
                splits += 1;
                // Timers know no less than a tick: shorter delays would all be the same, and on a
                // paused clock there would be none at all.
                let round_trip = (now - asked).max(TICK);
                let delay = Retry::split_delay(splits - 1, round_trip, random_u64());
                // They double: the last would take longer than all before it.
                delay.min(began + settings.node_timeout - now)
            } else if now < deadline {
                let begun = waiting.begin();
                begun.map_err(|error| Stopped::NotGranted(error.into()))?;
                polls += 1;
                let delay = settings.retry.delay(polls - 1, retry_after, random_u64());
                delay.min(deadline - now)
            } else {
                let contended = LockError::Contended { retry_after };
                return Err(Stopped::NotGranted(contended.into()));
            };
            tokio::select! {
                biased;
                () = grant.closed() => return Err(Stopped::Abandoned),
                () = reached(&mut self.stage, registry::Stage::Draining) => {
                    return Err(Stopped::NotGranted(LockError::Closed.into()));
                }
                () = sleep(delay.max(TICK)) => {}
            }
        }
    }

    /// One attempt: a fresh owner token, one `ACQUIRE` to every node, and the second phase if the
    /// numbers differ. Whatever a failed attempt may have locked is released on the way out.
    ///
    /// Of a key that keeps records, a record ends it: one that a majority has is the outcome, and one
    /// that a minority has is written to more nodes first.
    pub(super) async fn attempt(&mut self, mut caller: Caller<'_>) -> Result<Acquired, Missed> {
        let settings = &Arc::clone(&self.inner).settings;
        let mut claim = Claim::new(&self.inner, &self.names, self.asked_for);
        let began = Instant::now();
        let due = self.answers_due(began);
        let acquiring = self.tally.next_phase();
        let fenced = settings.fencing || self.asked_for.is_some();
        let acquire = Op::Acquire {
            proposal: fenced.then(next_proposal),
            ttl: self.ttl,
            retention: settings.fence_retention,
        };
        claim.send(acquire, self.ttl, &self.tally, 0..due.len());
        let asked_for = self.asked_for.unwrap_or_default();
        let mut round = OnceRound::new(settings.quorum, asked_for);
        let mut failures = Failures::none(due.len());
        let mut stage = Stage::Acquiring;
        // The record that is being written to more nodes, and the first time one is forgotten.
        let (mut repair, mut forgotten) = (None, Duration::MAX);
        loop {
            let next_due = match stage {
                Stage::Acquiring => round.silent().into_iter().map(|node| due[node]).min(),
                Stage::Confirming { due, .. }
                | Stage::Reading { due, .. }
                | Stage::Repairing { due, .. } => Some(due),
            };
            let step = tokio::select! {
                biased;
                () = caller.gone() => {
                    self.give_up(claim);
                    return Err(Missed::Stopped(Stopped::Abandoned));
                }
                Some(vote) = self.votes.recv() => {
                    let Some(Vote { node, phase, outcome }) = self.count_release(vote) else {
                        continue;
                    };
                    if let Ok(Reply::Done { expires_in, .. }) = &outcome {
                        forgotten = forgotten.min(*expires_in);
                    }
                    if phase == acquiring {
                        if outcome.as_ref().is_err_and(NodeFailure::never_sent) {
                            claim.excuse(node);
                        }
                        round.on_acquire(node, &failures.note(node, outcome))
                    } else {
                        match stage {
                            Stage::Confirming { phase: current, .. } if phase == current => {
                                round.on_confirm(node, round.step(), &failures.note(node, outcome))
                            }
                            Stage::Reading { phase: current, .. } if phase == current => {
                                match outcome {
                                    Ok(Reply::Done { record, .. }) if is_rest(&record, &repair) => {
                                        OnceStep::Repair(record)
                                    }
                                    _ => OnceStep::Wait,
                                }
                            }
                            Stage::Repairing { phase: current, .. } if phase == current => {
                                let answer = failures.note(node, outcome);
                                if matches!(answer, Answer::Replied(Reply::Done { .. })) {
                                    claim.excuse(node);
                                }
                                round.on_record(node, &answer)
                            }
                            // Of an earlier attempt or phase.
                            _ => OnceStep::Wait,
                        }
                    }
                }
                () = sleep_until(next_due.unwrap_or(began)) => {
                    let now = next_due.unwrap_or(began);
                    let mut late = round.silent();
                    if stage == Stage::Acquiring {
                        late.retain(|node| due[*node] <= now);
                    }
                    self.silence(&late, began, &mut failures, |node| match stage {
                        Stage::Confirming { .. } if !round.is_recorded() => {
                            round.on_confirm(node, round.step(), &Answer::Failed)
                        }
                        Stage::Reading { .. } | Stage::Repairing { .. } => {
                            round.on_record(node, &Answer::Failed)
                        }
                        Stage::Acquiring | Stage::Confirming { .. } => {
                            round.on_acquire(node, &Answer::Failed)
                        }
                    })
                }
            };
            match step {
                OnceStep::Wait => {}
                OnceStep::Confirm(token) => {
                    let now = Instant::now();
                    let due = match stage {
                        Stage::Confirming { due, .. } => due,
                        _ => now + settings.node_timeout,
                    };
                    let phase = self.tally.next_phase();
                    stage = Stage::Confirming { phase, due };
                    let confirm = Op::Confirm {
                        token: fenced.then_some(token),
                        ttl: self.ttl,
                        retention: settings.fence_retention,
                    };
                    claim.send(confirm, self.ttl, &self.tally, round.unconfirmed());
                }
                OnceStep::Repair(record) => {
                    let due = Instant::now() + settings.node_timeout;
                    let phase = self.tally.next_phase();
                    if record.is_whole() {
                        stage = Stage::Repairing { phase, due };
                        let retention = forgotten;
                        let write = Op::Record { record, retention };
                        claim.ask(write, &self.tally, round.repairers());
                    } else {
                        stage = Stage::Reading { phase, due };
                        claim.ask(Op::Look, &self.tally, round.holders(record.execution()));
                        repair = Some(record);
                    }
                }
                OnceStep::Execute(number) => {
                    Span::current().record("quorum.granted", round.acknowledged(number));
                    // After the last counted answer, and by the monotonic clock.
                    let elapsed = began.elapsed();
                    let Some(left) = validity::remaining(self.ttl, elapsed) else {
                        self.give_up(claim);
                        let ttl = self.ttl;
                        let error = LockError::Expired { ttl, elapsed };
                        return Err(Missed::not_granted(error));
                    };
                    let token = fenced.then(|| FencingToken::try_from(number));
                    return Ok(Acquired {
                        claim,
                        // The nodes never go beyond the largest token.
                        token: token.transpose().unwrap_or_default(),
                        began,
                        valid_until: began + elapsed + left,
                    });
                }
                OnceStep::Replay(record) => {
                    let expires_in = forgotten;
                    let replay = Box::new(Replay {
                        claim,
                        round,
                        acquiring,
                        due,
                        expires_in,
                    });
                    return Err(Missed::Stopped(Stopped::Replayed(record, replay)));
                }
                OnceStep::Refused(refusal) => {
                    self.excuse_and_give_up(claim, &round);
                    return Err(self.missed(refusal, &failures));
                }
                OnceStep::Undecided => {
                    self.excuse_and_give_up(claim, &round);
                    return Err(Missed::Undecided);
                }
                OnceStep::OtherRequest => {
                    self.excuse_and_give_up(claim, &round);
                    return Err(Missed::not_granted(NotGranted::OtherRequest));
                }
                OnceStep::Conflicting => {
                    self.excuse_and_give_up(claim, &round);
                    return Err(Missed::not_granted(NotGranted::Conflicting));
                }
                OnceStep::Unknown => {
                    self.excuse_and_give_up(claim, &round);
                    return Err(Missed::not_granted(NotGranted::Unknown));
                }
            }
        }
    }

    /// Releases what a failed attempt may hold, which is nothing where it was refused.
    fn excuse_and_give_up(&mut self, mut claim: Claim, round: &OnceRound) {
        for node in (0..self.inner.nodes.len()).filter(|node| round.refused_by(*node)) {
            claim.excuse(node);
        }
        self.give_up(claim);
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

    /// Returns until when each node may take to answer what is sent to it now.
    fn answers_due(&self, now: Instant) -> Vec<Instant> {
        let node_timeout = self.inner.settings.node_timeout;
        let nodes = self.inner.nodes.iter();
        nodes
            .map(|node| now + node_timeout + node.extra_patience())
            .collect()
    }

    /// Counts nodes as failed that were silent for too long.
    fn silence(
        &self,
        late: &[usize],
        began: Instant,
        failures: &mut Failures,
        mut count: impl FnMut(usize) -> OnceStep,
    ) -> OnceStep {
        for &node in late {
            let after = began.elapsed();
            let name = Arc::clone(self.inner.nodes[node].name());
            failures.0[node] = Some(NodeFailure::TimedOut { node: name, after });
            let step = count(node);
            if step != OnceStep::Wait {
                return step;
            }
        }
        OnceStep::Wait
    }
}
