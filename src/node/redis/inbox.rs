//! The inbox: what waits to be sent to one server, and how much may.

use std::collections::VecDeque;
use std::ops::{AddAssign, SubAssign};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::time::Instant;

use crate::node::job::Job;

/// The jobs that wait for a lane, in the order in which they were submitted.
///
/// # Design
///
/// One short lock for all that a job meets on its way in. A lock over five nodes passes ten of these
/// doors, from all threads of the runtime: a channel, a count of what waits and a place for the lane, each
/// with atomics of its own, cost more there than one after the other suggests.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    waiting: Mutex<Waiting>,
    /// Which lane it is that looks here: one that finds another number has been replaced. Changed under the
    /// lock.
    number: AtomicU64,
}

#[derive(Debug, Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    /// Of records.
    bytes: usize,
    /// What the lane has taken and not finished, as it last said.
    taken: Load,
    lane: Attendance,
    /// The runtime that the lane was started in.
    runtime: Option<Id>,
    /// Since when something of another runtime waits that the lane has not looked at.
    unheard: Option<Instant>,
    /// Others that jobs came from last, to go on in when that one ends.
    others: Vec<Handle>,
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
    /// It does not look before something was answered.
    Behind,
    Asleep(Waker),
}

/// What became of a job.
pub(super) enum Posted {
    Accepted,
    /// Accepted, and a lane is to be started here.
    NeedsLane(Handle),
    /// There is no lane, and no runtime to start one in.
    Stranded(Job),
    /// Too much waits already.
    Full(Job),
}

/// Most requests, beyond which a server is so far behind that no more of them would be answered in time.
const MAX_JOBS: usize = 1 << 16;
/// Most bytes of records.
const MAX_BYTES: usize = 64 << 20;
/// How long a lane may leave something unheard before another runtime takes over: its own may rest, and only
/// live on.
const REST: Duration = Duration::from_secs(1);
/// Most runtimes that are remembered beside the lane's.
const MAX_OTHERS: usize = 4;

impl Inbox {
    /// Puts a job behind all that wait.
    ///
    /// A release is never refused: a lock whose acquisition had a place must be given back whatever else
    /// waits, and there is at most one for each.
    pub(super) fn post(&self, job: Job) -> Posted {
        let bytes = job.bytes();
        let runtime = Handle::try_current().ok();
        let mut waiting = self.waiting();
        if !job.is_release() && !waiting.has_room(bytes) {
            return Posted::Full(job);
        }
        let rests = runtime
            .as_ref()
            .is_some_and(|runtime| waiting.rests(runtime));
        let (mut starts_in, mut replaced) = (None, None);
        match (&waiting.lane, runtime) {
            // In the caller's, also if there was a lane, and the runtime that it ran on is gone.
            (Attendance::Absent, Some(runtime)) => {
                waiting.runtime = Some(runtime.id());
                starts_in = Some(runtime);
            }
            (Attendance::Absent, None) => return Posted::Stranded(job),
            (_, Some(runtime)) if rests => {
                self.number.fetch_add(1, Ordering::AcqRel);
                waiting.taken = Load::default();
                waiting.runtime = Some(runtime.id());
                waiting.lane = Attendance::Awake;
                starts_in = Some(runtime);
            }
            (_, Some(runtime)) => replaced = waiting.note_other(runtime),
            (_, None) => {}
        }
        waiting.bytes += bytes;
        waiting.jobs.push_back(job);
        let lane = match waiting.lane {
            Attendance::Behind => Attendance::Behind,
            _ => std::mem::replace(&mut waiting.lane, Attendance::Awake),
        };
        drop(waiting);
        drop(replaced);
        if let Attendance::Asleep(lane) = lane {
            lane.wake();
        }
        starts_in.map_or(Posted::Accepted, Posted::NeedsLane)
    }

