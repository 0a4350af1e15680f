//! The hand-off of an outcome from a lease task to its caller.
//!
//! # Implementation details
//!
//! A lease task may outlive its caller, so it must be a spawned task in the end. A task that is spawned at once
//! would make each lock wait for the scheduler twice: to start the task, and to wake the caller. Instead, the caller
//! polls the task *inline* until its outcome is decided, and spawns the rest in the home of the lock service. This saves
//! two wake-ups.
//!
//! The task is spawned as soon as one of these happens:
//!
//! * It is created by a caller elsewhere, whose runtime may rest or end before the home does.
//! * The task hands out the outcome. [`Handoff::hand_out`] yields once, so that no later step runs inline.
//! * The task is about to wait for other holders ([`Handoff::detach`]). It then has a deadline to keep, and callers
//!   wait behind it in the queue, whether its own caller polls or not.
//! * The caller drops [`Inline`]. The task finds the hand-off closed, and cleans up.
//!
//! A panic while the task is polled inline is caught, as the runtime catches it in a spawned task: the task is
//! dropped, its `Drop` cleans up, and the caller gets no outcome.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tokio::sync::oneshot::{self, error::TryRecvError};
use tracing::{Instrument, Span};

use crate::lock::cluster::Cluster;
use crate::lock::error::LockError;

/// The task's end of the hand-off.
#[derive(Debug)]
pub(crate) struct Handoff<T> {
    outcome: oneshot::Sender<T>,
    /// Who polls the task: one of the constants below.
    mode: Arc<AtomicU8>,
}

/// The caller's end of the hand-off: a future that polls the task and resolves to its outcome, or to `None` if the
/// task ended without one.
pub(crate) struct Inline<T> {
    /// The task, while the caller polls it.
    task: Option<Task>,
    outcome: oneshot::Receiver<T>,
    /// Who polls the task: one of the constants below.
    mode: Arc<AtomicU8>,
    cluster: Arc<Cluster>,
}

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The caller polls it.
const INLINE: u8 = 0;
/// The caller polls the task, and must spawn it.
const DETACHING: u8 = 1;
/// The runtime polls the task.
const SPAWNED: u8 = 2;

impl<T> Handoff<T> {
    /// Waits until the caller goes away.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(crate) async fn closed(&mut self) {
        self.outcome.closed().await;
    }

    /// Sends the outcome of a task that is about to end. Without a caller, the outcome is dropped.
    pub(crate) fn send(self, outcome: T) {
        drop(self.outcome.send(outcome));
    }

    /// Sends the outcome of a task that goes on.
    pub(crate) async fn hand_out(self, outcome: T) {
        // Relaxed here and below: task and caller are one thread while the mode is `INLINE`, and the spawn that changes it
        // happens before the task's next poll.
        let mut yields = self.mode.load(Ordering::Relaxed) != SPAWNED;
        self.send(outcome);
        // No waker is needed: the caller spawns the task, which polls it again.
        poll_fn(|_| {
            if std::mem::take(&mut yields) {
                Poll::Pending
            } else {
                Poll::Ready(())
            }
        })
        .await;
    }

    /// Asks the caller to spawn the task at the next await.
    pub(crate) fn detach(&self) {
        if self.mode.load(Ordering::Relaxed) == INLINE {
            self.mode.store(DETACHING, Ordering::Relaxed);
        }
    }
}

impl<T> Inline<T> {
    /// Creates the task within a span.
    ///
    /// # Panics
    ///
    /// Panics outside of a runtime.
    pub(crate) fn new<F>(
        cluster: &Arc<Cluster>,
        task: impl FnOnce(Handoff<T>) -> F,
        span: &Span,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let here = Handle::current();
        let mode = Arc::new(AtomicU8::new(INLINE));
        let (sender, outcome) = oneshot::channel();
        let handoff = Handoff {
            outcome: sender,
            mode: Arc::clone(&mode),
        };
        let task: Task = Box::pin(task(handoff).instrument(span.clone()));
        let mut inline = Self {
            task: None,
            outcome,
            mode,
            cluster: Arc::clone(cluster),
        };
        match cluster.home.is(&here) {
            true => inline.task = Some(task),
            false => inline.spawn(task),
        }
        inline
    }

    /// Waits for the outcome. If the home ends before, the keys are released by a new one.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point; the task then cleans up.
    pub(crate) async fn outcome(self) -> Result<T, LockError> {
        match self.task {
            Some(_) => self.await.ok_or(LockError::Closed),
            // Boxed, so that the usual case has no room for it.
            None => Box::pin(self.outcome_elsewhere()).await,
        }
    }

    async fn outcome_elsewhere(self) -> Result<T, LockError> {
        let cluster = Arc::clone(&self.cluster);
        let nodes = match cluster.home.report(self).await {
            Some(Some(outcome)) => return Ok(outcome),
            Some(None) => {
                cluster.resume().await;
                cluster.all_ended()
            }
            None => cluster.all_not_run(),
        };
        Err(LockError::Unavailable {
            reached: 0,
            needed: cluster.quorum.majority(),
            voted: Vec::new(),
            nodes,
        })
    }

    fn spawn(&self, task: Task) {
        self.mode.store(SPAWNED, Ordering::Relaxed);
        self.cluster.home.spawn(task);
    }
}

impl<T> Future for Inline<T> {
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        if let Some(mut task) = self.task.take() {
            // Taken out while it is polled: a task that panics must not be polled again.
            let polled = catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(context)));
            let is_pending = matches!(polled, Ok(Poll::Pending));
            // After the poll, in which the task may have sent it. What it sends later wakes this caller.
            let outcome = self.outcome.try_recv();
            if is_pending {
                if matches!(outcome, Err(TryRecvError::Empty))
                    && self.mode.load(Ordering::Relaxed) != DETACHING
                {
                    self.task = Some(task);
                    return Poll::Pending;
                }
                self.spawn(task);
            }
            match outcome {
                Ok(outcome) => return Poll::Ready(Some(outcome)),
                Err(TryRecvError::Closed) => return Poll::Ready(None),
                Err(TryRecvError::Empty) => {}
            }
        }
        Pin::new(&mut self.outcome).poll(context).map(Result::ok)
    }
}

impl<T> Drop for Inline<T> {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            // Closed before it is spawned: the task then finds no caller with its first poll, and releases.
            self.outcome.close();
            self.spawn(task);
        }
    }
}
