//! The lease task: acquire, hold and renew, release; one sequential story.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until};

use crate::lock::claim::{Claim, jitter};
use crate::lock::error::{ExtendError, LockError, ReleaseError};
use crate::lock::front::Turn;
use crate::lock::guard::LockGuard;
use crate::lock::lease::{Extension, Lease, Status};
use crate::lock::lost::LostReason;
use crate::lock::redlock::Inner;
use crate::lock::registry::{Stage, Ticket};
use crate::lock::waiters::Waiting;
use crate::node::{NodeFailure, Tally, Vote, next_proposal};
use crate::protocol::message::Op;
use crate::protocol::round::{
    AcquireRound, AcquireStep, Answer, ExtendRound, ExtendStep, Refusal, RefusalKind, ReleaseRound,
    ReleaseStep,
};
use crate::protocol::{FencingToken, KeyNames, LockKeys, Retry, validity};

/// Resolution of tokio's timers: what is to happen by an instant is armed this much earlier.
const TICK: Duration = Duration::from_millis(1);

/// Where the outcome of the acquisition goes; closed when the caller has gone away.
pub(super) type Grant = oneshot::Sender<Result<LockGuard, LockError>>;

/// What a lease task is started with.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) inner: Arc<Inner>,
    pub(super) keys: LockKeys,
    pub(super) names: Arc<[KeyNames]>,
    pub(super) ttl: Duration,
    pub(super) max_hold: Option<Duration>,
    /// When the caller stops waiting.
    pub(super) deadline: Instant,
    pub(super) turn: Turn,
    pub(super) waiting: Waiting,
    pub(super) ticket: Ticket,
}

/// Runs a lock from its first request to its last.
pub(super) async fn run(order: Order, mut grant: Grant) {
    let Order {
        inner,
        keys,
        names,
        ttl,
        max_hold,
        deadline,
        turn,
        waiting,
        ticket,
    } = order;
    let (tally, votes) = Tally::new();
    let mut task = LeaseTask {
        stage: inner.registry.stage(),
        inner,
        keys,
        names,
        ttl,
        tally,
        votes,
        releases: Vec::new(),
        ticket,
    };
    match task.acquire(deadline, waiting, &mut grant).await {
        Ok(acquired) => task.hold(acquired, max_hold, turn, grant).await,
        Err(Stopped::Failed(error)) => {
            drop(turn);
            // A caller that has gone away has no use for the error.
            drop(grant.send(Err(error)));
        }
        Err(Stopped::Abandoned) => drop(turn),
    }
    task.settle().await;
}

struct LeaseTask {
    inner: Arc<Inner>,
    keys: LockKeys,
    names: Arc<[KeyNames]>,
    ttl: Duration,
    tally: Arc<Tally>,
    votes: mpsc::UnboundedReceiver<Vote>,
    /// Releases that some node has not confirmed yet, of failed attempts and of the lock itself.
    releases: Vec<Release>,
    stage: watch::Receiver<Stage>,
    ticket: Ticket,
}

/// A release under way.
struct Release {
    phase: u32,
    round: ReleaseRound,
    /// When the silent nodes are given up on; `None` once they are.
    due: Option<Instant>,
    failures: Failures,
}

