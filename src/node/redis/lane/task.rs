//! The task of a lane: moves jobs from the inbox to the connection, and replies to the votes.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use deadpool_redis::redis::{Pipeline, Value};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until};

use crate::node::failure::NodeFailure;
use crate::node::job::Job;
use crate::node::redis::decode::{
    deal, decode, is_noscript, is_refusal_of_call, is_temporary_refusal,
};
use crate::node::redis::describe::describe_refusal;
use crate::node::redis::lane::calls::Calls;
use crate::node::redis::lane::connection::{
    Connection, KEEPALIVE, Live, PROBE_PAUSE, poll_attempt, poll_replies,
};
use crate::node::redis::server::{RedisServer, weight};
use crate::node::redis::table::{encode_call_into, load_all};
use crate::node::telemetry::NodeCalls;
use crate::protocol::message::Reply;

/// The maximum number of jobs in one batch.
const MAX_BATCH: usize = 128;
/// The number of waiting jobs beyond which releases of expired locks are dropped. They would only take back an
/// intent, which only keeps a request from being executed.
const MAX_KEPT: usize = 1 << 16;
/// How often a server that is another node too is checked.
const DUPLICATE_PAUSE: Duration = Duration::from_secs(5);

struct Lane {
    server: Arc<RedisServer>,
    telemetry: NodeCalls,
    connection: Connection,
    calls: Calls,
    /// The replies that have arrived.
    replies: Vec<Value>,
    /// Jobs that wait for a connection.
    parked: VecDeque<Job>,
    /// Releases that the server refused for a temporary reason. A server that is busy with a script, or must not write,
    /// refuses all releases alike, so one of them is sent after each pause, and the others once that is accepted: sent
    /// together, the releases of many seconds would load a server that is slow already.
    refused: VecDeque<Job>,
    /// When to try the next of them.
    refused_due: Option<Instant>,
    /// The weight of the jobs that it has finished and not reported to the inbox.
    finished: usize,
}

