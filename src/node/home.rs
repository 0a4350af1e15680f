//! The home of background work: the one runtime in which the connections and the leases of a lock service live.
//!
//! # Implementation details
//!
//! Connections and leases must go on while no caller asks for anything, so they are tasks. All tasks of a lock service
//! run in one runtime, because a caller in another runtime could not tell a task that waits from one that is never
//! polled: a current-thread runtime runs only within `block_on`. Nothing moves from one runtime to another while the
//! home lives.
//!
//! No runtime tells that it has ended. Each home therefore has a task that does nothing: when the runtime ends, it
//! drops the task, and with it one end of a channel. The next use makes its own runtime the home. What the tasks of the
//! former home left behind, such as unconfirmed releases, waits for that.
//!
//! A caller in another runtime than the home does nothing but wait for the [report](Home::report) of a task, with a
//! timer of its own runtime, so that it hears in time that the home is not run.

use std::convert::Infallible;
use std::pin::pin;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use crate::node::Mutex;
use crate::node::sync::MutexGuard;
use crate::node::sync::atomic::{AtomicUsize, Ordering};
use crate::node::system::Epoch;

/// The runtime of all background work of a lock service.
#[derive(Debug, Default)]
pub(crate) struct Home {
    /// The first home, if it need not be that of the first use.
    given: Option<Handle>,
    /// The home, and what is closed when it has ended. `None` before the first use.
    used: Mutex<Option<(Handle, oneshot::Sender<Infallible>)>>,
    /// How many runtimes have been the home so far.
    count: AtomicUsize,
    /// From which the nodes in this process count the time: by tokio's clock, which tests can pause.
    pub(crate) epoch: Epoch,
}

/// How long a home may leave a task waiting before it counts as not run.
const IDLE_AFTER: Duration = Duration::from_millis(500);
/// How long a caller waits for its report before it looks whether the home is run: most reports come sooner.
const PATIENCE: Duration = Duration::from_millis(100);

impl Home {
    /// Creates a home in this runtime, or else in the current one, or else in that of the first use.
    pub(crate) fn new(given: Option<Handle>) -> Self {
        Self {
            given: given.or_else(|| Handle::try_current().ok()),
            ..Self::default()
        }
    }

