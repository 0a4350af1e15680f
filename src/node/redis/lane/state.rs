//! The state of a lane: its connection and the transitions between its states; its jobs, and how these are sent, kept and
//! given up.
//!
//! # Implementation details
//!
//! There may be a *live* connection, and there may be a *next* one: an attempt to open it is under way, or planned for an
//! instant. Without a live connection, there always is a next one. It is *paused* after a failed attempt, and if the server
//! closes one connection right behind the other.
//!
//! ```text
//!             opened                     lost                    when
//!   next ────────────────▶ live  ──────────────▶ connecting   usually
//!                                                paused       lost twice within the pause
//! ```
//!
//! A live connection may be silent or out of date. The next one is a *probe* then, opened beside it. If the old connection
//! is silent when the new one is ready, the new one stands by: the old one may still answer, and everything on it is
//! in order. The standby replaces it if it stays silent.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use deadpool::managed::Manager;
use deadpool_redis::redis::Pipeline;
use tokio::time::{Instant, timeout};

use crate::node::failure::NodeFailure;
use crate::node::job::Job;
use crate::node::redis::describe::describe_timeout;
use crate::node::redis::lane::calls::Calls;
use crate::node::redis::link::Link;
use crate::node::redis::server::{RedisServer, weight};
use crate::node::redis::table::{GenerationCheck, encode_call_into, load_all};
use crate::node::telemetry::NodeCalls;
use crate::protocol::message::Reply;

/// The maximum number of jobs in one batch.
pub(super) const MAX_BATCH: usize = 128;
/// The interval at which an idle connection is checked.
pub(super) const KEEPALIVE: Duration = Duration::from_secs(5);
/// The pause between two attempts to reach a server that does not answer.
pub(super) const PROBE_PAUSE: Duration = Duration::from_millis(150);
/// How often a server that is another node too is checked.
const DUPLICATE_PAUSE: Duration = Duration::from_secs(5);
/// The minimum time limit of an attempt. With the pause, it bounds how long after its recovery a server is back that
/// was reached before.
const PROBE_LIMIT: Duration = Duration::from_millis(500);

/// The task that talks to one server.
pub(super) struct Lane {
    pub(super) server: Arc<RedisServer>,
    pub(super) telemetry: NodeCalls,
    pub(super) live: Option<Live>,
    /// None only while there is a live one.
    pub(super) next: Option<Next>,
    /// When a connection was last lost.
    lost: Option<Instant>,
    /// How long the last successful attempt to connect took.
    pub(super) last_took: Option<Duration>,
    /// The number of attempts since then.
    pub(super) attempts: u32,
    pub(super) calls: Calls,
    /// Jobs that wait for a connection.
    pub(super) parked: VecDeque<Job>,
    /// Releases that the server refused for a temporary reason. A server that is busy with a script, must not write, or
    /// denies a command of the scripts refuses all releases alike, so one of them is sent after each pause, and the others
    /// once that is accepted: sent together, the releases of many seconds would load a server that is slow already.
    pub(super) refused: VecDeque<Job>,
    /// When to try the next of them.
    pub(super) refused_due: Option<Instant>,
    /// The weight of the jobs that it has finished and not reported to the inbox.
    pub(super) finished: usize,
}

/// A connection that is ready for lock commands.
pub(super) struct Live {
    pub(super) link: Link,
    /// What requests have beside their commands.
    pub(super) check: GenerationCheck,
    /// Until when the server is quarantined, by its admission.
    pub(super) quarantined_until: Option<Instant>,
    /// Since when it is used; before that, since when it was being opened.
    pub(super) since: Instant,
    /// When something was last sent on it.
    pub(super) sent: Instant,
    /// From when on several requests can share a call.
    pub(super) shares_from: Instant,
}

/// The next connection. Beside a live one, it is a probe.
pub(super) enum Next {
    /// An attempt to open it is under way, which ends by this instant.
    Connecting(Opening, Instant),
    /// It replaces the silent live one at this instant.
    Standby(Box<Live>, Instant),
    /// No attempt before this instant, because one has failed.
    Paused(Instant),
}

