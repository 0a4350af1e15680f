//! The inbox: what waits to be sent to one server, and how much may.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::node::job::Job;

/// The jobs that wait for a lane, in the order in which they were submitted.
///
/// # Design
///
/// One short lock for all that a job meets on its way in. A lock over five nodes passes ten of these
/// doors, from all threads of the runtime: a channel, a count of what waits and a place for the lane, each
/// with atomics of its own, cost more there than one after the other suggests.
#[derive(Debug, Default)]
pub(super) struct Inbox(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    /// Of records.
    bytes: usize,
    /// What the lane has taken and not finished, as it last said.
    taken: Load,
    lane: Attendance,
    /// Nothing comes in any more.
    closed: bool,
}

/// So many jobs, and so many bytes of records.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Load {
    pub(super) jobs: usize,
    pub(super) bytes: usize,
}

#[derive(Debug, Default)]
enum Attendance {
    /// There is no lane, or its runtime is gone.
    #[default]
    Absent,
    /// It will look before it sleeps.
    Awake,
    Asleep(Waker),
}

/// What became of a job.
pub(super) enum Posted {
    Accepted,
    /// Accepted, and a lane is to be started.
    NeedsLane,
    /// Too much waits already.
    Full(Job),
}

/// Most requests, beyond which a server is so far behind that no more of them would be answered in time.
const MAX_JOBS: usize = 1 << 16;
/// Most bytes of records.
const MAX_BYTES: usize = 64 << 20;

impl Inbox {
    /// Puts a job behind all that wait.
    ///
    /// A release is never refused: a lock whose acquisition had a place must be given back whatever else
    /// waits, and there is at most one for each.
    pub(super) fn post(&self, job: Job) -> Posted {
        let bytes = job.bytes();
        let mut waiting = self.waiting();
        if !job.is_release() && !waiting.has_room(bytes) {
            return Posted::Full(job);
        }
        waiting.bytes += bytes;
        waiting.jobs.push_back(job);
        match std::mem::replace(&mut waiting.lane, Attendance::Awake) {
            Attendance::Absent => Posted::NeedsLane,
            Attendance::Awake => Posted::Accepted,
            Attendance::Asleep(lane) => {
                drop(waiting);
                lane.wake();
                Posted::Accepted
            }
        }
    }

    /// Waits until there is something to take; false if there never will be.
    pub(super) fn poll_filled(&self, context: &Context<'_>) -> Poll<bool> {
        let mut waiting = self.waiting();
        if !waiting.jobs.is_empty() {
            return Poll::Ready(true);
        }
        if waiting.closed {
            return Poll::Ready(false);
        }
        match &mut waiting.lane {
            Attendance::Asleep(lane) => lane.clone_from(context.waker()),
            lane => *lane = Attendance::Asleep(context.waker().clone()),
        }
        Poll::Pending
    }

    /// Takes so many jobs at most, for a lane that has `carried` besides.
    pub(super) fn take(&self, most: usize, carried: Load) -> Vec<Job> {
        let mut waiting = self.waiting();
        let count = waiting.jobs.len().min(most);
        let jobs: Vec<Job> = waiting.jobs.drain(..count).collect();
        let bytes = if waiting.jobs.is_empty() {
            waiting.bytes
        } else {
            jobs.iter().map(Job::bytes).sum()
        };
        waiting.bytes -= bytes;
        waiting.taken = Load {
            jobs: carried.jobs + count,
            bytes: carried.bytes + bytes,
        };
        jobs
    }

    /// Ends the lane once it has nothing left to do.
    pub(super) fn close(&self) {
        let mut waiting = self.waiting();
        waiting.closed = true;
        if let Attendance::Asleep(lane) = std::mem::replace(&mut waiting.lane, Attendance::Awake) {
            drop(waiting);
            lane.wake();
        }
    }

    /// Drops what waits, unanswered; the next job needs a lane.
    pub(super) fn abandon(&self) {
        let mut waiting = self.waiting();
        let closed = waiting.closed;
        let abandoned = std::mem::take(&mut *waiting);
        waiting.closed = closed;
        // What they drop casts votes and wakes tasks.
        drop(waiting);
        drop(abandoned);
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn has_room(&self, bytes: usize) -> bool {
        self.jobs.len() + self.taken.jobs < MAX_JOBS
            && self.bytes + self.taken.bytes + bytes <= MAX_BYTES
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::time::Instant;

    use super::*;
    use crate::node::{Packet, Request, Tally};
    use crate::protocol::message::{Command, Op};
    use crate::protocol::{ExecutionId, Fingerprint, KeyNames, OwnerToken, Record};

    fn job(op: Op) -> Job {
        let names: Arc<[KeyNames]> = Arc::new([]);
        let packet = Packet::new(Command {
            names,
            owner: OwnerToken::from_random([0; 16]),
            op,
        });
        let (tally, _) = Tally::new(&["n".into()].into());
        Job::new(Request::Command(packet), tally.ballot(0), Instant::now())
    }

    fn record(bytes: usize) -> Job {
        let id = ExecutionId::from_random([1; 16]);
        let body = vec![0; bytes];
        let record = Record::new(id, Fingerprint::of_digest([2; 32]), [3; 32], &body);
        let retention = Duration::from_secs(1);
        job(Op::Record { record, retention })
    }

    #[test]
    fn there_is_so_much_room_that_what_the_lane_has_takes_too_and_releases_do_not_need() {
        let inbox = Inbox::default();
        assert!(matches!(inbox.post(job(Op::Look)), Posted::NeedsLane));
        for _ in 1..MAX_JOBS {
            assert!(matches!(inbox.post(job(Op::Look)), Posted::Accepted));
        }
        let is_full = |job| matches!(inbox.post(job), Posted::Full(_));
        assert!(is_full(job(Op::Look)));
        assert!(!is_full(job(Op::Release)));
        assert_eq!(inbox.take(100, Load::default()).len(), 100);
        assert!(is_full(job(Op::Look)));
        // When it takes the next, it has finished those.
        assert_eq!(inbox.take(10, Load::default()).len(), 10);
        assert!(!is_full(job(Op::Look)));
    }

    #[test]
    fn there_is_so_much_room_for_records() {
        let inbox = Inbox::default();
        let is_full = |job| matches!(inbox.post(job), Posted::Full(_));
        assert!(!is_full(record(MAX_BYTES / 2)));
        assert!(is_full(record(MAX_BYTES / 2)));
        assert!(!is_full(job(Op::Look)));
        inbox.take(1, Load::default());
        assert!(is_full(record(MAX_BYTES / 2)));
        inbox.take(1, Load::default());
        assert!(!is_full(record(MAX_BYTES / 2)));
    }

    #[tokio::test]
    async fn a_lane_is_woken_once_and_ends_when_all_is_taken_after_the_end() {
        let inbox = Inbox::default();
        inbox.post(job(Op::Look));
        inbox.abandon();
        assert!(matches!(inbox.post(job(Op::Look)), Posted::NeedsLane));
        let filled = || std::future::poll_fn(|context| inbox.poll_filled(context));
        assert!(filled().await);
        inbox.take(1, Load::default());
        let mut lane = tokio_test::task::spawn(filled());
        tokio_test::assert_pending!(lane.poll());
        inbox.post(job(Op::Look));
        assert!(lane.is_woken());
        inbox.post(job(Op::Look));
        assert!(tokio_test::assert_ready!(lane.poll()));
        inbox.close();
        assert!(filled().await);
        inbox.take(2, Load::default());
        assert!(!filled().await);
    }
}