    /// Spawns a task. Without a runtime, because the home has ended and there is no current one, the task is dropped.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        // A runtime that has ended drops the task at once, which may spawn another one.
        let runtime = self.current().as_ref().map(|(runtime, _)| runtime.clone());
        if let Some(runtime) = runtime {
            runtime.spawn(task);
        }
    }

    /// Returns whether the current task or `block_on` runs in another runtime than the home.
    pub(crate) fn is_elsewhere(&self) -> bool {
        Handle::try_current().is_ok_and(|here| !self.is(&here))
    }

    /// Returns whether this runtime, which is the current one, is the home.
    pub(crate) fn is(&self, here: &Handle) -> bool {
        let home = self.current();
        home.as_ref()
            .is_some_and(|(home, _)| home.id() == here.id())
    }

    /// Returns the number of the home, by which a task knows a timer that it has taken along from a home that has ended.
    pub(crate) fn number(&self) -> usize {
        // Relaxed: a task of the next home was spawned behind the count.
        self.count.load(Ordering::Relaxed)
    }

    /// Waits for what a task of the home reports. Returns `None` if the home is not run, which takes a runtime to notice.
    ///
    /// # Cancel safety
    ///
    /// As that of what it waits for.
    pub(crate) async fn report<T>(&self, reported: impl Future<Output = T>) -> Option<T> {
        let mut reported = pin!(reported);
        if !self.is_elsewhere() {
            return Some(reported.await);
        }
        let idle = async {
            sleep(PATIENCE).await;
            while !self.is_idle().await {
                sleep(IDLE_AFTER).await;
            }
        };
        tokio::select! {
            biased;
            reported = reported.as_mut() => Some(reported),
            () = Box::pin(idle) => None,
        }
    }

    /// Returns whether the home does not run a task that it is given. Never in the home itself.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(crate) async fn is_idle(&self) -> bool {
        if !self.is_elsewhere() {
            return false;
        }
        let (ran, probe) = oneshot::channel();
        self.spawn(async move { ran.send(()).unwrap_or_default() });
        timeout(IDLE_AFTER, probe).await.is_err()
    }

    /// Returns the home, which is the current runtime if the former one has ended.
    fn current(&self) -> MutexGuard<'_, Option<(Handle, oneshot::Sender<Infallible>)>> {
        let mut used = self.used.lock();
        if used.as_ref().is_none_or(|(_, ended)| ended.is_closed()) {
            let given = self.given.clone().into_iter();
            *used = given.chain(Handle::try_current().ok()).find_map(|runtime| {
                let (sender, ended) = oneshot::channel();
                // A runtime that has ended drops the task at once.
                runtime.spawn(async { drop(ended.await) });
                (!sender.is_closed()).then_some((runtime, sender))
            });
            self.count.fetch_add(1, Ordering::Relaxed);
        }
        used
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::runtime::{Builder, Runtime};

    use super::*;

    fn runtime() -> Runtime {
        let mut builder = Builder::new_current_thread();
        builder.enable_all().build().unwrap()
    }

    /// Returns the runtime in which the next task runs.
    fn runs_in<'a>(home: &Home, runtimes: &[&'a Runtime]) -> &'a Runtime {
        let ran = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&ran);
        home.spawn(async move {
            count.fetch_add(1, Ordering::Relaxed);
        });
        for runtime in runtimes {
            runtime.block_on(tokio::task::yield_now());
            if ran.load(Ordering::Relaxed) == 1 {
                return runtime;
            }
        }
        panic!("it ran nowhere");
    }

    #[test]
    fn home_is_the_given_runtime_or_that_of_new_or_that_of_the_first_use() {
        let (first, second) = (runtime(), runtime());
        let both = [&first, &second];
        let _within = first.enter();
        let given = Home::new(Some(second.handle().clone()));
        assert!(std::ptr::eq(runs_in(&given, &both), &second));
        assert!(given.is_elsewhere());
        let current = Home::new(None);
        assert!(!current.is_elsewhere());
        {
            let _within = second.enter();
            assert!(std::ptr::eq(runs_in(&current, &both), &first));
            assert!(current.is_elsewhere());
            let used = Home::default();
            assert!(!used.is_elsewhere());
            let _within = first.enter();
            assert!(std::ptr::eq(runs_in(&used, &both), &second));
        }
    }

    #[test]
    fn next_use_moves_a_home_whose_runtime_has_ended() {
        let (given, second, third) = (runtime(), runtime(), runtime());
        let home = Home::new(Some(given.handle().clone()));
        second.block_on(async { assert!(home.is_elsewhere()) });
        drop(given);
        // There is no runtime, so the task is dropped.
        let task = Arc::new(());
        let held = Arc::clone(&task);
        home.spawn(async move { drop(held) });
        assert_eq!(Arc::strong_count(&task), 1);
        second.block_on(async { assert!(!home.is_elsewhere()) });
        third.block_on(async { assert!(home.is_elsewhere()) });
        drop(second);
        third.block_on(async { assert!(!home.is_elsewhere()) });
    }

    /// A runtime may have ended before its first use.
    #[test]
    fn home_that_ended_unused_is_moved() {
        let (given, second) = (runtime(), runtime());
        let home = Home::new(Some(given.handle().clone()));
        drop(given);
        second.block_on(async { assert!(!home.is_elsewhere()) });
    }

    #[test]
    fn home_that_is_dropped_leaves_no_task() {
        let runtime = runtime();
        let home = Home::new(Some(runtime.handle().clone()));
        home.spawn(async {});
        let tasks = || runtime.metrics().num_alive_tasks();
        assert_eq!(tasks(), 2);
        drop(home);
        runtime.block_on(async {
            while tasks() > 0 {
                tokio::task::yield_now().await;
            }
        });
    }

    #[test]
    fn only_a_home_that_is_not_run_is_idle() {
        let mut builder = Builder::new_current_thread();
        let paused = builder.enable_all().start_paused(true).build().unwrap();
        let is_idle = |home: &Home, caller: &Runtime| {
            let report = home.report(std::future::pending::<()>());
            match caller.block_on(async { timeout(4 * IDLE_AFTER, report).await }) {
                Ok(reported) => reported.is_none(),
                Err(_) => false,
            }
        };
        let rests = runtime();
        assert!(is_idle(&Home::new(Some(rests.handle().clone())), &paused));
        assert!(!is_idle(&Home::new(Some(paused.handle().clone())), &paused));
        // A thread that runs has its own time.
        let mut builder = Builder::new_multi_thread();
        let runs = builder.worker_threads(1).build().unwrap();
        assert!(!is_idle(&Home::new(Some(runs.handle().clone())), &rests));
    }
}
