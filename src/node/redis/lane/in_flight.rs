//! The jobs in flight: those on the connection whose replies have not arrived.

use std::collections::VecDeque;
use std::time::Duration;

use deadpool_redis::redis::Value;
use tokio::time::Instant;

use crate::node::job::{Job, Request};
use crate::node::redis::queue::Load;

/// The maximum number of batches in flight. A long connection needs many, or jobs would wait for replies that have
/// nothing to do with them; beyond this the server is slow, and queued jobs may still be called off.
const MAX_BATCHES: usize = 32;

/// The jobs on the connection, in batches of calls, and the replies to the oldest batch as far as they have arrived.
pub(super) struct InFlight {
    /// The batches, oldest first, in the order of their replies.
    batches: VecDeque<Batch>,
    /// The number of jobs in each of their calls, and behind them the calls of the batch that is about to be sent.
    calls: VecDeque<usize>,
    /// The jobs of these calls, one call behind the other.
    jobs: VecDeque<Job>,
    /// The number of calls, and of their jobs, that are about to be sent.
    unsent: (usize, usize),
    load: Load,
    /// How much longer than the node timeout a reply may take because of everything in flight.
    transit: Duration,
    pub(super) replies: Vec<Value>,
    pub(super) last_sent: Instant,
}

pub(super) struct Batch {
    pub(super) load: Load,
    /// The number of calls.
    pub(super) calls: usize,
    pub(super) sent: Instant,
    /// How much longer than the node timeout it may take because of its own size.
    own_transit: Duration,
    /// The same because of everything in flight, this batch included, when it was sent.
    transit: Duration,
}

impl InFlight {
    pub(super) fn new() -> Self {
        Self {
            batches: VecDeque::new(),
            calls: VecDeque::new(),
            jobs: VecDeque::new(),
            unsent: (0, 0),
            load: Load::default(),
            transit: Duration::ZERO,
            replies: Vec::new(),
            last_sent: Instant::now(),
        }
    }

    pub(super) fn load(&self) -> Load {
        self.load
    }

    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// Returns whether there are as many batches as may be.
    pub(super) fn is_full(&self) -> bool {
        self.batches.len() >= MAX_BATCHES
    }

    pub(super) fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.jobs.iter()
    }

    /// Returns the numbers of jobs in the calls.
    #[cfg(test)]
    pub(super) fn calls(&self) -> impl Iterator<Item = usize> {
        self.calls.iter().copied()
    }

    /// Adds a call for these jobs to the next batch.
    pub(super) fn push_call(&mut self, jobs: impl Iterator<Item = Job>) {
        let before = self.jobs.len();
        self.jobs.extend(jobs);
        let count = self.jobs.len() - before;
        self.calls.push_back(count);
        self.unsent.0 += 1;
        self.unsent.1 += count;
    }

    /// Returns the requests of each call of the next batch.
    pub(super) fn unsent_calls(
        &self,
    ) -> impl ExactSizeIterator<Item = impl ExactSizeIterator<Item = &Request> + Clone> {
        let (calls, jobs) = self.unsent;
        let mut from = self.jobs.len() - jobs;
        self.calls
            .range(self.calls.len() - calls..)
            .map(move |count| {
                let jobs = self.jobs.range(from..from + count);
                from += count;
                jobs.map(|job| &job.request)
            })
    }

    /// Notes that the next batch, which may be empty, was sent.
    pub(super) fn on_sent(&mut self) {
        let sent = Instant::now();
        self.last_sent = sent;
        let (mut load, mut own_transit) = (Load::default(), Duration::ZERO);
        let (calls, jobs) = std::mem::take(&mut self.unsent);
        for job in self.jobs.range(self.jobs.len() - jobs..) {
            let (jobs, bytes) = (1, job.bytes());
            load += Load { jobs, bytes };
            own_transit += job.transit();
        }
        self.load += load;
        self.transit += own_transit;
        self.batches.push_back(Batch {
            load,
            calls,
            sent,
            own_transit,
            transit: self.transit,
        });
    }

    /// Removes the oldest batch, all of whose replies have arrived.
    pub(super) fn pop_batch(&mut self) -> Option<Batch> {
        let batch = self.batches.pop_front()?;
        self.load -= batch.load;
        self.transit = self.transit.saturating_sub(batch.own_transit);
        Some(batch)
    }

    /// Removes the replies to the batch that was popped. A batch without calls has replies too: to a ping,
    /// or to the loading of the scripts.
    pub(super) fn take_replies(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.replies)
    }

    /// Removes the oldest call, and returns the number of its jobs.
    pub(super) fn pop_call(&mut self) -> usize {
        self.calls.pop_front().unwrap_or_default()
    }

    /// Removes the oldest job.
    pub(super) fn pop_job(&mut self) -> Option<Job> {
        self.jobs.pop_front()
    }

    /// Removes everything, because the connection is gone, and returns the jobs.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Job> {
        self.transit = Duration::ZERO;
        self.load = Load::default();
        self.unsent = (0, 0);
        self.batches.clear();
        self.calls.clear();
        self.replies.clear();
        self.jobs.drain(..)
    }

    /// Returns when the reply to the oldest batch is overdue: after twice the node timeout. After the first, every
    /// lease has given up on it; the second is for a process that was starved of CPU.
    pub(super) fn silent_at(&self, node_timeout: Duration) -> Option<Instant> {
        let oldest = self.batches.front()?;
        Some(oldest.sent + 2 * node_timeout + oldest.transit)
    }
}
