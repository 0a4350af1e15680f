//! The life of one lock, from its order to its end.

use std::future::Future;
use std::time::Duration;

use tracing::Span;

use crate::lock::error::LockError;
use crate::lock::lease::acquire::Backoff;
use crate::lock::lease::attempt::AcquireError;
use crate::lock::lease::handoff::{Handoff, Inline};
use crate::lock::lease::shared::{Disposal, Share};
use crate::lock::lease::task::LeaseTask;
use crate::lock::queue::Permit;

/// Acquires a plain lock, and returns the first share of its lease.
///
/// # Panics
///
/// Outside of a runtime.
///
/// # Cancel safety
///
/// May be dropped at any point; what the nodes granted or will grant is released.
pub(crate) async fn acquire(
    task: LeaseTask,
    permit: Permit,
    backoff: Backoff,
    max_hold: Option<Duration>,
    span: &Span,
) -> Result<Share, LockError> {
    let run = |handoff| run(task, permit, backoff, max_hold, handoff);
    let outcome = Inline::new(run, span).await;
    // The task ends without an outcome if the runtime shuts down.
    outcome.unwrap_or(Err(LockError::Closed))
}

/// Runs a plain lock: attempts, hold, release.
///
/// Not an `async fn`, which would have room for its arguments twice in every lock that is held.
fn run(
    mut task: LeaseTask,
    mut permit: Permit,
    mut backoff: Backoff,
    max_hold: Option<Duration>,
    mut handoff: Handoff<Result<Share, LockError>>,
) -> impl Future<Output = ()> + Send {
    async move {
        let acquired = task.acquire(&mut backoff, &permit, &mut handoff).await;
        drop(backoff);
        match acquired {
            Ok(acquired) => {
                let (mut holding, share) =
                    task.begin_holding(acquired, max_hold, Disposal::Release, None, &permit);
                handoff.hand_out(Ok(share)).await;
                task.hold(&mut holding, &mut permit).await;
                task.release(holding, permit).await;
            }
            Err(error) => {
                drop(permit);
                if let Some(error) = error.into_lock_error() {
                    handoff.send(Err(error));
                }
            }
        }
        task.settle().await;
    }
}

impl AcquireError {
    /// Returns what the caller is told; `None` if it has gone away.
    fn into_lock_error(self) -> Option<LockError> {
        match self {
            Self::Contended { retry_after, .. } => Some(LockError::Contended { retry_after }),
            Self::Failed(error) => Some(error),
            Self::Abandoned => None,
        }
    }
}
