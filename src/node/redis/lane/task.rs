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
    Connection, ConnectionEvent, KEEPALIVE, Opened, PROBE_PAUSE,
};
use crate::node::redis::lane::in_flight::InFlight;
use crate::node::redis::queue::{JobQueue, Load};
use crate::node::redis::shared::Shared;
use crate::node::redis::table::load_all;
use crate::node::telemetry::NodeCalls;
use crate::protocol::message::Reply;

/// The maximum number of jobs in one batch.
const MAX_BATCH: usize = 128;
/// The number of waiting jobs beyond which releases of expired locks are dropped. They would only take back an
/// intent, which only keeps a request from being executed.
const MAX_KEPT: usize = 1 << 16;
/// How often a server that is another node too is checked. That takes a new connection, because the live one leads
/// to where the name led when it was opened.
const DUPLICATE_PAUSE: Duration = Duration::from_secs(5);

/// What the replies to a batch say about the server.
#[derive(Default)]
struct Found {
    /// It has forgotten the scripts.
    forgot_scripts: bool,
    /// It has lost its memory.
    forgot_all: bool,
    /// It executes releases.
    has_released: bool,
}

struct Lane {
    shared: Arc<Shared>,
    telemetry: NodeCalls,
    connection: Connection,
    calls: Calls,
    in_flight: InFlight,
    /// Jobs that wait for a connection.
    parked: JobQueue,
    /// Releases that the server refused for a temporary reason. A server that is busy with a script, or must not write,
    /// refuses all releases alike, so one of them is sent after each pause, and the others once that is accepted: sent
    /// together, the releases of many seconds would load a server that is slow already.
    refused: JobQueue,
    /// When to try the next of them.
    refused_due: Option<Instant>,
}

/// Starts a lane, which ends when the inbox is closed and no release is left.
pub(in super::super) fn spawn(shared: &Arc<Shared>) {
    shared.home.spawn(Lane::new(Arc::clone(shared)).run());
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
        self.shared.reachability.reset();
        self.shared.inbox.detach(unconfirmed);
    }
}

impl Lane {
    fn new(shared: Arc<Shared>) -> Self {
        Self {
            telemetry: NodeCalls::new(&shared.name, shared.reachability.group()),
            connection: Connection::new(&shared),
            calls: Calls::default(),
            in_flight: InFlight::new(),
            parked: JobQueue::default(),
            refused: JobQueue::default(),
            refused_due: None,
            shared,
        }
    }

    async fn run(mut self) {
        self.connection.start_attempt();
        let mut is_open = true;
        // One timer, which may fire too early: resetting it for every reply costs more than that.
        let mut timer = Box::pin(sleep_until(self.next_timer()));
        let mut jobs = VecDeque::new();
        let shared = Arc::clone(&self.shared);
        while is_open || self.has_release() {
            if !shared.reachability.is_open() {
                shared.reachability.set_asked_at(self.knows_more_at());
            }
            let next_timer = self.next_timer();
            if next_timer < timer.deadline() {
                timer.as_mut().reset(next_timer);
            }
            let load = self.load();
            let is_full = self.in_flight.is_full();
            tokio::select! {
                biased;
                event = poll_fn(|context| {
                    self.connection.poll_event(context, &mut self.in_flight.replies)
                }) => match event {
                    ConnectionEvent::Replied(replied) => self.on_replied(replied),
                    ConnectionEvent::Attempted(attempted) => self.on_attempted(attempted),
                },
                has_jobs = poll_fn(|context| shared.inbox.poll_ready(context, load)),
                    if is_open && !is_full =>
                {
                    is_open = has_jobs;
                    // On a busy connection, waits for callers that are about to submit: one batch costs less than
                    // two.
                    if !self.in_flight.is_empty() {
                        yield_now().await;
                    }
                    shared.inbox.take(MAX_BATCH, &mut jobs);
                    self.on_jobs(jobs.drain(..));
                }
                () = timer.as_mut() => {
                    self.on_timer();
                    timer.as_mut().reset(self.next_timer());
                }
            }
        }
    }

    /// Returns the jobs that it has taken and not finished.
    fn load(&self) -> Load {
        let mut load = self.parked.load();
        load += self.refused.load();
        load += self.in_flight.load();
        load
    }

