//! The lane: the one task that talks to one Redis server.
//!
//! All jobs for a server pass through its lane in the order they were submitted and leave it on one
//! connection, those that wait together in one pipeline. So a release reaches the server after its
//! acquisition without anybody waiting for an answer. The lane also notices when the server falls
//! silent, tells requests so at once, and keeps trying to reach it until it answers again.

mod connecting;
mod notes;
mod parked;
mod refused;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use deadpool_redis::redis::Value;
use tokio::runtime::Handle;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until};

use crate::node::job::{Job, Request};
use crate::node::redis::connection::Opened;
use crate::node::redis::decode::{answer, is_noscript, is_passing, refusal};
use crate::node::redis::encode::Passport;
use crate::node::redis::inbox::Load;
use crate::node::redis::lane::parked::Parked;
use crate::node::redis::lane::refused::Refused;
use crate::node::redis::link::Link;
use crate::node::redis::scripts::load_all;
use crate::node::redis::{Reachability, Shared};
use crate::node::{NodeFailure, telemetry};
use crate::protocol::message::Reply;

/// Most jobs that travel in one pipeline.
const MAX_BATCH: usize = 128;
/// Most pipelines that are on the wire. On a long wire many must be, or jobs wait for answers that have
/// nothing to do with them; beyond this a server is behind, and what waits may yet be called off.
const MAX_IN_FLIGHT: usize = 32;
/// Beyond so many jobs that wait, releases are not kept any more whose lock has expired: what they would
/// take back is an intent, which keeps a request from being executed and nothing else.
const MAX_KEPT: usize = 1 << 16;
/// A connection on which nothing was asked for this long is asked whether it still stands.
const KEEPALIVE: Duration = Duration::from_secs(5);
/// Pause between two attempts to reach a server that does not answer.
const PROBE_PAUSE: Duration = Duration::from_millis(150);
/// How long an attempt to reach a server may take at least; with the pause, it bounds how long
/// after its recovery a server is back that was reached before.
const PROBE_LIMIT: Duration = Duration::from_millis(500);

/// How long a server that another node is too is not asked who it is. That takes a new connection, because
/// the one that stands leads to where the name led then.
const TWIN_PAUSE: Duration = Duration::from_secs(5);

type Opening = Pin<Box<dyn Future<Output = Result<Opened, Arc<str>>> + Send>>;

struct Lane {
    shared: Arc<Shared>,
    /// Its own in the inbox; with another there, it was replaced.
    number: u64,
    calls: telemetry::NodeCalls,
    link: Option<Link>,
    /// What requests for votes name on it.
    passport: Passport,
    /// Batches that were sent on this connection and not answered, oldest first, which is the order of
    /// the answers.
    unanswered: VecDeque<Batch>,
    /// The jobs in them, one batch behind the other.
    out: VecDeque<Job>,
    /// The answers to the oldest, as far as they have come in.
    answers: Vec<Value>,
    /// How much longer than the node timeout an answer may take for what is on the wire before it.
    transit: Duration,
    /// What is in those batches.
    sent: Load,
    /// Jobs that wait for a connection.
    parked: Parked,
    /// Releases that the server refused for now.
    refused: Refused,
    opening: Option<Opening>,
    /// When to try to connect again.
    retry_at: Option<Instant>,
    /// When a connection was last lost.
    link_lost_at: Option<Instant>,
    /// Whether there is no connection because none is needed.
    rests: bool,
    /// Whether anything was asked on the connection in use, and whether nothing was on the one before.
    link_used: bool,
    ended_unused: bool,
    /// A new connection to a server whose old one is silent: used if the old one stays silent.
    candidate: Option<(Opened, Instant)>,
    /// Until when the server may not vote, as far as is known; then it is asked again.
    quarantined_until: Option<Instant>,
    last_sent: Instant,
    /// When the connection in use was made the one.
    adopted: Instant,
    opening_began: Instant,
    /// How long the last successful attempt to connect took.
    opening_took: Option<Duration>,
    /// Attempts since then.
    openings: u32,
}

