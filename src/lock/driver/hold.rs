//! The holders of a granted lock: what they see of it, and what they ask for; and its end.

use std::future::pending;
use std::pin::pin;
use std::sync::Arc;

use tokio::time::Instant;

use crate::lock::driver::lease::Driver;
use crate::lock::error::{ExtendError, LostReason, ReleaseError};
use crate::lock::queue::Permit;
use crate::lock::state::CommandOutcome;
use crate::protocol::lease::{Decided, Event, Input};
use crate::protocol::round::VoteStep;

impl Driver {
    /// Holds and renews the lock until its last share is gone, or the lease needs no holder any more.
    pub(super) async fn hold(&mut self, permit: &mut Permit) {
        let state = Arc::clone(&self.state);
        while self.lease.is_holding() {
            let (is_lost, is_shared) = (state.lost_reason().is_some(), state.is_shared());
            if is_lost || !is_shared {
                // Behind the look: holders note what they have done before they go.
                self.tell();
                self.pass_events();
            }
            if is_lost {
                // A holder that continues without its lock must not block the other callers of this process.
                drop(std::mem::take(permit));
            }
            if !is_shared {
                // The last share may have gone right after a command that needs none.
                let commands = self.command.take().into_iter();
                let mut commands = commands.chain(std::iter::from_fn(|| state.try_recv()));
                self.command = commands.find(|command| command.input.outlives_holder());
                if self.command.is_none() {
                    return;
                }
            }
            if self.carry_out() {
                continue;
            }
            // A notification that came since the last look is kept, so neither a command nor the last drop is missed.
            if let Some(event) = self.next_event(pin!(state.notified())).await {
                self.on_event(event);
            }
        }
    }

    /// Carries out the next command, or goes on with one that waited for an extension. Returns whether there was one.
    fn carry_out(&mut self) -> bool {
        if self.lease.is_extending() && self.state.is_shared() {
            return false;
        }
        if self.command.is_none() {
            self.command = self.state.try_recv();
        }
        let Some(command) = &self.command else {
            return false;
        };
        let input = command.input.clone();
        // They came before the command.
        self.take_votes(self.origin.elapsed());
        self.tell();
        self.pass_events();
        self.handle(input);
        if self.lease.is_holding() {
            self.pass_events();
            if !self.lease.is_extending() {
                // Lost before.
                self.answer_lost();
            }
        }
        true
    }

    fn pass_events(&mut self) {
        while let Some(event) = self.lease.poll_event() {
            self.on_event(event);
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Extended {
                valid_until,
                token,
                is_asked,
            } => {
                let token = token.and_then(|token| token.try_into().ok());
                self.state.prolong(self.instant(valid_until), token);
                if is_asked {
                    self.answer(Ok(None));
                }
            }
            Event::NotExtended { reached, silent } => {
                let error = ExtendError::Unavailable {
                    reached,
                    needed: self.state.spec.cluster.quorum.majority(),
                    nodes: self.take_failures(silent),
                };
                self.answer(Err(error));
            }
            Event::Lost(reason) => {
                // Another task has reported a revocation.
                if self.state.lose(reason).is_none() {
                    self.state.report_loss(reason);
                }
                self.answer_lost();
            }
            Event::Granted { .. }
            | Event::Refused(_)
            | Event::TooLate { .. }
            | Event::Released(_)
            | Event::Unread(_)
            | Event::Settled => {}
            // What a holder asked for.
            event => self.answer(Ok(Some(event))),
        }
    }

    fn answer_lost(&mut self) {
        let reason = self.state.lost_reason().unwrap_or(LostReason::Abandoned);
        self.answer(Err(ExtendError::Lost(reason)));
    }

    fn answer(&mut self, outcome: CommandOutcome) {
        if let Some(command) = self.command.take() {
            // The holder may have gone away.
            drop(command.done.send(outcome));
        }
    }

    /// Releases the lock, and reports to its last holder as soon as a majority has confirmed that.
    ///
    /// Not an `async fn`, which would have room for its arguments in every lock that is held.
    pub(super) fn release(&mut self, permit: Permit) -> impl Future<Output = ()> + Send + use<'_> {
        let now = Instant::now();
        let elapsed = now - self.origin;
        // Those of the nodes that did not decide, before the queue gets as many again.
        self.take_votes(elapsed);
        self.pass_events();
        // Before the first node can grant the lock to another caller: no handle may show it as valid then.
        let lost = self.state.end(now);
        self.handle_at(self.dropped(permit.publishes()), elapsed);
        // The requests of the next waiter follow the releases on every node.
        drop(permit);
        async move {
            let mut outcome = self.released().await;
            if let Some(reason) = lost {
                outcome = Err(ReleaseError::Lost(reason));
            } else if let Err(ReleaseError::Lost(reason)) = &outcome {
                self.state.report_loss(*reason);
            }
            self.state.close(Some(outcome));
            // Mostly, all nodes have answered by now.
            if self.votes.has_more() {
                self.take_votes(self.origin.elapsed());
            }
        }
    }

    /// Waits until a majority has confirmed the release, or cannot.
    async fn released(&mut self) -> Result<(), ReleaseError> {
        loop {
            match self.next_event(pin!(pending::<()>())).await {
                Some(Event::Released(VoteStep::Lost)) => {
                    return Err(ReleaseError::Lost(LostReason::Gone));
                }
                Some(Event::Released(VoteStep::Missed { reached })) => {
                    return Err(ReleaseError::Unavailable {
                        reached,
                        needed: self.state.spec.cluster.quorum.majority(),
                        nodes: self.take_failures(self.lease.release_round().1.silent()),
                    });
                }
                Some(Event::Released(_) | Event::Settled) | None => return Ok(()),
                Some(_) => {}
            }
        }
    }

    /// Goes on with an execution that its holder has left to itself, and tells the holder how it ended.
    ///
    /// Passes on what the lease says, and does not look into it.
    pub(super) async fn finish(&mut self, permit: Permit) {
        self.state.lose(LostReason::Released);
        let outcome = loop {
            match self.next_event(pin!(pending::<()>())).await {
                Some(Event::Unrepaired) => {
                    let decided = self.repair().await;
                    self.handle(Input::Repaired(decided));
                }
                Some(Event::Settled) | None => break None,
                Some(event) => break Some(event),
            }
        };
        self.state.close(Some(Ok(())));
        // The next callers of this process need not ask the nodes.
        if let Some(decided) = outcome.clone().and_then(Event::memo) {
            permit.set_memo(decided);
        }
        self.answer(Ok(outcome));
    }

    /// Makes one attempt of another owner, which executes nothing, and returns what it has found.
    async fn repair(&mut self) -> Decided {
        let mut repairer = self.repairer();
        repairer.begin();
        let mut found = Decided::Undecided;
        while !repairer.lease.is_releasing() {
            if let Some(Event::Decided(decided)) = repairer.next_event(pin!(pending::<()>())).await
            {
                found = decided;
            }
        }
        found
    }
}