    fn on_jobs(&mut self, jobs: impl ExactSizeIterator<Item = Job>) {
        let now = Instant::now();
        // A single job shares no call.
        let check = self.connection.shared_check(now).filter(|_| jobs.len() > 1);
        let failure = self.shared.failure();
        let may_send =
            self.connection.is_live() && (failure.is_some() || self.shared.reachability.is_open());
        for job in jobs {
            if job.calls_off() {
                job.sender.send(Ok(Reply::Released));
                continue;
            }
            if !job.is_wanted(now) {
                let given_up = || NodeFailure::Unreachable {
                    node: Arc::clone(&self.shared.name),
                    why: "the caller gave up before the request was sent".into(),
                };
                job.fail(&failure.clone().unwrap_or_else(given_up));
                continue;
            }
            let job = match &failure {
                Some(failure) => job.despite(failure),
                None => Some(job),
            };
            match job {
                Some(job) if !may_send => self.parked.push_back(job),
                // Also to a silent server: the acquisition is ahead of its release on this connection.
                Some(job) => self.calls.add(job, check, &mut self.in_flight),
                None => {}
            }
        }
        self.calls.end_run(&mut self.in_flight);
        if self.connection.is_live() {
            self.send();
        } else if !self.parked.is_empty() {
            self.connection.wake();
        }
    }

    /// Sends the next batch, unless it is empty.
    fn send(&mut self) {
        let calls = self.in_flight.unsent_calls();
        if calls.len() > 0 {
            self.connection.send(calls);
            self.in_flight.on_sent();
        }
    }

    /// Sends those of the jobs that are still wanted, or parks them without a connection.
    fn send_again(&mut self, jobs: impl IntoIterator<Item = Job>) {
        let now = Instant::now();
        let (wanted, unwanted): (Vec<_>, Vec<_>) =
            jobs.into_iter().partition(|job| job.is_wanted(now));
        drop(unwanted);
        if !self.connection.is_live() {
            self.parked.extend(wanted);
            if !self.parked.is_empty() {
                self.connection.wake();
            }
            return;
        }
        let mut wanted = wanted.into_iter().peekable();
        while wanted.peek().is_some() {
            let check = self.connection.shared_check(now);
            for job in wanted.by_ref().take(MAX_BATCH) {
                self.calls.add(job, check, &mut self.in_flight);
            }
            self.calls.end_run(&mut self.in_flight);
            self.send();
        }
    }

    fn take_refused(&mut self) -> VecDeque<Job> {
        self.refused_due = None;
        self.refused.take()
    }

    fn send_parked(&mut self) {
        let parked = self.parked.take();
        self.send_again(parked);
    }

    /// Sends commands that are no jobs.
    fn send_pipeline(&mut self, commands: &Pipeline) {
        if self.connection.send_pipeline(commands) {
            self.in_flight.on_sent();
        }
    }

    /// Handles the replies to the oldest batch.
    fn on_replied(&mut self, replied: Result<(), Arc<str>>) {
        if let Err(why) = replied {
            return self.on_lost(&why);
        }
        let Some(batch) = self.in_flight.pop_batch() else {
            return;
        };
        let now = Instant::now();
        let took = now - batch.sent;
        self.telemetry.at(now);
        if batch.load.jobs == 0
            && let Some(why) = self.in_flight.replies.iter().find_map(describe_refusal)
        {
            // A server that refuses a ping or the scripts refuses all requests. A new connection finds out why, and
            // reports it.
            return self.on_lost(&why);
        }
        let mut found = Found::default();
        let mut replies = self.in_flight.take_replies();
        for mut reply in replies.drain(..).take(batch.calls) {
            let count = self.in_flight.pop_call();
            let is_refused = count > 1 && is_refusal_of_call(&reply);
            if is_refused {
                self.connection.pause_sharing(now);
            }
            for place in 0..count {
                if let Some(job) = self.in_flight.pop_job() {
                    let value = deal(&mut reply, count, place, &job.request);
                    self.on_answered(job, &value, is_refused, now, took, &mut found);
                }
            }
        }
        self.in_flight.replies = replies;
        if self.shared.reachability.is_down() && !self.is_silent() {
            if let Some(opened) = self.connection.on_recovered() {
                return self.adopt(opened);
            }
            self.shared.reachability.set_answering();
        }
        if found.forgot_scripts {
            // By `SCRIPT FLUSH`.
            self.send_pipeline(&load_all());
        }
        if !self.parked.is_empty() && self.connection.is_live() {
            self.send_parked();
        }
        if found.has_released && !self.refused.is_empty() {
            let refused = self.take_refused();
            self.send_again(refused);
        }
        if found.forgot_all {
            self.on_amnesia();
        }
    }

