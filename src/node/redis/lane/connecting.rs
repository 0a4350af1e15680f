//! How a lane comes to a connection, and what becomes of its jobs when one is lost.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::node::NodeFailure;
use crate::node::job::Job;
use crate::node::redis::connection::{Opened, open};
use crate::node::redis::inbox::Load;
use crate::node::redis::lane::{KEEPALIVE, Lane, PROBE_LIMIT, PROBE_PAUSE};

impl Lane {
    pub(super) fn on_opened(&mut self, opened: Result<Opened, Arc<str>>) {
        self.opening = None;
        let now = Instant::now();
        match opened {
            // The old connection may be about to answer, and then it is the better one: what went
            // out on it is still in order.
            Ok(opened) if self.is_silent() => {
                self.candidate = Some((opened, now + self.shared.timeouts.node));
            }
            Ok(opened) => self.adopt(opened),
            Err(why) => {
                self.note_down(&why);
                if self.shared.is_twin() {
                    self.leave(&why);
                }
                self.refuse_parked();
                self.retry_at = Some(now + PROBE_PAUSE);
            }
        }
    }

    /// Gives up a connection to what another node is too, after which the other may vote: this one is
    /// admitted again before it does.
    fn leave(&mut self, why: &Arc<str>) {
        // It was admitted before.
        self.candidate = None;
        let again = self.give_up_link(why);
        self.park_again(again);
        if let Some(guard) = &self.shared.guard {
            guard.leave(&self.shared.name);
        }
    }

    /// Makes a new connection the one that is used. Releases and records that are not confirmed go out again.
    pub(super) fn adopt(&mut self, opened: Opened) {
        let Opened { link, admission } = opened;
        let again = self.give_up_link(&"replaced by a new connection".into());
        self.park_again(again);
        let left = admission
            .as_ref()
            .map_or(Duration::ZERO, |admission| admission.left);
        self.passport.generation = admission.map(|admission| admission.generation);
        self.link = Some(link);
        self.adopted = Instant::now();
        self.link_used = false;
        self.opening_took = Some(self.opening_began.elapsed());
        self.openings = 0;
        self.candidate = None;
        self.retry_at = None;
        if left.is_zero() {
            self.quarantined_until = None;
            self.note_up();
        } else {
            self.note_quarantined(Instant::now() + left);
        }
        // Those that waited for a server that turns out not to have a vote.
        self.refuse_parked();
        self.send_parked();
    }

    pub(super) fn on_link_lost(&mut self, why: &Arc<str>) {
        let again = self.give_up_link(why);
        self.park_again(again);
        if let Some((opened, _)) = self.candidate.take() {
            self.adopt(opened);
        } else if self.opening.is_none() {
            let now = Instant::now();
            let unused = !self.link_used;
            let ended_unused = std::mem::replace(&mut self.ended_unused, unused);
            let lost_before = self.link_lost_at.replace(now);
            if unused && ended_unused && self.parked.is_empty() {
                // The server, or a proxy, closes idle connections: the next request opens one.
                self.rests = true;
                self.retry_at = Some(now + KEEPALIVE);
            } else if lost_before.is_some_and(|at| now - at < PROBE_PAUSE) {
                // The server, or a proxy, closes every connection at once.
                self.retry_at = Some(now + PROBE_PAUSE);
            } else {
                // At once: an idle connection that the server closed is no outage, and until this
                // attempt fails requests wait for it.
                self.start_opening();
            }
        }
    }

    /// Drops the connection and fails what is out on it, but for what is sent again, which it returns.
    pub(super) fn give_up_link(&mut self, why: &Arc<str>) -> Vec<Job> {
        self.link = None;
        self.transit = Duration::ZERO;
        self.sent = Load::default();
        self.unanswered.clear();
        self.answers.clear();
        // Those that were refused are older than what is out.
        let mut again: Vec<Job> = self.refused.take().into();
        for job in self.out.drain(..) {
            if job.is_sent_again() {
                again.push(job);
            } else {
                job.sender.send(Err(NodeFailure::Disconnected {
                    node: Arc::clone(&self.shared.name),
                    why: Arc::clone(why),
                }));
            }
        }
        again
    }

    /// Parks what was on a connection, before what never was: it is older.
    pub(super) fn park_again(&mut self, jobs: Vec<Job>) {
        for job in jobs.into_iter().rev() {
            self.parked.push_front(job);
        }
    }

    pub(super) fn start_opening(&mut self) {
        let shared = Arc::clone(&self.shared);
        let limit = self.opening_limit();
        self.retry_at = None;
        self.rests = false;
        self.opening_began = Instant::now();
        self.openings += 1;
        self.opening = Some(Box::pin(async move {
            tokio::time::timeout(limit, open(&shared))
                .await
                .unwrap_or_else(|_| Err(format!("no connection within {limit:?}").into()))
        }));
    }

    /// Returns how long an attempt to connect may take. Short, once it is known how long it takes,
    /// so that a server is back soon after its recovery; now and then as long as it is allowed to,
    /// for one that has become slower.
    fn opening_limit(&self) -> Duration {
        let longest = self.shared.timeouts.connect;
        match self.opening_took {
            Some(took) if self.openings % 8 != 7 => PROBE_LIMIT.max(2 * took).min(longest),
            _ => longest,
        }
    }

    /// Fails the requests that waited for a connection, but for those that go out all the same.
    fn refuse_parked(&mut self) {
        let now = Instant::now();
        let Some(failure) = self.shared.unreachable() else {
            return;
        };
        for job in self.parked.take() {
            if job.is_wanted(now) {
                self.parked.extend(job.despite(&failure));
            } else {
                job.sender.send(Err(failure.clone()));
            }
        }
    }
}