/// A lock that a majority has granted.
struct Acquired {
    claim: Claim,
    token: Option<FencingToken>,
    /// Before the first request was sent.
    began: Instant,
    valid_until: Instant,
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
enum Stopped {
    Failed(LockError),
    /// The caller went away.
    Abandoned,
}

/// Why nodes did not vote in a phase, by node.
struct Failures(Vec<Option<NodeFailure>>);

impl LeaseTask {
    async fn acquire(
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
                jitter(|random| Retry::split_delay(splits - 1, now - asked, random))
            } else if now < deadline {
                waiting.begin().map_err(Stopped::Failed)?;
                polls += 1;
                let delay = jitter(|random| settings.retry.delay(polls - 1, retry_after, random));
                delay.min(deadline - now)
            } else {
                return Err(Stopped::Failed(LockError::Contended { retry_after }));
            };
            tokio::select! {
                () = sleep(delay) => {}
                () = grant.closed() => return Err(Stopped::Abandoned),
                () = reached(&mut self.stage, Stage::Draining) => {
                    return Err(Stopped::Failed(LockError::Closed));
                }
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
                    if phase == acquiring && outcome.as_ref().is_err_and(NodeFailure::never_sent) {
                        claim.excuse(node);
                    }
                    let answer = failures.note(node, outcome);
                    match confirming {
                        _ if phase == acquiring => round.on_acquire(node, answer),
                        Some((current, _)) if phase == current => {
                            round.on_confirm(node, round.step(), answer)
                        }
                        _ => AcquireStep::Wait,
                    }
                }
                () = sleep_until(next_due) => {
                    let late: Vec<usize> = match confirming {
                        Some(_) => round.silent().collect(),
                        None => round.silent().filter(|node| due[*node] <= next_due).collect(),
                    };
                    self.silence(&late, began, &mut failures, |node| match confirming {
                        Some(_) => round.on_confirm(node, round.step(), Answer::Failed),
                        None => round.on_acquire(node, Answer::Failed),
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
                    return Err(self.missed(refusal, failures));
                }
            }
        }
    }

    fn missed(&self, refusal: Refusal, failures: Failures) -> Missed {
        match refusal.kind {
            RefusalKind::Contended { expires_in } => Missed::Contended {
                retry_after: expires_in,
                split: refusal.split,
            },
            RefusalKind::Unavailable => Missed::Stopped(Stopped::Failed(LockError::Unavailable {
                reached: refusal.reached,
                needed: self.inner.settings.quorum.majority(),
                nodes: failures.into_list(),
            })),
        }
    }

    /// Hands the guard out, renews while it is held, and releases.
    async fn hold(
        &mut self,
        acquired: Acquired,
        max_hold: Option<Duration>,
        turn: Turn,
        grant: Grant,
    ) {
        let Acquired {
            mut claim,
            token,
            began,
            valid_until,
        } = acquired;
        let (status, seen) = watch::channel(Status {
            valid_until,
            lost: None,
            released: None,
        });
        turn.set_holder(&seen);
        self.ticket.set_held();
        let (wishes, mut extensions) = mpsc::unbounded_channel();
        let max_ttl = self.inner.settings.max_ttl;
        let (lease, share) = Lease::new(self.keys.clone(), token, max_ttl, seen, wishes);
        claim.lease = Some(Arc::clone(&lease));
        // A caller that has gone away drops the guard, and with it the only share.
        drop(grant.send(Ok(LockGuard::new(share))));

        let mut holding = Holding {
            token,
            status: &status,
            hold_until: max_hold.map(|max_hold| began + max_hold),
            renew_at: self.inner.settings.renew.then(|| began + self.ttl / 3),
            extending: None,
        };
        loop {
            let alarm = holding.next_alarm();
            tokio::select! {
                biased;
                () = lease.unshared.notified() => break,
                Some(vote) = self.votes.recv() => {
                    if let Some(vote) = self.count_release(vote) {
                        self.on_extension_vote(&mut holding, vote);
                    }
                }
                Some(wish) = extensions.recv(), if holding.extending.is_none() => {
                    let Extension { ttl, done } = wish;
                    if let Some(reason) = holding.lost() {
                        // Whoever asked may have gone away.
                        drop(done.send(Err(ExtendError::Lost(reason))));
                    } else {
                        self.start_extension(&mut holding, &mut claim, ttl, Some(done));
                    }
                }
                () = reached(&mut self.stage, Stage::TimedOut), if holding.renew_at.is_some() => {
                    holding.renew_at = None;
                }
                () = sleep_until(alarm) => self.on_alarm(&mut holding, &mut claim),
            }
        }
        drop(holding);
        self.release(claim, turn, &status).await;
    }

