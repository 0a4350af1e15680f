//! Holding: the guard is out, the lock is renewed, and its holders learn when it is lost.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::lock::claim::Claim;
use crate::lock::error::ExtendError;
use crate::lock::front::{Holder, Turn};
use crate::lock::guard::LockGuard;
use crate::lock::lease::{Beginning, Effect, Extension, Lease, Recording, Status, Wish, Wished};
use crate::lock::lost::LostReason;
use crate::lock::once::{NotBegun, NotGranted};
use crate::lock::record::HeldRecord;
use crate::lock::registry::Stage;
use crate::lock::settings::{after, whole_millis};
use crate::lock::task::acquire::{Acquired, Missed};
use crate::lock::task::attempt::Inquiry;
use crate::lock::task::run::Grant;
use crate::lock::task::state::{Failures, LeaseTask, TICK};
use crate::node::{Threshold, Vote, telemetry};
use crate::protocol::message::{Op, Reply};
use crate::protocol::once::OnceStep;
use crate::protocol::round::{ExtendRound, ExtendStep};
use crate::protocol::{FencingToken, Quorum, validity};

/// A lock while it is held.
pub(super) struct Holding {
    claim: Claim,
    token: Option<FencingToken>,
    status: watch::Sender<Status>,
    /// What its holders have of it.
    lease: Arc<Lease>,
    wished: Wished,
    record: HeldRecord,
    /// When `max_hold` is over.
    hold_until: Option<Instant>,
    /// When to renew next; never, if renewal is off or has come to its end.
    renew_at: Option<Instant>,
    /// Boxed, like all that few locks come to: every lock would have its room.
    extending: Option<Box<Extending>>,
    /// Of a key that keeps records, as long as its execution has not begun.
    pending: Option<Box<Pending>>,
}

/// A grant whose execution has not begun.
struct Pending {
    /// The attempt that was granted, which still takes votes.
    inquiry: Inquiry,
    granted_at: Instant,
    /// What follows from a record that was heard of since the grant.
    heard: Option<OnceStep>,
    /// The execution that is about to begin.
    beginning: Option<Beginning>,
    /// Whether all nodes were asked once more.
    asked_again: bool,
}

/// Why a lock is not held any longer.
pub(super) enum Ending {
    /// Its last share is gone.
    Released,
    /// What was executed under it is to be kept.
    Recording(Recording),
    /// A record was heard of before the execution began, and decides instead.
    Overtaken(Box<Overtaken>),
}

/// An execution that a record came before.
pub(super) struct Overtaken {
    inquiry: Inquiry,
    step: OnceStep,
    beginning: Beginning,
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

/// A lock that is to be given back.
pub(super) struct Ended {
    claim: Claim,
    status: watch::Sender<Status>,
    /// Whoever wishes for something as long as this lives is told how it ended.
    wished: Wished,
}

impl LeaseTask {
    /// Makes the guard of a lock, and begins to hold it.
    pub(super) fn begin_holding(
        &mut self,
        acquired: Acquired,
        max_hold: Option<Duration>,
        turn: &Turn,
    ) -> (Holding, LockGuard) {
        let Acquired {
            mut claim,
            token,
            began,
            valid_until,
            inquiry,
        } = acquired;
        let (status, seen) = watch::channel(Status {
            valid_until,
            lost: None,
        });
        let (lease, share, wished) = Lease::new(&self.inner, self.keys.clone(), token, seen);
        turn.set_holder(&Holder {
            lease: Arc::clone(&lease),
            asked_for: self.asked_for,
        });
        turn.hush();
        self.ticket.set_held();
        let record = HeldRecord::new(self.label);
        claim.lease = Some(Arc::clone(&lease));
        let holding = Holding {
            claim,
            token,
            status,
            lease,
            wished,
            record,
            hold_until: max_hold.map(|max_hold| after(began, max_hold)),
            renew_at: self.inner.settings.renew.then(|| began + self.ttl / 3),
            extending: None,
            pending: inquiry.map(|inquiry| Box::new(Pending::new(inquiry))),
        };
        // With a caller that has gone away the only share is dropped.
        (holding, LockGuard::new(share))
    }

