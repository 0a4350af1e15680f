//! The task of a lane: moves jobs from the inbox to the connection, and replies to the votes.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use deadpool_redis::redis::{Value, pipe};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until};

use crate::node::job::Job;
use crate::node::redis::decode::{deal, decode};
use crate::node::redis::describe::{
    describe_refusal, ends_admission, has_code, is_refusal_of_call, is_temporary_refusal,
};
use crate::node::redis::lane::state::{
    KEEPALIVE, Lane, Live, MAX_BATCH, Next, PROBE_PAUSE, shared_check,
};
use crate::node::redis::link::Link;
use crate::node::redis::server::{RedisServer, weight};
use crate::node::redis::table::load_all;
use crate::protocol::message::{Op, Reply};

/// The number of waiting jobs beyond which releases of expired locks are dropped. They would only take back an
/// intent, which only keeps a request from being executed.
const MAX_KEPT: usize = 1 << 16;

/// How long no requests share a call after the server has refused one. A server that refuses all, because its user may
/// not run some command of the scripts, then costs little; and a single key that the user must not touch does not end
/// the sharing for all others.
const SHARING_PAUSE: Duration = Duration::from_secs(1);

/// Starts a lane, which ends when the inbox is closed and no release is left.
pub(in super::super) fn spawn(server: &Arc<RedisServer>) {
    server.home.spawn(Lane::new(Arc::clone(server)).run());
}

