//! The holders of a granted lock: what they see of it, and what they ask for.

use std::future::{Future, pending};
use std::pin::pin;
use std::sync::Arc;

use tokio::time::Instant;

use crate::lock::driver::task::Driver;
use crate::lock::error::{ExtendError, ReleaseError};
use crate::lock::lost::LostReason;
use crate::lock::queue::{HeldLease, Permit};
use crate::lock::span::HeldSpan;
use crate::lock::state::{
    CommandOutcome, HolderCommand, LeaseControl, LeaseTerms, LockState, Share, report_loss,
};
use crate::protocol::FencingToken;
use crate::protocol::lease::{Event, Input, Lease, Loss};
use crate::protocol::round::ReleaseStep;

/// What a holder's end of the lock needs.
pub(super) struct Held {
    pub(super) state: Arc<LockState>,
    pub(super) control: LeaseControl,
    pub(super) span: HeldSpan,
    /// The command of the holder that is being carried out.
    pub(super) command: Option<Box<HolderCommand>>,
}

impl Driver {
    /// Creates what the holders of a granted lock see, and the first share of it.
    pub(super) fn begin_holding(
        &mut self,
        (token, valid_until): (Option<FencingToken>, Instant),
        permit: &Permit,
    ) -> (Held, Share) {
        let terms = LeaseTerms {
            cluster: Arc::clone(&self.cluster),
            registry: Arc::clone(self.ticket.registry()),
            keys: self.keys.clone(),
            access: self.terms.access,
            slot: self.slot,
            purpose: self.terms.once,
        };
        let (state, share, control) = LockState::new(terms, token, valid_until);
        permit.set_holder(&(Arc::clone(&state) as Arc<dyn HeldLease>), self.task);
        permit.unsubscribe();
        self.ticket.set_held(self.slot.map(|_| &self.keys));
        if let Some(attempt) = &mut self.attempt {
            attempt.state = Some(Arc::clone(&state));
        }
        let held = Held {
            state,
            control,
            span: HeldSpan::new(self.labels.clone()),
            command: None,
        };
        (held, share)
    }

    /// Holds and renews the lock until its last share is gone, or the lease needs no holder any more.
    pub(super) async fn hold(&mut self, held: &mut Held, permit: &mut Permit) {
        loop {
            if !self.is_holding() {
                return;
            }
            self.tell();
            self.pass_events(held);
            if held.control.status().lost.is_some() {
                // A holder that continues without its lock must not block the other callers of this process.
                drop(std::mem::take(permit));
            }
            if !held.state.is_shared() {
                // The last share may have gone right after a command that needs none.
                held.take_last_command();
                if held.command.is_none() {
                    return;
                }
            }
            if self.carry_out(held) {
                continue;
            }
            let event = {
                let notified = pin!(held.control.notified());
                self.next_event(notified).await
            };
            if let Some(event) = event {
                self.on_event(held, &event);
            }
        }
    }

    /// Carries out the next command, or goes on with one that waited for an extension. Returns whether there was one.
    fn carry_out(&mut self, held: &mut Held) -> bool {
        if self.is_extending() && held.state.is_shared() {
            return false;
        }
        if held.command.is_none() {
            held.command = held.control.try_recv();
        }
        let Some(command) = &held.command else {
            return false;
        };
        let input = command.input.clone();
        // They came before the command.
        self.take_votes();
        self.pass_events(held);
        self.handle(input);
        if !self.is_holding() {
            return true;
        }
        self.pass_events(held);
        if !self.is_extending() {
            // Lost before.
            held.answer(Err(held.lost()));
        }
        true
    }

    fn pass_events(&mut self, held: &mut Held) {
        while let Some(event) = self.poll_event() {
            self.on_event(held, &event);
        }
    }

