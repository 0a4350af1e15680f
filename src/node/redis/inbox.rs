//! The inbox: the bounded queue between the callers and the lane of one server.
//!
//! # Implementation details
//!
//! An inbox is a multi-producer, single-consumer channel whose consumer, the lane, can be replaced. One short
//! critical section does everything that a job meets on its way in: a lock on five nodes submits ten jobs from
//! all threads of the runtime, and a channel, a counter of queued jobs and a slot for the waker, each with atomics
//! of its own, cost more.
//!
//! *Lane.* [`LaneState`] says whether there is a lane, and whether a job must wake it. A lane lives in the home of its
//! lock service. If that ends, the lane is dropped and detaches itself; the next job starts another one.
//!
//! *Room.* The bound covers the queued jobs and those that the lane has taken and not finished, as it last
//! reported. A release is never refused: a lock whose acquisition was accepted must be released, and there is at
//! most one release for each acquisition.
//!
//! Invariants: jobs leave in the order of submission, those that a lane returns before all others. There is at most
//! one lane.

use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

use crate::node::Mutex;
use crate::node::job::Job;
use crate::node::redis::queue::{JobQueue, Load};

/// The jobs that are queued for a lane, in the order of submission.
#[derive(Debug, Default)]
pub(super) struct Inbox(Mutex<Queued>);

#[derive(Debug, Default)]
struct Queued {
    jobs: JobQueue,
    /// The jobs that the lane has taken and not finished, as it last reported.
    taken: Load,
    lane: LaneState,
    /// Whether the handle of the node has been dropped.
    is_closed: bool,
}

/// The activity of the lane.
#[derive(Debug, Default)]
enum LaneState {
    /// There is no lane, or its home has ended.
    #[default]
    Absent,
    /// It looks into the inbox before it sleeps, or after the next reply.
    Awake,
    Asleep(Waker),
}

/// The result of posting a job.
pub(super) enum Posted {
    Accepted,
    /// Accepted, and the caller must start a lane.
    NeedsLane,
    /// Not accepted: there is no room.
    Full(Job),
}

/// The maximum number of jobs. Beyond it, a server is so slow that no more of them would be answered in time.
const MAX_JOBS: usize = 1 << 16;
/// The maximum size of their records.
const MAX_BYTES: usize = 64 << 20;

impl Inbox {
    /// Appends a job to the queue. A release is never refused for lack of room.
    pub(super) fn post(&self, job: Job) -> Posted {
        let bytes = job.bytes();
        let mut queued = self.0.lock();
        if !job.is_release() && !queued.has_room(bytes) {
            return Posted::Full(job);
        }
        queued.jobs.push_back(job);
        // Claimed together with the push: one of several callers starts the lane, or wakes it, and a lane that goes to sleep
        // has looked for jobs after that.
        let lane = std::mem::replace(&mut queued.lane, LaneState::Awake);
        drop(queued);
        match lane {
            LaneState::Absent => return Posted::NeedsLane,
            LaneState::Asleep(lane) => lane.wake(),
            LaneState::Awake => {}
        }
        Posted::Accepted
    }

    /// Waits until there are jobs to take, and returns false if there never will be. The lane reports that it has
    /// `taken` so much.
    pub(super) fn poll_ready(&self, context: &Context<'_>, taken: Load) -> Poll<bool> {
        let mut queued = self.0.lock();
        queued.taken = taken;
        if !queued.jobs.is_empty() {
            return Poll::Ready(true);
        }
        if queued.is_closed {
            return Poll::Ready(false);
        }
        match &mut queued.lane {
            LaneState::Asleep(lane) => lane.clone_from(context.waker()),
            lane => *lane = LaneState::Asleep(context.waker().clone()),
        }
        Poll::Pending
    }

    /// Moves up to `most` jobs to `jobs`, which is empty.
    pub(super) fn take(&self, most: usize, jobs: &mut VecDeque<Job>) {
        let mut queued = self.0.lock();
        let taken = queued.jobs.move_to(jobs, most);
        queued.taken += taken;
    }

    /// Lets the lane end once it has nothing left to do.
    pub(super) fn close(&self) {
        let mut queued = self.0.lock();
        queued.is_closed = true;
        if let LaneState::Asleep(lane) = std::mem::replace(&mut queued.lane, LaneState::Awake) {
            drop(queued);
            lane.wake();
        }
    }

