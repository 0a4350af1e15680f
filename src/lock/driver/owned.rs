//! A lease with its owner: what its requests are made of.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::lock::failures::Failures;
use crate::lock::registry::UnsettledRelease;
use crate::lock::state::LockState;
#[cfg(feature = "test-util")]
use crate::lock::traces::LeaseTrace;
use crate::node::{NodeFailure, Packet, Trail, Vote};
use crate::protocol::lease::{Input, Lease};
use crate::protocol::message::{Command, Op};
use crate::protocol::{KeyNames, LockKeys, OwnerToken};

/// One attempt, with what its requests are made of.
pub(super) struct OwnedLease {
    pub(super) lease: Lease,
    /// The time that the lease counts from.
    pub(super) origin: Instant,
    /// The phase of the votes before its first request.
    pub(super) phase: u32,
    pub(super) owner: OwnerToken,
    pub(super) trail: Trail,
    pub(super) names: Arc<[KeyNames]>,
    pub(super) keys: LockKeys,
    /// The failures of nodes in the acquisition, or in the extension or release that followed it.
    pub(super) failures: Failures,
    /// The request of that extension or release.
    pub(super) decision: u32,
    /// What its holders see, once it is granted.
    pub(super) state: Option<Arc<LockState>>,
    #[cfg(feature = "test-util")]
    pub(super) trace: Option<LeaseTrace>,
}

impl OwnedLease {
    pub(super) fn handle(&mut self, input: Input) {
        let now = self.origin.elapsed();
        self.handle_at(input, now);
    }

    fn handle_at(&mut self, input: Input, now: Duration) {
        #[cfg(feature = "test-util")]
        if let Some(trace) = &self.trace {
            trace.lock().push(input.clone(), now);
        }
        self.lease.handle(input, now);
    }

    pub(super) fn on_vote(&mut self, vote: Vote, now: Duration) {
        let (node, number) = (vote.node, vote.phase - self.phase);
        let never_sent = vote.outcome.as_ref().is_err_and(NodeFailure::never_sent);
        let answer = self.failures(number).note(node, vote.outcome);
        let input = match never_sent {
            true => Input::NeverSent { node, number },
            false => Input::Answered {
                node,
                number,
                answer,
            },
        };
        self.handle_at(input, now);
    }

    /// Returns the failures of the nodes in the decision to which this request belongs.
    pub(super) fn failures(&mut self, number: u32) -> &mut Failures {
        if self.decision != number && !self.lease.is_acquiring() {
            (self.decision, self.failures) = (number, Failures::default());
        }
        &mut self.failures
    }

    pub(super) fn packet(&mut self, op: Op, publishes: bool, gone_at: Instant) -> Arc<Packet> {
        let retention = self.names.first().and_then(KeyNames::intent_retention);
        let until = match op {
            Op::Release => retention.map(|retention| gone_at + retention),
            Op::ReleaseAfter { left } => Some(Instant::now() + left),
            _ => None,
        };
        let command = Command {
            names: Arc::clone(&self.names),
            owner: self.owner.clone(),
            op,
        };
        Packet::of_release(until, command, publishes, self.trail.clone())
    }

    /// Returns whether a vote is on a request of this attempt to which answers still count.
    pub(super) fn is_asked(&self, vote: &Vote) -> bool {
        vote.phase > self.phase && self.lease.counts(vote.phase - self.phase)
    }

    /// Returns whether a vote is on a request of the acquisition, which has ended.
    pub(super) fn is_late(&self, vote: &Vote) -> bool {
        vote.phase > self.phase && !self.is_asked(vote)
    }

    /// Returns whether a node may still have the lock.
    pub(super) fn is_open(&self, now: Instant) -> bool {
        now < self.origin + self.lease.gone_at() && !self.lease.may_hold().is_empty()
    }

    /// Returns the release that goes on without the driver.
    pub(super) fn unsettled(self) -> UnsettledRelease {
        let gone_at = self.origin + self.lease.gone_at();
        let (number, round) = self.lease.into_release();
        UnsettledRelease {
            keys: self.keys,
            phase: self.phase + number,
            round,
            gone_at,
        }
    }
}
