//! The life of one lock, from its order to its end.

use std::convert::identity;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::Span;

use crate::lock::error::LockError;
use crate::lock::lease::attempt::AcquireError;
use crate::lock::lease::handoff::{Handoff, Inline};
use crate::lock::lease::shared::{Disposal, Share};
use crate::lock::lease::task::LeaseTask;
use crate::lock::queue::{Permit, WaiterSlots};

/// Acquires a plain lock, and returns the first share of its lease.
///
/// # Cancel safety
///
/// May be dropped at any point; what the nodes granted or will grant is released. The task exists from the call on, not
/// from the first poll.
///
/// Not an `async fn`, whose future would store the task twice: as an argument and in the box.
pub(crate) fn acquire(
    task: LeaseTask,
    permit: Permit,
    slots: WaiterSlots,
    deadline: Instant,
    max_hold: Option<Duration>,
    span: &Span,
) -> impl Future<Output = Result<Share, LockError>> + Send + use<> {
    let cluster = Arc::clone(&task.cluster);
    let run = |handoff| run(task, permit, slots, deadline, max_hold, handoff);
    let inline = Inline::new(&cluster, run, span);
    async move { inline.outcome().await.and_then(identity) }
}

/// Runs a plain lock: attempts, hold, release.
///
/// Not an `async fn`, which would have room for its arguments twice in every lock that is held. For the same
/// reason each step takes what it needs by value, or is a block of its own: the next one uses its room.
#[expect(
    clippy::manual_async_fn,
    reason = "an async fn has room for its arguments twice"
)]
fn run(
    mut task: LeaseTask,
    mut permit: Permit,
    slots: WaiterSlots,
    deadline: Instant,
    max_hold: Option<Duration>,
    mut handoff: Handoff<Result<Share, LockError>>,
) -> impl Future<Output = ()> + Send {
    async move {
        'held: {
            let acquired = match task.acquire(slots, deadline, &permit, &mut handoff).await {
                Ok(acquired) => acquired,
                Err(error) => {
                    let error = error.into_lock_error();
                    if let Some(error) = &error {
                        permit.set_failed(false, error);
                    }
                    drop(permit);
                    if let Some(error) = error {
                        handoff.send(Err(error));
                    }
                    break 'held;
                }
            };
            let holding = {
                let (mut holding, share) =
                    task.begin_holding(acquired, max_hold, Disposal::Release, None, &permit);
                handoff.hand_out(Ok(share)).await;
                task.hold(&mut holding, &mut permit).await;
                holding
            };
            task.release(holding, permit).await;
        }
        task.settle().await;
    }
}

impl AcquireError {
    /// Returns the error for the caller; `None` if the caller has gone away.
    pub(crate) fn into_lock_error(self) -> Option<LockError> {
        match self {
            Self::Contended { retry_after, .. } => Some(LockError::Contended { retry_after }),
            Self::Failed(error) => Some(error),
            Self::Abandoned => None,
        }
    }
}
