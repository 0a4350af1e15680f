//! Acquiring: attempts until a majority grants the lock, or none will.

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use crate::lock::claim::Claim;
use crate::lock::error::LockError;
use crate::lock::front::Turn;
use crate::lock::once::NotGranted;
use crate::lock::registry::Stage;
use crate::lock::task::attempt::Inquiry;
use crate::lock::task::recording::Replay;
use crate::lock::task::run::Grant;
use crate::lock::task::state::{LeaseTask, TICK};
use crate::lock::waiters::Waiting;
use crate::node::{ReleaseSignal, random_u64};
use crate::protocol::{FencingToken, OnRelease, Record, Retry};

/// A lock that a majority has granted.
pub(super) struct Acquired {
    pub(super) claim: Claim,
    pub(super) token: Option<FencingToken>,
    /// Before the first request was sent.
    pub(super) began: Instant,
    pub(super) valid_until: Instant,
    /// Of a key that keeps records: goes on until the execution begins. Boxed, because most locks have none.
    pub(super) inquiry: Option<Box<Inquiry>>,
}

/// Why a single attempt did not end in a lock.
pub(super) enum Missed {
    /// Others hold it, or as many got some nodes as we did; trying again makes sense.
    Contended {
        retry_after: Option<Duration>,
        split: bool,
    },
    Stopped(Stopped),
    /// A minority has a record; when more nodes answer it may be replayed.
    Undecided,
}

/// Why the task stops trying.
pub(super) enum Stopped {
    NotGranted(NotGranted),
    /// There is a record, and what is left to do about it.
    Replayed(Record, Box<Replay>),
    /// The caller went away.
    Abandoned,
}

/// Who waits for an attempt; nobody, if it is for the record alone.
pub(super) struct Caller<'a>(pub(super) Option<&'a mut Grant>);

impl Caller<'_> {
    /// Waits until the caller has gone away.
    pub(super) async fn gone(&mut self) {
        match &mut self.0 {
            Some(grant) => grant.closed().await,
            None => std::future::pending().await,
        }
    }
}

impl Missed {
    pub(super) fn not_granted(reason: impl Into<NotGranted>) -> Self {
        Self::Stopped(Stopped::NotGranted(reason.into()))
    }
}

/// What a task that waits for a lock has learned so far.
struct Waits {
    began: Instant,
    deadline: Instant,
    waiting: Waiting,
    /// How many votes in a row were split, and until when that is a reason to ask again soon.
    splits: Option<(u32, Instant)>,
    polls: u32,
    /// How many releases were heard of.
    heard: u32,
    /// How long the last attempt took.
    round_trip: Duration,
    /// What hears of a release, by key.
    ears: Vec<Arc<ReleaseSignal>>,
}

/// Other processes that are let in.
enum Others {
    /// So many, with this one, were told of the release.
    Told(usize),
    /// Perhaps there are some.
    Unknown,
}

impl LeaseTask {
    pub(super) async fn acquire(
        &mut self,
        deadline: Instant,
        waiting: Waiting,
        turn: &Turn,
        grant: &mut Grant,
    ) -> Result<Acquired, Stopped> {
        let mut waits = Waits {
            began: Instant::now(),
            deadline,
            waiting,
            splits: None,
            polls: 0,
            heard: 0,
            round_trip: TICK,
            ears: Vec::new(),
        };
        if let Some(others) = self.others(turn) {
            Box::pin(self.let_others_in(others, &mut waits, turn, grant)).await?;
        }
        loop {
            for ear in &waits.ears {
                ear.reset();
            }
            let asked = Instant::now();
            // Boxed: what comes after it in the task needs less room.
            let attempt = Box::pin(self.attempt(Caller(Some(&mut *grant))));
            let (retry_after, split) = match attempt.await {
                Ok(acquired) => return Ok(acquired),
                Err(Missed::Stopped(stopped)) => return Err(stopped),
                Err(Missed::Contended { retry_after, split }) => (retry_after, split),
                Err(Missed::Undecided) if asked < deadline => (None, false),
                Err(Missed::Undecided) => return Err(Stopped::NotGranted(NotGranted::Undecided)),
            };
            // Timers know no less than a tick: shorter delays would all be the same, and on a paused
            // clock there would be none at all.
            waits.round_trip = asked.elapsed().max(TICK);
            let delay = self.delay(&mut waits, turn, asked, retry_after, split)?;
            if Box::pin(self.pause(&mut waits, delay, grant)).await? {
                // Others were told as well: who wins is put to the vote anew.
                waits.splits = None;
            }
        }
    }

