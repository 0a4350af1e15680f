//! Threads that post jobs while lanes take them, begin and end.

use shuttle::future::block_on;
use shuttle::thread::{JoinHandle, spawn};

use super::*;
use crate::node::sync::atomic::{AtomicUsize, Ordering};
use crate::node::sync::tests::{in_many_orders, join};

/// An inbox, and what its lanes have done.
#[derive(Debug)]
struct Lanes {
    inbox: Inbox,
    /// A job is useful for as many seconds from here as its number says.
    epoch: Instant,
    /// The number of lanes at present.
    alive: AtomicUsize,
    lanes: Mutex<Vec<JoinHandle<()>>>,
    /// The numbers of the finished jobs.
    finished: Mutex<Vec<u64>>,
}

impl Lanes {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            inbox: Inbox::default(),
            epoch: Instant::now(),
            alive: AtomicUsize::new(0),
            lanes: Mutex::default(),
            finished: Mutex::default(),
        })
    }

    /// Posts a job with this number, and starts a lane if the inbox asks for one. With `ends`, that lane takes jobs once,
    /// and then ends as if its runtime had.
    fn post(self: &Arc<Self>, number: u64, ends: bool) {
        let votes = VoteReceiver::new(&["n".into()].into());
        let useful_until = self.epoch + Duration::from_secs(number);
        let job = Job::new(Packet::ping(), votes.sender(0), useful_until);
        drop(votes);
        if self.inbox.post(job).expect("there is room") {
            let others = self.alive.fetch_add(1, Ordering::SeqCst);
            assert_eq!(others, 0, "a second lane");
            let lanes = Arc::clone(self);
            let lane = spawn(move || lanes.run(ends));
            self.lanes.lock().push(lane);
        }
    }

    fn run(&self, ends: bool) {
        let mut taken = VecDeque::new();
        while self.has_jobs() {
            self.inbox.take(2, &mut taken);
            if ends {
                break;
            }
            let numbers = taken
                .drain(..)
                .map(|job| (job.useful_until - self.epoch).as_secs());
            self.finished.lock().extend(numbers);
        }
        self.alive.fetch_sub(1, Ordering::SeqCst);
        self.inbox.detach(taken.into());
    }

    fn has_jobs(&self) -> bool {
        block_on(poll_fn(|context| self.inbox.poll_ready(context, &mut 0)))
    }

    /// Closes the inbox, and returns the numbers of the jobs once all lanes have ended.
    fn close(&self) -> Vec<u64> {
        self.inbox.close();
        let lanes = std::mem::take(&mut *self.lanes.lock());
        join(lanes);
        self.finished.lock().clone()
    }
}

/// Invariant: there is one lane, which takes all jobs, those of a thread in their order, and ends once the inbox is
/// closed.
#[test]
fn a_lane_does_not_sleep_over_jobs_or_the_end() {
    in_many_orders(|| {
        let lanes = Lanes::new();
        let posting = [10, 20].map(|first| {
            let lanes = Arc::clone(&lanes);
            spawn(move || (first..first + 2).for_each(|number| lanes.post(number, false)))
        });
        join(posting);
        let finished = lanes.close();
        let of_thread = |first| {
            let numbers = finished.iter().filter(|number| **number / first == 1);
            numbers.copied().collect::<Vec<_>>()
        };
        assert_eq!(finished.len(), 4);
        assert_eq!((of_thread(10), of_thread(20)), (vec![10, 11], vec![20, 21]));
    });
}

/// Invariant: after a lane has ended, the next job starts one lane, which begins with the jobs that the former left.
#[test]
fn the_next_lane_begins_with_the_jobs_that_the_former_left() {
    in_many_orders(|| {
        let lanes = Lanes::new();
        lanes.post(0, true);
        let former = lanes.lanes.lock().pop().unwrap();
        let posting = {
            let lanes = Arc::clone(&lanes);
            spawn(move || [1, 2].map(|number| lanes.post(number, false)))
        };
        join([former]);
        join([posting]);
        lanes.post(3, false);
        assert_eq!(lanes.close(), [0, 1, 2, 3]);
    });
}
