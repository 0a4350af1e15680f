//! Holding: renews a lock while it has shares, and reports its loss to the holders.
//!
//! # Implementation details
//!
//! An extension renews the lock: a `CONFIRM` with its token at all nodes. Each extension has a phase and a round of
//! its own, because an answer to an older one must not vouch for a newer expiry. One extension is under way at a
//! time.
//!
//! The first extension begins a third of the ttl after the acquisition began, and each further one a third of the
//! ttl after the last successful one began. After a failed extension, the next one begins after a tenth of the ttl,
//! and the old validity continues. The end of the validity never moves back. `max_hold` bounds the ttl of a renewal,
//! so that the validity ends with it.
//!
//! The lock is lost when a majority answers that it is gone, or one timer tick before the end of the validity. A
//! lost lock is no longer renewed, and its permit goes to the next waiter, but its keys are released only when the
//! last share is gone.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::lock::error::ExtendError;
use crate::lock::failures::Failures;
use crate::lock::lease::attempt::GrantedLock;
use crate::lock::lease::cleanup::Cleanup;
use crate::lock::lease::task::LeaseTask;
use crate::lock::lost::LostReason;
use crate::lock::queue::{HeldLease, Memo, Permit};
use crate::lock::registry::DrainStage;
use crate::lock::span::HeldSpan;
use crate::lock::state::{
    Disposal, ExtendCommand, LeaseControl, LeaseTerms, LockState, Share, report_loss,
};
use crate::lock::time::{TICK, after, whole_millis};
use crate::node::{NodeFailure, Threshold, Vote};
use crate::protocol::message::Reply;
use crate::protocol::round::{ExtendRound, ExtendStep};
use crate::protocol::{FencingToken, Quorum, validity};

/// A lock while it is held.
pub(crate) struct HoldingLock {
    pub(crate) lease: Arc<LockState>,
    pub(crate) cleanup: Cleanup,
    pub(crate) control: LeaseControl,
    /// `Some` until the holding ends.
    span: Option<HeldSpan>,
    max_hold: Option<Duration>,
    /// When the time that `max_hold` bounds began; `None` if it begins when the caller has all its leases.
    began: Option<Instant>,
    /// When to renew the lock next; `None` if renewal is off or has ended.
    renew_at: Option<Instant>,
    /// Boxed, because few locks are held long enough for one.
    extension: Option<Box<ExtendingLock>>,
}

/// An extension under way.
struct ExtendingLock {
    round: ExtendRound,
    phase: u32,
    /// The time before the first request was sent.
    began: Instant,
    due: Instant,
    ttl: Duration,
    failures: Failures,
    /// That of the holder who requested the extension; `None` for a renewal.
    command: Option<ExtendCommand>,
}

impl LeaseTask {
    /// Creates the lease of an acquired lock, and its first share.
    pub(crate) fn begin_holding(
        &mut self,
        acquired: GrantedLock,
        max_hold: Option<Duration>,
        disposal: Disposal,
        purpose: Option<Memo>,
        permit: &Permit,
    ) -> (HoldingLock, Share) {
        let GrantedLock {
            mut cleanup,
            token,
            began,
            valid_until,
        } = acquired;
        let (keys, registry) = (self.keys.clone(), Arc::clone(self.ticket.registry()));
        let terms = LeaseTerms {
            cluster: Arc::clone(&self.cluster),
            registry,
            keys,
            access: self.terms.access,
            slot: self.slot,
            hold_at_least: self.terms.hold_at_least,
            purpose,
        };
        let (lease, share, control) = LockState::new(terms, disposal, token, valid_until);
        permit.set_holder(&(Arc::clone(&lease) as Arc<dyn HeldLease>), self.task);
        permit.unsubscribe();
        self.ticket.set_held(self.slot.map(|_| &self.keys));
        cleanup.lease = Some(Arc::clone(&lease));
        let renew_at = self.renews(&lease).then(|| began + self.terms.ttl / 3);
        let holding = HoldingLock {
            lease,
            cleanup,
            control,
            span: Some(HeldSpan::new(self.labels.clone())),
            max_hold,
            began: self.terms.earlier.is_none().then_some(began),
            renew_at,
            extension: None,
        };
        (holding, share)
    }