    /// Answers a job with its part of the reply to its call, or keeps it to be sent again.
    fn on_answered(
        &mut self,
        mut job: Job,
        value: &Value,
        is_refused: bool,
        now: Instant,
        took: Duration,
        found: &mut Found,
    ) {
        let is_noscript = is_noscript(value);
        found.forgot_scripts |= is_noscript;
        if (is_noscript || is_refused) && job.may_be_repeated(now) {
            // Sent again behind this batch. The server has executed nothing.
            return self.parked.push_back(job);
        }
        if *value == Value::Nil && job.may_be_repeated(now) && job.ask_why() {
            return self.parked.push_back(job);
        }
        self.telemetry.record(job.request.operation().name, took);
        if let Value::Int(published) = value
            && job.is_release()
        {
            found.has_released = true;
            self.shared.set_subscribers(&mut job, *published);
        }
        let mut outcome = decode(&job.request, value, &self.shared.name);
        if outcome == Ok(Reply::Lost) && job.is_release() && job.is_repeated() {
            // It may have released the lock itself, and only the reply was lost.
            outcome = Ok(Reply::Released);
        }
        if job.is_release() && is_temporary_refusal(value) {
            // Answered at once, because the next attempts may take longer than any caller waits.
            job.answer(outcome);
            self.refused_due.get_or_insert(now + PROBE_PAUSE);
            return self.refused.push_back(job);
        }
        if outcome == Ok(Reply::Released) && job.leaves_taken() && took > self.shared.timeouts.node
        {
            // Executed late, perhaps by a server that was stopped: the keys would stay taken for that much longer.
            job.answer(outcome);
            return self.parked.push_back(job);
        }
        if outcome == Ok(Reply::Amnesia) {
            found.forgot_all = true;
            outcome = Err(self.shared.amnesia());
        }
        job.sender.send(outcome);
    }

    /// Quarantines the server, and opens a new connection to have it admitted again.
    fn on_amnesia(&mut self) {
        if let Some(guard) = &self.shared.guard {
            self.shared.set_quarantined(guard.window());
            if !self.connection.is_probing() {
                self.connection.start_attempt();
            }
        }
    }

    fn on_attempted(&mut self, attempted: Result<Opened, Arc<str>>) {
        let now = Instant::now();
        match attempted {
            Ok(opened) if self.is_silent() => {
                let until = now + self.shared.timeouts.node;
                self.connection.stand_by(opened, until);
            }
            Ok(opened) => self.adopt(opened),
            Err(why) => {
                self.shared.reachability.set_down(&why);
                if self.shared.is_duplicate() {
                    self.leave_duplicate(&why, now);
                } else {
                    self.connection.on_attempt_failed(now);
                }
                self.refuse_parked();
            }
        }
    }

    /// Gives up the connection to a server that is another node too, after which the other node may vote. This node
    /// is admitted again before it does.
    fn leave_duplicate(&mut self, why: &Arc<str>, now: Instant) {
        self.connection.close(now);
        self.park_in_flight(why);
        if let Some(guard) = &self.shared.guard {
            guard.forget(&self.shared.name);
        }
    }

