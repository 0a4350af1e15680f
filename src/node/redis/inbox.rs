//! The inbox: the bounded queue between the callers and the lane of one server.
//!
//! # Implementation details
//!
//! An inbox is a multi-producer, single-consumer channel whose consumer, the lane, can be replaced. One short
//! critical section does everything that a job meets on its way in: a lock on five nodes submits ten jobs from
//! all threads of the runtime, and a channel, a counter of queued jobs and a slot for the waker, each with atomics
//! of its own, cost more.
//!
//! *Lane.* A lane lives in the home of its lock service. If that ends, the lane is dropped and detaches itself; the
//! next job starts another one.
//!
//! *Room.* The bound covers the queued jobs and those that the lane has taken and has not reported as finished. A
//! release is never refused: a lock whose acquisition was accepted must be released, and there is at most one release
//! for each acquisition.
//!
//! Invariants: jobs leave in the order of submission, those that a lane returns before all others. There is at most
//! one lane.

use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

use crate::node::Mutex;
use crate::node::job::Job;

/// The jobs that are queued for a lane, in the order of submission.
#[derive(Debug, Default)]
pub(super) struct Inbox(Mutex<Queued>);

#[derive(Debug, Default)]
struct Queued {
    jobs: VecDeque<Job>,
    /// The [`weight`] of these jobs and of those that the lane has taken and not finished.
    weight: usize,
    /// Whether there is a lane whose home has not ended.
    has_lane: bool,
    /// Wakes the lane. `None` while it is awake: it looks into the inbox before it sleeps, or after the next reply.
    asleep: Option<Waker>,
    /// Whether the handle of the node has been dropped.
    is_closed: bool,
}

/// The maximum weight of the jobs. Beyond it, a server is so slow that no more of them would be answered in time.
const MAX_WEIGHT: usize = 64 << 20;
/// The weight of a job without a record: there may be at most 65,536 of them.
const JOB: usize = 1 << 10;

/// Returns how much of the room of an inbox a job takes: its own size, roughly, and that of its record. It does not change
/// while the job is with the lane.
pub(super) fn weight(job: &Job) -> usize {
    JOB + job.bytes()
}

impl Inbox {
    /// Appends a job to the queue, and returns whether the caller must start a lane.
    ///
    /// # Errors
    ///
    /// Returns the job if there is no room for it. A release is never refused.
    pub(super) fn post(&self, job: Job) -> Result<bool, Job> {
        let weight = weight(&job);
        let mut queued = self.0.lock();
        if queued.weight + weight > MAX_WEIGHT && !job.is_release() {
            return Err(job);
        }
        queued.weight += weight;
        queued.jobs.push_back(job);
        // Both are claimed together with the push: one of several callers starts the lane, or wakes it, and a lane that goes
        // to sleep has looked for jobs after that.
        let needs_lane = !std::mem::replace(&mut queued.has_lane, true);
        let asleep = queued.asleep.take();
        // Woken without the mutex, which the lane locks at once.
        drop(queued);
        if let Some(lane) = asleep {
            lane.wake();
        }
        Ok(needs_lane)
    }

