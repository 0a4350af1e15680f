//! Leading: work that one process at a time does, for as long as it holds a key.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::Fuse;
use tokio::time::{Instant, sleep, timeout};

use crate::lock::acquisition::LockRequest;
use crate::lock::error::LockError;
use crate::lock::guard::LockGuard;
use crate::lock::layout::Core;
use crate::lock::options::LockOptions;
use crate::lock::registry::DrainStage;
use crate::lock::rest::Left;
use crate::lock::span::label_of;
use crate::node::random_u64;
use crate::protocol::{FencingToken, LockKeys, retry};

type Running = Pin<Box<dyn Future<Output = Result<(), LockError>> + Send>>;

/// Future of [`Redlock::lead`](crate::Redlock::lead): campaigns for a key, and does the work while it holds the key.
///
/// It does nothing until it is polled; spawn it. It ends when [`Redlock::drain`](crate::Redlock::drain) is called.
///
/// # Errors
///
/// Resolves to a [`LockError`] if the request can never succeed, because the key or the ttl is invalid. Nodes that
/// cannot be reached are waited for.
///
/// # Panics
///
/// Panics if it is polled outside of a tokio runtime with a timer. A panic of the work is passed on, and the key is
/// released.
///
/// # Cancel safety
///
/// May be dropped at any point: the work is dropped, and the key is released in the background if it is held.
#[must_use = "a process does not campaign until the future is polled"]
pub struct Lead {
    options: LockOptions,
    /// `None` once it runs.
    campaign: Option<Box<dyn FnOnce(LockOptions) -> Running + Send>>,
    /// Terminated before that.
    running: Fuse<Running>,
}

impl Lead {
    pub(crate) fn new<F, W>(core: Arc<Core>, keys: LockKeys, work: F) -> Self
    where
        F: Fn(LockGuard) -> W + Send + Sync + 'static,
        W: Future<Output = ()> + Send + 'static,
    {
        let campaign = |options| -> Running { Box::pin(campaign(core, keys, options, work)) };
        Self {
            options: LockOptions::default()
                .wait(Duration::MAX)
                .max_hold(Duration::MAX),
            campaign: Some(Box::new(campaign)),
            running: Fuse::terminated(),
        }
    }

    setters! {
        /// Sets how long the lock lives on the nodes without renewal, and so how soon another process leads after this
        /// one has died. Default: the builder's ttl.
        ttl(ttl: Duration) => options.ttl = Some(ttl);

        /// Sets the name of the kind of resource in spans and metrics. Default: as for
        /// [`LockRequest::label`](crate::LockRequest::label).
        label(label: &'static str) => options.label = Some(label);
    }
}

impl Future for Lead {
    type Output = Result<(), LockError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(campaign) = self.campaign.take() {
            self.running = campaign(self.options.clone()).fuse();
        }
        Pin::new(&mut self.running).poll(context)
    }
}

opaque_debug! { Lead [options = options] }

/// A shorter term counts as a failure for the pause behind it: work that fails at once would begin many times a second.
const SHORT_TERM: Duration = Duration::from_secs(1);

/// Campaigns and leads by turns, until the service is drained.
async fn campaign<F, W>(
    core: Arc<Core>,
    keys: LockKeys,
    options: LockOptions,
    work: F,
) -> Result<(), LockError>
where
    F: Fn(LockGuard) -> W,
    W: Future<Output = ()>,
{
    let (registry, retry) = (&core.registry, &core.settings.retry);
    let (mut failures, mut short_terms) = (0, 0);
    loop {
        let request = LockRequest {
            core: Arc::clone(&core),
            keys: keys.clone(),
            options: options.clone(),
            // A candidate waits for as long as another process leads, and must not keep other callers from waiting.
            caps: [None, None],
        };
        match request.await {
            Ok(guard) => {
                failures = 0;
                let resource = label_of(options.label, &keys);
                let fencing_token = guard.fencing_token().map(FencingToken::as_u64);
                tracing::info!(resource, fencing_token, "redlock leadership gained");
                // Also if this future is dropped, or the work panics.
                let term = Left(Some(resource), |resource| {
                    tracing::info!(resource, "redlock leadership lost");
                });
                let began = Instant::now();
                lead(&core, guard, &work).await;
                drop(term);
                short_terms = match began.elapsed() < SHORT_TERM {
                    true => short_terms + 1,
                    false => 0,
                };
            }
            Err(LockError::Closed) => return Ok(()),
            Err(
                error @ (LockError::Contended { .. }
                | LockError::Unavailable { .. }
                | LockError::Expired { .. }
                | LockError::Overloaded { .. }),
            ) => {
                tracing::debug!(%error, "redlock campaign failed");
                failures += 1;
            }
            // The same request fails again in any case.
            Err(error) => return Err(error),
        }
        // Other processes may lead now.
        tokio::select! {
            () = registry.reached(DrainStage::Draining) => return Ok(()),
            () = sleep(retry::delay(retry, failures.max(short_terms), None, random_u64())) => {}
        }
    }
}

/// Does the work until it returns, the lock is lost, or the service is drained.
async fn lead<W: Future<Output = ()>>(
    core: &Core,
    guard: LockGuard,
    work: impl Fn(LockGuard) -> W,
) {
    let (lost, handle) = (guard.lost(), guard.handle());
    // The lock is held until the work ends, also if it drops its guard.
    let share = handle.upgrade();
    // The lease reports the loss late if its thread was busy or the process was stopped. Work must not begin, or go
    // on, even for a moment.
    if handle.is_valid() {
        let mut work = pin!(work(guard));
        let while_valid = poll_fn(|context| {
            if !handle.is_valid() {
                return Poll::Ready(());
            }
            work.as_mut().poll(context)
        });
        tokio::select! {
            biased;
            () = core.registry.reached(DrainStage::Draining) => {}
            _ = lost => {}
            () = while_valid => {}
        }
    }
    drop(share);
    // A guard that the work has passed on keeps the lock.
    let node_timeout = core.settings.node_timeout;
    drop(timeout(node_timeout, handle.released()).await);
}