struct Batch {
    load: Load,
    sent: Instant,
    /// How much longer it may take for what it carries.
    own: Duration,
    /// The same for all that were before it on the wire, too.
    transit: Duration,
}

/// Starts a lane. It ends when the inbox is closed and nothing is left to do.
pub(super) fn spawn(runtime: &Handle, shared: Arc<Shared>) {
    shared.set_reachability(Reachability::Untried);
    runtime.spawn(Lane::new(shared).run());
}

/// However it ends, what comes later needs another lane. If it is because its runtime does, so does what it
/// carried for others.
impl Drop for Lane {
    fn drop(&mut self) {
        // Not what it panicked on.
        let unfinished = match std::thread::panicking() {
            true => Vec::new(),
            false => self.unfinished(),
        };
        if self.is_replaced() {
            return self.shared.inbox.take_back(unfinished);
        }
        // What it knew of the server too: with it, requests would be refused, and none come as far as to
        // start the next lane. Before it leaves, because the next one may know more at once.
        self.shared.set_reachability(Reachability::Untried);
        for runtime in self.shared.inbox.leave(unfinished) {
            let shared = Arc::clone(&self.shared);
            // Some may rest, or end as well: the first that goes on has it, or the next that asks.
            runtime.spawn(async move {
                if shared.inbox.attend() {
                    Self::new(shared).run().await;
                }
            });
        }
    }
}

impl Lane {
    fn new(shared: Arc<Shared>) -> Self {
        let guard = shared.guard.as_ref();
        Self {
            calls: telemetry::NodeCalls::of(&shared.name),
            passport: Passport {
                generation_key: guard.map(|guard| Arc::clone(&guard.generation_key)),
                generation: None,
            },
            number: shared.inbox.number(),
            shared,
            link: None,
            unanswered: VecDeque::new(),
            out: VecDeque::new(),
            answers: Vec::new(),
            transit: Duration::ZERO,
            sent: Load::default(),
            parked: Parked::default(),
            refused: Refused::default(),
            opening: None,
            retry_at: None,
            link_lost_at: None,
            rests: false,
            link_used: false,
            ended_unused: false,
            candidate: None,
            quarantined_until: None,
            last_sent: Instant::now(),
            adopted: Instant::now(),
            opening_began: Instant::now(),
            opening_took: None,
            openings: 0,
        }
    }

    async fn run(mut self) {
        self.start_opening();
        let mut open = true;
        // One timer, which may go off too early: setting it anew for every answer would cost more than
        // that.
        let mut alarm = Box::pin(sleep_until(self.next_alarm()));
        let mut jobs = VecDeque::new();
        let (shared, number) = (Arc::clone(&self.shared), self.number);
        while open || self.has_release() {
            let next_alarm = self.next_alarm();
            if next_alarm < alarm.deadline() {
                alarm.as_mut().reset(next_alarm);
            }
            let carried = self.load();
            if open && self.is_full() {
                self.shared.inbox.note_behind(number);
            }
            tokio::select! {
                // Answers first: what has arrived is not late, however late we look.
                biased;
                // Its runtime went on after all: what it knows of the server is another's to tell now.
                () = poll_replaced(&shared, number) => return,
                answered = poll_answers(&mut self.link, &mut self.answers) => self.on_answered(answered),
                opened = poll_opening(&mut self.opening) => self.on_opened(opened),
                filled = poll_fn(|context| shared.inbox.poll_filled(number, context, carried)),
                    if open && !self.is_full() =>
                {
                    open = filled;
                    // For those who are about to ask too, on a busy wire: one pipeline costs less
                    // than two.
                    if !self.unanswered.is_empty() {
                        yield_now().await;
                    }
                    self.shared.inbox.take(MAX_BATCH, &mut jobs);
                    self.on_jobs(jobs.drain(..));
                }
                () = alarm.as_mut() => {
                    self.on_alarm();
                    alarm.as_mut().reset(self.next_alarm());
                }
            }
        }
    }

    /// Returns what it has taken and not finished.
    fn load(&self) -> Load {
        let mut load = self.parked.load();
        load += self.refused.load();
        load += self.sent;
        load
    }