    fn on_alarm(&mut self, holding: &mut Holding<'_>, claim: &mut Claim) {
        let now = Instant::now();
        holding.check_validity(now);
        if let Some(extending) = &holding.extending
            && extending.due <= now
        {
            let late: Vec<usize> = extending.round.silent().collect();
            for node in late {
                let phase = holding
                    .extending
                    .as_ref()
                    .map_or(0, |extending| extending.phase);
                let outcome = Err(self.timed_out(node));
                self.on_extension_vote(
                    holding,
                    Vote {
                        node,
                        phase,
                        outcome,
                    },
                );
            }
        }
        if holding.renew_at.is_some_and(|at| at <= now) && holding.extending.is_none() {
            match holding.renewal_ttl(self.ttl, now) {
                Some(ttl) => self.start_extension(holding, claim, ttl, None),
                None => holding.renew_at = None,
            }
        }
    }

    fn start_extension(
        &mut self,
        holding: &mut Holding<'_>,
        claim: &mut Claim,
        ttl: Duration,
        done: Option<oneshot::Sender<Result<(), ExtendError>>>,
    ) {
        let settings = &self.inner.settings;
        let ttl = crate::lock::settings::whole_millis(ttl);
        let began = Instant::now();
        let phase = self.tally.next_phase();
        let confirm = Op::Confirm {
            token: holding.token.map(FencingToken::as_u64),
            ttl,
            retention: settings.fence_retention,
        };
        let nodes = settings.quorum.nodes();
        claim.send(confirm, ttl.max(self.ttl), &self.tally, 0..nodes);
        let number = holding.token.map_or(0, FencingToken::as_u64);
        holding.extending = Some(Extending {
            round: ExtendRound::new(settings.quorum, number),
            phase,
            began,
            due: began + settings.node_timeout,
            ttl,
            failures: Failures::none(nodes),
            done,
        });
    }

    fn on_extension_vote(&mut self, holding: &mut Holding<'_>, vote: Vote) {
        let Vote {
            node,
            phase,
            outcome,
        } = vote;
        // Only answers to the requests of this very extension are counted.
        let Some(extending) = holding.extending.as_mut().filter(|e| e.phase == phase) else {
            return;
        };
        let answer = extending.failures.note(node, outcome);
        let step = extending.round.on_confirm(node, answer);
        if step == ExtendStep::Wait {
            return;
        }
        let Some(extending) = holding.extending.take() else {
            return;
        };
        let now = Instant::now();
        holding.check_validity(now);
        let (began, ttl) = (extending.began, extending.ttl);
        let outcome = match step {
            _ if let Some(reason) = holding.lost() => Err(ExtendError::Lost(reason)),
            ExtendStep::Lost => {
                holding.lose(LostReason::Gone);
                Err(ExtendError::Lost(LostReason::Gone))
            }
            ExtendStep::Extended => {
                holding.prolong(began + validity::lifetime(ttl).unwrap_or_default());
                if extending.done.is_some() {
                    self.ttl = ttl;
                }
                holding.renew_at = holding.renew_at.map(|_| began + self.ttl / 3);
                Ok(())
            }
            ExtendStep::Missed { .. } | ExtendStep::Wait => {
                // Soon again, while the old validity runs on.
                let pause = (self.ttl / 10).max(TICK);
                holding.renew_at = holding.renew_at.map(|_| now + pause);
                let reached = match step {
                    ExtendStep::Missed { reached } => reached,
                    _ => 0,
                };
                Err(ExtendError::Unavailable {
                    reached,
                    needed: self.inner.settings.quorum.majority(),
                    nodes: extending.failures.into_list(),
                })
            }
        };
        if let Some(done) = extending.done {
            // Whoever asked may have gone away.
            drop(done.send(outcome));
        }
    }

