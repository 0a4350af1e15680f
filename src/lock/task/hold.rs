//! Holding: the guard is out, the lock is renewed, and its holders learn when it is lost.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::lock::claim::Claim;
use crate::lock::error::ExtendError;
use crate::lock::front::{Holder, Turn};
use crate::lock::guard::LockGuard;
use crate::lock::lease::{Extension, Lease, Recording, Status, Wish, Wished};
use crate::lock::lost::LostReason;
use crate::lock::record::HeldRecord;
use crate::lock::registry::Stage;
use crate::lock::settings::{after, whole_millis};
use crate::lock::task::acquire::Acquired;
use crate::lock::task::run::Grant;
use crate::lock::task::state::{Failures, LeaseTask, TICK};
use crate::node::{Enough, Vote, telemetry};
use crate::protocol::message::Op;
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
        } = acquired;
        let (status, seen) = watch::channel(Status {
            valid_until,
            lost: None,
        });
        turn.set_holder(&Holder {
            status: seen.clone(),
            asked_for: self.asked_for,
        });
        turn.hush();
        self.ticket.set_held();
        let record = HeldRecord::new(self.label);
        let (lease, share, wished) = Lease::new(&self.inner, self.keys.clone(), token, seen);
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
        };
        // With a caller that has gone away the only share is dropped.
        (holding, LockGuard::new(share))
    }

    /// Hands the guard out and renews until it is given back; returns what is to be kept of what it was
    /// for.
    pub(super) async fn hold(
        &mut self,
        holding: &mut Holding,
        turn: &mut Turn,
        grant: Grant,
        guard: LockGuard,
    ) -> Option<Recording> {
        grant.hand_out(guard).await;
        loop {
            if holding.lost().is_some() {
                // A holder that goes on without its lock must not keep this process from it.
                drop(std::mem::take(turn));
            }
            if !holding.lease.is_shared() {
                // The last share may have gone with whoever asked for the recording.
                let mut wishes = std::iter::from_fn(|| holding.wished.next());
                return wishes.find_map(Wish::recording);
            }
            if holding.extending.is_none()
                && let Some(wish) = holding.wished.next()
            {
                match wish {
                    Wish::Extend(wish) => self.on_wish(holding, wish),
                    Wish::Record(recording) => return Some(recording),
                }
                continue;
            }
            let alarm = holding.next_alarm();
            let enough = holding.enough(self.inner.settings.quorum);
            tokio::select! {
                biased;
                () = holding.wished.stirred() => {}
                // Of the acquisition and of failed attempts, nothing is urgent.
                vote = self.votes.next(enough), if holding.extending.is_some() => {
                    if let Some(vote) = self.count_release(vote) {
                        self.on_extension_vote(holding, vote);
                    }
                }
                () = self.alarm.at(alarm) => self.on_alarm(holding),
            }
        }
    }

    /// Keeps what is to be kept, and releases.
    pub(super) async fn end(&mut self, ended: Ended, recording: Option<Recording>, turn: Turn) {
        let Ended {
            claim,
            status,
            wished,
        } = ended;
        if let Some(recording) = recording {
            Box::pin(self.record(claim, recording, turn, &status, &wished)).await;
        } else {
            let releasing = self.begin_release(claim, turn, &status);
            self.finish_release(releasing, &wished).await;
        }
        drop((status, wished));
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
            while let Some(vote) = self.votes.waiting() {
                if let Some(vote) = self.count_release(vote) {
                    self.on_extension_vote(holding, vote);
                }
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
                        listeners: None,
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
        let phase = self.tally.next_phase();
        let confirm = Op::Confirm {
            token: holding.token.map(FencingToken::as_u64),
            ttl,
            retention: settings.fence_retention,
        };
        let nodes = settings.quorum.nodes();
        let claim = &mut holding.claim;
        claim.send(confirm, ttl.max(self.ttl), &self.tally, 0..nodes);
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

impl Holding {
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
    fn enough(&self, quorum: Quorum) -> Enough {
        let Some(extending) = &self.extending else {
            return Enough::any();
        };
        let heard = quorum.nodes() - extending.round.silent().count();
        Enough::of(extending.phase, quorum.decisive().saturating_sub(heard))
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
