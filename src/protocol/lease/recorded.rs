//! The round of an attempt at a key whose outcome is recorded.

use std::time::Duration;

use crate::protocol::lease::io::ACQUIRE;
use crate::protocol::lease::once::OnceSpec;
use crate::protocol::message::Reply;
use crate::protocol::once::{OnceRound, OnceStep};
use crate::protocol::quorum::{NodeSet, Quorum};
use crate::protocol::round::{AcquireRound, AcquireStep, Answer};

/// The next step of an attempt: one of the acquisition, or as an error one of the records.
pub(super) type Step = Result<AcquireStep, OnceStep>;

/// A [`OnceRound`], with what belongs to its record.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct RecordedRound {
    pub(super) round: OnceRound,
    /// The time until the first node with a record forgets it.
    pub(super) expires_in: Duration,
    /// The number of the `RECORD` of a repair.
    pub(super) repair: Option<u32>,
    /// Whether the rest of the record to repair is being read, for which the round waits.
    pub(super) is_reading: bool,
}

impl RecordedRound {
    pub(super) fn new(spec: OnceSpec, quorum: Quorum) -> Self {
        Self {
            round: OnceRound::new(quorum, spec.fingerprint),
            expires_in: Duration::MAX,
            repair: None,
            is_reading: false,
        }
    }

    pub(super) fn acquiring(&self) -> &AcquireRound {
        self.round.acquiring()
    }

    pub(super) fn silent(&self) -> NodeSet {
        self.round.silent().collect()
    }

    /// Returns whether all phases have the same deadline by now.
    pub(super) fn is_repairing(&self) -> bool {
        self.repair.is_some()
    }

    pub(super) fn counts(&self, number: u32) -> bool {
        self.repair == Some(number)
    }

    /// Returns the number of the request that the silent nodes have not answered.
    pub(super) fn silence(&self, confirm: Option<u32>) -> u32 {
        // With a record, the answers to the `ACQUIRE` matter even in the second phase.
        let confirm = confirm.filter(|_| !self.round.is_recorded());
        self.repair.or(confirm).unwrap_or(ACQUIRE)
    }

    pub(super) fn on_answer(
        &mut self,
        node: usize,
        number: u32,
        confirm: Option<u32>,
        answer: &Answer,
    ) -> Step {
        self.note_expiry(answer);
        split(if number == ACQUIRE {
            self.round.on_acquire(node, answer)
        } else if self.repair == Some(number) {
            self.round.on_record(node, answer)
        } else if confirm == Some(number) {
            self.round.on_confirm(node, self.round.step(), answer)
        } else {
            OnceStep::Wait
        })
    }

    /// Takes the answer of a node to an extension of the granted lock.
    pub(super) fn on_extension(&mut self, node: usize, answer: &Answer) -> Step {
        self.note_expiry(answer);
        split(self.round.on_extension(node, answer))
    }

    /// A record that cannot be read cannot be written either.
    pub(super) fn on_unreadable(&mut self) -> Step {
        for node in self.silent().iter() {
            let step = split(self.round.on_record(node, &Answer::Failed));
            if step != Ok(AcquireStep::Wait) {
                return step;
            }
        }
        Ok(AcquireStep::Wait)
    }

    fn note_expiry(&mut self, answer: &Answer) {
        if let Answer::Replied(Reply::Done { expires_in, .. }) = answer {
            self.expires_in = self.expires_in.min(*expires_in);
        }
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