    /// Releases the lock and tells how that went as soon as a majority has answered.
    async fn release(&mut self, claim: Claim, turn: Turn, status: &watch::Sender<Status>) {
        let now = Instant::now();
        let mut lost = None;
        status.send_modify(|status| {
            if status.lost.is_none() && status.valid_until <= now {
                status.lost = Some(LostReason::Expired);
            }
            lost = status.lost;
            status.lost.get_or_insert(LostReason::Released);
        });
        self.give_up(claim);
        // The requests of whoever is next are behind the releases on every node.
        drop(turn);
        let Some(phase) = self.releases.last().map(|release| release.phase) else {
            return;
        };
        let outcome = loop {
            let Some(release) = self.releases.iter().find(|release| release.phase == phase) else {
                return;
            };
            match release.round.step() {
                ReleaseStep::Wait => {}
                ReleaseStep::Freed => break Ok(()),
                ReleaseStep::Unconfirmed => {
                    break Err(ReleaseError::Unavailable {
                        reached: release.round.released(),
                        needed: self.inner.settings.quorum.majority(),
                        nodes: release.failures.clone_list(),
                    });
                }
            }
            self.next_release_vote().await;
        };
        let outcome = match lost {
            Some(reason) => Err(ReleaseError::Lost(reason)),
            None => outcome,
        };
        status.send_modify(|status| status.released = Some(outcome));
    }

    /// Releases what a claim may hold. Returns at once; the answers are counted as they come.
    fn give_up(&mut self, claim: Claim) {
        let now = Instant::now();
        // A node that was given up on keeps its release; there is nobody left to hear of it.
        self.forget_old_releases(now);
        let phase = self.tally.next_phase();
        let round = claim.release(&self.tally);
        let nodes = self.inner.nodes.len();
        self.releases.push(Release {
            phase,
            round,
            due: Some(now + self.inner.settings.node_timeout),
            failures: Failures::none(nodes),
        });
    }

    /// Counts a vote if it is on a release, and gives it back if not.
    fn count_release(&mut self, vote: Vote) -> Option<Vote> {
        let Some(release) = self.releases.iter_mut().find(|r| r.phase == vote.phase) else {
            return Some(vote);
        };
        let answer = release.failures.note(vote.node, vote.outcome);
        release.round.on_release(vote.node, answer);
        None
    }

    /// Waits for one more vote on a release, or gives up on the nodes that are overdue.
    async fn next_release_vote(&mut self) {
        let due = self.releases.iter().filter_map(|release| release.due).min();
        let due = due.unwrap_or_else(Instant::now);
        tokio::select! {
            biased;
            Some(vote) = self.votes.recv() => {
                // Votes on anything else are of no interest any more.
                drop(self.count_release(vote));
            }
            () = sleep_until(due) => {
                let timed_out = (0..self.inner.nodes.len()).map(|node| self.timed_out(node));
                let timed_out: Vec<NodeFailure> = timed_out.collect();
                let is_late = |release: &&mut Release| release.due.is_some_and(|at| at <= due);
                for release in self.releases.iter_mut().filter(is_late) {
                    release.due = None;
                    let late: Vec<usize> = release.round.silent().collect();
                    for node in late {
                        let failure = Err(timed_out[node].clone());
                        let answer = release.failures.note(node, failure);
                        release.round.on_release(node, answer);
                    }
                }
            }
        }
    }

    /// Waits until every node has answered every release, or is overdue, and notes which did not.
    async fn settle(&mut self) {
        while self
            .releases
            .iter()
            .any(|release| release.round.silent().next().is_some())
        {
            self.next_release_vote().await;
        }
        self.forget_old_releases(Instant::now());
    }

    fn forget_old_releases(&mut self, now: Instant) {
        let (inner, ticket, keys) = (&self.inner, &self.ticket, &self.keys);
        self.releases.retain(|release| {
            let late = release.due.is_none_or(|due| due <= now);
            let over = late || release.round.silent().next().is_none();
            if over {
                let nodes = release.round.unreleased();
                let names = nodes.map(|node| Arc::clone(inner.nodes[node].name()));
                ticket.set_unconfirmed(names, keys);
            }
            !over
        });
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

    fn timed_out(&self, node: usize) -> NodeFailure {
        NodeFailure::TimedOut {
            node: Arc::clone(self.inner.nodes[node].name()),
            after: self.inner.settings.node_timeout,
        }
    }
}

/// A lock while it is held.
struct Holding<'a> {
    token: Option<FencingToken>,
    status: &'a watch::Sender<Status>,
    /// When `max_hold` is over.
    hold_until: Option<Instant>,
    /// When to renew next; never, if renewal is off or has come to its end.
    renew_at: Option<Instant>,
    extending: Option<Extending>,
}