    fn on_jobs(&mut self, jobs: impl Iterator<Item = Job>) {
        let now = Instant::now();
        let from = self.out.len();
        let down = self.shared.unreachable();
        for job in jobs {
            if job.calls_off() {
                job.sender.send(Ok(Reply::Released));
                continue;
            }
            if !job.is_wanted(now) {
                let over = || NodeFailure::Unreachable {
                    node: Arc::clone(&self.shared.name),
                    why: "the request was over before it could be sent".into(),
                };
                job.sender.send(Err(down.clone().unwrap_or_else(over)));
                continue;
            }
            let job = match &down {
                Some(failure) => job.despite(failure),
                None => Some(job),
            };
            match job {
                Some(job) if self.link.is_none() => self.parked.push_back(job),
                // Also to a silent server: the acquisition is ahead of it on this connection.
                Some(job) => self.put_out(job),
                None => {}
            }
        }
        self.send(from);
    }

    /// Puts a job behind all that are on the connection; it goes out when they are sent from there on.
    fn put_out(&mut self, job: Job) {
        // Not when it is sent: its release may be in the same batch, and must not be called off.
        job.mark_sent();
        self.out.push_back(job);
    }

    /// Sends the jobs that were put out from there on.
    fn send(&mut self, from: usize) {
        let Some(link) = &mut self.link else {
            self.parked.extend(self.out.drain(from..));
            if self.rests && !self.parked.is_empty() {
                self.start_opening();
            }
            return;
        };
        if self.out.len() > from {
            self.link_used = true;
            let jobs = self.out.range(from..);
            link.send(jobs.map(|job| &job.request), &self.passport);
            self.note_sent(from);
        }
    }

    /// Notes that the jobs from there on were put on the connection, behind all that is on it; perhaps
    /// there are none.
    fn note_sent(&mut self, from: usize) {
        let sent = Instant::now();
        self.last_sent = sent;
        let (mut load, mut own) = (Load::default(), Duration::ZERO);
        for job in self.out.range(from..) {
            let (jobs, bytes) = (1, job.bytes());
            load += Load { jobs, bytes };
            own += job.transit();
        }
        self.sent += load;
        self.transit += own;
        self.unanswered.push_back(Batch {
            load,
            sent,
            own,
            transit: self.transit,
        });
    }

    /// Takes the answers to the oldest batch.
    fn on_answered(&mut self, answered: Result<(), Arc<str>>) {
        if let Err(why) = answered {
            return self.on_link_lost(&why);
        }
        let Some(batch) = self.unanswered.pop_front() else {
            return;
        };
        self.sent -= batch.load;
        self.transit = self.transit.saturating_sub(batch.own);
        let now = Instant::now();
        let took = now - batch.sent;
        self.calls.at(now);
        if batch.load.jobs == 0
            && let Some(why) = self.answers.iter().find_map(refusal)
        {
            // Neither the scripts nor a ping are ever refused where requests are not; a new connection
            // finds out what is wrong, and tells.
            return self.on_link_lost(&why);
        }
        let (mut forgot_scripts, mut forgot_all, mut releases) = (false, false, false);
        let jobs = self.out.drain(..batch.load.jobs);
        // There are more answers than jobs if what was sent had nobody who waits.
        for (mut job, value) in jobs.zip(self.answers.drain(..)) {
            if is_noscript(&value) {
                forgot_scripts = true;
                if job.is_release() {
                    // Not lost: sent again below, behind the scripts.
                    self.parked.push_back(job);
                    continue;
                }
            }
            self.calls.took(job.request.name(), took);
            if let Value::Int(told) = value
                && job.is_release()
            {
                releases = true;
                self.shared.note_listeners(&mut job, told);
            }
            let mut outcome = answer(&job.request, &value, &self.shared.name);
            if job.is_release() && is_passing(&value) {
                // Told at once, because it may take longer than anyone waits.
                job.answer(outcome);
                self.refused.push(job, now + PROBE_PAUSE);
                continue;
            }
            if outcome == Ok(Reply::Amnesia) {
                forgot_all = true;
                outcome = Err(self.shared.forgot());
            }
            job.sender.send(outcome);
        }
        if self.shared.is_down() && !self.is_silent() {
            // Attempts to replace a connection that answers again are called off, but for one that led to
            // another memory: what is known of the node now is known of that.
            if let Some((opened, _)) = self.candidate.take_if(|(opened, _)| {
                let admission = opened.admission.as_ref();
                admission.map(|admission| &admission.generation)
                    != self.passport.generation.as_ref()
            }) {
                return self.adopt(opened);
            }
            self.candidate = None;
            self.opening = None;
            self.retry_at = None;
            self.note_up();
        }
        if forgot_scripts {
            self.reload_scripts();
        }
        if releases && !self.refused.is_empty() {
            let refused = self.refused.take();
            self.send_again(refused);
        }
        if forgot_all {
            self.on_amnesia();
        }
    }