type Opening = Pin<Box<dyn Future<Output = Result<Live, Arc<str>>> + Send>>;

/// Detaches the lane from the inbox, however it ends. If its home has ended, the next lane sends the releases.
impl Drop for Lane {
    fn drop(&mut self) {
        let unconfirmed = match std::thread::panicking() {
            // The next lane must not panic on the same job.
            true => Vec::new(),
            false => self.unconfirmed(),
        };
        // Requests must not fail because of the last reachability, or none would start the next lane. Reset before
        // detaching, because the next lane may set it at once.
        self.server.reset();
        self.server.inbox.detach(unconfirmed);
    }
}

impl Lane {
    /// Creates a lane whose server is down until the first attempt to connect.
    pub(super) fn new(server: Arc<RedisServer>) -> Self {
        Self {
            telemetry: NodeCalls::new(&server.name, server.group()),
            live: None,
            next: Some(Next::Paused(Instant::now())),
            lost: None,
            last_took: None,
            attempts: 0,
            calls: Calls::default(),
            parked: VecDeque::new(),
            refused: VecDeque::new(),
            refused_due: None,
            finished: 0,
            server,
        }
    }

    /// Starts an attempt, beside the live connection if there is one.
    pub(super) fn start_attempt(&mut self) {
        let (server, began) = (Arc::clone(&self.server), Instant::now());
        let limit = self.attempt_limit();
        let opening = async move {
            let opened = timeout(limit, open(&server, began)).await;
            opened.unwrap_or_else(|_| Err(describe_timeout(limit)))
        };
        self.next = Some(Next::Connecting(Box::pin(opening), began + limit));
        self.attempts += 1;
    }

    pub(super) fn on_attempted(&mut self, attempted: Result<Live, Arc<str>>) {
        let now = Instant::now();
        match attempted {
            Ok(opened) if self.is_silent() => {
                let until = now + self.server.timeouts.node;
                self.next = Some(Next::Standby(Box::new(opened), until));
            }
            Ok(opened) => self.adopt(opened),
            Err(why) => {
                self.server.set_down(&why);
                self.next = Some(Next::Paused(now + PROBE_PAUSE));
                if self.server.duplicate().is_some() {
                    // Gives up the connection to a server that is another node too, after which the other node may vote.
                    // This node is admitted again before it does.
                    self.live = None;
                    self.park_in_flight(&why);
                    self.server.guard.forget(&self.server.name);
                }
                self.send_parked();
            }
        }
    }

    /// Uses a new connection from now on. Unconfirmed releases and records are sent again.
    pub(super) fn adopt(&mut self, mut opened: Live) {
        self.park_in_flight(&"replaced by a new connection".into());
        let now = Instant::now();
        // With its admission, because the next attempt is measured with that as well.
        self.last_took = Some(now - opened.since);
        self.attempts = 0;
        opened.since = now;
        self.server.set_answering(opened.quarantined_until);
        self.live = Some(opened);
        self.next = None;
        self.send_parked();
    }

    /// Uses the standby, and returns whether there was one.
    pub(super) fn adopt_standby(&mut self) -> bool {
        let is_standby = |next: &mut Next| matches!(next, Next::Standby(..));
        let Some(Next::Standby(opened, _)) = self.next.take_if(is_standby) else {
            return false;
        };
        self.adopt(*opened);
        true
    }

    pub(super) fn on_lost(&mut self, why: &Arc<str>) {
        self.park_in_flight(why);
        self.live = None;
        // A probe beside it becomes the connection, or is it already.
        if self.adopt_standby() || matches!(self.next, Some(Next::Connecting(..))) {
            return;
        }
        let now = Instant::now();
        let before = self.lost.replace(now);
        if before.is_some_and(|before| now - before < PROBE_PAUSE) {
            // The server, or a proxy, closes every connection at once.
            self.next = Some(Next::Paused(now + PROBE_PAUSE));
        } else {
            // A closed idle connection is no outage, so jobs wait for this attempt.
            self.start_attempt();
        }
    }