/// An extension under way.
struct Extending {
    round: ExtendRound,
    phase: u32,
    /// Before its first request was sent.
    began: Instant,
    due: Instant,
    ttl: Duration,
    failures: Failures,
    /// Who asked for it; nobody, if it is a renewal.
    done: Option<oneshot::Sender<Result<(), ExtendError>>>,
}

impl Holding<'_> {
    fn next_alarm(&self) -> Instant {
        let now = self.status.borrow();
        let lost_at = now.lost.is_none().then(|| now.valid_until - TICK);
        let renew_at = self.renew_at.filter(|_| self.extending.is_none());
        let extended_at = self.extending.as_ref().map(|extending| extending.due);
        let next = [lost_at, renew_at, extended_at].into_iter().flatten().min();
        // Nothing left to do in time but to be released.
        next.unwrap_or_else(|| Instant::now() + Duration::from_secs(60 * 60))
    }

    fn lost(&self) -> Option<LostReason> {
        self.status.borrow().lost
    }

    fn lose(&mut self, reason: LostReason) {
        self.renew_at = None;
        self.status.send_modify(|status| status.lost = Some(reason));
        tracing::warn!(%reason, "redlock lock lost while it was held");
    }

    /// Declares the lock lost if its validity is over, or will be before a timer can tell.
    fn check_validity(&mut self, now: Instant) {
        let valid_until = self.status.borrow().valid_until;
        if self.lost().is_none() && valid_until <= now + TICK {
            let at_max_hold = self.hold_until.is_some_and(|end| end + TICK <= valid_until);
            self.lose(if at_max_hold {
                LostReason::MaxHold
            } else {
                LostReason::Expired
            });
        }
    }

    fn prolong(&mut self, valid_until: Instant) {
        self.status.send_modify(|status| {
            // Never shortens.
            status.valid_until = status.valid_until.max(valid_until);
        });
    }

    /// Returns the ttl to renew with: so much that the validity ends with `max_hold`, not later.
    fn renewal_ttl(&self, ttl: Duration, now: Instant) -> Option<Duration> {
        let Some(end) = self.hold_until else {
            return Some(ttl);
        };
        let valid_until = self.status.borrow().valid_until;
        let enough = end.saturating_duration_since(now) + validity::drift(ttl) + 2 * TICK;
        (valid_until < end + TICK).then(|| ttl.min(enough))
    }
}

impl Failures {
    fn none(nodes: usize) -> Self {
        Self(vec![None; nodes])
    }

    /// Notes why a node did not vote, and returns its vote as the rounds take it.
    fn note(
        &mut self,
        node: usize,
        outcome: Result<crate::protocol::message::Reply, NodeFailure>,
    ) -> Answer {
        match outcome {
            Ok(reply) => Answer::Replied(reply),
            Err(failure) => {
                self.0[node] = Some(failure);
                Answer::Failed
            }
        }
    }

    fn into_list(self) -> Vec<NodeFailure> {
        self.0.into_iter().flatten().collect()
    }

    fn clone_list(&self) -> Vec<NodeFailure> {
        self.0.iter().flatten().cloned().collect()
    }
}

/// Waits until the shutdown has come as far as `stage`.
async fn reached(stages: &mut watch::Receiver<Stage>, stage: Stage) {
    if stages.wait_for(|now| *now >= stage).await.is_err() {
        // The registry is gone with the last Redlock; nobody can drain it any more.
        std::future::pending().await
    }
}