    /// Admits the server again, on a new connection; until then it does not vote.
    fn on_amnesia(&mut self) {
        if let Some(guard) = &self.shared.guard {
            self.note_quarantined(Instant::now() + guard.window());
            if !self.is_probing() {
                self.start_opening();
            }
        }
    }

    /// Loads the scripts again after a server forgot them (`SCRIPT FLUSH`), and then sends the
    /// releases that met their absence. An acquisition that did is not sent again: its release may
    /// be ahead of it by now.
    fn reload_scripts(&mut self) {
        if let Some(link) = &mut self.link {
            link.send_pipeline(load_all());
            self.note_sent(self.out.len());
        }
        self.send_parked();
    }

    fn send_parked(&mut self) {
        let parked = self.parked.take();
        self.send_again(parked);
    }

    /// Sends those of the jobs that are still wanted.
    fn send_again(&mut self, jobs: impl IntoIterator<Item = Job>) {
        let now = Instant::now();
        let (wanted, over): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| job.is_wanted(now));
        drop(over);
        let mut wanted = wanted.into_iter().peekable();
        while wanted.peek().is_some() {
            let from = self.out.len();
            wanted
                .by_ref()
                .take(MAX_BATCH)
                .for_each(|job| self.put_out(job));
            self.send(from);
        }
    }

    /// Whether an answer on this connection is overdue.
    fn is_silent(&self) -> bool {
        self.silent_at().is_some_and(|at| at <= Instant::now())
    }

    /// Returns when the oldest unanswered batch is overdue. Twice the node timeout: by the first,
    /// every lease has given up on it, and a process that was starved of CPU gets a second look.
    fn silent_at(&self) -> Option<Instant> {
        let oldest = self.unanswered.front()?;
        Some(oldest.sent + 2 * self.shared.timeouts.node + oldest.transit)
    }

    fn next_alarm(&self) -> Instant {
        let adopt_at = self.candidate.as_ref().map(|(_, at)| *at);
        let keepalive_at = self.link.is_some().then(|| self.last_sent + KEEPALIVE);
        // While it is known to be silent, the next thing to happen is the next probe.
        let silent_at = self.silent_at().filter(|_| !self.is_probing());
        let readmit_at = self.readmit_at();
        let refused_at = self.refused.due();
        let twin_at = self.twin_at();
        [
            adopt_at,
            self.retry_at,
            silent_at,
            keepalive_at,
            readmit_at,
            refused_at,
            twin_at,
        ]
        .into_iter()
        .flatten()
        .min()
        .unwrap_or_else(|| Instant::now() + KEEPALIVE)
    }

    fn on_alarm(&mut self) {
        let now = Instant::now();
        if let Some((opened, _)) = self.candidate.take_if(|(_, at)| *at <= now) {
            self.adopt(opened);
        }
        if self.retry_at.is_some_and(|at| at <= now) {
            self.start_opening();
        }
        if self.is_silent() && !self.is_probing() {
            let patience = 2 * self.shared.timeouts.node;
            self.note_down(&format!("no answer for {patience:?}").into());
            self.start_opening();
        }
        if self.readmit_at().is_some_and(|until| until <= now) {
            // By its own clocks the server decides, so it is asked again, from the beginning.
            self.start_opening();
        }
        if self.twin_at().is_some_and(|at| at <= now) {
            self.start_opening();
        }
        if self.last_sent + KEEPALIVE <= now {
            self.last_sent = now;
            if !self.is_silent() {
                self.keep_alive();
            }
        }
        if self.is_full() && self.is_silent() && !self.is_worth_waiting_for(now) {
            // Else nothing more would be taken, not even that all is over, as long as the server is silent.
            let again = self.give_up_link(&"nothing of use is on it any more".into());
            self.park_again(again);
        }
        let has_room = self.load().jobs <= MAX_KEPT;
        let is_kept = |job: &Job| job.is_wanted(now) && (has_room || !job.is_about_intent(now));
        self.parked.retain(is_kept);
        self.refused.retain(is_kept);
        // One, to find out whether it takes them again; the others follow it then.
        if let Some(release) = self.refused.next(now, now + PROBE_PAUSE) {
            self.send_again([release]);
        }
    }

    /// Returns when to ask a server again whether it may vote. What another node is too may not anyway.
    fn readmit_at(&self) -> Option<Instant> {
        let is_asked = self.is_probing() || self.shared.is_twin();
        self.quarantined_until.filter(|_| !is_asked)
    }

    /// Returns when to ask a server again that another node is too.
    fn twin_at(&self) -> Option<Instant> {
        let is_due = self.link.is_some() && self.shared.is_twin() && !self.is_probing();
        is_due.then(|| self.adopted + TWIN_PAUSE)
    }

    /// Whether an attempt to reach the server is under way or planned.
    fn is_probing(&self) -> bool {
        self.opening.is_some() || self.candidate.is_some() || self.retry_at.is_some()
    }

    /// Takes what another connection may carry out, also what this one may have: the owners are the same.
    fn unfinished(&mut self) -> Vec<Job> {
        let now = Instant::now();
        let refused = self.refused.take().into_iter();
        let sent = self.out.drain(..).filter(Job::may_be_repeated);
        let jobs = refused.chain(sent).chain(self.parked.take());
        jobs.filter(|job| job.is_wanted(now)).collect()
    }

    /// Whether a release is still to be confirmed whose lock may be there. Intents live for a day, which is
    /// too long to wait for a server when nothing is left that could ask it for a lock.
    fn has_release(&self) -> bool {
        let now = Instant::now();
        self.out
            .iter()
            .chain(self.parked.iter())
            .chain(self.refused.iter())
            .any(|job| job.may_unlock(now))
    }

    /// Whether as much is on the connection as may be.
    fn is_full(&self) -> bool {
        self.unanswered.len() >= MAX_IN_FLIGHT
    }

    fn is_replaced(&self) -> bool {
        self.shared.inbox.number() != self.number
    }

    /// Whether anything is on the connection that has to be carried out, or is waited for.
    fn is_worth_waiting_for(&self, now: Instant) -> bool {
        let of_use = |job: &Job| job.may_unlock(now) || job.sender.is_open();
        self.out.iter().any(of_use)
    }

    /// Asks an idle connection whether it still stands, so that the next lock need not find out.
    fn keep_alive(&mut self) {
        if let Some(link) = &mut self.link {
            link.send([&Request::Ping].into_iter(), &self.passport);
            self.note_sent(self.out.len());
        }
    }
}

/// Waits until another lane has taken over, to be looked at whenever the task is woken.
async fn poll_replaced(shared: &Shared, number: u64) {
    poll_fn(|_| match shared.inbox.number() == number {
        true => Poll::Pending,
        false => Poll::Ready(()),
    })
    .await;
}

/// Waits for the answers to the oldest batch, or the end of the connection; for ever, if there is none.
async fn poll_answers(link: &mut Option<Link>, answers: &mut Vec<Value>) -> Result<(), Arc<str>> {
    poll_fn(|context| match link {
        Some(link) => link.poll_answers(context, answers),
        None => Poll::Pending,
    })
    .await
}

/// Waits for the connection that is being opened; for ever, if there is none.
async fn poll_opening(opening: &mut Option<Opening>) -> Result<Opened, Arc<str>> {
    match opening {
        Some(opening) => opening.await,
        None => std::future::pending().await,
    }
}
