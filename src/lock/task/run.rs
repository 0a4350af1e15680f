//! The story as a whole: acquire, hold, release.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::{Instrument, Span};

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

/// Starts the task that runs a lock, and returns where it will say what became of the acquisition.
pub(in crate::lock) fn start(
    order: Order,
    span: &Span,
) -> oneshot::Receiver<Result<LockGuard, NotGranted>> {
    let (grant, granted) = oneshot::channel();
    tokio::spawn(run(order, grant).instrument(span.clone()));
    granted
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
