//! Releasing: releases the keys on every node that may hold them, and counts the answers.
//!
//! # Implementation details
//!
//! The task sends a release, and counts its answers while it continues, for example with another attempt. Several
//! releases may be under way, each in a phase of its own. The task waits for a node up to the node timeout. The lane
//! of the node keeps the release beyond that, and sends it when it can. When the task ends, it passes the unconfirmed
//! ones to the registry together with its votes, where later confirmations arrive.

use std::future::Future;
use std::sync::Arc;

use tokio::time::Instant;

use crate::lock::error::ReleaseError;
use crate::lock::failures::Failures;
use crate::lock::lease::cleanup::Cleanup;
use crate::lock::lease::hold::HoldingLock;
use crate::lock::lease::task::{LeaseTask, Release};
use crate::lock::lost::LostReason;
use crate::lock::queue::Permit;
use crate::lock::registry::{Unsettled, UnsettledRelease};
use crate::node::{Threshold, Vote, VoteReceiver};
use crate::protocol::Quorum;
use crate::protocol::round::ReleaseStep;

impl LeaseTask {
    /// Releases a lock, and reports to its last holder as soon as a majority has confirmed that.
    ///
    /// Not an `async fn`, which would have room for the holding in every lock that is held.
    pub(crate) fn release(
        &mut self,
        mut holding: HoldingLock,
        permit: Permit,
    ) -> impl Future<Output = ()> + Send + use<'_> {
        holding.end();
        let status = holding.control.status();
        if status.valid_until <= Instant::now() && status.lost.is_none() {
            holding.control.lose(LostReason::Expired);
        }
        let lost = holding.set_released();
        let HoldingLock {
            cleanup, control, ..
        } = holding;
        let phase = self.begin_release(cleanup, permit.publishes());
        // The requests of the next waiter follow the releases on every node.
        drop(permit);
        async move {
            let outcome = self.confirmed(phase).await;
            control.conclude(lost, outcome);
        }
    }

    /// Releases the keys that a failed attempt may hold. Not published, because no process waits for them.
    pub(crate) fn give_up(&mut self, cleanup: Cleanup) {
        self.begin_release(cleanup, false);
    }

    /// Leaves the keys on the nodes until their ttl.
    pub(crate) fn leave_to_expire(&mut self, cleanup: Cleanup) {
        self.releases.push(Release {
            keys: self.keys.clone(),
            phase: self.votes.next_phase(),
            gone_at: cleanup.gone_at(),
            round: cleanup.disarm(),
            due: None,
            failures: Failures::default(),
        });
    }

    /// Sends the releases of an attempt, and returns their phase. The answers are counted as they arrive.
    pub(super) fn begin_release(&mut self, cleanup: Cleanup, publishes: bool) -> u32 {
        self.count_received();
        let now = Instant::now();
        self.forget_releases(now);
        let phase = self.votes.next_phase();
        let gone_at = cleanup.gone_at();
        let round = cleanup.release(&self.votes, publishes);
        // Most locks have one release, and a push would reserve room for four.
        self.releases.reserve_exact(1);
        self.releases.push(Release {
            keys: self.keys.clone(),
            phase,
            round,
            due: Some(now + self.cluster.settings.node_timeout),
            failures: Failures::default(),
            gone_at,
        });
        phase
    }

    /// Counts a vote if it is on a release, and returns it otherwise.
    pub(crate) fn count_release(&mut self, vote: Vote) -> Option<Vote> {
        if let Some(subscribers) = vote.subscribers {
            self.places.set_subscribers(subscribers);
        }
        let Some(release) = self.releases.iter_mut().find(|r| r.phase == vote.phase) else {
            return Some(vote);
        };
        let answer = release.failures.note(vote.node, vote.outcome);
        release.round.on_release(vote.node, &answer);
        None
    }

    /// Waits until every node has answered every release or is overdue, and passes the unconfirmed ones to the registry.
    pub(crate) async fn settle(&mut self) {
        let is_open = |release: &&Release| !release.round.silent().is_empty();
        while let Some(release) = self.releases.iter().find(is_open) {
            let threshold = Threshold::new(release.phase, release.round.silent().len());
            self.next_release_votes(threshold).await;
        }
        self.forget_releases(Instant::now());
        if self.releases.is_empty() {
            return;
        }
        let names = Arc::clone(&self.cluster.names);
        let votes = std::mem::replace(&mut self.votes, VoteReceiver::new(&names));
        // Only releases go on.
        votes.next_phase();
        let releases = self.releases.drain(..).map(|release| UnsettledRelease {
            keys: release.keys,
            phase: release.phase,
            round: release.round,
            gone_at: release.gone_at,
        });
        self.ticket.registry().keep_unsettled(Unsettled {
            votes,
            names,
            releases: releases.collect(),
        });
    }

    /// Waits until a majority has confirmed a release, or cannot.
    async fn confirmed(&mut self, phase: u32) -> Result<(), ReleaseError> {
        let quorum = self.cluster.quorum;
        while let Some(release) = self.releases.iter().find(|release| release.phase == phase) {
            match release.round.step() {
                ReleaseStep::Wait => {}
                ReleaseStep::Freed => break,
                ReleaseStep::Lost => return Err(ReleaseError::Lost(LostReason::Gone)),
                ReleaseStep::Unconfirmed => {
                    return Err(ReleaseError::Unavailable {
                        reached: release.round.released(),
                        needed: quorum.majority(),
                        nodes: {
                            let failures = release.failures.clone();
                            failures.list(&self.cluster, release.round.silent().iter())
                        },
                    });
                }
            }
            let threshold = release.threshold(quorum);
            self.next_release_votes(threshold).await;
        }
        Ok(())
    }

    /// Waits for more votes on a release, and counts overdue nodes as failed.
    async fn next_release_votes(&mut self, threshold: Threshold) {
        let due = self.releases.iter().filter_map(|release| release.due).min();
        let due = due.unwrap_or_else(Instant::now);
        tokio::select! {
            biased;
            vote = self.votes.recv(threshold) => {
                // Other votes are no longer needed.
                drop(self.count_release(vote));
                self.count_received();
            }
            () = self.timer.at(due) => {
                self.count_received();
                self.give_up_on_late_nodes(due);
            }
        }
    }

    fn give_up_on_late_nodes(&mut self, due: Instant) {
        let after = self.cluster.settings.node_timeout;
        let is_late = |release: &&mut Release| release.due.is_some_and(|at| at <= due);
        for release in self.releases.iter_mut().filter(is_late) {
            release.due = None;
            for node in release.round.silent().iter() {
                let failure = self.cluster.timed_out(node, after);
                let answer = release.failures.note(node, Err(failure));
                release.round.on_release(node, &answer);
            }
        }
    }

    /// Counts the votes that arrived below their threshold.
    fn count_received(&mut self) {
        while let Some(vote) = self.votes.try_recv() {
            // Other votes are no longer needed.
            drop(self.count_release(vote));
        }
    }

    /// Forgets the releases that every node has confirmed, and those whose keys have ended by their ttl.
    fn forget_releases(&mut self, now: Instant) {
        self.releases
            .retain(|release| now < release.gone_at && !release.round.unreleased().is_empty());
    }
}

impl Release {
    /// Returns the number of further votes that may decide the release.
    fn threshold(&self, quorum: Quorum) -> Threshold {
        let answered = quorum.nodes() - self.round.silent().len();
        Threshold::new(self.phase, quorum.decisive().saturating_sub(answered))
    }
}