    /// Hands the guard out, and renews the lock for as long as it is held.
    pub(super) async fn hold(
        &mut self,
        holding: &mut Holding,
        turn: &mut Turn,
        grant: Grant,
        guard: LockGuard,
    ) -> Ending {
        grant.hand_out(guard).await;
        loop {
            if holding.lost().is_some() {
                // A holder that goes on without its lock must not keep this process from it.
                drop(std::mem::take(turn));
            }
            if !holding.lease.is_shared() {
                // The last share may have gone with whoever asked for the recording.
                let mut wishes = std::iter::from_fn(|| holding.wished.next());
                let recording = wishes.find_map(Wish::recording);
                return recording.map_or(Ending::Released, Ending::Recording);
            }
            if let Some(overtaken) = self.begin_execution(holding) {
                return Ending::Overtaken(overtaken);
            }
            if holding.extending.is_none()
                && let Some(wish) = holding.wished.next()
            {
                match wish {
                    Wish::Extend(wish) => self.on_wish(holding, wish),
                    Wish::Record(recording) => return Ending::Recording(recording),
                    Wish::Begin(beginning) => holding.on_beginning(beginning),
                }
                continue;
            }
            let alarm = holding.next_alarm();
            let enough = holding.enough(self.inner.settings.quorum);
            tokio::select! {
                biased;
                () = holding.wished.stirred() => {}
                // Of the acquisition and of failed attempts, nothing is urgent.
                vote = self.votes.recv(enough), if holding.extending.is_some() => {
                    self.on_vote(holding, vote);
                }
                () = self.alarm.at(alarm) => self.on_alarm(holding),
            }
        }
    }

    /// Keeps what is to be kept, and gives the lock back if that may be done.
    pub(super) async fn end(&mut self, ended: Ended, ending: Ending, turn: Turn) {
        let Ended {
            claim,
            status,
            wished,
        } = ended;
        match ending {
            Ending::Recording(recording) => {
                Box::pin(self.record(claim, recording, turn, &status, &wished)).await;
            }
            Ending::Overtaken(overtaken) => {
                set_released(&status);
                Box::pin(self.yield_to_record(claim, *overtaken, turn)).await;
                wished.tell_released(Ok(()));
            }
            Ending::Released if claim.effect() == Effect::Possible => {
                set_released(&status);
                self.leave_to_its_ttl(claim);
                drop(turn);
                wished.tell_released(Ok(()));
            }
            Ending::Released => {
                let releasing = self.begin_release(claim, turn, &status);
                self.finish_release(releasing, &wished).await;
            }
        }
        drop((status, wished));
    }

    /// Lets an execution that is about to begin do so, unless a record was heard of or the lock is lost.
    fn begin_execution(&mut self, holding: &mut Holding) -> Option<Box<Overtaken>> {
        let is_asked = |pending: &Pending| pending.beginning.is_some();
        if holding.extending.is_some() || !holding.pending.as_deref().is_some_and(is_asked) {
            return None;
        }
        // None of these is waited for, but a record that is among them decides.
        while let Some(vote) = self.votes.try_recv() {
            self.on_vote(holding, vote);
        }
        let now = Instant::now();
        holding.check_validity(now);
        let lost = holding.lost();
        let mut pending = holding.pending.take()?;
        let beginning = pending.beginning.take()?;
        if let Some(step) = pending.heard.take() {
            let inquiry = pending.inquiry;
            return Some(Box::new(Overtaken {
                inquiry,
                step,
                beginning,
            }));
        }
        let is_late = now - pending.granted_at > self.inner.settings.node_timeout;
        match lost {
            // The execution may have gone away with its caller, here and below.
            Some(reason) => drop(beginning.send(Err(NotBegun::Lost(reason)))),
            None if is_late && !pending.asked_again => {
                pending.asked_again = true;
                pending.beginning = Some(beginning);
                holding.pending = Some(pending);
                let renewed = holding.renewal_ttl(self.ttl, now);
                let ttl = renewed.filter(|_| holding.renew_at.is_some());
                // A lock that is not to be renewed is asked about, for what is left of it.
                let ttl = ttl.unwrap_or_else(|| holding.left(now));
                self.start_extension(holding, ttl, None);
            }
            None => {
                holding.lease.set_effect(Effect::Possible);
                drop(beginning.send(Ok(())));
            }
        }
        None
    }

