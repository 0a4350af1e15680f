//! The inbox: the bounded queue between the callers and the lane of one server.
//!
//! # Implementation details
//!
//! An inbox is a multi-producer, single-consumer channel whose consumer, the lane, can be replaced. One short
//! critical section does everything that a job meets on its way in: a lock on five nodes submits ten jobs from
//! all threads of the runtime, and a channel, a counter of queued jobs and a slot for the waker, each with atomics
//! of its own, cost more.
//!
//! *Lane.* A lane runs in the runtime of the caller that started it. [`LaneState`] says whether there is one and
//! whether a job must wake it. If its runtime ends, the lane is dropped and detaches itself; the next job, or
//! another runtime that has submitted jobs, starts a new one. A runtime may also stall without ending: a
//! current-thread runtime runs only within `block_on`. If a job of another runtime has not been looked at for
//! [`STALLED_AFTER`], that runtime starts a new lane, and `number` tells the stalled one that it has been replaced.
//!
//! *Room.* The bound covers the queued jobs and those that the lane has taken and not finished, as it last
//! reported. A release is never refused: a lock whose acquisition was accepted must be released, and there is at
//! most one release for each acquisition.
//!
//! Invariants: jobs leave in the order of submission, those that a lane returns before all others. There is at most
//! one lane whose number is current.

use std::collections::VecDeque;
use std::ops::{AddAssign, SubAssign};
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::time::Instant;

use crate::node::Mutex;
use crate::node::job::Job;

/// The jobs that are queued for a lane, in the order of submission.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    queued: Mutex<Queued>,
    /// The number of the current lane; one with another number has been replaced. Changed under the mutex.
    number: AtomicU64,
}

#[derive(Debug, Default)]
struct Queued {
    jobs: VecDeque<Job>,
    /// The size of the records in these jobs.
    bytes: usize,
    /// The jobs that the lane has taken and not finished, as it last reported.
    taken: Load,
    lane: LaneState,
    /// The runtime of the lane.
    runtime: Option<Id>,
    /// Since when a job of another runtime waits that the lane has not looked at.
    unserved_since: Option<Instant>,
    /// The other runtimes that submitted jobs last, in which to start a lane when the current one ends.
    others: Vec<Handle>,
    /// Whether the handle of the node has been dropped.
    is_closed: bool,
}

/// A number of jobs and the size of their records.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Load {
    pub(super) jobs: usize,
    pub(super) bytes: usize,
}

/// The activity of the lane.
#[derive(Debug, Default)]
enum LaneState {
    /// There is no lane, or its runtime has ended.
    #[default]
    Absent,
    /// It looks into the inbox before it sleeps.
    Awake,
    /// It looks into the inbox only after the next reply.
    Backlogged,
    Asleep(Waker),
}

/// The result of posting a job.
pub(super) enum Posted {
    Accepted,
    /// Accepted, and the caller must start a lane in this runtime.
    NeedsLane(Handle),
    /// Not accepted: there is no lane, and no runtime to start one in.
    NoRuntime(Job),
    /// Not accepted: there is no room.
    Full(Job),
}

/// The maximum number of jobs. Beyond it, a server is so slow that no more of them would be answered in time.
const MAX_JOBS: usize = 1 << 16;
/// The maximum size of their records.
const MAX_BYTES: usize = 64 << 20;
/// How long a lane may leave jobs of another runtime unserved before it counts as stalled.
const STALLED_AFTER: Duration = Duration::from_secs(1);
/// The maximum number of other runtimes that are remembered.
const MAX_OTHERS: usize = 4;

