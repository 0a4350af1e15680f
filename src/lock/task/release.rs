//! Releasing: what was claimed is given back on every node, and the answers are counted.

use std::sync::Arc;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::lock::claim::Claim;
use crate::lock::error::ReleaseError;
use crate::lock::front::Turn;
use crate::lock::lease::{Status, Wished};
use crate::lock::lost::LostReason;
use crate::lock::task::state::{Failures, LeaseTask, Release};
use crate::node::{NodeFailure, Threshold, Vote};
use crate::protocol::Quorum;
use crate::protocol::round::ReleaseStep;

/// A lock that is being released.
pub(super) struct Releasing {
    phase: u32,
    /// Why it was not held any more, if it was not.
    lost: Option<LostReason>,
}

impl LeaseTask {
    /// Sends the release of the lock.
    pub(super) fn begin_release(
        &mut self,
        claim: Claim,
        turn: Turn,
        status: &watch::Sender<Status>,
    ) -> Releasing {
        let now = Instant::now();
        let mut lost = None;
        status.send_modify(|status| {
            if status.lost.is_none() && status.valid_until <= now {
                status.lost = Some(LostReason::Expired);
            }
            lost = status.lost;
            status.lost.get_or_insert(LostReason::Released);
        });
        let phase = self.give_back(claim, turn.tells());
        // The requests of whoever is next are behind the releases on every node.
        drop(turn);
        Releasing { phase, lost }
    }

    /// Tells how the release went as soon as a majority has answered.
    pub(super) async fn finish_release(&mut self, releasing: Releasing, wished: &Wished) {
        let Releasing { phase, lost } = releasing;
        let outcome = loop {
            let Some(release) = self.releases.iter().find(|release| release.phase == phase) else {
                return;
            };
            match release.round.step() {
                ReleaseStep::Wait => {}
                ReleaseStep::Freed => break Ok(()),
                ReleaseStep::Unconfirmed => {
                    break Err(ReleaseError::Unavailable {
                        reached: release.round.released(),
                        needed: self.inner.settings.quorum.majority(),
                        nodes: release.failures.list(),
                    });
                }
            }
            self.next_release_votes(release.enough(self.inner.settings.quorum))
                .await;
        };
        let outcome = match lost {
            Some(reason) => Err(ReleaseError::Lost(reason)),
            None => outcome,
        };
        wished.tell_released(outcome);
    }

    /// Releases what a failed attempt may hold. Nobody is told: nobody waits for what it had.
    pub(super) fn give_up(&mut self, claim: Claim) {
        self.give_back(claim, false);
    }

    /// Releases what a claim may hold. Returns at once; the answers are counted as they come.
    /// Returns their phase.
    pub(super) fn give_back(&mut self, claim: Claim, tells: bool) -> u32 {
        self.count_waiting();
        let now = Instant::now();
        // A node that was given up on keeps its release; there is nobody left to hear of it.
        self.forget_old_releases(now);
        let phase = self.votes.next_phase();
        let gone_at = claim.gone_at();
        let round = claim.release(&self.votes, tells);
        self.releases.push(Release {
            phase,
            round,
            due: Some(now + self.inner.settings.node_timeout),
            failures: Failures::default(),
            gone_at,
        });
        phase
    }

    /// Counts a vote if it is on a release, and gives it back if not.
    pub(super) fn count_release(&mut self, vote: Vote) -> Option<Vote> {
        if let Some(listeners) = vote.subscribers {
            for rivals in &self.rivals {
                rivals.set_subscribers(listeners);
            }
        }
        let Some(release) = self.releases.iter_mut().find(|r| r.phase == vote.phase) else {
            return Some(vote);
        };
        let answer = release.failures.note(vote.node, vote.outcome);
        release.round.on_release(vote.node, &answer);
        None
    }

    /// Waits for more votes on a release, or gives up on the nodes that are overdue.
    async fn next_release_votes(&mut self, enough: Threshold) {
        let due = self.releases.iter().filter_map(|release| release.due).min();
        let due = due.unwrap_or_else(Instant::now);
        tokio::select! {
            biased;
            vote = self.votes.recv(enough) => {
                // VoteReceiver on anything else are of no interest any more.
                drop(self.count_release(vote));
                self.count_waiting();
            }
            () = self.alarm.at(due) => {
                self.count_waiting();
                let timed_out = (0..self.inner.nodes.len()).map(|node| self.timed_out(node));
                let timed_out: Vec<NodeFailure> = timed_out.collect();
                let is_late = |release: &&mut Release| release.due.is_some_and(|at| at <= due);
                for release in self.releases.iter_mut().filter(is_late) {
                    release.due = None;
                    let late: Vec<usize> = release.round.silent().collect();
                    for node in late {
                        let failure = Err(timed_out[node].clone());
                        let answer = release.failures.note(node, failure);
                        release.round.on_release(node, &answer);
                    }
                }
            }
        }
    }

    /// Counts the votes that were too few to wake for, but came in time.
    fn count_waiting(&mut self) {
        while let Some(vote) = self.votes.try_recv() {
            // VoteReceiver on anything else are of no interest any more.
            drop(self.count_release(vote));
        }
    }

    /// Waits until every node has answered every release, or is overdue, and notes which did not.
    pub(super) async fn settle(&mut self) {
        let is_open = |release: &&Release| release.round.silent().next().is_some();
        while let Some(release) = self.releases.iter().find(is_open) {
            let enough = Threshold::new(release.phase, release.round.silent().count());
            self.next_release_votes(enough).await;
        }
        self.forget_old_releases(Instant::now());
    }

    fn forget_old_releases(&mut self, now: Instant) {
        let (inner, ticket, keys) = (&self.inner, &self.ticket, &self.keys);
        self.releases.retain(|release| {
            let late = release.due.is_none_or(|due| due <= now);
            let over = late || release.round.silent().next().is_none();
            if over {
                let nodes = release.round.unreleased();
                let names = nodes.map(|node| Arc::clone(inner.nodes[node].name()));
                ticket.set_unconfirmed(names, keys, release.gone_at);
            }
            !over
        });
    }
}

impl Release {
    /// Returns how many more votes may decide it.
    fn enough(&self, quorum: Quorum) -> Threshold {
        let heard = quorum.nodes() - self.round.silent().count();
        Threshold::new(self.phase, quorum.decisive().saturating_sub(heard))
    }
}