    /// Goes on with the record that an execution met before it began.
    async fn yield_to_record(&mut self, mut claim: Claim, overtaken: Overtaken, turn: Turn) {
        let Overtaken {
            inquiry,
            step,
            beginning,
        } = overtaken;
        // Nothing was executed under it, and its guard is of no use any more.
        claim.lease = None;
        let (reason, replay) = match self.resume(claim, inquiry, step).await {
            Err(Missed::Stopped(stopped)) => stopped.conclude(&turn),
            Err(Missed::Undecided | Missed::Contended { .. }) => {
                (Some(NotGranted::Undecided), None)
            }
            Ok(acquired) => {
                // Where a record is known there is no grant; should there be one, it is not to be used.
                self.give_up(acquired.claim);
                (Some(NotGranted::Undecided), None)
            }
        };
        drop(turn);
        if let Some(reason) = reason {
            drop(beginning.send(Err(NotBegun::NotGranted(reason))));
        }
        if let Some(replay) = replay {
            self.finish_replay(*replay).await;
        }
    }

    /// Counts a vote that came in while the lock is held.
    fn on_vote(&mut self, holding: &mut Holding, vote: Vote) {
        let vote = self.count_release(vote);
        if let Some(vote) = vote.and_then(|vote| holding.hear(vote)) {
            self.on_extension_vote(holding, vote);
        }
    }

    fn on_wish(&mut self, holding: &mut Holding, wish: Extension) {
        let Extension { ttl, done } = wish;
        if let Some(reason) = holding.lost() {
            // Whoever asked may have gone away.
            drop(done.send(Err(ExtendError::Lost(reason))));
        } else {
            self.start_extension(holding, ttl, Some(done));
        }
    }

    fn on_alarm(&mut self, holding: &mut Holding) {
        let now = Instant::now();
        holding.check_validity(now);
        if let Some(extending) = &holding.extending
            && extending.due <= now
        {
            // Too few to wake for, but in time.
            while let Some(vote) = self.votes.try_recv() {
                self.on_vote(holding, vote);
            }
        }
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
                        subscribers: None,
                    },
                );
            }
        }
        if holding.renew_at.is_some_and(|at| at <= now) && holding.extending.is_none() {
            let goes_on = self.inner.registry.stage() < Stage::TimedOut;
            match holding.renewal_ttl(self.ttl, now).filter(|_| goes_on) {
                Some(ttl) => self.start_extension(holding, ttl, None),
                None => holding.renew_at = None,
            }
        }
    }

    fn start_extension(
        &mut self,
        holding: &mut Holding,
        ttl: Duration,
        done: Option<oneshot::Sender<Result<(), ExtendError>>>,
    ) {
        let settings = &self.inner.settings;
        let began = Instant::now();
        let phase = self.votes.next_phase();
        let confirm = Op::Confirm {
            token: holding.token.map(FencingToken::as_u64),
            ttl,
            retention: settings.fence_retention,
        };
        let nodes = settings.quorum.nodes();
        let claim = &mut holding.claim;
        claim.send(confirm, ttl.max(self.ttl), &self.votes, 0..nodes);
        let number = holding.token.map_or(0, FencingToken::as_u64);
        holding.extending = Some(Box::new(Extending {
            round: ExtendRound::new(settings.quorum, number),
            phase,
            began,
            due: began + settings.node_timeout,
            ttl,
            failures: Failures::default(),
            done,
        }));
    }

    fn on_extension_vote(&mut self, holding: &mut Holding, vote: Vote) {
        let Vote {
            node,
            phase,
            outcome,
            ..
        } = vote;
        // Only answers to the requests of this very extension are counted.
        let Some(extending) = holding.extending.as_mut().filter(|e| e.phase == phase) else {
            return;
        };
        let answer = extending.failures.note(node, outcome);
        let step = extending.round.on_confirm(node, &answer);
        if step == ExtendStep::Wait {
            return;
        }
        let Some(extending) = holding.extending.take() else {
            return;
        };
        let now = Instant::now();
        holding.check_validity(now);
        let (began, ttl) = (extending.began, extending.ttl);
        let outcome = match (holding.lost(), step) {
            (Some(reason), _) => Err(ExtendError::Lost(reason)),
            (None, ExtendStep::Lost) => {
                holding.lose(LostReason::Gone);
                Err(ExtendError::Lost(LostReason::Gone))
            }
            (None, ExtendStep::Extended) => {
                holding.prolong(began + validity::lifetime(ttl).unwrap_or_default());
                if extending.done.is_some() {
                    self.ttl = ttl;
                }
                holding.renew_at = holding.renew_at.map(|_| began + self.ttl / 3);
                Ok(())
            }
            (None, ExtendStep::Missed { reached }) => {
                // Soon again, while the old validity runs on.
                let pause = (self.ttl / 10).max(TICK);
                holding.renew_at = holding.renew_at.map(|_| now + pause);
                Err(ExtendError::Unavailable {
                    reached,
                    needed: self.inner.settings.quorum.majority(),
                    nodes: extending.failures.list(),
                })
            }
            (None, ExtendStep::Wait) => return,
        };
        if let Some(done) = extending.done {
            // Whoever asked may have gone away.
            drop(done.send(outcome));
        }
    }
}

