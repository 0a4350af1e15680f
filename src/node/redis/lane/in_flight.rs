//! The jobs in flight: those on the connection whose replies have not arrived.

use std::collections::VecDeque;
use std::time::Duration;

use deadpool_redis::redis::Value;
use tokio::time::Instant;

use crate::node::job::{Job, Request};
use crate::node::redis::inbox::Load;

/// The maximum number of batches in flight. A long connection needs many, or jobs would wait for replies that have
/// nothing to do with them; beyond this the server is slow, and queued jobs may still be called off.
const MAX_BATCHES: usize = 32;

/// The jobs on the connection, in batches, and the replies to the oldest batch as far as they have arrived.
pub(super) struct InFlight {
    /// The batches, oldest first, in the order of their replies.
    batches: VecDeque<Batch>,
    /// Their jobs, one batch behind the other, and behind them those of the batch that is about to be sent.
    jobs: VecDeque<Job>,
    load: Load,
    /// How much longer than the node timeout a reply may take because of everything in flight.
    transit: Duration,
    pub(super) replies: Vec<Value>,
    pub(super) last_sent: Instant,
}

pub(super) struct Batch {
    pub(super) load: Load,
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
            jobs: VecDeque::new(),
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

    /// Returns the number of jobs, those of the next batch included.
    pub(super) fn len(&self) -> usize {
        self.jobs.len()
    }

    pub(super) fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.jobs.iter()
    }

    /// Adds a job to the next batch and marks it as sent: its release may be in the same batch, and must not be
    /// called off.
    pub(super) fn push(&mut self, job: Job) {
        job.mark_sent();
        self.jobs.push_back(job);
    }

    /// Returns the requests of the jobs from this one on.
    pub(super) fn requests_from(&self, from: usize) -> impl ExactSizeIterator<Item = &Request> {
        self.jobs.range(from..).map(|job| &job.request)
    }

    /// Removes the jobs from this one on, which were not sent.
    pub(super) fn drain_from(&mut self, from: usize) -> impl Iterator<Item = Job> {
        self.jobs.drain(from..)
    }

    /// Notes that the jobs from this one on were sent as a batch, which may be empty.
    pub(super) fn on_sent(&mut self, from: usize) {
        let sent = Instant::now();
        self.last_sent = sent;
        let (mut load, mut own_transit) = (Load::default(), Duration::ZERO);
        for job in self.jobs.range(from..) {
            let (jobs, bytes) = (1, job.bytes());
            load += Load { jobs, bytes };
            own_transit += job.transit();
        }
        self.load += load;
        self.transit += own_transit;
        self.batches.push_back(Batch {
            load,
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

    /// Removes the jobs of the batch that was popped, each with its reply. A batch without jobs has replies too.
    pub(super) fn drain_answered(&mut self, batch: &Batch) -> impl Iterator<Item = (Job, Value)> {
        let jobs = self.jobs.drain(..batch.load.jobs);
        jobs.zip(self.replies.drain(..))
    }

    /// Removes everything, because the connection is gone, and returns the jobs.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Job> {
        self.transit = Duration::ZERO;
        self.load = Load::default();
        self.batches.clear();
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
