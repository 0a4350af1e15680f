//! The hand-off of an outcome from a lease task to its caller.
//!
//! # Implementation details
//!
//! A lease task may outlive its caller, so it must be a spawned task in the end. A task that is spawned at once
//! would make each lock wait for the scheduler twice: to start the task, and to wake the caller. Instead, the caller
//! polls the task *inline* until its outcome is decided, and spawns the rest in the [`Home`]. This saves two wake-ups,
//! and a caller in another runtime hears in time that the home is not run.
//!
//! The task is spawned as soon as one of these happens:
//!
//! * The task hands out the outcome. [`Handoff::hand_out`] yields once, so that no later step runs inline.
//! * The caller drops [`Inline`]. The task finds the hand-off closed, and cleans up.
//!
//! A timer belongs to the runtime in which it was made, and fires no more when that has ended. Before the outcome, the
//! task therefore looks whether the hand-off is closed before it looks at a timer; afterwards it makes new ones.
//!
//! A panic while the task is polled inline is caught, as the runtime catches it in a spawned task: the task is
//! dropped, its `Drop` cleans up, and the caller gets no outcome.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::sync::oneshot::{self, error::TryRecvError};
use tracing::{Instrument, Span};

use crate::node::Home;

/// The task's end of the hand-off.
#[derive(Debug)]
pub(crate) struct Handoff<T>(oneshot::Sender<T>);

/// The caller's end of the hand-off: a future that polls the task and resolves to its outcome, or to `None` if the
/// task ended without one.
pub(crate) struct Inline<T> {
    task: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    outcome: oneshot::Receiver<T>,
    home: Arc<Home>,
}

impl<T> Handoff<T> {
    /// Waits until the caller goes away.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(crate) async fn closed(&mut self) {
        self.0.closed().await;
    }

    /// Sends the outcome of a task that is about to end. Without a caller, the outcome is dropped.
    pub(crate) fn send(self, outcome: T) {
        drop(self.0.send(outcome));
    }

    /// Sends the outcome of a task that goes on.
    pub(crate) async fn hand_out(self, outcome: T) {
        // Without a caller, the task is spawned already.
        let mut yields = !self.0.is_closed();
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
}

impl<T> Inline<T> {
    /// Creates the task within a span.
    pub(crate) fn new<F>(home: &Arc<Home>, task: impl FnOnce(Handoff<T>) -> F, span: &Span) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (sender, outcome) = oneshot::channel();
        let task = task(Handoff(sender)).instrument(span.clone());
        Self {
            task: Some(Box::pin(task)),
            outcome,
            home: Arc::clone(home),
        }
    }
}

impl<T> Future for Inline<T> {
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        if let Some(mut task) = self.task.take() {
            let polled = catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(context)));
            let is_pending = matches!(polled, Ok(Poll::Pending));
            let outcome = self.outcome.try_recv();
            if is_pending {
                if matches!(outcome, Err(TryRecvError::Empty)) {
                    self.task = Some(task);
                    return Poll::Pending;
                }
                self.home.spawn(task);
            }
            return Poll::Ready(outcome.ok());
        }
        Poll::Ready(None)
    }
}

impl<T> Drop for Inline<T> {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            self.outcome.close();
            self.home.spawn(task);
        }
    }
}
