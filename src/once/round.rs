//! The acquisition round of a key with records, in the form that a lease drives.

use std::time::Duration;

use crate::lock::Round;
use crate::protocol::message::Reply;
use crate::protocol::once::{OnceRound, OnceStep};
use crate::protocol::round::{AcquireRound, AcquireStep, Answer};

/// The next step of a lease: one of the acquisition, or as an error one of the records.
pub(super) type Step = Result<AcquireStep, OnceStep>;

/// A [`OnceRound`], with the expiry of its record.
pub(super) struct RecordedRound {
    pub(super) round: OnceRound,
    /// The time until the first node with a record forgets it.
    pub(super) expires_in: Duration,
}

impl RecordedRound {
    pub(super) fn new(round: OnceRound) -> Self {
        Self {
            round,
            expires_in: Duration::MAX,
        }
    }

    /// Takes the answer of a node to an extension of the granted lock.
    pub(super) fn on_extension(&mut self, node: usize, answer: &Answer) -> Step {
        self.note_expiry(answer);
        split(self.round.on_extension(node, answer))
    }

    /// Takes the answer of a node to the `RECORD` of a repair.
    pub(super) fn on_record(&mut self, node: usize, answer: &Answer) -> Step {
        self.note_expiry(answer);
        split(self.round.on_record(node, answer))
    }

    fn note_expiry(&mut self, answer: &Answer) {
        if let Answer::Replied(Reply::Done { expires_in, .. }) = answer {
            self.expires_in = self.expires_in.min(*expires_in);
        }
    }
}

impl Round for RecordedRound {
    type Other = OnceStep;

    fn acquiring(&self) -> &AcquireRound {
        self.round.acquiring()
    }

    fn on_acquire(&mut self, node: usize, answer: &Answer) -> Step {
        self.note_expiry(answer);
        split(self.round.on_acquire(node, answer))
    }

    fn on_confirm(&mut self, node: usize, answer: &Answer) -> Step {
        self.note_expiry(answer);
        let step = self.round.step();
        split(self.round.on_confirm(node, step, answer))
    }

    fn on_silence(&mut self, node: usize) -> Step {
        // With a record, the answers to the `ACQUIRE` matter even in the second phase.
        if self.round.step() == 0 || self.round.is_recorded() {
            self.on_acquire(node, &Answer::Failed)
        } else {
            self.on_confirm(node, &Answer::Failed)
        }
    }

    fn silent(&self) -> impl Iterator<Item = usize> {
        self.round.silent()
    }
}

/// Splits the steps of the acquisition from those of the records.
fn split(step: OnceStep) -> Step {
    match step {
        OnceStep::Wait => Ok(AcquireStep::Wait),
        OnceStep::Confirm(token) => Ok(AcquireStep::Confirm(token)),
        OnceStep::Execute(token) => Ok(AcquireStep::Granted(token)),
        OnceStep::Refused(refusal) => Ok(AcquireStep::Refused(refusal)),
        other => Err(other),
    }
}
