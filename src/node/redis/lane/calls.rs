//! The calls of a lane: how jobs are grouped into them, and those in flight.

use std::collections::VecDeque;
use std::mem::take;
use std::time::Duration;

use tokio::time::Instant;

use crate::node::job::Job;
use crate::node::redis::table::GenerationCheck;

/// The jobs that a lane is about to send, and those on the connection whose replies have not arrived.
///
/// # Design
///
/// A batch consists of runs of jobs, in the order of submission, in which no two jobs are on one key. Within a run, the
/// order does not matter, so jobs of one kind share a call. A run ends before a job whose key it has already: so a
/// release stays behind its acquisition. A job on several keys is a run of its own.
#[derive(Default)]
pub(super) struct Calls {
    /// The calls of the current run, of which so many are used. Behind them are empty ones, which keep their buffers.
    run: Vec<OpenCall>,
    used: usize,
    /// The hashes of the keys in the run. Equal hashes of two keys only end a run early.
    keys: Vec<u64>,
    /// One bit of 512 for each of them, so that a key that is not there is rarely looked for.
    key_bits: [u64; 8],
    /// The calls in flight, oldest first, in the order of their replies, and behind them those of the next batch.
    calls: VecDeque<Call>,
    /// The jobs of these calls, one call behind the other.
    pub(super) jobs: VecDeque<Job>,
    /// The number of calls in the next batch, and of their jobs.
    unsent: (usize, usize),
    /// The number of batches in flight.
    batches: usize,
    /// How much longer than the node timeout a reply may take because of all these jobs.
    transit: Duration,
}

/// Jobs that share the next call.
#[derive(Default)]
struct OpenCall {
    jobs: Vec<Job>,
    /// The length of their own parts.
    bytes: usize,
}

/// A call in flight, which has one reply.
pub(super) struct Call {
    /// The number of its jobs; none if it is a command of the lane itself.
    pub(super) jobs: usize,
    pub(super) sent: Instant,
    /// How much longer than the node timeout it may take because of its own size.
    own_transit: Duration,
    /// The same because of everything in flight, this call included, when it was sent.
    transit: Duration,
    /// Whether it is the last of its batch.
    ends_batch: bool,
}

/// The most jobs in one call. The server does nothing else meanwhile; a call of this size takes it about a third of a
/// millisecond.
const MAX_JOBS: usize = 64;
/// The most bytes of keys and owners in one call.
const MAX_BYTES: usize = 32 << 10;
/// The maximum number of batches in flight. A long connection needs many, or jobs would wait for replies that have
/// nothing to do with them; beyond this the server is slow, and queued jobs may still be called off.
const MAX_BATCHES: usize = 32;

impl Calls {
    /// Returns whether there are as many batches as may be.
    pub(super) fn is_full(&self) -> bool {
        self.batches >= MAX_BATCHES
    }

    /// Returns whether no call is in flight.
    pub(super) fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Returns the numbers of jobs in the calls.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> impl Iterator<Item = usize> {
        self.calls.iter().map(|call| call.jobs)
    }

    /// Returns when the oldest reply is overdue: after twice the node timeout. After the first, every lease has given
    /// up on it; the second is for a process that was starved of CPU.
    pub(super) fn silent_at(&self, node_timeout: Duration) -> Option<Instant> {
        let oldest = self.calls.front()?;
        Some(oldest.sent + 2 * node_timeout + oldest.transit)
    }