/// Starts a lane, which ends when the inbox is closed and no release is left.
pub(in super::super) fn spawn(server: &Arc<RedisServer>) {
    server.home.spawn(Lane::new(Arc::clone(server)).run());
}

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
    fn new(server: Arc<RedisServer>) -> Self {
        Self {
            telemetry: NodeCalls::new(&server.name, server.group()),
            connection: Connection::new(&server),
            calls: Calls::new(),
            replies: Vec::new(),
            parked: VecDeque::new(),
            refused: VecDeque::new(),
            refused_due: None,
            finished: 0,
            server,
        }
    }

    async fn run(mut self) {
        self.connection.start_attempt();
        let mut is_open = true;
        // One timer, which may fire too early: resetting it for every reply costs more than that.
        let mut timer = Box::pin(sleep_until(self.next_timer()));
        let mut jobs = VecDeque::new();
        while is_open || self.has_release() {
            if !self.server.is_open() {
                self.server.set_asked_at(self.knows_more_at());
            }
            let next_timer = self.next_timer();
            if next_timer < timer.deadline() {
                timer.as_mut().reset(next_timer);
            }
            // In this order: a reply that has arrived is not late, and it may free the room that a job needs.
            tokio::select! {
                biased;
                replied = poll_fn(|context| {
                    poll_replies(&mut self.connection.live, context, &mut self.replies)
                }) => self.on_replied(replied),
                attempted = poll_fn(|context| {
                    poll_attempt(&mut self.connection.next, context)
                }) => self.on_attempted(attempted),
                has_jobs = poll_fn(|context| {
                    self.server.inbox.poll_ready(context, &mut self.finished)
                }), if is_open && !self.calls.is_full() => {
                    is_open = has_jobs;
                    // On a busy connection, waits for callers that are about to submit: one batch costs less than
                    // two.
                    if !self.calls.is_empty() {
                        yield_now().await;
                    }
                    self.server.inbox.take(MAX_BATCH, &mut jobs);
                    self.on_jobs(jobs.drain(..));
                }
                () = timer.as_mut() => {
                    self.on_timer();
                    timer.as_mut().reset(self.next_timer());
                }
            }
        }
    }

    fn on_jobs(&mut self, jobs: impl ExactSizeIterator<Item = Job>) {
        let now = Instant::now();
        let failure = self.server.failure();
        let is_live = self.connection.live.is_some();
        let may_send = is_live && (failure.is_some() || self.server.is_open());
        // A single job shares no call.
        let may_share = jobs.len() > 1;
        for job in jobs {
            if job.calls_off() {
                self.finish(job, Ok(Reply::Released));
                continue;
            }
            if !job.is_wanted(now) {
                let given_up = || NodeFailure::Unreachable {
                    node: Arc::clone(&self.server.name),
                    why: "the caller gave up before the request was sent".into(),
                };
                let why = failure.clone().unwrap_or_else(given_up);
                self.finish(job, Err(why));
                continue;
            }
            let job = match &failure {
                Some(failure) => match job.despite(failure) {
                    Ok(job) => job,
                    Err(job) => {
                        self.finish(job, Err(failure.clone()));
                        continue;
                    }
                },
                None => job,
            };
            if may_send {
                // Also to a silent server: the acquisition is ahead of its release on this connection.
                let check = may_share.then(|| self.connection.shared_check(now));
                self.calls.add(job, check.flatten(), now);
            } else {
                self.parked.push_back(job);
            }
        }
        if is_live {
            self.send(now);
        } else if !self.parked.is_empty() {
            self.connection.wake();
        }
    }

    /// Answers a job for the last time, which frees its room in the inbox.
    fn finish(&mut self, job: Job, outcome: Result<Reply, NodeFailure>) {
        self.finished += weight(&job);
        job.sender.send(outcome);
    }

    /// Sends the next batch, unless it is empty.
    fn send(&mut self, now: Instant) {
        let calls = self.calls.unsent(now);
        if let Some(live) = &mut self.connection.live
            && calls.len() > 0
        {
            live.is_used = true;
            live.link.send(calls.len(), |output| {
                for jobs in calls {
                    let commands = jobs.map(|job| job.encoded(&live.check));
                    encode_call_into(commands, &live.check, output);
                }
            });
            self.calls.on_sent();
        }
    }

    /// Sends those of the parked jobs that are still wanted, unless there is no connection.
    fn send_parked(&mut self) {
        if self.connection.live.is_none() && !self.parked.is_empty() {
            return self.connection.wake();
        }
        let now = Instant::now();
        for (job, count) in std::mem::take(&mut self.parked).into_iter().zip(1..) {
            if job.is_wanted(now) {
                self.calls.add(job, self.connection.shared_check(now), now);
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
    fn send_pipeline(&mut self, commands: &Pipeline) {
        if let Some(live) = &mut self.connection.live {
            live.link.send_pipeline(commands);
            let now = Instant::now();
            (0..commands.len()).for_each(|_| self.calls.push_call(now, None));
            self.calls.on_sent();
        }
    }

    /// Handles the replies that have arrived, behind which the connection may be lost.
    fn on_replied(&mut self, mut replied: Result<(), Arc<str>>) {
        let now = Instant::now();
        self.telemetry.at(now);
        let (mut forgot_scripts, mut forgot_all) = (false, false);
        let mut replies = std::mem::take(&mut self.replies);
        for mut reply in replies.drain(..) {
            // Replies come in the order of the calls, so each belongs to the oldest one.
            let Some(call) = self.calls.pop() else {
                replied = Err("the server sent a reply without a request".into());
                break;
            };
            if call.jobs == 0
                && let Some(why) = describe_refusal(&reply)
            {
                // A server that refuses a ping or the scripts refuses all requests. A new connection finds out why, and
                // reports it.
                replied = Err(why);
                break;
            }
            let is_error = matches!(reply, Value::ServerError(_));
            let is_noscript = is_error && is_noscript(&reply);
            forgot_scripts |= is_noscript;
            let is_refused = is_error && call.jobs > 1 && is_refusal_of_call(&reply);
            if is_refused {
                self.connection.pause_sharing(now);
            }
            for place in 0..call.jobs {
                let Some(job) = self.calls.jobs.pop_front() else {
                    break;
                };
                let value = deal(&mut reply, call.jobs, place, &job);
                if (is_noscript || is_refused) && job.may_be_repeated(now) {
                    // Sent again behind the other replies at hand. The server has executed nothing.
                    self.parked.push_back(job);
                } else {
                    forgot_all |= self.on_answered(job, &value, now, now - call.sent);
                }
            }
        }
        self.replies = replies;
        if let Err(why) = replied {
            return self.on_lost(&why);
        }
        if !self.server.is_open() && self.server.is_down() && !self.is_silent() {
            if let Some(opened) = self.connection.on_recovered() {
                return self.adopt(opened);
            }
            self.server.set_answering();
        }
        if forgot_scripts {
            // By `SCRIPT FLUSH`.
            self.send_pipeline(&load_all());
        }
        if !self.parked.is_empty() {
            self.send_parked();
        }
        if forgot_all {
            // A new connection has it admitted again.
            self.server.set_quarantined(self.server.window());
            if !self.connection.is_probing() {
                self.connection.start_attempt();
            }
        }
    }

    /// Answers a job with its part of the reply to its call, or keeps it to be sent again. Returns whether the server has
    /// lost its memory.
    fn on_answered(&mut self, mut job: Job, value: &Value, now: Instant, took: Duration) -> bool {
        if *value == Value::Nil && job.may_be_repeated(now) && job.ask_why() {
            self.parked.push_back(job);
            return false;
        }
        self.telemetry.record(job.operation().name, took);
        let is_release = job.is_release();
        if let Value::Int(published) = value
            && is_release
        {
            self.server.set_subscribers(&mut job, *published);
            if !self.refused.is_empty() {
                // The server executes releases again.
                self.unpark_refused();
            }
        }
        let mut outcome = decode(&job, value, &self.server.name);
        if outcome == Ok(Reply::Lost) && is_release && job.is_repeated() {
            // It may have released the lock itself, and only the reply was lost.
            outcome = Ok(Reply::Released);
        }
        if is_release && outcome.is_err() && is_temporary_refusal(value) {
            // Answered at once, because the next attempts may take longer than any caller waits.
            job.answer(outcome);
            self.refused_due.get_or_insert(now + PROBE_PAUSE);
            self.refused.push_back(job);
            return false;
        }
        if outcome == Ok(Reply::Released) && job.leaves_taken() && took > self.server.timeouts.node
        {
            // Executed late, perhaps by a server that was stopped: the keys would stay taken for that much longer.
            job.answer(outcome);
            self.parked.push_back(job);
            return false;
        }
        let is_amnesia = outcome == Ok(Reply::Amnesia);
        if is_amnesia {
            outcome = Err(self.server.amnesia());
        }
        self.finish(job, outcome);
        is_amnesia
    }

    /// Parks the refused releases before all other jobs, because they are older.
    fn unpark_refused(&mut self) {
        self.refused_due = None;
        while let Some(release) = self.refused.pop_back() {
            self.parked.push_front(release);
        }
    }

    fn on_attempted(&mut self, attempted: Result<Live, Arc<str>>) {
        let now = Instant::now();
        match attempted {
            Ok(opened) if self.is_silent() => {
                let until = now + self.server.timeouts.node;
                self.connection.stand_by(opened, until);
            }
            Ok(opened) => self.adopt(opened),
            Err(why) => {
                self.server.set_down(&why);
                if self.server.duplicate().is_some() {
                    // Gives up the connection to a server that is another node too, after which the other node may vote.
                    // This node is admitted again before it does.
                    self.connection.close(now);
                    self.park_in_flight(&why);
                    if let Some(guard) = &self.server.guard {
                        guard.forget(&self.server.name);
                    }
                } else {
                    self.connection.on_attempt_failed(now);
                }
                self.refuse_parked();
            }
        }
    }

    /// Uses a new connection from now on. Unconfirmed releases and records are sent again.
    fn adopt(&mut self, opened: Live) {
        self.park_in_flight(&"replaced by a new connection".into());
        let left = opened.left;
        self.connection.replace(opened);
        if left.is_zero() {
            self.server.set_up();
        } else {
            self.server.set_quarantined(left);
        }
        // Jobs that waited for a server which turns out to be quarantined.
        self.refuse_parked();
        self.send_parked();
    }

    fn on_lost(&mut self, why: &Arc<str>) {
        self.park_in_flight(why);
        let has_parked = !self.parked.is_empty();
        if let Some(opened) = self.connection.on_lost(Instant::now(), has_parked) {
            self.adopt(opened);
        }
    }

    /// Fails the jobs of a connection that is gone, and parks those that are sent again before all that were never
    /// sent, because they are older.
    fn park_in_flight(&mut self, why: &Arc<str>) {
        for job in self.calls.drain().into_iter().rev() {
            if job.is_sent_again() {
                self.parked.push_front(job);
            } else {
                self.finish(job, Err(self.disconnected(why)));
            }
        }
        // Refused releases are older than the jobs in flight.
        self.unpark_refused();
    }

    fn disconnected(&self, why: &Arc<str>) -> NodeFailure {
        NodeFailure::Disconnected {
            node: Arc::clone(&self.server.name),
            why: Arc::clone(why),
        }
    }

    /// Fails the parked jobs that are not sent to the server in its current state.
    fn refuse_parked(&mut self) {
        let now = Instant::now();
        let Some(failure) = self.server.last_failure() else {
            return;
        };
        for job in std::mem::take(&mut self.parked) {
            let kept = match job.is_wanted(now) {
                true => job.despite(&failure),
                false => Err(job),
            };
            match kept {
                Ok(job) => self.parked.push_back(job),
                Err(job) => self.finish(job, Err(failure.clone())),
            }
        }
    }

    fn next_timer(&self) -> Instant {
        let keepalive_at = self.calls.last_sent + KEEPALIVE;
        // While the server is known to be silent, the next event is the next probe.
        let silent_at = self.calls.silent_at(self.server.timeouts.node);
        let silent_at = silent_at.filter(|_| !self.connection.is_probing());
        [
            self.connection.next_timer(),
            silent_at,
            self.connection.live.is_some().then_some(keepalive_at),
            self.recheck_at(),
            self.refused_due,
        ]
        .into_iter()
        .flatten()
        .min()
        .unwrap_or_else(|| Instant::now() + KEEPALIVE)
    }

    fn on_timer(&mut self) {
        let now = Instant::now();
        if let Some(opened) = self.connection.on_timer(now) {
            self.adopt(opened);
        }
        if self.is_silent() && !self.connection.is_probing() {
            let patience = 2 * self.server.timeouts.node;
            let why = format!("no answer for {patience:?}, which is twice node_timeout");
            self.server.set_down(&why.into());
            self.connection.start_attempt();
        }
        if self.recheck_at().is_some_and(|at| at <= now) {
            self.connection.start_attempt();
        }
        if self.calls.last_sent + KEEPALIVE <= now {
            self.calls.last_sent = now;
            if !self.is_silent() {
                // So that the next lock does not have to find out that an idle connection is broken.
                let mut ping = Pipeline::new();
                ping.cmd("PING");
                self.send_pipeline(&ping);
            }
        }
        // Whether it has to be executed, or its caller waits for it.
        let is_useful = |job: &Job| job.may_unlock(now) || job.sender.is_open();
        if self.calls.is_full() && self.is_silent() && !self.calls.jobs.iter().any(is_useful) {
            // Otherwise the inbox would not be read, not even to notice that it is closed, while the server is silent.
            self.park_in_flight(&"no job on it is of use any more".into());
            if let Some(opened) = self.connection.give_up() {
                self.adopt(opened);
            }
        }
        self.drop_unwanted(now);
        // Tries one of them; the others follow once the server accepts it.
        if self.refused_due.take_if(|due| *due <= now).is_some() {
            self.parked.extend(self.refused.pop_front());
            self.refused_due = (!self.refused.is_empty()).then_some(now + PROBE_PAUSE);
            self.send_parked();
        }
    }

    /// Drops the waiting jobs that are of no use any more.
    fn drop_unwanted(&mut self, now: Instant) {
        let waiting = self.parked.len() + self.refused.len() + self.calls.jobs.len();
        let has_room = waiting <= MAX_KEPT;
        let finished = &mut self.finished;
        let mut is_kept = |job: &Job| {
            // Of a release whose lock has expired, at most an intent is left to take back.
            let is_due = has_room || !job.is_release() || job.may_unlock(now);
            let is_kept = is_due && job.is_wanted(now);
            *finished += if is_kept { 0 } else { weight(job) };
            is_kept
        };
        self.parked.retain(&mut is_kept);
        self.refused.retain(is_kept);
    }

    /// Returns when to ask the server again, on a new connection, whether it may vote.
    fn recheck_at(&self) -> Option<Instant> {
        if self.connection.is_probing() {
            return None;
        }
        if self.server.duplicate().is_some() {
            // The live connection leads to where the name led when it was opened.
            return Some(self.connection.live.as_ref()?.since + DUPLICATE_PAUSE);
        }
        // The server decides by its own clock, so it is asked again at the end of its quarantine.
        match self.server.is_open() {
            true => None,
            false => self.server.quarantined_until(),
        }
    }

    /// Returns whether a reply on the connection is overdue.
    fn is_silent(&self) -> bool {
        let silent_at = self.calls.silent_at(self.server.timeouts.node);
        silent_at.is_some_and(|at| at <= Instant::now())
    }

    /// Removes all jobs. Returns the releases, and answers the others: the server may have executed them.
    fn unconfirmed(&mut self) -> Vec<Job> {
        let now = Instant::now();
        let why = "the runtime of the connection has ended; the next use connects again";
        let lost = self.disconnected(&why.into());
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

    /// Returns when more is known of a server that is down or must not vote.
    fn knows_more_at(&self) -> Option<Instant> {
        let at = [self.connection.knows_more_at(), self.recheck_at()];
        at.into_iter().flatten().min()
    }

    /// Returns whether a release is unconfirmed whose lock may still be there. Intents do not count: they live for a
    /// day, which is too long to keep a lane whose node was dropped.
    fn has_release(&self) -> bool {
        let now = Instant::now();
        let waiting = self.parked.iter().chain(&self.refused);
        let mut jobs = waiting.chain(&self.calls.jobs);
        jobs.any(|job| job.may_unlock(now))
    }
}

#[cfg(test)]
mod tests;
