//! What happens to a handler whose client goes away: it is dropped, or runs to its end.

use std::fmt;
use std::future::Future;
use std::panic;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use http::Request;
use pin_project::pin_project;
use tokio::task::JoinHandle;
use tower::Service;
use tracing::Instrument;

use crate::lock::{LockGuard, LockHandle};

/// Drop the handler when the client goes away, wherever it is, and release the lock: what hyper
/// does without a lock, too. The default of [`RedlockLayer`](crate::RedlockLayer).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CancelOnDisconnect;

/// Let a handler that has begun run to its end under its lock when the client goes away.
///
/// It runs in a task of its own, in the span of the request, and the lock is released when it is
/// done; its response is dropped. With [`OnLost::Abort`](crate::OnLost::Abort) the end of the lock
/// is its end too, so `max_hold` bounds it. A client whose request was aborted may meet its own lock
/// with the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RunToCompletion;

/// Extension with which a layer tells the service in it that the request has a lock.
#[derive(Clone)]
pub(super) struct Outlive {
    pub(super) lock: LockHandle,
    pub(super) abort_if_lost: bool,
    /// Set if the lock is lost before the handler begins, which then never does.
    pub(super) not_begun: Arc<AtomicBool>,
}

/// Service inside of a [`RedlockService`](crate::middleware::RedlockService) that calls its inner
/// service in a task of its own for every request with a lock.
#[derive(Debug, Clone)]
pub struct RunToCompletionService<S> {
    inner: S,
}

impl<S> RunToCompletionService<S> {
    pub(super) fn new(inner: S) -> Self {
        Self { inner }
    }

    /// Returns a reference to the inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }
}

impl<S, B> Service<Request<B>> for RunToCompletionService<S>
where
    S: Service<Request<B>>,
    S::Future: Send + 'static,
    S::Response: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = RunToCompletionFuture<S::Future, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let outlive = request.extensions_mut().remove::<Outlive>();
        let inner = self.inner.call(request);
        let share = outlive.and_then(
            |Outlive {
                 lock,
                 abort_if_lost,
                 not_begun,
             }| {
                let share = lock.upgrade().ok()?;
                Some((share, abort_if_lost, not_begun))
            },
        );
        let kind = match share {
            Some((share, abort_if_lost, not_begun)) => {
                let running = run(inner, share, abort_if_lost, not_begun).in_current_span();
                Kind::Spawned(tokio::spawn(running))
            }
            None => Kind::Inline(inner),
        };
        RunToCompletionFuture { kind }
    }
}

/// Runs a handler to its end, or to that of its lock.
async fn run<F: Future>(
    handler: F,
    share: LockGuard,
    abort_if_lost: bool,
    not_begun: Arc<AtomicBool>,
) -> Option<F::Output> {
    // The task may have waited for a thread beyond the validity of the lock.
    if !share.is_valid() {
        not_begun.store(true, Ordering::Release);
        return None;
    }
    let lost = async {
        if abort_if_lost {
            share.lost().await;
        } else {
            std::future::pending::<()>().await;
        }
    };
    let output = tokio::select! {
        biased;
        () = lost => None,
        output = handler => Some(output),
    };
    // Before the response is handed over: whoever sends it releases the lock in order.
    drop(share);
    output
}

/// Response future of [`RunToCompletionService`].
#[pin_project]
pub struct RunToCompletionFuture<F, T> {
    #[pin]
    kind: Kind<F, T>,
}

#[pin_project(project = KindProjection)]
enum Kind<F, T> {
    Inline(#[pin] F),
    /// Dropping the handle does not end the task.
    Spawned(#[pin] JoinHandle<Option<T>>),
}

impl<F: Future<Output = T>, T> Future for RunToCompletionFuture<F, T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        match self.project().kind.project() {
            KindProjection::Inline(inner) => inner.poll(context),
            KindProjection::Spawned(task) => match ready!(task.poll(context)) {
                Ok(Some(output)) => Poll::Ready(output),
                // The lock is lost, and the layer around answers for that.
                Ok(None) => Poll::Pending,
                Err(error) => match error.try_into_panic() {
                    Ok(panic) => panic::resume_unwind(panic),
                    // The runtime is shutting down, and this future with it.
                    Err(_) => Poll::Pending,
                },
            },
        }
    }
}

impl<F, T> fmt::Debug for RunToCompletionFuture<F, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunToCompletionFuture")
            .finish_non_exhaustive()
    }
}