impl Pending {
    fn new(inquiry: Box<Inquiry>) -> Self {
        Self {
            inquiry: *inquiry,
            granted_at: Instant::now(),
            heard: None,
            beginning: None,
            asked_again: false,
        }
    }
}

impl Holding {
    /// Notes that an execution is about to begin.
    fn on_beginning(&mut self, beginning: Beginning) {
        match &mut self.pending {
            Some(pending) => pending.beginning = Some(beginning),
            // It has begun already, or what it waits for keeps no records.
            None => drop(beginning.send(Ok(()))),
        }
    }

    /// Looks for a record in a vote, as long as the execution has not begun; returns the vote if it is on
    /// an extension.
    fn hear(&mut self, vote: Vote) -> Option<Vote> {
        let Some(pending) = &mut self.pending else {
            return Some(vote);
        };
        let inquiry = &mut pending.inquiry;
        let (step, vote) = if inquiry.asked_in(vote.phase) {
            (inquiry.on_vote(vote, &mut self.claim), None)
        } else if let Ok(Reply::Done { .. }) = &vote.outcome {
            (inquiry.on_extension(vote.node, &vote.outcome), Some(vote))
        } else {
            (OnceStep::Wait, Some(vote))
        };
        if inquiry.is_recorded() && (pending.heard.is_none() || step != OnceStep::Wait) {
            pending.heard = Some(step);
        }
        vote
    }

    /// Ends the holding.
    pub(super) fn end(self) -> Ended {
        drop(self.record);
        Ended {
            claim: self.claim,
            status: self.status,
            wished: self.wished,
        }
    }

    fn next_alarm(&self) -> Instant {
        let now = self.status.borrow();
        let lost_at = now.lost.is_none().then(|| now.valid_until - TICK);
        let renew_at = self.renew_at.filter(|_| self.extending.is_none());
        let extended_at = self.extending.as_ref().map(|extending| extending.due);
        let next = [lost_at, renew_at, extended_at].into_iter().flatten().min();
        // Nothing left to do in time but to be released.
        next.unwrap_or_else(|| Instant::now() + Duration::from_secs(60 * 60))
    }

    /// Returns how many votes may decide an extension.
    fn enough(&self, quorum: Quorum) -> Threshold {
        let Some(extending) = &self.extending else {
            return Threshold::any();
        };
        let heard = quorum.nodes() - extending.round.silent().count();
        Threshold::new(extending.phase, quorum.decisive().saturating_sub(heard))
    }

    fn lost(&self) -> Option<LostReason> {
        self.status.borrow().lost
    }

    fn lose(&mut self, reason: LostReason) {
        self.renew_at = None;
        self.status.send_modify(|status| status.lost = Some(reason));
        telemetry::lost(reason.name());
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

    /// Returns the ttl with which an extension prolongs nothing.
    fn left(&self, now: Instant) -> Duration {
        let valid_until = self.status.borrow().valid_until;
        whole_millis(valid_until.saturating_duration_since(now)).max(TICK)
    }

    /// Returns the ttl to renew with: so much that the validity ends with `max_hold`, not later.
    fn renewal_ttl(&self, ttl: Duration, now: Instant) -> Option<Duration> {
        let Some(end) = self.hold_until else {
            return Some(ttl);
        };
        let valid_until = self.status.borrow().valid_until;
        let enough = end.saturating_duration_since(now) + validity::drift(ttl) + 2 * TICK;
        (valid_until < end + TICK).then(|| ttl.min(whole_millis(enough)))
    }
}

/// Tells holders that are left that the lock is not theirs any more.
fn set_released(status: &watch::Sender<Status>) {
    status.send_modify(|status| {
        status.lost.get_or_insert(LostReason::Released);
    });
}
