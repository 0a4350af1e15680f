//! The story as a whole: acquire, hold, release.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot::{self, error::TryRecvError};
use tokio::time::Instant;
use tracing::{Instrument, Span};

use crate::lock::error::LockError;
use crate::lock::front::Turn;
use crate::lock::guard::LockGuard;
use crate::lock::once::NotGranted;
use crate::lock::redlock::Inner;
use crate::lock::registry::Ticket;
use crate::lock::task::acquire::Stopped;
use crate::lock::task::state::{Alarm, LeaseTask};
use crate::lock::waiters::Waiting;
use crate::node::Tally;
use crate::protocol::{Fingerprint, KeyNames, LockKeys};

/// Where the outcome of the acquisition goes; closed when the caller has gone away.
pub(in crate::lock) type Grant = oneshot::Sender<Result<LockGuard, NotGranted>>;

/// What a lease task is started with.
#[derive(Debug)]
pub(in crate::lock) struct Order {
    pub(in crate::lock) inner: Arc<Inner>,
    pub(in crate::lock) keys: LockKeys,
    pub(in crate::lock) names: Arc<[KeyNames]>,
    pub(in crate::lock) ttl: Duration,
    pub(in crate::lock) max_hold: Option<Duration>,
    /// When the caller stops waiting.
    pub(in crate::lock) deadline: Instant,
    pub(in crate::lock) turn: Turn,
    pub(in crate::lock) waiting: Waiting,
    pub(in crate::lock) ticket: Ticket,
    /// What the lock is called in metrics.
    pub(in crate::lock) label: &'static str,
    /// What is asked for, if the key keeps records.
    pub(in crate::lock) asked_for: Option<Fingerprint>,
}

/// A lock from its first request to its last; resolves with what became of the acquisition.
///
/// # Design
///
/// Until the caller has its answer, whoever polls this does the work; the rest is a task of its own, also
/// if this is dropped before. So a lock that is granted at once is decided in the task that asks for it,
/// which need not wait for another to be scheduled, and then to be woken by it.
pub(in crate::lock) struct Story {
    rest: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    granted: oneshot::Receiver<Result<LockGuard, NotGranted>>,
}

impl Story {
    pub(in crate::lock) fn of(order: Order, span: &Span) -> Self {
        let (grant, granted) = oneshot::channel();
        Self {
            rest: Some(Box::pin(run(order, grant).instrument(span.clone()))),
            granted,
        }
    }
}

impl Future for Story {
    type Output = Result<LockGuard, NotGranted>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(rest) = &mut self.rest {
            // A panic ends it as it would end a task of its own: the claim gives back what it may hold, and
            // the caller is told that nobody answers.
            let polled = AssertUnwindSafe(|| rest.as_mut().poll(context));
            let goes_on = catch_unwind(polled).is_ok_and(|polled| polled.is_pending());
            if !goes_on {
                self.rest = None;
            }
        }
        match self.granted.try_recv() {
            Ok(outcome) => {
                if let Some(rest) = self.rest.take() {
                    tokio::spawn(rest);
                }
                Poll::Ready(outcome)
            }
            Err(TryRecvError::Empty) => Poll::Pending,
            Err(TryRecvError::Closed) => Poll::Ready(Err(LockError::Closed.into())),
        }
    }
}

/// The caller went away: what it asked for is given back.
impl Drop for Story {
    fn drop(&mut self) {
        self.granted.close();
        if let Some(rest) = self.rest.take()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(rest);
        }
        // Without a runtime the claim is dropped, which gives it back as well; nobody counts the answers.
    }
}

/// Runs a lock from its first request to its last.
async fn run(order: Order, mut grant: Grant) {
    let Order {
        inner,
        keys,
        names,
        ttl,
        max_hold,
        deadline,
        turn,
        waiting,
        ticket,
        label,
        asked_for,
    } = order;
    let (tally, votes) = Tally::new(&inner.names);
    let mut task = LeaseTask {
        inner,
        keys,
        names,
        ttl,
        tally,
        votes,
        releases: Vec::new(),
        ticket,
        label,
        asked_for,
        rivals: turn.rivals(),
        alarm: Alarm::default(),
    };
    let outcome = task.acquire(deadline, waiting, &turn, &mut grant).await;
    match outcome {
        Ok(acquired) => {
            let ended = task.hold(acquired, max_hold, turn, grant).await;
            task.end(ended).await;
        }
        Err(Stopped::NotGranted(reason)) => {
            drop(turn);
            // A caller that has gone away has no use for the reason.
            drop(grant.send(Err(reason)));
        }
        Err(Stopped::Replayed(record, replay)) => {
            turn.set_recorded(&record);
            drop(turn);
            drop(grant.send(Err(NotGranted::Done(record))));
            Box::pin(task.finish_replay(*replay)).await;
        }
        Err(Stopped::Abandoned) => drop(turn),
    }
    task.settle().await;
}
