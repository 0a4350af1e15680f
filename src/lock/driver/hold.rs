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
    Disposal, ExtendCommand, LeaseControl, LeaseTerms, LockState, Share, report_loss,
};
use crate::protocol::FencingToken;
use crate::protocol::lease::{Event, Input, Lease, Loss};
use crate::protocol::round::ReleaseStep;

/// What a holder's end of the lock needs.
pub(super) struct Held {
    pub(super) state: Arc<LockState>,
    pub(super) control: LeaseControl,
    pub(super) span: HeldSpan,
    /// The command of the holder whose extension is under way.
    pub(super) command: Option<ExtendCommand>,
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
            hold_at_least: self.terms.hold_at_least,
            purpose: None,
        };
        let (state, share, control) = LockState::new(terms, Disposal::Release, token, valid_until);
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

    /// Holds and renews the lock until its last share is gone.
    pub(super) async fn hold(&mut self, held: &mut Held, permit: &mut Permit) {
        loop {
            self.tell();
            while let Some(event) = self.poll_event() {
                self.on_event(held, &event);
            }
            if held.control.status().lost.is_some() {
                // A holder that continues without its lock must not block the other callers of this process.
                drop(std::mem::take(permit));
            }
            if !held.state.is_shared() {
                return;
            }
            if held.command.is_none()
                && !self.is_extending()
                && let Some(command) = held.control.try_recv()
            {
                let (ttl, token) = (command.ttl, command.token.map(FencingToken::as_u64));
                held.command = Some(command);
                self.handle(Input::Extend { ttl, token });
                if !self.is_extending() {
                    while let Some(event) = self.poll_event() {
                        self.on_event(held, &event);
                    }
                    // Lost before.
                    held.answer(Err(held.lost()));
                }
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

    fn on_event(&mut self, held: &mut Held, event: &Event) {
        match *event {
            Event::Extended {
                valid_until,
                is_asked,
            } => {
                held.control.prolong(self.instant(valid_until));
                if is_asked {
                    let command = held.command.as_ref();
                    if let Some(token) = command.and_then(|command| command.token) {
                        held.control.set_token(token);
                    }
                    held.answer(Ok(()));
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
            Event::Granted { .. }
            | Event::Refused(_)
            | Event::TooLate { .. }
            | Event::Released(_)
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
        let Held { control, span, .. } = held;
        drop(span);
        let status = control.status();
        if status.lost.is_none() && status.valid_until <= Instant::now() {
            control.lose(LostReason::Expired);
        }
        // Before the first node can grant the lock to another caller: no handle may show it as valid then.
        let lost = control.lose(LostReason::Released);
        let publishes = permit.publishes();
        self.handle(Input::Dropped { publishes });
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

    fn answer(&mut self, outcome: Result<(), ExtendError>) {
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