    /// Removes the lane, and takes its unfinished jobs back before the queued ones.
    pub(super) fn detach(&self, unfinished: Vec<Job>) {
        let mut queued = self.0.lock();
        queued.taken = Load::default();
        queued.lane = LaneState::Absent;
        for job in unfinished.into_iter().rev() {
            queued.jobs.push_front(job);
        }
    }
}

impl Queued {
    fn has_room(&self, bytes: usize) -> bool {
        let mut load = self.jobs.load();
        load += self.taken;
        load.jobs < MAX_JOBS && load.bytes + bytes <= MAX_BYTES
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
    use crate::node::job::{Packet, Request};
    use crate::node::votes::VoteReceiver;
    use crate::protocol::message::{Command, Op};
    use crate::protocol::{ExecutionId, Fingerprint, KeyNames, OwnerToken, Record};

    #[cfg(shuttle)]
    mod schedules;

    fn job(op: Op) -> Job {
        let names: Arc<[KeyNames]> = Arc::new([]);
        let command = Command {
            names,
            owner: OwnerToken::from_random([0; 16]),
            op,
        };
        let packet = Packet::new(command, false, None);
        let votes = VoteReceiver::new(&["n".into()].into());
        Job::new(Request::Command(packet), votes.sender(0), Instant::now())
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
        assert!(matches!(inbox.post(job(Op::Look)), Posted::NeedsLane));
        for _ in 1..MAX_JOBS {
            assert!(matches!(inbox.post(job(Op::Look)), Posted::Accepted));
        }
        let is_full = |job| matches!(inbox.post(job), Posted::Full(_));
        assert!(is_full(job(Op::Look)));
        assert!(!is_full(job(Op::Release)));
        let mut taken = VecDeque::new();
        inbox.take(MAX_JOBS + 1, &mut taken);
        assert_eq!(taken.len(), MAX_JOBS + 1);
        assert!(is_full(job(Op::Look)));
        // The lane has finished them and looks for more.
        let taken = Load::default();
        let mut ready = spawn(poll_fn(|context| inbox.poll_ready(context, taken)));
        assert_pending!(ready.poll());
        assert!(!is_full(job(Op::Look)));
    }

    #[tokio::test]
    async fn post_bounds_the_size_of_records() {
        let inbox = Inbox::default();
        let is_full = |job| matches!(inbox.post(job), Posted::Full(_));
        assert!(!is_full(record(MAX_BYTES / 2)));
        assert!(is_full(record(MAX_BYTES / 2)));
        assert!(!is_full(job(Op::Look)));
        let mut taken = VecDeque::new();
        inbox.take(1, &mut taken);
        assert!(is_full(record(MAX_BYTES / 2)));
        drop(taken);
        inbox.detach(Vec::new());
        assert!(!is_full(record(MAX_BYTES / 2)));
    }

    #[tokio::test]
    async fn post_wakes_the_lane_once_and_a_closed_inbox_ends_it_when_empty() {
        let inbox = Inbox::default();
        let ready = || poll_fn(|context| inbox.poll_ready(context, Load::default()));
        inbox.post(job(Op::Look));
        assert!(ready().await);
        inbox.take(1, &mut VecDeque::new());
        let mut lane = spawn(ready());
        assert_pending!(lane.poll());
        inbox.post(job(Op::Look));
        assert!(lane.is_woken());
        inbox.post(job(Op::Look));
        assert!(assert_ready!(lane.poll()));
        inbox.close();
        assert!(ready().await);
        inbox.take(2, &mut VecDeque::new());
        assert!(!ready().await);
    }

    #[test]
    fn jobs_that_a_lane_leaves_are_before_those_that_wait_for_the_next() {
        let inbox = Inbox::default();
        assert!(matches!(inbox.post(job(Op::Release)), Posted::NeedsLane));
        let mut taken = VecDeque::new();
        inbox.take(9, &mut taken);
        assert!(matches!(inbox.post(job(Op::Look)), Posted::Accepted));
        inbox.detach(taken.drain(..).collect());
        assert!(matches!(inbox.post(job(Op::Look)), Posted::NeedsLane));
        assert!(matches!(inbox.post(job(Op::Look)), Posted::Accepted));
        inbox.take(9, &mut taken);
        assert!(taken.len() == 4 && taken[0].is_release());
    }
}