    /// Waits until there is something to take; false if there never will be. The lane with this `number` has
    /// `carried`; for one that was replaced there is nothing.
    pub(super) fn poll_filled(
        &self,
        number: u64,
        context: &Context<'_>,
        carried: Load,
    ) -> Poll<bool> {
        let mut waiting = self.waiting();
        if self.number() != number {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        waiting.taken = carried;
        waiting.unheard = None;
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

    /// Notes that the lane looks again when something was answered.
    pub(super) fn note_behind(&self, number: u64) {
        let mut waiting = self.waiting();
        if self.number() == number {
            waiting.lane = Attendance::Behind;
            waiting.unheard = None;
        }
    }

    /// Returns the number of the lane that is there, or about to be.
    pub(super) fn number(&self) -> u64 {
        self.number.load(Ordering::Acquire)
    }

    /// Takes back what a lane has not finished that was replaced.
    pub(super) fn take_back(&self, unfinished: Vec<Job>) {
        let mut waiting = self.waiting();
        waiting.push_front(unfinished);
        if !matches!(waiting.lane, Attendance::Asleep(_)) || waiting.jobs.is_empty() {
            return;
        }
        if let Attendance::Asleep(lane) = std::mem::replace(&mut waiting.lane, Attendance::Awake) {
            drop(waiting);
            lane.wake();
        }
    }

    /// Moves so many jobs at most to `jobs`, which is empty, beside what the lane has.
    pub(super) fn take(&self, most: usize, jobs: &mut VecDeque<Job>) {
        let mut waiting = self.waiting();
        let bytes = if waiting.jobs.len() <= most {
            // All of them, and the room of those that were taken before is for the next.
            std::mem::swap(&mut waiting.jobs, jobs);
            waiting.bytes
        } else {
            jobs.extend(waiting.jobs.drain(..most));
            jobs.iter().map(Job::bytes).sum()
        };
        waiting.bytes -= bytes;
        let jobs = jobs.len();
        waiting.taken += Load { jobs, bytes };
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

    /// The lane is gone: what waits is the next one's, behind what it had not finished. There may be
    /// releases, and jobs of other runtimes: returns those to [attend](Self::attend) in, unless the next job
    /// comes sooner.
    #[must_use]
    pub(super) fn leave(&self, unfinished: Vec<Job>) -> Vec<Handle> {
        let mut waiting = self.waiting();
        waiting.taken = Load::default();
        waiting.push_front(unfinished);
        waiting.unheard = None;
        waiting.runtime = None;
        waiting.lane = Attendance::Absent;
        match waiting.jobs.is_empty() {
            true => Vec::new(),
            false => std::mem::take(&mut waiting.others),
        }
    }

    /// Makes the caller the lane, in the runtime that it is called in, if there is none and something waits.
    #[must_use]
    pub(super) fn attend(&self) -> bool {
        let mut waiting = self.waiting();
        let is_needed = matches!(waiting.lane, Attendance::Absent) && !waiting.jobs.is_empty();
        if is_needed {
            waiting.lane = Attendance::Awake;
            waiting.runtime = Handle::try_current().ok().map(|runtime| runtime.id());
        }
        is_needed
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
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

impl Waiting {
    /// Whether the lane has left something of another runtime than its own unheard for too long.
    fn rests(&mut self, runtime: &Handle) -> bool {
        let looks_later = matches!(self.lane, Attendance::Absent | Attendance::Behind);
        if looks_later || self.runtime == Some(runtime.id()) {
            return false;
        }
        let now = Instant::now();
        let unheard = self.unheard.get_or_insert(now);
        let rests = now.saturating_duration_since(*unheard) > REST;
        if rests {
            self.unheard = None;
        }
        rests
    }

    fn push_front(&mut self, unfinished: Vec<Job>) {
        for job in unfinished.into_iter().rev() {
            self.bytes += job.bytes();
            self.jobs.push_front(job);
        }
    }

    /// Notes where a job came from, if the lane is not there; returns what that takes the place of.
    fn note_other(&mut self, runtime: Handle) -> Option<Handle> {
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
    use crate::node::{Packet, Request, VoteReceiver};
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
    async fn there_is_so_much_room_that_what_the_lane_has_takes_too_and_releases_do_not_need() {
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
        // It has answered them, and looks whether there are more.
        let carried = Load::default();
        let mut filled = spawn(poll_fn(|context| inbox.poll_filled(0, context, carried)));
        assert_pending!(filled.poll());
        assert!(!is_full(job(Op::Look)));
    }

    #[tokio::test]
    async fn there_is_so_much_room_for_records() {
        let inbox = Inbox::default();
        let is_full = |job| matches!(inbox.post(job), Posted::Full(_));
        assert!(!is_full(record(MAX_BYTES / 2)));
        assert!(is_full(record(MAX_BYTES / 2)));
        assert!(!is_full(job(Op::Look)));
        let mut taken = VecDeque::new();
        inbox.take(1, &mut taken);
        assert!(is_full(record(MAX_BYTES / 2)));
        drop(taken);
        assert!(inbox.leave(Vec::new()).is_empty());
        assert!(!is_full(record(MAX_BYTES / 2)));
    }

    #[tokio::test]
    async fn a_lane_is_woken_once_and_ends_when_all_is_taken_after_the_end() {
        let inbox = Inbox::default();
        let filled = || poll_fn(|context| inbox.poll_filled(0, context, Load::default()));
        inbox.post(job(Op::Look));
        assert!(filled().await);
        inbox.take(1, &mut VecDeque::new());
        let mut lane = spawn(filled());
        assert_pending!(lane.poll());
        inbox.post(job(Op::Look));
        assert!(lane.is_woken());
        inbox.post(job(Op::Look));
        assert!(assert_ready!(lane.poll()));
        inbox.close();
        assert!(filled().await);
        inbox.take(2, &mut VecDeque::new());
        assert!(!filled().await);
    }

    #[test]
    fn what_a_lane_leaves_is_for_the_next_and_without_a_runtime_there_is_none() {
        let inbox = Inbox::default();
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.build().unwrap();
        assert!(matches!(inbox.post(job(Op::Look)), Posted::Stranded(_)));
        let posted = runtime.block_on(async { inbox.post(job(Op::Release)) });
        assert!(matches!(posted, Posted::NeedsLane(_)));
        assert!(matches!(inbox.post(job(Op::Look)), Posted::Accepted));
        assert!(inbox.leave(Vec::new()).is_empty());
        assert!(matches!(inbox.post(job(Op::Look)), Posted::Stranded(_)));
        let posted = runtime.block_on(async { inbox.post(job(Op::Look)) });
        assert!(matches!(posted, Posted::NeedsLane(_)));
        let mut taken = VecDeque::new();
        inbox.take(9, &mut taken);
        assert_eq!(taken.len(), 3);
    }

    #[test]
    fn what_a_lane_leaves_of_two_runtimes_goes_on_in_the_other() {
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
        let next = inbox.leave(taken.drain(..).collect());
        let next: Vec<_> = next.iter().map(Handle::id).collect();
        assert_eq!(next, [second.handle().id()]);
        assert!(second.block_on(async { inbox.attend() }));
        assert!(!second.block_on(async { inbox.attend() }));
        inbox.take(9, &mut taken);
        assert!(taken.len() == 4 && taken[0].is_release());
        // That one ends too, and nothing is left.
        taken.clear();
        first.block_on(async { assert!(matches!(post(Op::Look), Posted::Accepted)) });
        inbox.take(9, &mut VecDeque::new());
        assert!(inbox.leave(Vec::new()).is_empty());
    }

    /// A runtime may rest, and is alive all the same: it has nothing until it goes on.
    #[test]
    fn what_a_lane_leaves_is_for_whichever_runtime_asks_first() {
        let runtime = || tokio::runtime::Builder::new_current_thread().build();
        let (first, resting, third) = (runtime().unwrap(), runtime().unwrap(), runtime().unwrap());
        let inbox = Inbox::default();
        let post = |op| inbox.post(job(op));
        let posted = first.block_on(async { post(Op::Look) });
        assert!(matches!(posted, Posted::NeedsLane(_)));
        resting.block_on(async { assert!(matches!(post(Op::Look), Posted::Accepted)) });
        assert_eq!(inbox.leave(Vec::new()).len(), 1);
        let posted = third.block_on(async { post(Op::Look) });
        assert!(matches!(posted, Posted::NeedsLane(_)));
        assert!(!resting.block_on(async { inbox.attend() }));
    }

    #[test]
    fn a_lane_that_leaves_another_runtime_unheard_for_long_is_replaced() {
        let runtime = || tokio::runtime::Builder::new_current_thread().build();
        let (resting, other) = (runtime().unwrap(), runtime().unwrap());
        let inbox = Inbox::default();
        let post = |op| inbox.post(job(op));
        let posted = resting.block_on(async { post(Op::Look) });
        assert!(matches!(posted, Posted::NeedsLane(_)));
        let ago = |how_long| {
            let now = Instant::now();
            inbox.waiting().unheard = now.checked_sub(how_long);
        };
        other.block_on(async {
            assert!(matches!(post(Op::Look), Posted::Accepted));
            ago(REST / 2);
            assert!(matches!(post(Op::Look), Posted::Accepted));
            // It is behind, and not at rest.
            inbox.note_behind(0);
            ago(2 * REST);
            assert!(matches!(post(Op::Look), Posted::Accepted));
            inbox.waiting().lane = Attendance::Awake;
            assert!(matches!(post(Op::Look), Posted::NeedsLane(_)));
        });
        assert_eq!(inbox.number(), 1);
        // The old one goes on, and what it had is the other's.
        let mut taken = VecDeque::new();
        inbox.take(9, &mut taken);
        inbox.note_behind(0);
        let old = poll_fn(|context| inbox.poll_filled(0, context, Load::default()));
        assert_pending!(spawn(old).poll());
        inbox.take_back(taken.drain(..).collect());
        inbox.take(9, &mut taken);
        assert_eq!(taken.len(), 5);
    }
}
