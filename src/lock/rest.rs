//! Rest: a lock that is held, and for which nothing is to be done.
//!
//! # Implementation details
//!
//! Most locks are released before they need to be renewed. Their tasks would be spawned, wait, and end. Instead, the task of
//! a lock that was just granted is left with what its holders share, and spawned by the first who needs it: a holder with
//! a command, the drop of the last share, a revocation, or the [registry](crate::lock::registry) when something is due.
//! Who waits for the release polls the task itself.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::node::Home;

/// The task of a lock at rest.
pub(crate) struct Rest(Pin<Box<dyn Future<Output = ()> + Send + Sync>>);

opaque_debug! { Rest }

impl Rest {
    pub(crate) fn new(task: impl Future<Output = ()> + Send + Sync + 'static) -> Self {
        Self(Box::pin(task))
    }

    /// Ends the rest.
    pub(crate) fn spawn(self, home: &Home) {
        home.spawn(self.0);
    }

    /// Polls the task, and returns whether it has ended.
    pub(crate) fn has_ended(&mut self, context: &mut Context<'_>) -> bool {
        // As the runtime catches a panic of a task, whose drop ends the lock.
        let polled = catch_unwind(AssertUnwindSafe(|| self.0.as_mut().poll(context)));
        !matches!(polled, Ok(Poll::Pending))
    }
}

/// Calls a function with what is left when it is dropped.
pub(crate) struct Left<T, F: FnMut(T)>(pub(crate) Option<T>, pub(crate) F);

impl<T, F: FnMut(T)> Drop for Left<T, F> {
    fn drop(&mut self) {
        if let Some(left) = self.0.take() {
            (self.1)(left);
        }
    }
}
