//! Arithmetic of durations and instants, and the timer of a lease task.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

pub(crate) use crate::protocol::lease::TICK;
pub(crate) use crate::protocol::validity::whole_millis;

/// Adds a duration to an instant; cuts it to 30 years, so that the sum cannot overflow.
pub(crate) fn after(instant: Instant, duration: Duration) -> Instant {
    const NEVER: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);
    instant + duration.min(NEVER)
}

/// The one timer of a task.
///
/// # Implementation details
///
/// The timer is reset only to fire sooner, or after it has fired too early. Otherwise, a lock that is held for a
/// moment would register and remove several timers that never fire.
#[derive(Debug, Default)]
pub(crate) struct Timer(Option<Pin<Box<Sleep>>>);

impl Timer {
    /// Waits until an instant.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point, and called again.
    pub(crate) async fn at(&mut self, due: Instant) {
        poll_fn(|context| self.poll_at(context, due)).await;
    }

    fn poll_at(&mut self, context: &mut Context<'_>, due: Instant) -> Poll<()> {
        let timer = self.0.get_or_insert_with(|| Box::pin(sleep_until(due)));
        if timer.deadline() > due {
            timer.as_mut().reset(due);
        }
        loop {
            ready!(timer.as_mut().poll(context));
            if timer.deadline() >= due {
                return Poll::Ready(());
            }
            timer.as_mut().reset(due);
        }
    }
}