    /// Ends the probe, because the live connection answers again. Returns whether that stays: not if the standby leads to
    /// another memory, because the state of the node is that of the memory found last.
    pub(super) fn on_recovered(&mut self) -> bool {
        // The standby was admitted last, so the guard and callers know the node by its memory.
        if let (Some(live), Some(Next::Standby(opened, _))) = (&self.live, &self.next)
            && opened.check.generation != live.check.generation
        {
            return !self.adopt_standby();
        }
        self.next = None;
        self.server.set_answering(self.server.quarantined_until());
        true
    }

    /// Returns when more is known of a server that is down or must not vote, at the latest: the next attempt begins, or the
    /// current one ends.
    pub(super) fn knows_more_at(&self) -> Option<Instant> {
        match &self.next {
            Some(Next::Connecting(_, ends_at)) => Some(*ends_at),
            _ => self.next_due(),
        }
    }

    /// Returns the time limit of the next attempt. It is short once the usual time is known, so that a server is
    /// back soon after its recovery; every eighth attempt may take as long as the settings allow, because the
    /// server may have become slower.
    fn attempt_limit(&self) -> Duration {
        let longest = self.server.timeouts.connect;
        let connecting = match self.last_took {
            Some(took) if self.attempts % 8 != 7 => PROBE_LIMIT.max(2 * took).min(longest),
            _ => longest,
        };
        // Added, so that a provider of credentials is given up first: that error names it.
        connecting + self.server.pool.manager().login_limit()
    }

    /// Answers a job for the last time, which frees its room in the inbox.
    pub(super) fn finish(&mut self, job: Job, outcome: Result<Reply, NodeFailure>) {
        self.finished += weight(&job);
        job.sender.send(outcome);
    }

    /// Sends the next batch, unless it is empty.
    pub(super) fn send(&mut self, now: Instant) {
        let calls = self.calls.unsent(now);
        if let Some(live) = &mut self.live
            && calls.len() > 0
        {
            live.sent = now;
            let check = &live.check;
            live.link.send(calls.len(), |output| {
                for jobs in calls {
                    encode_call_into(jobs.map(|job| job.encoded(check)), check, output);
                }
            });
            self.calls.on_sent();
        }
    }

    /// Sends the parked jobs if there is a connection, and fails those that are not sent to the server in its current state.
    pub(super) fn send_parked(&mut self) {
        let (now, failure) = (Instant::now(), self.server.last_failure());
        for (job, count) in std::mem::take(&mut self.parked).into_iter().zip(1..) {
            let job = self.accept(job, failure.as_ref(), now);
            if self.live.is_none() {
                self.parked.extend(job);
            } else if let Some(job) = job {
                self.calls.add(job, shared_check(&self.live, now), now);
            }
            if count % MAX_BATCH == 0 {
                self.send(now);
            }
        }
        self.send(now);
    }

    /// Sends commands that are no jobs.
    pub(super) fn send_pipeline(&mut self, commands: &Pipeline) {
        if let Some(live) = &mut self.live {
            live.link.send_pipeline(commands);
            let now = Instant::now();
            live.sent = now;
            (0..commands.len()).for_each(|_| self.calls.push_call(now, None));
            self.calls.on_sent();
        }
    }

    /// Parks the refused releases before all other jobs, because they are older.
    pub(super) fn unpark_refused(&mut self) {
        self.refused_due = None;
        while let Some(release) = self.refused.pop_back() {
            self.parked.push_front(release);
        }
    }

    /// Fails the jobs of a connection that is gone, and parks those that are sent again before all that were never
    /// sent, because they are older.
    pub(super) fn park_in_flight(&mut self, why: &Arc<str>) {
        for job in self.calls.drain().into_iter().rev() {
            if job.is_sent_again() {
                self.parked.push_front(job);
            } else {
                self.finish(job, Err(self.server.disconnected(why)));
            }
        }
        // Refused releases are older than the jobs in flight.
        self.unpark_refused();
    }

