//! Runs a few threads in many orders.
#![cfg(shuttle)]

use std::sync::PoisonError;

use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::atomic::{AtomicBool, Ordering};
pub(crate) use shuttle::sync::{MutexGuard, atomic};
use shuttle::thread::JoinHandle;
use shuttle::{Config, Runner};
use tokio::sync::futures::Notified;
use tokio::sync::{AcquireError, SemaphorePermit, TryAcquireError};

/// The number of orders of threads in which each check runs, unless the variable `SCHEDULES` sets another one.
const SCHEDULES: usize = 1_000;

/// How often the scheduler with priorities lets another thread overtake: most errors need one switch or two, at the
/// right points.
const SWITCHES: usize = 3;

/// The same orders in each run, so that a check that fails can be repeated.
const SEED: u64 = 0;

/// Runs `check` in many orders of the threads that it spawns. An order in which none of them can go on fails.
pub(crate) fn in_many_orders(check: fn()) {
    let asked = std::env::var("SCHEDULES").map(|text| text.parse().expect("SCHEDULES is a number"));
    let half = asked.unwrap_or(SCHEDULES).div_ceil(2);
    run(RandomScheduler::new_from_seed(SEED, half), check);
    run(PctScheduler::new_from_seed(SEED, SWITCHES, half), check);
}

fn run(scheduler: impl Scheduler + 'static, check: fn()) {
    let mut config = Config::new();
    // Of unoptimised code.
    config.stack_size = 1 << 18;
    // It warns of each ordering: this module says so.
    config.silence_warnings = true;
    Runner::new(scheduler, config).run(check);
}

/// Waits until threads have ended, and fails if one of them has failed.
pub(crate) fn join<T>(threads: impl IntoIterator<Item = JoinHandle<T>>) {
    for thread in threads {
        thread.join().expect("a thread that has not panicked");
    }
}

/// That of shuttle, which is not poisoned, like that of parking_lot.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A point where another thread may go on.
#[derive(Debug, Default)]
struct Point(AtomicBool);

impl Point {
    fn pass(&self) {
        self.0.load(Ordering::SeqCst);
    }
}

/// That of tokio, each call of which is one step: tokio checks itself that they are.
#[derive(Debug, Default)]
pub(crate) struct Notify {
    inner: tokio::sync::Notify,
    point: Point,
}

impl Notify {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn notified(&self) -> Notified<'_> {
        self.point.pass();
        self.inner.notified()
    }

    pub(crate) fn notify_one(&self) {
        self.point.pass();
        self.inner.notify_one();
    }

    pub(crate) fn notify_waiters(&self) {
        self.point.pass();
        self.inner.notify_waiters();
    }
}

/// That of tokio, as for [`Notify`].
#[derive(Debug)]
pub(crate) struct Semaphore {
    inner: tokio::sync::Semaphore,
    point: Point,
}

impl Semaphore {
    pub(crate) fn new(permits: usize) -> Self {
        let inner = tokio::sync::Semaphore::new(permits);
        let point = Point::default();
        Self { inner, point }
    }

    pub(crate) fn available_permits(&self) -> usize {
        self.point.pass();
        self.inner.available_permits()
    }

    pub(crate) fn add_permits(&self, permits: usize) {
        self.point.pass();
        self.inner.add_permits(permits);
    }

    pub(crate) fn try_acquire_many(
        &self,
        permits: u32,
    ) -> Result<SemaphorePermit<'_>, TryAcquireError> {
        self.point.pass();
        self.inner.try_acquire_many(permits)
    }

    pub(crate) fn acquire_many(
        &self,
        permits: u32,
    ) -> impl Future<Output = Result<SemaphorePermit<'_>, AcquireError>> {
        self.point.pass();
        self.inner.acquire_many(permits)
    }
}