    /// Waits for the next event of a held lock, and handles it. Passes every vote that is not on a release to
    /// `observe`.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point, and called again.
    pub(crate) async fn hold_step(
        &mut self,
        holding: &mut HoldingLock,
        observe: &mut (impl FnMut(&Vote, &mut Cleanup) + Send),
    ) {
        if holding.extension.is_none()
            && let Some(command) = holding.control.try_recv()
        {
            return self.on_command(holding, command);
        }
        let alarm = holding.next_alarm();
        let threshold = holding.threshold(self.cluster.quorum);
        tokio::select! {
            biased;
            () = holding.control.notified() => {}
            // Late votes on the acquisition and on failed attempts are not urgent.
            vote = self.votes.recv(threshold), if holding.extension.is_some() => {
                self.on_vote(holding, vote, observe);
            }
            () = self.timer.at(alarm) => self.on_alarm(holding, observe),
        }
    }

    /// Takes the votes that have arrived.
    pub(crate) fn take_votes(
        &mut self,
        holding: &mut HoldingLock,
        observe: &mut impl FnMut(&Vote, &mut Cleanup),
    ) {
        while let Some(vote) = self.votes.try_recv() {
            self.on_vote(holding, vote, observe);
        }
    }

    /// Returns whether the lock is renewed. That of an execution always is, because a second one must not begin beside
    /// it. One of several leases is until the caller has them all: it may wait for the others for longer than the ttl.
    fn renews(&self, lease: &LockState) -> bool {
        let is_execution = lease.purpose().is_some();
        let is_partial = || self.terms.earlier.is_some() && lease.delivered_at().is_none();
        self.cluster.settings.renew || is_execution || is_partial()
    }

    /// Asks all nodes to confirm the lock once more, and renews it with that if it is to be renewed.
    pub(crate) fn ask_again(&mut self, holding: &mut HoldingLock, now: Instant) {
        let renewed = holding.renewal_ttl(self.terms.ttl, now);
        let ttl = renewed.filter(|_| holding.renew_at.is_some());
        // A lock that is not to be renewed is confirmed for the rest of its validity.
        let ttl = ttl.unwrap_or_else(|| holding.left(now));
        self.begin_extension(holding, ttl, None);
    }

    fn on_command(&mut self, holding: &mut HoldingLock, command: ExtendCommand) {
        if let Some(reason) = holding.lost() {
            // The holder may have gone away.
            drop(command.done.send(Err(ExtendError::Lost(reason))));
        } else {
            let ttl = command.ttl.unwrap_or(self.terms.ttl);
            self.begin_extension(holding, ttl, Some(command));
        }
    }

    fn on_vote(
        &mut self,
        holding: &mut HoldingLock,
        vote: Vote,
        observe: &mut impl FnMut(&Vote, &mut Cleanup),
    ) {
        if let Some(vote) = self.count_release(vote) {
            observe(&vote, &mut holding.cleanup);
            self.on_extension_vote(holding, vote.node, vote.phase, vote.outcome);
        }
    }

