//! Arithmetic of durations and instants, and the timer of a lease task.

use std::pin::Pin;
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

pub(crate) use crate::protocol::lease::TICK;
pub(crate) use crate::protocol::validity::whole_millis;

/// The longest time that is counted, 30 years: no sum with an instant overflows.
pub(crate) const NEVER: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);

/// Adds a duration to an instant; cuts it to [`NEVER`].
pub(crate) fn after(instant: Instant, duration: Duration) -> Instant {
    instant + duration.min(NEVER)
}

/// Waits until an instant, with the one timer of a task.
///
/// # Implementation details
///
/// The timer is reset only to fire sooner, or after it has fired too early. Otherwise, a lock that is held for a
/// moment would register and remove several timers that never fire.
///
/// # Cancel safety
///
/// May be dropped at any point, and called again.
pub(crate) async fn reached(timer: &mut Option<Pin<Box<Sleep>>>, due: Instant) {
    let timer = timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
    if timer.deadline() > due {
        timer.as_mut().reset(due);
    }
    loop {
        timer.as_mut().await;
        if timer.deadline() >= due {
            return;
        }
        timer.as_mut().reset(due);
    }
}
