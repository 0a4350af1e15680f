//! The state of a lane: its connection and its jobs, and how these are sent, kept and given up.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use deadpool_redis::redis::Pipeline;
use tokio::time::Instant;

use crate::node::failure::NodeFailure;
use crate::node::job::Job;
use crate::node::redis::guard::Admission;
use crate::node::redis::lane::calls::Calls;
use crate::node::redis::link::Link;
use crate::node::redis::server::{RedisServer, weight};
use crate::node::redis::table::{GenerationCheck, encode_call_into};
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

/// The task that talks to one server.
pub(super) struct Lane {
    pub(super) server: Arc<RedisServer>,
    pub(super) telemetry: NodeCalls,
    pub(super) live: Option<Live>,
    pub(super) next: Next,
    /// When a connection was last lost.
    pub(super) lost_at: Option<Instant>,
    /// Whether the connection before was lost without any use.
    pub(super) was_unused: bool,
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
    pub(super) admission: Admission,
    /// Since when it is used; before that, since when it was being opened.
    pub(super) since: Instant,
    /// Whether any job was sent on it.
    pub(super) is_used: bool,
    /// From when on several requests can share a call.
    pub(super) shares_from: Instant,
}

/// The next connection. Beside a live one, it is a probe.
pub(super) enum Next {
    /// None is planned, because there is a live one.
    None,
    /// An attempt to open it is under way, which ends by this instant.
    Connecting(Opening, Instant),
    /// It replaces the silent live one at this instant.
    Standby(Box<Live>, Instant),
    /// No attempt before this instant, because one has failed.
    Paused(Instant),
    /// No attempt before this instant unless a job comes.
    Resting(Instant),
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
            next: Next::Paused(Instant::now()),
            lost_at: None,
            was_unused: false,
            last_took: None,
            attempts: 0,
            calls: Calls::new(),
            parked: VecDeque::new(),
            refused: VecDeque::new(),
            refused_due: None,
            finished: 0,
            server,
        }
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
            live.is_used = true;
            let check = &live.admission.check;
            live.link.send(calls.len(), |output| {
                for jobs in calls {
                    encode_call_into(jobs.map(|job| job.encoded(check)), check, output);
                }
            });
            self.calls.on_sent();
        }
    }

    /// Sends those of the parked jobs that are still wanted, unless there is no connection.
    pub(super) fn send_parked(&mut self) {
        if self.live.is_none() {
            return;
        }
        let now = Instant::now();
        for (job, count) in std::mem::take(&mut self.parked).into_iter().zip(1..) {
            if job.is_wanted(now) {
                self.calls.add(job, shared_check(&self.live, now), now);
            } else {
                self.finished += weight(&job);
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

    /// Fails the parked jobs that are not sent to the server in its current state.
    pub(super) fn refuse_parked(&mut self) {
        let (now, failure) = (Instant::now(), self.server.last_failure());
        if failure.is_some() {
            for job in std::mem::take(&mut self.parked) {
                let kept = self.accept(job, failure.as_ref(), now);
                self.parked.extend(kept);
            }
        }
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

    /// Returns whether an attempt to connect is under way or planned. That is always so without a connection.
    pub(super) fn is_probing(&self) -> bool {
        !matches!(self.next, Next::None)
    }

    /// Returns when the standby is used or an attempt begins, if nothing else happens before.
    pub(super) fn next_due(&self) -> Option<Instant> {
        match &self.next {
            Next::None | Next::Connecting(..) => None,
            Next::Standby(_, at) | Next::Paused(at) | Next::Resting(at) => Some(*at),
        }
    }

    /// Returns when to ask the server again, on a new connection, whether it may vote.
    pub(super) fn recheck_at(&self) -> Option<Instant> {
        if self.is_probing() {
            return None;
        }
        if self.server.duplicate().is_some() {
            // The live connection leads to where the name led when it was opened.
            return Some(self.live.as_ref()?.since + DUPLICATE_PAUSE);
        }
        // The server decides by its own clock, so it is asked again at the end of its quarantine.
        match self.server.is_open() {
            true => None,
            false => self.server.quarantined_until(),
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
    live.map(|live| &live.admission.check)
}