    /// Returns what to send for a job to a server that has this failure, if it has one. Fails a job that is not sent.
    pub(super) fn accept(
        &mut self,
        job: Job,
        failure: Option<&NodeFailure>,
        now: Instant,
    ) -> Option<Job> {
        let accepted = match failure {
            _ if !job.is_wanted(now) => Err(job),
            Some(failure) => job.despite(failure),
            None => Ok(job),
        };
        let refuse = |job| {
            let given_up = || self.server.given_up();
            let why = failure.cloned().unwrap_or_else(given_up);
            self.finish(job, Err(why));
        };
        accepted.map_err(refuse).ok()
    }

    /// Returns when the standby is used or an attempt begins, if nothing else happens before. A server that must not vote is
    /// asked again, on a new connection.
    pub(super) fn next_due(&self) -> Option<Instant> {
        match &self.next {
            Some(Next::Connecting(..)) => None,
            Some(Next::Standby(_, at) | Next::Paused(at)) => Some(*at),
            // The live connection leads to where the name led when it was opened.
            None if self.server.duplicate().is_some() => {
                Some(self.live.as_ref()?.since + DUPLICATE_PAUSE)
            }
            None if self.server.is_open() => None,
            // The server decides by its own clock, so it is asked again at the end of its quarantine.
            None => self.server.quarantined_until(),
        }
    }

    /// Returns whether a reply on the connection is overdue.
    pub(super) fn is_silent(&self) -> bool {
        let silent_at = self.calls.silent_at(self.server.timeouts.node);
        silent_at.is_some_and(|at| at <= Instant::now())
    }

    /// Removes all jobs. Returns the releases, and answers the others: the server may have executed them.
    fn unconfirmed(&mut self) -> Vec<Job> {
        let now = Instant::now();
        let why = "the runtime of the connection has ended; the next use connects again";
        let lost = self.server.disconnected(&why.into());
        // The oldest first.
        let jobs = self.refused.drain(..).chain(self.calls.drain());
        let (mut unconfirmed, others): (Vec<_>, Vec<_>) =
            jobs.chain(self.parked.drain(..)).partition(Job::is_release);
        for job in others {
            job.sender.send(Err(lost.clone()));
        }
        unconfirmed.retain(|job| job.is_wanted(now));
        unconfirmed
    }

    /// Returns whether a release is unconfirmed whose lock may still be there. Intents do not count: they live for a
    /// day, which is too long to keep a lane whose node was dropped.
    pub(super) fn has_release(&self) -> bool {
        let now = Instant::now();
        let waiting = self.parked.iter().chain(&self.refused);
        let mut jobs = waiting.chain(&self.calls.jobs);
        jobs.any(|job| job.may_unlock(now))
    }
}

/// Returns the check with which requests can share a call, if they can.
pub(super) fn shared_check(live: &Option<Live>, now: Instant) -> Option<&GenerationCheck> {
    let live = live.as_ref().filter(|live| live.shares_from <= now);
    live.map(|live| &live.check)
}

/// Opens a connection and prepares it for lock commands, on the very connection that is kept.
///
/// It does not come out of the pool: the name may lead to another server since an idle connection was opened, and
/// that one may be dead.
async fn open(server: &RedisServer, began: Instant) -> Result<Live, Arc<str>> {
    let mut link = server.pool.manager().create().await?;
    // Before the admission, whose script is one of these.
    link.call_all(&load_all(false)).await?;
    let attempt = server.timeouts.connect + server.timeouts.node;
    let admitted = server.guard.admit(&server.name, &mut link, attempt);
    let (check, quarantine) = admitted.await?;
    if check.in_cluster_mode {
        link.call_all(&load_all(true)).await?;
    }
    Ok(Live {
        link,
        check,
        quarantined_until: (!quarantine.is_zero()).then(|| Instant::now() + quarantine),
        since: began,
        sent: began,
        shares_from: began,
    })
}

#[cfg(test)]
pub(super) mod tests;
