//! What only an execution meets: its outcome is found or decided by the nodes.
//!
//! The driver passes on what the lease says, and does not look into it.

use std::future::pending;
use std::pin::pin;

use crate::lock::driver::hold::Held;
use crate::lock::driver::reading::{Reader, Reading};
use crate::lock::driver::task::Driver;
use crate::lock::lost::LostReason;
use crate::lock::queue::Permit;
use crate::protocol::lease::{Decided, Event, Input, OnceEvent, OnceInput};

impl Driver {
    /// Sets who reads what the lease asks for.
    pub(crate) fn read_with(mut self, reader: Box<Reader>) -> Self {
        self.reading = Some(Box::new(Reading { reader, read: None }));
        self
    }

    /// Goes on with a lease that its holder has left to itself, and tells the holder how it ended.
    pub(super) async fn finish(&mut self, held: Held, permit: Permit) {
        let Held {
            control,
            span,
            command,
            ..
        } = held;
        drop(span);
        control.lose(LostReason::Released);
        let outcome = loop {
            match self.next_event(pin!(pending::<()>())).await {
                Some(Event::Once(OnceEvent::Unrepaired)) => {
                    let decided = self.repair().await;
                    self.handle(Input::Once(OnceInput::Repaired(decided)));
                }
                Some(Event::Once(event)) => break Some(event),
                Some(Event::Settled) | None => break None,
                Some(_) => {}
            }
        };
        control.close(Ok(()));
        // The next callers of this process need not ask the nodes.
        if let Some(decided) = outcome.as_ref().and_then(OnceEvent::memo) {
            permit.set_memo(decided);
        }
        if let Some(command) = command {
            // The holder may have gone away.
            drop(command.done.send(Ok(outcome)));
        }
    }

    /// Makes one attempt of another owner, which executes nothing, and returns what it has found.
    async fn repair(&mut self) -> Decided {
        let first = self.attempt.take();
        if let Some(once) = &mut self.terms.once {
            once.executes = false;
        }
        self.begin_attempt();
        let mut found = Decided::Undecided;
        // To its end, so that the requests of both do not mix.
        while !self.is_settled() {
            match self.next_event(pin!(pending::<()>())).await {
                Some(Event::Once(OnceEvent::Decided(decided))) => found = decided,
                Some(_) => {}
                None => break,
            }
        }
        let second = std::mem::replace(&mut self.attempt, first);
        self.earlier.extend(second.map(|attempt| *attempt));
        found
    }
}
