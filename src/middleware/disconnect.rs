//! What happens to a handler whose client disconnects: it is dropped, or runs to completion.
//!
//! # Implementation details
//!
//! With [`RunToCompletion`], the layer puts a [`SpawnHandler`] into the extensions of each locked request. The
//! service inside takes it out again, and runs the handler in a task, which holds the share of the layer too. The task
//! checks the validity before it first polls the handler, because it may have waited for a thread. It drops the share
//! before it returns the output, so that the layer outside holds the last one and releases the lock in order.

use std::future::pending;
use std::panic;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use http::Request;
use tower::Service;
use tracing::Instrument;

use crate::lock::LockHandle;
use crate::middleware::config::OnLost;
use crate::middleware::held::{HeldShare, first_lost};

/// Drop the handler when the client disconnects, at any `await`, and release the lock, as hyper
/// does without a lock. The default of [`RedlockLayer`](crate::RedlockLayer).
#[derive(Debug, Clone)]
pub struct CancelOnDisconnect;

/// Let a handler that has started run to completion under its lock when the client disconnects.
///
/// The handler runs in a task of its own, in the span of the request. When it completes, the lock is released
/// and the response dropped. With [`OnLost::Abort`] the handler ends with the lock, so `max_hold` bounds it.
/// A client whose request was aborted may meet its own lock with its next request.
#[derive(Debug, Clone, Copy)]
pub struct RunToCompletion;

/// Extension of a request whose handler is to run in a task.
#[derive(Clone)]
pub(super) struct SpawnHandler {
    pub(super) lock: LockHandle,
    pub(super) on_lost: OnLost,
    /// Set if the lock is lost before the handler starts; then it never starts.
    pub(super) is_not_started: Arc<AtomicBool>,
}

/// Service inside of a [`RedlockService`](crate::middleware::RedlockService) that runs the handler of each
/// locked request in a task of its own.
#[derive(Debug, Clone)]
#[expect(unnameable_types, reason = "the service of the layer has it inside")]
pub struct RunToCompletionService<S> {
    pub(super) inner: S,
}

impl<S, B> Service<Request<B>> for RunToCompletionService<S>
where
    S: Service<Request<B>>,
    S::Future: Send + 'static,
    S::Response: Send + 'static,
    S::Error: Send + 'static,
{
    boxed_service!(S::Response);

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let spawn = request.extensions_mut().remove::<SpawnHandler>();
        let inner = self.inner.call(request);
        let Some(spawn) = spawn else {
            return Box::pin(inner);
        };
        let Some(held) = HeldShare::from_handle(spawn.lock, spawn.on_lost) else {
            return Box::pin(inner);
        };
        let task = tokio::spawn(run(inner, held, spawn.is_not_started).in_current_span());
        Box::pin(async move {
            match task.await {
                Ok(Some(output)) => output,
                Err(error) if error.is_panic() => panic::resume_unwind(error.into_panic()),
                // The lock is lost, and the layer outside answers; or the runtime is shutting down and drops this future
                // too.
                Ok(None) | Err(_) => pending().await,
            }
        })
    }
}

/// Runs a handler until it completes; `None` if its lock ends first.
async fn run<F: Future>(
    handler: F,
    mut held: HeldShare,
    is_not_started: Arc<AtomicBool>,
) -> Option<F::Output> {
    if held.lost_reason().is_some() {
        // Relaxed: the end of this task, for which the reader waits, orders it.
        is_not_started.store(true, Ordering::Relaxed);
        return None;
    }
    let output = tokio::select! {
        biased;
        _ = first_lost(slice::from_mut(&mut held)) => None,
        output = handler => Some(output),
    };
    // Before the output is returned: the layer outside releases the last share.
    drop(held);
    output
}