    /// Waits until there are jobs to take, and returns false if there never will be. The lane reports the weight of the jobs
    /// that it has `finished` since it reported last.
    pub(super) fn poll_ready(&self, context: &Context<'_>, finished: &mut usize) -> Poll<bool> {
        let mut queued = self.0.lock();
        // Taken out, because the lane may be polled again before it finishes more.
        queued.weight -= std::mem::take(finished);
        if !queued.jobs.is_empty() {
            return Poll::Ready(true);
        }
        if queued.is_closed {
            return Poll::Ready(false);
        }
        match &mut queued.asleep {
            Some(lane) => lane.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }

    /// Moves up to `most` jobs to `jobs`, which is empty. They keep their room.
    pub(super) fn take(&self, most: usize, jobs: &mut VecDeque<Job>) {
        let mut queued = self.0.lock();
        if queued.jobs.len() <= most {
            // Swapped, so that the buffer of the jobs taken before serves the next ones.
            std::mem::swap(&mut queued.jobs, jobs);
        } else {
            jobs.extend(queued.jobs.drain(..most));
        }
    }

    /// Lets the lane end once it has nothing left to do.
    pub(super) fn close(&self) {
        let mut queued = self.0.lock();
        queued.is_closed = true;
        let asleep = queued.asleep.take();
        drop(queued);
        if let Some(lane) = asleep {
            lane.wake();
        }
    }

    /// Removes the lane, and takes its unfinished jobs back before the queued ones.
    pub(super) fn detach(&self, unfinished: Vec<Job>) {
        // In one critical section: the next job starts another lane, which must find these jobs before that job.
        let mut queued = self.0.lock();
        queued.has_lane = false;
        queued.asleep = None;
        for job in unfinished.into_iter().rev() {
            queued.jobs.push_front(job);
        }
        // Counted anew: the jobs that the lane has answered as it ended were not reported.
        queued.weight = queued.jobs.iter().map(weight).sum();
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::time::Instant;
    use tokio_test::task::spawn;
    use tokio_test::{assert_pending, assert_ready};

    use super::*;
    use crate::node::job::Packet;
    use crate::node::votes::VoteReceiver;
    use crate::protocol::message::{Command, Op};
    use crate::protocol::{ExecutionId, Fingerprint, KeyNames, OwnerToken, Record};

    #[cfg(shuttle)]
    mod schedules;

    const MAX_JOBS: usize = 1 << 16;

    fn job(op: Op) -> Job {
        let names: Arc<[KeyNames]> = Arc::new([]);
        let command = Command {
            names,
            owner: OwnerToken::from_random([0; 16]),
            op,
        };
        let packet = Packet::new(command, false, None);
        let votes = VoteReceiver::new(&["n".into()].into());
        Job::new(Some(packet), votes.sender(0), Instant::now())
    }

    fn record(bytes: usize) -> Job {
        let id = ExecutionId::from_random([1; 16]);
        let body = vec![0; bytes];
        let record = Record::new(id, Fingerprint::from_digest([2; 32]), [3; 32], &body);
        let retention = Duration::from_secs(1);
        job(Op::Record { record, retention })
    }

    #[tokio::test]
    async fn post_counts_jobs_that_the_lane_has_taken_and_accepts_every_release() {
        let inbox = Inbox::default();
        assert!(matches!(inbox.post(job(Op::Look)), Ok(true)));
        for _ in 1..MAX_JOBS {
            assert!(matches!(inbox.post(job(Op::Look)), Ok(false)));
        }
        let is_full = |job| inbox.post(job).is_err();
        assert!(is_full(job(Op::Look)));
        assert!(!is_full(job(Op::Release)));
        let mut taken = VecDeque::new();
        inbox.take(MAX_JOBS + 1, &mut taken);
        assert_eq!(taken.len(), MAX_JOBS + 1);
        assert!(is_full(job(Op::Look)));
        // The lane has finished them and looks for more.
        let mut finished = taken.iter().map(weight).sum();
        let mut ready = spawn(poll_fn(|context| inbox.poll_ready(context, &mut finished)));
        assert_pending!(ready.poll());
        assert!(!is_full(job(Op::Look)));
    }

    #[tokio::test]
    async fn post_bounds_the_size_of_records() {
        let inbox = Inbox::default();
        let is_full = |job| inbox.post(job).is_err();
        assert!(!is_full(record(MAX_WEIGHT / 2)));
        assert!(is_full(record(MAX_WEIGHT / 2)));
        assert!(!is_full(job(Op::Look)));
        let mut taken = VecDeque::new();
        inbox.take(1, &mut taken);
        assert!(is_full(record(MAX_WEIGHT / 2)));
        drop(taken);
        inbox.detach(Vec::new());
        assert!(!is_full(record(MAX_WEIGHT / 2)));
    }

    #[tokio::test]
    async fn post_wakes_the_lane_once_and_a_closed_inbox_ends_it_when_empty() {
        let inbox = Inbox::default();
        let ready = || poll_fn(|context| inbox.poll_ready(context, &mut 0));
        let post = || assert!(inbox.post(job(Op::Look)).is_ok());
        post();
        assert!(ready().await);
        inbox.take(1, &mut VecDeque::new());
        let mut lane = spawn(ready());
        assert_pending!(lane.poll());
        post();
        assert!(lane.is_woken());
        post();
        assert!(assert_ready!(lane.poll()));
        inbox.close();
        assert!(ready().await);
        inbox.take(2, &mut VecDeque::new());
        assert!(!ready().await);
    }

    #[test]
    fn jobs_that_a_lane_leaves_are_before_those_that_wait_for_the_next() {
        let inbox = Inbox::default();
        assert!(matches!(inbox.post(job(Op::Release)), Ok(true)));
        let mut taken = VecDeque::new();
        inbox.take(9, &mut taken);
        assert!(matches!(inbox.post(job(Op::Look)), Ok(false)));
        inbox.detach(taken.drain(..).collect());
        assert!(matches!(inbox.post(job(Op::Look)), Ok(true)));
        assert!(matches!(inbox.post(job(Op::Look)), Ok(false)));
        inbox.take(9, &mut taken);
        assert!(taken.len() == 4 && taken[0].is_release());
    }
}