impl Lane {
    async fn run(mut self) {
        self.start_attempt();
        let mut is_open = true;
        // One timer, which may fire too early: resetting it for every reply costs more than that.
        let mut timer = Box::pin(sleep_until(self.next_timer()));
        // Kept for their room.
        let (mut replies, mut jobs) = (Vec::new(), VecDeque::new());
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
                    let link = self.live.as_mut().map(|live| &mut live.link);
                    poll_replies(link, context, &mut replies)
                }) => self.on_replied(replies.drain(..), replied),
                attempted = poll_fn(|context| match &mut self.next {
                    Some(Next::Connecting(opening, _)) => opening.as_mut().poll(context),
                    _ => Poll::Pending,
                }) => self.on_attempted(attempted),
                has_jobs = poll_fn(|context| {
                    self.server.inbox.poll_ready(context, &mut self.finished)
                }), if is_open && self.has_room() => {
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

    /// Returns whether more jobs are taken. Of a server that is down, always: it gets only releases, and a lane that
    /// took none would not notice either that its inbox is closed.
    fn has_room(&self) -> bool {
        !self.calls.is_full() || self.server.is_down()
    }

    fn on_jobs(&mut self, jobs: impl ExactSizeIterator<Item = Job>) {
        let now = Instant::now();
        let failure = self.server.failure();
        let may_send = self.live.is_some() && (failure.is_some() || self.server.is_open());
        // A single job shares no call.
        let may_share = jobs.len() > 1;
        for job in jobs {
            // A release of what was not sent: neither is.
            if job.is_release() && job.sender.mark_released() {
                self.finish(job, Ok(Reply::Released));
                continue;
            }
            // Mostly as it is, without a move.
            let accepted = match failure.is_none() && job.is_wanted(now) {
                true => Some(job),
                false => self.accept(job, failure.as_ref(), now),
            };
            let Some(job) = accepted else {
                continue;
            };
            if may_send {
                // Also to a silent server: the acquisition is ahead of its release on this connection.
                let check = may_share.then(|| shared_check(&self.live, now));
                self.calls.add(job, check.flatten(), now);
            } else {
                self.parked.push_back(job);
            }
        }
        self.send(now);
    }

    /// Handles the replies that have arrived, behind which the connection may be lost.
    fn on_replied(
        &mut self,
        replies: impl IntoIterator<Item = Value>,
        mut replied: Result<(), Arc<str>>,
    ) {
        let now = Instant::now();
        let (mut forgot_scripts, mut forgot_all) = (false, false);
        for mut reply in replies {
            // Replies come in the order of the calls, so each belongs to the oldest one.
            let Some(call) = self.calls.pop() else {
                replied = Err("the server sent a reply without a request".into());
                break;
            };
            let is_error = matches!(reply, Value::ServerError(_));
            if is_error
                && (call.jobs == 0 || ends_admission(&reply))
                && let Some(why) = describe_refusal(&reply)
            {
                // A server that refuses a ping or the scripts refuses all requests, and so does one that wants a login again, or
                // has lost slots. A new connection finds out why, and reports it.
                replied = Err(why);
                break;
            }
            let is_noscript = is_error && has_code(&reply, &["NOSCRIPT"]);
            forgot_scripts |= is_noscript;
            let is_refused = is_error && call.jobs > 1 && is_refusal_of_call(&reply);
            if let Some(live) = self.live.as_mut().filter(|_| is_refused) {
                live.shares_from = now + SHARING_PAUSE;
            }
            let took = now - call.sent;
            for place in 0..call.jobs {
                let Some(job) = self.calls.jobs.pop_front() else {
                    break;
                };
                let value = deal(&mut reply, call.jobs, place, job.op());
                if (is_noscript || is_refused) && job.may_be_repeated(now) {
                    // Sent again behind the other replies at hand. The server has executed nothing.
                    self.parked.push_back(job);
                } else {
                    forgot_all |= self.on_answered(job, &value, now, took);
                }
            }
        }
        if let Err(why) = replied {
            return self.on_lost(&why);
        }
        let is_up_again = !self.server.is_open() && self.server.is_down() && !self.is_silent();
        if is_up_again && !self.on_recovered() {
            return;
        }
        if let Some(live) = self.live.as_ref().filter(|_| forgot_scripts) {
            // By `SCRIPT FLUSH`.
            self.send_pipeline(&load_all(live.check.in_cluster_mode));
        }
        if !self.parked.is_empty() {
            self.send_parked();
        }
        if forgot_all {
            // A new connection has it admitted again.
            let until = now + self.server.guard.window();
            self.server.set_answering(Some(until));
            if self.next.is_none() {
                self.start_attempt();
            }
        }
    }

    /// Answers a job with its part of the reply to its call, or keeps it to be sent again. Returns whether the server has
    /// lost its memory.
    fn on_answered(&mut self, mut job: Job, value: &Value, now: Instant, took: Duration) -> bool {
        if matches!(value, Value::Nil) && job.may_be_repeated(now) && job.ask_why() {
            self.parked.push_back(job);
            return false;
        }
        self.telemetry.record(job.operation().name, took, now);
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
        let mut outcome = decode(&job.packet.command, value, &self.server.name);
        if matches!(outcome, Ok(Reply::Lost)) && is_release && job.is_repeated() {
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
        if matches!(job.op(), Op::ReleaseAfter { left } if !left.is_zero())
            && took > self.server.timeouts.node
            && matches!(outcome, Ok(Reply::Released))
        {
            // Executed late, perhaps by a server that was stopped: the keys would stay taken for that much longer.
            job.answer(outcome);
            self.parked.push_back(job);
            return false;
        }
        let is_amnesia = matches!(outcome, Ok(Reply::Amnesia));
        if is_amnesia {
            outcome = Err(self.server.quarantined(self.server.guard.window()));
        }
        self.finish(job, outcome);
        is_amnesia
    }

    fn next_timer(&self) -> Instant {
        // While the server is known to be silent, the next event is the next probe.
        let silent_at = self.calls.silent_at(self.server.timeouts.node);
        let silent_at = silent_at.filter(|_| self.next.is_none());
        let keepalive_at = self.live.as_ref().map(|live| live.sent + KEEPALIVE);
        let timers = [self.next_due(), silent_at, keepalive_at, self.refused_due];
        let earliest = timers.into_iter().flatten().min();
        earliest.unwrap_or_else(|| Instant::now() + KEEPALIVE)
    }

    pub(super) fn on_timer(&mut self) {
        let now = Instant::now();
        if self.is_silent() && self.next.is_none() {
            let patience = 2 * self.server.timeouts.node;
            let why = format!("no answer for {patience:?}, which is twice node_timeout");
            self.server.set_down(&why.into());
            self.start_attempt();
        }
        // The standby replaces the connection, or the attempt begins.
        if self.next_due().is_some_and(|due| due <= now) && !self.adopt_standby() {
            self.start_attempt();
        }
        let is_due = |live: &&mut Live| live.sent + KEEPALIVE <= now;
        if let Some(live) = self.live.as_mut().filter(is_due) {
            live.sent = now;
            if !self.is_silent() {
                // So that the next lock does not have to find out that an idle connection is broken.
                self.send_pipeline(pipe().cmd("PING"));
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
}

/// Appends the replies that have arrived to `replies`; ready if there are any, or if the connection is lost behind them.
fn poll_replies(
    link: Option<&mut Link>,
    context: &mut Context<'_>,
    replies: &mut Vec<Value>,
) -> Poll<Result<(), Arc<str>>> {
    let Some(link) = link else {
        return Poll::Pending;
    };
    // Until no more is there: the lane handles them together, which reads the clock and looks at its state once. They are
    // kept if the connection is lost behind them, because the server has executed what it answered.
    loop {
        match link.poll_reply(context) {
            Poll::Ready(Ok(reply)) => replies.push(reply),
            Poll::Ready(Err(why)) => return Poll::Ready(Err(why)),
            Poll::Pending if replies.is_empty() => return Poll::Pending,
            Poll::Pending => return Poll::Ready(Ok(())),
        }
    }
}

#[cfg(test)]
mod tests;