impl Inbox {
    /// Appends a job to the queue. A release is never refused for lack of room.
    pub(super) fn post(&self, job: Job) -> Posted {
        let bytes = job.bytes();
        let runtime = Handle::try_current().ok();
        let mut queued = self.queued.lock();
        if !job.is_release() && !queued.has_room(bytes) {
            return Posted::Full(job);
        }
        let is_stalled = runtime
            .as_ref()
            .is_some_and(|runtime| queued.is_stalled(runtime));
        let (mut starts_in, mut replaced) = (None, None);
        match (&queued.lane, runtime) {
            // Also if there was a lane whose runtime has ended.
            (LaneState::Absent, Some(runtime)) => {
                queued.runtime = Some(runtime.id());
                starts_in = Some(runtime);
            }
            (LaneState::Absent, None) => return Posted::NoRuntime(job),
            (_, Some(runtime)) if is_stalled => {
                self.number.fetch_add(1, Ordering::AcqRel);
                queued.taken = Load::default();
                queued.runtime = Some(runtime.id());
                queued.lane = LaneState::Awake;
                starts_in = Some(runtime);
            }
            (_, Some(runtime)) => replaced = queued.remember_runtime(runtime),
            (_, None) => {}
        }
        queued.bytes += bytes;
        queued.jobs.push_back(job);
        let lane = match queued.lane {
            LaneState::Backlogged => LaneState::Backlogged,
            _ => std::mem::replace(&mut queued.lane, LaneState::Awake),
        };
        drop(queued);
        drop(replaced);
        if let LaneState::Asleep(lane) = lane {
            lane.wake();
        }
        starts_in.map_or(Posted::Accepted, Posted::NeedsLane)
    }