    /// Adds a job. It is marked as sent at once: its release may be in the same batch, and must not be called off.
    ///
    /// Jobs share no calls without `check`, the check of a connection that supports them.
    pub(super) fn add(&mut self, mut job: Job, check: Option<&GenerationCheck>, now: Instant) {
        job.mark_sent();
        let Some(check) = check else {
            return self.push_call(now, [job]);
        };
        let encoded = job.encoded(check);
        let Some(hash) = encoded.key_hash else {
            // It may be on the keys of jobs before and behind it.
            self.end_run(now);
            return self.push_call(now, [job]);
        };
        // The older job on this key is in a call of the run. That call may stand behind others when the run is sent, so only
        // the next run is certainly behind it.
        let [word, bit, ..] = hash.to_le_bytes();
        let (word, bit) = (usize::from(word % 8), 1 << (bit % 64));
        if self.key_bits[word] & bit != 0 && self.keys.contains(&hash) {
            self.end_run(now);
        }
        self.keys.push(hash);
        self.key_bits[word] |= bit;
        let (bytes, is_shareable) = (encoded.own.end, encoded.is_shareable(check));
        let fits = |call: &OpenCall| {
            let has_room = call.jobs.len() < MAX_JOBS && call.bytes + bytes <= MAX_BYTES;
            // Jobs that are alike can share calls, or none of them can.
            let is_like = |other: &Job| other.encoded(check).is_like(encoded);
            has_room && call.jobs.first().is_some_and(is_like)
        };
        // Any call of the run, not only the last: its jobs are on different keys, so their order is free. The first that fits
        // keeps jobs of one kind in the order of submission. If none does, an empty one behind them.
        let found = is_shareable.then(|| self.run[..self.used].iter().position(fits));
        let place = found.flatten().unwrap_or(self.used);
        if place == self.run.len() {
            self.run.push(OpenCall::default());
        }
        self.used = self.used.max(place + 1);
        let call = &mut self.run[place];
        call.bytes += bytes;
        call.jobs.push(job);
    }

    /// Ends the run and moves its calls to the next batch.
    fn end_run(&mut self, now: Instant) {
        self.keys.clear();
        self.key_bits = [0; 8];
        // Put back below with the buffers of its calls, which serve the next runs.
        let (mut run, used) = (take(&mut self.run), take(&mut self.used));
        for call in &mut run[..used] {
            call.bytes = 0;
            self.push_call(now, call.jobs.drain(..));
        }
        self.run = run;
    }

    /// Adds a call to the next batch: for these jobs, or a command of the lane itself.
    pub(super) fn push_call(&mut self, now: Instant, jobs: impl IntoIterator<Item = Job>) {
        let before = self.jobs.len();
        self.jobs.extend(jobs);
        let jobs = self.jobs.len() - before;
        // A reply comes behind those to all earlier calls, and their records are transferred before it.
        // Those with a record share no call.
        let alone = self.jobs.back().filter(|_| jobs == 1);
        let own_transit = alone.map(|job| job.op().transit()).unwrap_or_default();
        self.transit += own_transit;
        self.unsent.0 += 1;
        self.unsent.1 += jobs;
        self.calls.push_back(Call {
            jobs,
            sent: now,
            own_transit,
            transit: self.transit,
            ends_batch: false,
        });
    }

    /// Ends the run, and returns the jobs of each call of the next batch.
    pub(super) fn unsent(
        &mut self,
        now: Instant,
    ) -> impl ExactSizeIterator<Item = impl ExactSizeIterator<Item = &Job> + Clone> {
        self.end_run(now);
        let (calls, jobs) = (&self.calls, &self.jobs);
        let mut from = jobs.len() - self.unsent.1;
        calls.range(calls.len() - self.unsent.0..).map(move |call| {
            let of_call = jobs.range(from..from + call.jobs);
            from += call.jobs;
            of_call
        })
    }

    /// Notes that the next batch was sent.
    pub(super) fn on_sent(&mut self) {
        self.unsent = (0, 0);
        // A batch is in flight until its last call is answered. Batches are counted and not calls, because what was queued
        // together is sent together, however many calls it needs.
        if let Some(last) = self.calls.back_mut() {
            last.ends_batch = true;
            self.batches += 1;
        }
    }

    /// Removes the oldest call, whose reply has arrived. Its jobs are the oldest.
    pub(super) fn pop(&mut self) -> Option<Call> {
        let call = self.calls.pop_front()?;
        self.batches -= usize::from(call.ends_batch);
        self.transit = self.transit.saturating_sub(call.own_transit);
        Some(call)
    }

    /// Removes everything, because the connection is gone, and returns the jobs.
    pub(super) fn drain(&mut self) -> VecDeque<Job> {
        // Those about to be sent, too: nothing may be sent twice, and the lane parks what it sends again.
        self.calls.clear();
        self.unsent = (0, 0);
        self.batches = 0;
        self.transit = Duration::ZERO;
        take(&mut self.jobs)
    }
}

#[cfg(test)]
mod tests;