    fn on_alarm(
        &mut self,
        holding: &mut HoldingLock,
        observe: &mut impl FnMut(&Vote, &mut Cleanup),
    ) {
        let now = Instant::now();
        holding.check_validity(now);
        if holding.is_overdue(now) {
            // Votes below the threshold have arrived in time.
            self.take_votes(holding, observe);
        }
        if let Some(extension) = holding.extension.as_ref().filter(|e| e.due <= now) {
            let late = extension.round.silent();
            let (phase, after) = (extension.phase, self.cluster.settings.node_timeout);
            if let Some(extension) = &mut holding.extension {
                for node in late.iter() {
                    let failure = self.cluster.timed_out(node, after);
                    extension.failures.set(node, failure);
                }
            }
            for node in late.iter() {
                let failure = self.cluster.timed_out(node, after);
                self.on_extension_vote(holding, node, phase, Err(failure));
            }
        }
        if holding.lost().is_some() {
            // Revoked, by another task.
            holding.renew_at = None;
        }
        if holding.renew_at.is_some_and(|at| at <= now) && holding.extension.is_none() {
            let goes_on = self.ticket.registry().stage() < DrainStage::TimedOut
                && self.renews(&holding.lease);
            match holding.renewal_ttl(self.terms.ttl, now).filter(|_| goes_on) {
                Some(ttl) => self.begin_extension(holding, ttl, None),
                None => holding.renew_at = None,
            }
        }
    }

    fn begin_extension(
        &mut self,
        holding: &mut HoldingLock,
        ttl: Duration,
        command: Option<ExtendCommand>,
    ) {
        let settings = &self.cluster.settings;
        let began = Instant::now();
        let phase = self.votes.next_phase();
        let raised = command.as_ref().and_then(|command| command.token);
        let token = raised.or_else(|| holding.lease.token());
        let token = token.map(FencingToken::as_u64);
        let confirm = self
            .terms
            .access
            .confirm(token, ttl, settings.fence_retention);
        let nodes = 0..self.cluster.quorum.nodes();
        let (cleanup, longest) = (&mut holding.cleanup, ttl.max(self.terms.ttl));
        cleanup.send(confirm, longest, began, &self.votes, nodes);
        holding.extension = Some(Box::new(ExtendingLock {
            round: ExtendRound::new(self.cluster.quorum, token.unwrap_or(0)),
            phase,
            began,
            due: began + settings.node_timeout,
            ttl,
            failures: Failures::default(),
            command,
        }));
    }

    fn on_extension_vote(
        &mut self,
        holding: &mut HoldingLock,
        node: usize,
        phase: u32,
        outcome: Result<Reply, NodeFailure>,
    ) {
        // Only answers to the requests of the current extension count.
        let Some(extension) = holding.extension.as_mut().filter(|e| e.phase == phase) else {
            return;
        };
        let answer = extension.failures.note(node, outcome);
        let step = extension.round.on_confirm(node, &answer);
        if step != ExtendStep::Wait
            && let Some(extension) = holding.extension.take()
        {
            self.end_extension(holding, *extension, step);
        }
    }

    fn end_extension(
        &mut self,
        holding: &mut HoldingLock,
        extension: ExtendingLock,
        step: ExtendStep,
    ) {
        let now = Instant::now();
        holding.check_validity(now);
        let (began, ttl) = (extension.began, extension.ttl);
        let outcome = match (holding.lost(), step) {
            (Some(reason), _) => Err(ExtendError::Lost(reason)),
            (None, ExtendStep::Lost) => {
                holding.lose(LostReason::Gone);
                Err(ExtendError::Lost(LostReason::Gone))
            }
            (None, ExtendStep::Extended) => {
                holding
                    .control
                    .prolong(began + validity::lifetime(ttl).unwrap_or_default());
                if let Some(command) = &extension.command {
                    self.terms.ttl = ttl;
                    if let Some(token) = command.token {
                        holding.control.set_token(token);
                    }
                }
                holding.renew_at = holding.renew_at.map(|_| began + self.terms.ttl / 3);
                Ok(())
            }
            (None, ExtendStep::Missed { reached }) => {
                let pause = (self.terms.ttl / 10).max(TICK);
                holding.renew_at = holding.renew_at.map(|_| now + pause);
                Err(ExtendError::Unavailable {
                    reached,
                    needed: self.cluster.quorum.majority(),
                    nodes: {
                        let silent = extension.round.silent().iter();
                        extension.failures.list(&self.cluster, silent)
                    },
                })
            }
            // Such a step does not end an extension.
            (None, ExtendStep::Wait) => return,
        };
        if let Some(command) = extension.command {
            // The holder may have gone away.
            drop(command.done.send(outcome));
        }
    }
}

