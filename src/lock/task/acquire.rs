//! Acquiring: attempts until a majority grants the lock, or none will.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};
use tracing::Span;

use crate::lock::claim::Claim;
use crate::lock::error::LockError;
use crate::lock::registry::Stage;
use crate::lock::task::run::Grant;
use crate::lock::task::state::{Failures, LeaseTask, TICK, reached};
use crate::lock::waiters::Waiting;
use crate::node::{NodeFailure, Vote, next_proposal, random_u64};
use crate::protocol::message::Op;
use crate::protocol::round::{AcquireRound, AcquireStep, Answer, Refusal, RefusalKind};
use crate::protocol::{FencingToken, Retry, validity};

/// A lock that a majority has granted.
pub(super) struct Acquired {
    pub(super) claim: Claim,
    pub(super) token: Option<FencingToken>,
    /// Before the first request was sent.
    pub(super) began: Instant,
    pub(super) valid_until: Instant,
}

/// Why a single attempt did not end in a lock.
enum Missed {
    /// Others hold it, or as many got some nodes as we did; trying again makes sense.
    Contended {
        retry_after: Option<Duration>,
        split: bool,
    },
    Stopped(Stopped),
}

/// Why the task stops trying.
pub(super) enum Stopped {
    Failed(LockError),
    /// The caller went away.
    Abandoned,
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
            let (retry_after, split) = match self.attempt(grant).await {
                Ok(acquired) => return Ok(acquired),
                Err(Missed::Stopped(stopped)) => return Err(stopped),
                Err(Missed::Contended { retry_after, split }) => (retry_after, split),
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
                waiting.begin().map_err(Stopped::Failed)?;
                polls += 1;
                let delay = settings.retry.delay(polls - 1, retry_after, random_u64());
                delay.min(deadline - now)
            } else {
                return Err(Stopped::Failed(LockError::Contended { retry_after }));
            };
            tokio::select! {
                biased;
                () = grant.closed() => return Err(Stopped::Abandoned),
                () = reached(&mut self.stage, Stage::Draining) => {
                    return Err(Stopped::Failed(LockError::Closed));
                }
                () = sleep(delay.max(TICK)) => {}
            }
        }
    }

    /// One attempt: a fresh owner token, one `ACQUIRE` to every node, and the second phase if the
    /// numbers differ. Whatever a failed attempt may have locked is released on the way out.
    async fn attempt(&mut self, grant: &mut Grant) -> Result<Acquired, Missed> {
        let settings = &Arc::clone(&self.inner).settings;
        let mut claim = Claim::new(&self.inner, &self.names);
        let began = Instant::now();
        let due = self.answers_due(began);
        let acquiring = self.tally.next_phase();
        let acquire = Op::Acquire {
            proposal: settings.fencing.then(next_proposal),
            ttl: self.ttl,
            retention: settings.fence_retention,
        };
        claim.send(acquire, self.ttl, &self.tally, 0..due.len());
        let mut round = AcquireRound::new(settings.quorum);
        let mut failures = Failures::none(due.len());
        // The second phase: its number in the tally, and when all of its steps must be over.
        let mut confirming: Option<(u32, Instant)> = None;
        loop {
            let next_due = match confirming {
                Some((_, due)) => due,
                None => round.silent().map(|node| due[node]).min().unwrap_or(began),
            };
            let step = tokio::select! {
                biased;
                () = grant.closed() => {
                    self.give_up(claim);
                    return Err(Missed::Stopped(Stopped::Abandoned));
                }
                Some(vote) = self.votes.recv() => {
                    let Some(Vote { node, phase, outcome }) = self.count_release(vote) else {
                        continue;
                    };
                    if phase == acquiring {
                        if outcome.as_ref().is_err_and(NodeFailure::never_sent) {
                            claim.excuse(node);
                        }
                        round.on_acquire(node, &failures.note(node, outcome))
                    } else if confirming.is_some_and(|(current, _)| phase == current) {
                        round.on_confirm(node, round.step(), &failures.note(node, outcome))
                    } else {
                        // Of an earlier attempt or second phase.
                        AcquireStep::Wait
                    }
                }
                () = sleep_until(next_due) => {
                    let late: Vec<usize> = match confirming {
                        Some(_) => round.silent().collect(),
                        None => round.silent().filter(|node| due[*node] <= next_due).collect(),
                    };
                    self.silence(&late, began, &mut failures, |node| match confirming {
                        Some(_) => round.on_confirm(node, round.step(), &Answer::Failed),
                        None => round.on_acquire(node, &Answer::Failed),
                    })
                }
            };
            match step {
                AcquireStep::Wait => {}
                AcquireStep::Confirm(token) => {
                    let now = Instant::now();
                    let due = confirming.map_or(now + settings.node_timeout, |(_, due)| due);
                    confirming = Some((self.tally.next_phase(), due));
                    let confirm = Op::Confirm {
                        token: settings.fencing.then_some(token),
                        ttl: self.ttl,
                        retention: settings.fence_retention,
                    };
                    claim.send(confirm, self.ttl, &self.tally, round.unconfirmed());
                }
                AcquireStep::Granted(number) => {
                    Span::current().record("quorum.granted", round.acknowledged(number));
                    // After the last counted answer, and by the monotonic clock.
                    let elapsed = began.elapsed();
                    let Some(left) = validity::remaining(self.ttl, elapsed) else {
                        self.give_up(claim);
                        let ttl = self.ttl;
                        let error = LockError::Expired { ttl, elapsed };
                        return Err(Missed::Stopped(Stopped::Failed(error)));
                    };
                    let token = settings.fencing.then(|| FencingToken::try_from(number));
                    return Ok(Acquired {
                        claim,
                        // The nodes never go beyond the largest token.
                        token: token.transpose().unwrap_or_default(),
                        began,
                        valid_until: began + elapsed + left,
                    });
                }
                AcquireStep::Refused(refusal) => {
                    for node in (0..due.len()).filter(|node| round.refused_by(*node)) {
                        claim.excuse(node);
                    }
                    self.give_up(claim);
                    return Err(self.missed(refusal, &failures));
                }
            }
        }
    }

    fn missed(&self, refusal: Refusal, failures: &Failures) -> Missed {
        match refusal.kind {
            RefusalKind::Contended { expires_in } => Missed::Contended {
                retry_after: expires_in,
                split: refusal.split,
            },
            RefusalKind::Unavailable => Missed::Stopped(Stopped::Failed(LockError::Unavailable {
                reached: refusal.reached,
                needed: self.inner.settings.quorum.majority(),
                nodes: failures.list(),
            })),
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
        mut count: impl FnMut(usize) -> AcquireStep,
    ) -> AcquireStep {
        for &node in late {
            let after = began.elapsed();
            let name = Arc::clone(self.inner.nodes[node].name());
            failures.0[node] = Some(NodeFailure::TimedOut { node: name, after });
            let step = count(node);
            if step != AcquireStep::Wait {
                return step;
            }
        }
        AcquireStep::Wait
    }
}
