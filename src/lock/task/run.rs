//! The story as a whole: acquire, hold, release.

use std::future::{Future, poll_fn};
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
use crate::lock::task::recording::Replay;
use crate::lock::task::state::{Alarm, LeaseTask};
use crate::lock::waiters::Waiting;
use crate::node::VoteReceiver;
use crate::protocol::{Fingerprint, KeyNames, LockKeys};

/// What became of an acquisition.
type Outcome = Result<LockGuard, NotGranted>;

/// Where the outcome of the acquisition goes; closed when the caller has gone away.
pub(in crate::lock) enum Grant {
    /// To whoever polls the task.
    Here(oneshot::Sender<Word>),
    /// To somebody who only waits.
    Away(oneshot::Sender<Outcome>),
}

/// What whoever polls the task is told.
pub(in crate::lock) enum Word {
    Decided(Outcome),
    /// It takes its time: the task goes on by itself, and the outcome comes this way.
    Later(oneshot::Receiver<Outcome>),
}

impl Grant {
    /// Waits until the caller has gone away.
    pub(super) async fn closed(&mut self) {
        match self {
            Self::Here(grant) => grant.closed().await,
            Self::Away(grant) => grant.closed().await,
        }
    }

    /// Tells the outcome. A caller that has gone away has no use for it, and what it holds is given back.
    /// Returns whether the caller polls the task, and is about to make it go on by itself.
    pub(super) fn send(self, outcome: Outcome) -> bool {
        match self {
            Self::Here(grant) => grant.send(Word::Decided(outcome)).is_ok(),
            Self::Away(grant) => {
                drop(grant.send(outcome));
                false
            }
        }
    }

    /// Tells a success; what comes later does not wake the caller any more.
    pub(super) async fn hand_out(self, guard: LockGuard) {
        let mut is_polled_by_caller = self.send(Ok(guard));
        poll_fn(|_| {
            // Nothing has to wake it: it is spawned, and polled then.
            if std::mem::take(&mut is_polled_by_caller) {
                Poll::Pending
            } else {
                Poll::Ready(())
            }
        })
        .await;
    }

    /// Makes the task go on by itself.
    pub(super) fn postpone(&mut self) {
        if matches!(self, Self::Away(_)) {
            return;
        }
        let (away, outcome) = oneshot::channel();
        if let Self::Here(here) = std::mem::replace(self, Self::Away(away)) {
            // A caller that has gone away has dropped the other end, and so is this one's.
            drop(here.send(Word::Later(outcome)));
        }
    }
}

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
/// The first attempt is made by whoever polls this; the rest is a task of its own, also if this is dropped
/// before. So a lock that is granted at once is decided in the task that asks for it, which need not wait
/// for another to be scheduled, and then to be woken by it. Whoever has to wait for others does that in a
/// task: it has a deadline to keep, and others behind it, whether the caller polls or not.
pub(in crate::lock) struct Story {
    told: Told,
    runtime: Handle,
}

enum Told {
    Here {
        task: Pin<Box<dyn Future<Output = ()> + Send>>,
        word: oneshot::Receiver<Word>,
    },
    Away(oneshot::Receiver<Outcome>),
    Over,
}

impl Story {
    /// # Panics
    ///
    /// Outside of a runtime.
    pub(in crate::lock) fn of(order: Order, span: &Span) -> Self {
        let runtime = Handle::current();
        let (grant, word) = oneshot::channel();
        let task = run(order, Grant::Here(grant)).instrument(span.clone());
        let task = Box::pin(task);
        let told = Told::Here { task, word };
        Self { told, runtime }
    }
}

impl Future for Story {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome> {
        let closed = || Err(LockError::Closed.into());
        loop {
            let (mut task, mut word) = match std::mem::replace(&mut self.told, Told::Over) {
                Told::Here { task, word } => (task, word),
                Told::Away(mut outcome) => {
                    let polled = Pin::new(&mut outcome).poll(context);
                    if polled.is_pending() {
                        self.told = Told::Away(outcome);
                    }
                    // Nobody answers if the task panicked or the runtime shuts down.
                    return polled.map(|outcome| outcome.unwrap_or_else(|_| closed()));
                }
                Told::Over => return Poll::Ready(closed()),
            };
            // A panic ends it as it would end a task of its own: the claim gives back what it may hold.
            let polled = catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(context)));
            let told = word.try_recv();
            match (polled, told) {
                (Ok(Poll::Pending), Err(TryRecvError::Empty)) => {
                    self.told = Told::Here { task, word };
                    return Poll::Pending;
                }
                (polled, Ok(told)) => {
                    if matches!(polled, Ok(Poll::Pending)) {
                        self.runtime.spawn(task);
                    }
                    match told {
                        Word::Decided(outcome) => return Poll::Ready(outcome),
                        Word::Later(outcome) => self.told = Told::Away(outcome),
                    }
                }
                (_, Err(_)) => return Poll::Ready(closed()),
            }
        }
    }
}

/// The caller went away: what it asked for is given back.
impl Drop for Story {
    fn drop(&mut self) {
        if let Told::Here { task, mut word } = std::mem::replace(&mut self.told, Told::Over) {
            word.close();
            self.runtime.spawn(task);
        }
    }
}

/// Runs a lock from its first request to its last.
///
/// Not an async fn, which would have room for what it is given twice: every lock that is held has this.
fn run(order: Order, mut grant: Grant) -> impl Future<Output = ()> + Send {
    let Order {
        inner,
        keys,
        names,
        ttl,
        max_hold,
        deadline,
        mut turn,
        waiting,
        ticket,
        label,
        asked_for,
    } = order;
    let votes = VoteReceiver::new(&inner.names);
    let mut task = LeaseTask {
        inner,
        keys,
        names,
        ttl,
        votes,
        releases: Vec::new(),
        ticket,
        label,
        asked_for,
        rivals: turn.rivals(),
        alarm: Alarm::default(),
    };
    async move {
        let replay = 'held: {
            let acquired = match task.acquire(deadline, waiting, &turn, &mut grant).await {
                Ok(acquired) => acquired,
                Err(stopped) => break 'held stopped.tell(turn, grant),
            };
            let (ended, ending) = {
                let (mut holding, guard) = task.begin_holding(acquired, max_hold, &turn);
                let ending = task.hold(&mut holding, &mut turn, grant, guard).await;
                (holding.end(), ending)
            };
            task.end(ended, ending, turn).await;
            None
        };
        // Boxed, like all that few locks come to: every lock would have its room.
        if let Some(replay) = replay {
            Box::pin(task.finish_replay(*replay)).await;
        }
        task.settle().await;
    }
}

impl Stopped {
    /// Tells why the lock was not granted; returns what is left to do about a replay.
    fn tell(self, turn: Turn, grant: Grant) -> Option<Box<Replay>> {
        let (reason, replay) = self.conclude(&turn);
        drop(turn);
        if let Some(reason) = reason {
            grant.send(Err(reason));
        }
        replay
    }

    /// Makes a record known to those who wait for the turn. Returns why there is no lock, unless the caller
    /// went away, and what is left to do about a replay.
    pub(super) fn conclude(self, turn: &Turn) -> (Option<NotGranted>, Option<Box<Replay>>) {
        match self {
            Self::NotGranted(reason) => (Some(reason), None),
            Self::Replayed(record, replay) => {
                turn.set_recorded(&record);
                (Some(NotGranted::Done(record)), Some(replay))
            }
            Self::Abandoned => (None, None),
        }
    }
}