    /// Uses a new connection from now on. Unconfirmed releases and records are sent again.
    fn adopt(&mut self, opened: Opened) {
        self.park_in_flight(&"replaced by a new connection".into());
        let admission = opened.admission.as_ref();
        let left = admission.map_or(Duration::ZERO, |admission| admission.left);
        self.connection.replace(opened);
        if left.is_zero() {
            self.shared.reachability.set_up();
        } else {
            self.shared.set_quarantined(left);
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
        // Refused releases are older than the jobs in flight.
        let mut again: Vec<Job> = self.take_refused().into();
        for job in self.in_flight.drain() {
            if job.is_sent_again() {
                again.push(job);
            } else {
                job.sender.send(Err(NodeFailure::Disconnected {
                    node: Arc::clone(&self.shared.name),
                    why: Arc::clone(why),
                }));
            }
        }
        for job in again.into_iter().rev() {
            self.parked.push_front(job);
        }
    }

    /// Fails the parked jobs that are not sent to the server in its current state.
    fn refuse_parked(&mut self) {
        let now = Instant::now();
        let Some(failure) = self.shared.last_failure() else {
            return;
        };
        for job in self.parked.take() {
            if job.is_wanted(now) {
                self.parked.extend(job.despite(&failure));
            } else {
                job.fail(&failure);
            }
        }
    }

    fn next_timer(&self) -> Instant {
        let keepalive_at = self.in_flight.last_sent + KEEPALIVE;
        // While the server is known to be silent, the next event is the next probe.
        let silent_at = self.silent_at().filter(|_| !self.connection.is_probing());
        [
            self.connection.next_timer(),
            silent_at,
            self.connection.is_live().then_some(keepalive_at),
            self.readmit_at(),
            self.refused_due,
            self.check_duplicate_at(),
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
            let patience = 2 * self.shared.timeouts.node;
            let why = format!("no answer for {patience:?}, which is twice node_timeout");
            self.shared.reachability.set_down(&why.into());
            self.connection.start_attempt();
        }
        // The server decides by its own clock, so it is asked again at the end of its quarantine.
        if self.readmit_at().is_some_and(|until| until <= now) {
            self.connection.start_attempt();
        }
        if self.check_duplicate_at().is_some_and(|at| at <= now) {
            self.connection.start_attempt();
        }
        if self.in_flight.last_sent + KEEPALIVE <= now {
            self.in_flight.last_sent = now;
            if !self.is_silent() {
                // So that the next lock does not have to find out that an idle connection is broken.
                let mut ping = Pipeline::new();
                ping.cmd("PING");
                self.send_pipeline(&ping);
            }
        }
        if self.in_flight.is_full() && self.is_silent() && !self.has_useful_in_flight(now) {
            // Otherwise the inbox would not be read, not even to notice that it is closed, while the server is silent.
            self.park_in_flight(&"no job on it is of use any more".into());
            if let Some(opened) = self.connection.give_up() {
                self.adopt(opened);
            }
        }
        let has_room = self.load().jobs <= MAX_KEPT;
        let is_kept = |job: &Job| job.is_wanted(now) && (has_room || !job.is_about_intent(now));
        self.parked.retain(is_kept);
        self.refused.retain(is_kept);
        // Tries one of them; the others follow once the server accepts it.
        if self.refused_due.take_if(|due| *due <= now).is_some() {
            let release = self.refused.pop_front();
            self.refused_due = (!self.refused.is_empty()).then_some(now + PROBE_PAUSE);
            self.send_again(release);
        }
    }

    /// Returns when to ask a quarantined server again whether it may vote. A duplicate must not vote anyway.
    fn readmit_at(&self) -> Option<Instant> {
        let is_asked = self.connection.is_probing() || self.shared.is_duplicate();
        let until = self.shared.reachability.quarantined_until();
        until.filter(|_| !is_asked)
    }

    /// Returns when to check again whether the server is another node too.
    fn check_duplicate_at(&self) -> Option<Instant> {
        let is_due = self.shared.is_duplicate() && !self.connection.is_probing();
        let since = self.connection.live_since().filter(|_| is_due)?;
        Some(since + DUPLICATE_PAUSE)
    }

    /// Returns whether a reply on the connection is overdue.
    fn is_silent(&self) -> bool {
        self.silent_at().is_some_and(|at| at <= Instant::now())
    }

    fn silent_at(&self) -> Option<Instant> {
        self.in_flight.silent_at(self.shared.timeouts.node)
    }

    /// Removes all jobs. Returns the releases, and answers the others: the server may have executed them.
    fn unconfirmed(&mut self) -> Vec<Job> {
        let now = Instant::now();
        let refused = self.take_refused().into_iter();
        let jobs = refused
            .chain(self.in_flight.drain())
            .chain(self.parked.take());
        let (unconfirmed, others): (Vec<_>, Vec<_>) = jobs.partition(Job::is_release);
        for job in others {
            job.sender.send(Err(NodeFailure::Disconnected {
                node: Arc::clone(&self.shared.name),
                why: "the runtime of the connection has ended; the next use connects again".into(),
            }));
        }
        let is_wanted = |job: &Job| job.is_wanted(now);
        unconfirmed.into_iter().filter(is_wanted).collect()
    }

    /// Returns when more is known of a server that is down or must not vote.
    fn knows_more_at(&self) -> Option<Instant> {
        [
            self.connection.knows_more_at(),
            self.readmit_at(),
            self.check_duplicate_at(),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Returns whether a release is unconfirmed whose lock may still be there. Intents do not count: they live for a
    /// day, which is too long to keep a lane whose node was dropped.
    fn has_release(&self) -> bool {
        let now = Instant::now();
        self.in_flight
            .jobs()
            .chain(self.parked.iter())
            .chain(self.refused.iter())
            .any(|job| job.may_unlock(now))
    }

    /// Returns whether a job in flight has to be executed, or its caller waits for it.
    fn has_useful_in_flight(&self, now: Instant) -> bool {
        let is_useful = |job: &Job| job.may_unlock(now) || job.sender.is_open();
        self.in_flight.jobs().any(is_useful)
    }
}

#[cfg(test)]
mod tests;