impl HoldingLock {
    /// Returns whether the lock has holders. Drops the permit of a lost lock, because a holder that continues without
    /// its lock must not block the other callers of this process.
    pub(crate) fn is_held_with(&self, permit: &mut Permit) -> bool {
        if self.lost().is_some() {
            drop(std::mem::take(permit));
        }
        self.lease.is_shared()
    }

    /// Returns whether an extension is under way.
    pub(crate) fn is_extending(&self) -> bool {
        self.extension.is_some()
    }

    /// Returns the reason if the lock is lost.
    pub(crate) fn lost(&self) -> Option<LostReason> {
        self.control.status().lost
    }

    /// Returns when `max_hold` is over, if that is known.
    fn hold_until(&self) -> Option<Instant> {
        let began = self.began.or_else(|| self.lease.delivered_at());
        Some(after(began?, self.max_hold?))
    }

    /// Declares the lock lost if its validity has ended, or ends before a timer can fire.
    pub(crate) fn check_validity(&mut self, now: Instant) {
        let valid_until = self.control.status().valid_until;
        if self.lost().is_none() && valid_until <= now + TICK {
            let end = self.hold_until();
            let at_max_hold = end.is_some_and(|end| end + TICK <= valid_until);
            self.lose(if at_max_hold {
                LostReason::MaxHold
            } else {
                LostReason::Expired
            });
        }
    }

    /// Ends the holding: its metrics, and an extension that is under way.
    pub(crate) fn end(&mut self) {
        self.span = None;
        self.extension = None;
    }

    /// Publishes that the lock is released, for handles that outlive its guards. Returns why it was lost before,
    /// if it was.
    pub(crate) fn set_released(&self) -> Option<LostReason> {
        self.control.lose(LostReason::Released)
    }

    fn lose(&mut self, reason: LostReason) {
        self.renew_at = None;
        self.control.lose(reason);
        report_loss(reason);
    }

    fn is_overdue(&self, now: Instant) -> bool {
        let extension = self.extension.as_ref();
        extension.is_some_and(|extension| extension.due <= now)
    }

    fn next_alarm(&self) -> Instant {
        let now = self.control.status();
        let lost_at = now.lost.is_none().then(|| now.valid_until - TICK);
        let renew_at = self.renew_at.filter(|_| self.extension.is_none());
        let extended_at = self.extension.as_ref().map(|extension| extension.due);
        let next = [lost_at, renew_at, extended_at].into_iter().flatten().min();
        // Without an alarm, the task waits for its holders only.
        next.unwrap_or_else(|| Instant::now() + Duration::from_secs(60 * 60))
    }

    /// Returns the number of votes that may decide the extension.
    fn threshold(&self, quorum: Quorum) -> Threshold {
        let Some(extension) = &self.extension else {
            return Threshold::any();
        };
        let answered = quorum.nodes() - extension.round.silent().len();
        Threshold::new(extension.phase, quorum.decisive().saturating_sub(answered))
    }

    /// Returns the rest of the validity, the ttl with which an extension does not prolong the lock.
    fn left(&self, now: Instant) -> Duration {
        let valid_until = self.control.status().valid_until;
        whole_millis(valid_until.saturating_duration_since(now)).max(TICK)
    }

    /// Returns the ttl of the next renewal, cut so that the validity ends with `max_hold`; `None` if it does already.
    fn renewal_ttl(&self, ttl: Duration, now: Instant) -> Option<Duration> {
        let Some(end) = self.hold_until() else {
            return Some(ttl);
        };
        let valid_until = self.control.status().valid_until;
        let enough = end.saturating_duration_since(now) + validity::drift(ttl) + 2 * TICK;
        (valid_until < end + TICK).then(|| ttl.min(whole_millis(enough)))
    }
}