    /// Returns what is known of other processes whose turn it is.
    ///
    /// Whoever is next in this process would always be first, because it needs no message; and without
    /// messages it would hand the turn on for ever.
    fn others(&self, turn: &Turn) -> Option<Others> {
        let settings = &self.inner.settings;
        if settings.wake_ups {
            let told = self.rivals.iter().filter_map(|rivals| rivals.waiting());
            return told.max().map(Others::Told);
        }
        let run = settings.retry.max().saturating_mul(RUN);
        (turn.run() >= run).then_some(Others::Unknown)
    }

    /// Lets other processes try first, as likely as not.
    async fn let_others_in(
        &mut self,
        others: Others,
        waits: &mut Waits,
        turn: &Turn,
        grant: &mut Grant,
    ) -> Result<(), Stopped> {
        let left = waits.deadline.saturating_duration_since(waits.began);
        if left.is_zero() {
            return Ok(());
        }
        let delay = match others {
            Others::Told(rivals) => match Retry::on_release(rivals, 0, TICK, random_u64()) {
                OnRelease::Try(delay) => delay,
                OnRelease::Rest(delay) => {
                    waits.ears = turn.listen(&self.inner, &self.names);
                    delay
                }
            },
            // Those who were refused wait as long.
            Others::Unknown => {
                turn.end_run();
                let retry = self.inner.settings.retry;
                retry.delay(u32::MAX, None, random_u64())
            }
        };
        self.pause(waits, delay.min(left), grant).await.map(drop)
    }

    /// Returns how long to wait before the next attempt, if there is to be one.
    fn delay(
        &self,
        waits: &mut Waits,
        turn: &Turn,
        asked: Instant,
        retry_after: Option<Duration>,
        split: bool,
    ) -> Result<Duration, Stopped> {
        let settings = &self.inner.settings;
        let now = Instant::now();
        if split {
            // As long for whoever has waited as for whoever comes, but past the deadline only for the latter.
            let last = waits.deadline.max(waits.began + settings.node_timeout);
            let end = last.min(asked + settings.node_timeout);
            let (splits, end) = waits.splits.get_or_insert((0, end));
            if now < *end {
                let delay = Retry::split_delay(*splits, waits.round_trip, random_u64());
                *splits += 1;
                // They double: the last would take longer than all before it.
                return Ok(delay.min(*end - now));
            }
        } else {
            waits.splits = None;
        }
        if now >= waits.deadline {
            let contended = LockError::Contended { retry_after };
            return Err(Stopped::NotGranted(contended.into()));
        }
        turn.end_run();
        let begun = waits.waiting.begin();
        begun.map_err(|error| Stopped::NotGranted(error.into()))?;
        if settings.wake_ups && waits.ears.is_empty() {
            waits.ears = turn.listen(&self.inner, &self.names);
        }
        let told = !waits.ears.is_empty() && waits.ears.iter().all(|ear| ear.is_subscribed());
        let delay = if told {
            let bound = settings.poll_interval;
            settings.retry.poll_delay(bound, retry_after, random_u64())
        } else {
            waits.polls += 1;
            let polls = waits.polls - 1;
            settings.retry.delay(polls, retry_after, random_u64())
        };
        Ok(delay.min(waits.deadline - now))
    }

    /// Waits for a while, or until a release is heard of and it is this process's turn to try; returns
    /// whether it is.
    async fn pause(
        &mut self,
        waits: &mut Waits,
        delay: Duration,
        grant: &mut Grant,
    ) -> Result<bool, Stopped> {
        grant.postpone();
        let told = async {
            let mut rested = Duration::MAX;
            loop {
                let Ok(listeners) = timeout(rested, first_news(&waits.ears)).await else {
                    return;
                };
                waits.heard = waits.heard.saturating_add(1);
                match Retry::on_release(listeners, waits.heard, waits.round_trip, random_u64()) {
                    OnRelease::Try(Duration::ZERO) => return,
                    OnRelease::Try(delay) => return sleep(delay).await,
                    OnRelease::Rest(delay) => rested = delay,
                }
            }
        };
        tokio::select! {
            biased;
            () = grant.closed() => Err(Stopped::Abandoned),
            () = self.inner.registry.reached(Stage::Draining) => {
                Err(Stopped::NotGranted(LockError::Closed.into()))
            }
            () = told => Ok(true),
            () = sleep(delay.max(TICK)) => Ok(false),
        }
    }
}

/// How many times the longest delay between attempts the turn is handed on in one process.
const RUN: u32 = 10;

/// Waits until one of the ears hears of a release, and returns how many processes did.
async fn first_news(ears: &[Arc<ReleaseSignal>]) -> usize {
    let mut news: Vec<_> = ears.iter().map(|ear| Box::pin(ear.released())).collect();
    poll_fn(|context| {
        let ready = news.iter_mut().map(|news| news.as_mut().poll(context));
        ready.fold(
            Poll::Pending,
            |first, next| if first.is_ready() { first } else { next },
        )
    })
    .await
}