    fn on_event(&mut self, held: &mut Held, event: &Event) {
        match *event {
            Event::Extended {
                valid_until,
                is_asked,
            } => {
                held.control.prolong(self.instant(valid_until));
                if is_asked {
                    let input = held.command.as_ref().map(|command| &command.input);
                    if let Some(Input::Extend {
                        token: Some(token), ..
                    }) = input
                        && let Ok(token) = FencingToken::try_from(*token)
                    {
                        held.control.set_token(token);
                    }
                    held.answer(Ok(None));
                }
            }
            Event::NotExtended { reached, silent } => {
                let error = ExtendError::Unavailable {
                    reached,
                    needed: self.cluster.quorum.majority(),
                    nodes: self.take_failures().list(&self.cluster, silent.iter()),
                };
                held.answer(Err(error));
            }
            Event::Lost(loss) => {
                let reason = LostReason::from(loss);
                // Another task has reported a revocation.
                if held.control.lose(reason).is_none() {
                    report_loss(reason);
                }
                held.answer(Err(held.lost()));
            }
            Event::Once(ref event) => held.answer(Ok(Some(event.clone()))),
            Event::Granted { .. }
            | Event::Refused(_)
            | Event::TooLate { .. }
            | Event::Released(_)
            | Event::Unread(_)
            | Event::Settled => {}
        }
    }

    /// Releases the lock, and reports to its last holder as soon as a majority has confirmed that.
    ///
    /// Not an `async fn`, which would have room for its arguments in every lock that is held.
    pub(super) fn release(
        &mut self,
        held: Held,
        permit: Permit,
    ) -> impl Future<Output = ()> + Send + use<'_> {
        let Held {
            state,
            control,
            span,
            ..
        } = held;
        drop(span);
        let status = control.status();
        if status.lost.is_none() && status.valid_until <= Instant::now() {
            control.lose(LostReason::Expired);
        }
        // Before the first node can grant the lock to another caller: no handle may show it as valid then.
        let lost = control.lose(LostReason::Released);
        let publishes = permit.publishes();
        let effect = state.effect();
        self.handle(Input::Dropped { publishes, effect });
        // The requests of the next waiter follow the releases on every node.
        drop(permit);
        async move {
            let outcome = self.released().await;
            control.conclude(lost, outcome);
        }
    }

    /// Waits until a majority has confirmed the release, or cannot.
    async fn released(&mut self) -> Result<(), ReleaseError> {
        loop {
            match self.next_event(pin!(pending::<()>())).await {
                Some(Event::Released(ReleaseStep::Lost)) => {
                    return Err(ReleaseError::Lost(LostReason::Gone));
                }
                Some(Event::Released(ReleaseStep::Unconfirmed)) => return Err(self.unconfirmed()),
                Some(Event::Released(_) | Event::Settled) | None => return Ok(()),
                Some(_) => {}
            }
        }
    }

    fn unconfirmed(&mut self) -> ReleaseError {
        let quorum = self.cluster.quorum;
        let lease = self.attempt.as_ref().map(|attempt| &attempt.lease);
        let left = lease.map(Lease::may_hold).unwrap_or_default();
        let silent = lease.map(Lease::unanswered).unwrap_or_default();
        ReleaseError::Unavailable {
            reached: quorum.nodes() - left.len(),
            needed: quorum.majority(),
            nodes: self.take_failures().list(&self.cluster, silent.iter()),
        }
    }
}

impl Held {
    /// Returns the error of an extension of a lock that is lost.
    fn lost(&self) -> ExtendError {
        let lost = self.control.status().lost;
        ExtendError::Lost(lost.unwrap_or(LostReason::Abandoned))
    }

    /// Takes the command of a holder that is gone, if it is one that needs no holder.
    fn take_last_command(&mut self) {
        let needs_none = |command: &HolderCommand| command.input.outlives_holder();
        self.command = self.command.take().filter(|command| needs_none(command));
        while self.command.is_none()
            && let Some(command) = self.control.try_recv()
        {
            self.command = Some(command).filter(|command| needs_none(command));
        }
    }

    fn answer(&mut self, outcome: CommandOutcome) {
        if let Some(command) = self.command.take() {
            // The holder may have gone away.
            drop(command.done.send(outcome));
        }
    }
}

impl From<Loss> for LostReason {
    fn from(loss: Loss) -> Self {
        match loss {
            Loss::Expired => Self::Expired,
            Loss::MaxHold => Self::MaxHold,
            Loss::Gone => Self::Gone,
            Loss::Revoked => Self::Revoked,
        }
    }
}
