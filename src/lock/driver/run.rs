//! The life of one lock, from its order to its end.

use std::convert::identity;
use std::future::Future;
use std::sync::Arc;

use tokio::time::Instant;
use tracing::Span;

use crate::lock::backoff::AcquireError;
use crate::lock::driver::task::Driver;
use crate::lock::handoff::{Handoff, Inline};
use crate::lock::queue::{CapPermits, Permit};
use crate::lock::state::Share;

/// Acquires a lock, and returns the first share of it.
///
/// # Cancel safety
///
/// May be dropped at any point; what the nodes granted or will grant is released. The task exists from the call on, not
/// from the first poll.
///
/// Not an `async fn`, whose future would store the task twice: as an argument and in the box.
pub(crate) fn acquire(
    driver: Driver,
    permit: Permit,
    slots: CapPermits,
    deadline: Instant,
    span: &Span,
) -> impl Future<Output = Result<Share, AcquireError>> + Send + use<> {
    let cluster = Arc::clone(&driver.cluster);
    let run = |handoff| driver.run(permit, slots, deadline, handoff);
    let inline = Inline::new(&cluster, run, span);
    async move {
        let outcome = inline.outcome().await;
        outcome.map_err(AcquireError::from).and_then(identity)
    }
}

impl Driver {
    /// Runs a lock: attempts, hold, release.
    ///
    /// Not an `async fn`, which would have room for its arguments twice in every lock that is held.
    #[expect(
        clippy::manual_async_fn,
        reason = "an async fn has room for its arguments twice"
    )]
    fn run(
        mut self,
        mut permit: Permit,
        slots: CapPermits,
        deadline: Instant,
        mut handoff: Handoff<Result<Share, AcquireError>>,
    ) -> impl Future<Output = ()> + Send {
        async move {
            let acquiring = Box::pin(self.acquire(slots, deadline, &permit, &mut handoff));
            match acquiring.await {
                Ok(acquired) => {
                    let (mut held, share) = self.begin_holding(acquired, &permit);
                    handoff.hand_out(Ok(share)).await;
                    self.hold(&mut held, &mut permit).await;
                    match self.is_holding() {
                        true => self.release(held, permit).await,
                        false => Box::pin(self.finish(held, permit)).await,
                    }
                }
                Err(error) => {
                    if let Some(error) = error.for_others() {
                        permit.set_failed(self.terms.once.is_some(), &error);
                    }
                    if let AcquireError::Decided(decided) = &error
                        && decided.is_memorable()
                    {
                        permit.set_memo(decided.clone());
                    }
                    drop(permit);
                    if !matches!(error, AcquireError::Abandoned) {
                        handoff.send(Err(error));
                    }
                }
            }
            self.settle().await;
        }
    }
}