    /// Waits until there are jobs to take, and returns false if there never will be. The lane with this `number`
    /// reports that it has `taken` so much; one that was replaced gets no jobs.
    pub(super) fn poll_ready(&self, number: u64, context: &Context<'_>, taken: Load) -> Poll<bool> {
        let mut queued = self.queued.lock();
        if self.number() != number {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        queued.taken = taken;
        queued.unserved_since = None;
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

    /// Notes that the lane will look again after the next reply.
    pub(super) fn set_backlogged(&self, number: u64) {
        let mut queued = self.queued.lock();
        if self.number() == number {
            queued.lane = LaneState::Backlogged;
            queued.unserved_since = None;
        }
    }

    /// Returns the number of the current lane, or of the next one.
    pub(super) fn number(&self) -> u64 {
        self.number.load(Ordering::Acquire)
    }

    /// Takes back the unfinished jobs of a lane that was replaced.
    pub(super) fn return_unfinished(&self, unfinished: Vec<Job>) {
        let mut queued = self.queued.lock();
        queued.push_front(unfinished);
        if !matches!(queued.lane, LaneState::Asleep(_)) || queued.jobs.is_empty() {
            return;
        }
        if let LaneState::Asleep(lane) = std::mem::replace(&mut queued.lane, LaneState::Awake) {
            drop(queued);
            lane.wake();
        }
    }

    /// Moves up to `most` jobs to `jobs`, which is empty.
    pub(super) fn take(&self, most: usize, jobs: &mut VecDeque<Job>) {
        let mut queued = self.queued.lock();
        let bytes = if queued.jobs.len() <= most {
            // Swapped, so that the buffer of the jobs taken before serves the next ones.
            std::mem::swap(&mut queued.jobs, jobs);
            queued.bytes
        } else {
            jobs.extend(queued.jobs.drain(..most));
            jobs.iter().map(Job::bytes).sum()
        };
        queued.bytes -= bytes;
        let jobs = jobs.len();
        queued.taken += Load { jobs, bytes };
    }

    /// Lets the lane end once it has nothing left to do.
    pub(super) fn close(&self) {
        let mut queued = self.queued.lock();
        queued.is_closed = true;
        if let LaneState::Asleep(lane) = std::mem::replace(&mut queued.lane, LaneState::Awake) {
            drop(queued);
            lane.wake();
        }
    }

    /// Removes the lane and takes back its unfinished jobs, before the queued ones. If there are any, returns the
    /// runtimes in which to [attach](Self::attach) another lane, unless the next job does so first.
    #[must_use]
    pub(super) fn detach(&self, unfinished: Vec<Job>) -> Vec<Handle> {
        let mut queued = self.queued.lock();
        queued.taken = Load::default();
        queued.push_front(unfinished);
        queued.unserved_since = None;
        queued.runtime = None;
        queued.lane = LaneState::Absent;
        match queued.jobs.is_empty() {
            true => Vec::new(),
            false => std::mem::take(&mut queued.others),
        }
    }

    /// Makes the caller the lane, in the current runtime, if there is none and jobs are queued. Returns whether it
    /// did.
    #[must_use]
    pub(super) fn attach(&self) -> bool {
        let mut queued = self.queued.lock();
        let is_needed = matches!(queued.lane, LaneState::Absent) && !queued.jobs.is_empty();
        if is_needed {
            queued.lane = LaneState::Awake;
            queued.runtime = Handle::try_current().ok().map(|runtime| runtime.id());
        }
        is_needed
    }
}

impl AddAssign for Load {
    fn add_assign(&mut self, more: Self) {
        self.jobs += more.jobs;
        self.bytes += more.bytes;
    }
}

impl SubAssign for Load {
    fn sub_assign(&mut self, less: Self) {
        self.jobs -= less.jobs;
        self.bytes -= less.bytes;
    }
}

impl Queued {
    /// Returns whether the lane has left jobs of other runtimes than its own unserved for too long.
    fn is_stalled(&mut self, runtime: &Handle) -> bool {
        let cannot_stall = matches!(self.lane, LaneState::Absent | LaneState::Backlogged);
        if cannot_stall || self.runtime == Some(runtime.id()) {
            return false;
        }
        let now = Instant::now();
        let since = self.unserved_since.get_or_insert(now);
        let is_stalled = now.saturating_duration_since(*since) > STALLED_AFTER;
        if is_stalled {
            self.unserved_since = None;
        }
        is_stalled
    }

    fn push_front(&mut self, unfinished: Vec<Job>) {
        for job in unfinished.into_iter().rev() {
            self.bytes += job.bytes();
            self.jobs.push_front(job);
        }
    }

    /// Remembers the runtime of a job if it is not the lane's. Returns the handle to drop outside of the mutex.
    fn remember_runtime(&mut self, runtime: Handle) -> Option<Handle> {
        let id = runtime.id();
        let is_known = self.runtime == Some(id) || self.others.iter().any(|other| other.id() == id);
        if is_known {
            return Some(runtime);
        }
        let oldest = self.others.len() == MAX_OTHERS;
        let replaced = oldest.then(|| self.others.remove(0));
        self.others.push(runtime);
        replaced
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.jobs.len() + self.taken.jobs < MAX_JOBS
            && self.bytes + self.taken.bytes + bytes <= MAX_BYTES
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::Arc;

    use tokio_test::task::spawn;
    use tokio_test::{assert_pending, assert_ready};

    use super::*;
    use crate::node::job::Request;
    use crate::node::packet::Packet;
    use crate::node::votes::VoteReceiver;
    use crate::protocol::message::{Command, Op};
    use crate::protocol::{ExecutionId, Fingerprint, KeyNames, OwnerToken, Record};

    fn job(op: Op) -> Job {
        let names: Arc<[KeyNames]> = Arc::new([]);
        let packet = Packet::new(Command {
            names,
            owner: OwnerToken::from_random([0; 16]),
            op,
        });
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
        assert!(matches!(inbox.post(job(Op::Look)), Posted::NeedsLane(_)));
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
        let mut ready = spawn(poll_fn(|context| inbox.poll_ready(0, context, taken)));
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
        assert!(inbox.detach(Vec::new()).is_empty());
        assert!(!is_full(record(MAX_BYTES / 2)));
    }

    #[tokio::test]
    async fn post_wakes_the_lane_once_and_a_closed_inbox_ends_it_when_empty() {
        let inbox = Inbox::default();
        let ready = || poll_fn(|context| inbox.poll_ready(0, context, Load::default()));
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
    fn post_starts_a_lane_in_the_callers_runtime_and_queued_jobs_stay_for_the_next() {
        let inbox = Inbox::default();
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.build().unwrap();
        assert!(matches!(inbox.post(job(Op::Look)), Posted::NoRuntime(_)));
        let posted = runtime.block_on(async { inbox.post(job(Op::Release)) });
        assert!(matches!(posted, Posted::NeedsLane(_)));
        assert!(matches!(inbox.post(job(Op::Look)), Posted::Accepted));
        assert!(inbox.detach(Vec::new()).is_empty());
        assert!(matches!(inbox.post(job(Op::Look)), Posted::NoRuntime(_)));
        let posted = runtime.block_on(async { inbox.post(job(Op::Look)) });
        assert!(matches!(posted, Posted::NeedsLane(_)));
        let mut taken = VecDeque::new();
        inbox.take(9, &mut taken);
        assert_eq!(taken.len(), 3);
    }

    #[test]
    fn detach_returns_the_other_runtimes_to_attach_in() {
        let runtime = || tokio::runtime::Builder::new_current_thread().build();
        let (first, second) = (runtime().unwrap(), runtime().unwrap());
        let inbox = Inbox::default();
        let post = |op| inbox.post(job(op));
        let posted = first.block_on(async { post(Op::Release) });
        assert!(matches!(posted, Posted::NeedsLane(_)));
        let mut taken = VecDeque::new();
        inbox.take(9, &mut taken);
        first.block_on(async { assert!(matches!(post(Op::Look), Posted::Accepted)) });
        second.block_on(async { assert!(matches!(post(Op::Look), Posted::Accepted)) });
        first.block_on(async { assert!(matches!(post(Op::Look), Posted::Accepted)) });
        let next = inbox.detach(taken.drain(..).collect());
        let next: Vec<_> = next.iter().map(Handle::id).collect();
        assert_eq!(next, [second.handle().id()]);
        assert!(second.block_on(async { inbox.attach() }));
        assert!(!second.block_on(async { inbox.attach() }));
        inbox.take(9, &mut taken);
        assert!(taken.len() == 4 && taken[0].is_release());
        // That runtime ends too, and no jobs are left.
        taken.clear();
        first.block_on(async { assert!(matches!(post(Op::Look), Posted::Accepted)) });
        inbox.take(9, &mut VecDeque::new());
        assert!(inbox.detach(Vec::new()).is_empty());
    }

    /// A runtime may stall without ending, and would not serve the jobs until it runs again.
    #[test]
    fn attach_fails_after_another_runtime_has_started_a_lane() {
        let runtime = || tokio::runtime::Builder::new_current_thread().build();
        let (first, stalled, third) = (runtime().unwrap(), runtime().unwrap(), runtime().unwrap());
        let inbox = Inbox::default();
        let post = |op| inbox.post(job(op));
        let posted = first.block_on(async { post(Op::Look) });
        assert!(matches!(posted, Posted::NeedsLane(_)));
        stalled.block_on(async { assert!(matches!(post(Op::Look), Posted::Accepted)) });
        assert_eq!(inbox.detach(Vec::new()).len(), 1);
        let posted = third.block_on(async { post(Op::Look) });
        assert!(matches!(posted, Posted::NeedsLane(_)));
        assert!(!stalled.block_on(async { inbox.attach() }));
    }

    #[test]
    fn post_replaces_a_lane_that_leaves_another_runtime_unserved() {
        let runtime = || tokio::runtime::Builder::new_current_thread().build();
        let (stalled, other) = (runtime().unwrap(), runtime().unwrap());
        let inbox = Inbox::default();
        let post = |op| inbox.post(job(op));
        let posted = stalled.block_on(async { post(Op::Look) });
        assert!(matches!(posted, Posted::NeedsLane(_)));
        let set_unserved = |how_long| {
            let now = Instant::now();
            inbox.queued.lock().unserved_since = now.checked_sub(how_long);
        };
        other.block_on(async {
            assert!(matches!(post(Op::Look), Posted::Accepted));
            set_unserved(STALLED_AFTER / 2);
            assert!(matches!(post(Op::Look), Posted::Accepted));
            // It is backlogged, not stalled.
            inbox.set_backlogged(0);
            set_unserved(2 * STALLED_AFTER);
            assert!(matches!(post(Op::Look), Posted::Accepted));
            inbox.queued.lock().lane = LaneState::Awake;
            assert!(matches!(post(Op::Look), Posted::NeedsLane(_)));
        });
        assert_eq!(inbox.number(), 1);
        // The old lane runs again, and its jobs go to the new one.
        let mut taken = VecDeque::new();
        inbox.take(9, &mut taken);
        inbox.set_backlogged(0);
        let old = poll_fn(|context| inbox.poll_ready(0, context, Load::default()));
        assert_pending!(spawn(old).poll());
        inbox.return_unfinished(taken.drain(..).collect());
        inbox.take(9, &mut taken);
        assert_eq!(taken.len(), 5);
    }
}
