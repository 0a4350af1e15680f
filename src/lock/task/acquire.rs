//! Acquiring: attempts until a majority grants the lock, or none will.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::lock::claim::Claim;
use crate::lock::error::LockError;
use crate::lock::once::NotGranted;
use crate::lock::registry;
use crate::lock::task::recording::Replay;
use crate::lock::task::run::Grant;
use crate::lock::task::state::{LeaseTask, TICK, reached};
use crate::lock::waiters::Waiting;
use crate::node::random_u64;
use crate::protocol::{FencingToken, Record, Retry};

/// A lock that a majority has granted.
pub(super) struct Acquired {
    pub(super) claim: Claim,
    pub(super) token: Option<FencingToken>,
    /// Before the first request was sent.
    pub(super) began: Instant,
    pub(super) valid_until: Instant,
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

impl LeaseTask {
    pub(super) async fn acquire(
        &mut self,
        deadline: Instant,
        mut waiting: Waiting,
        grant: &mut Grant,
    ) -> Result<Acquired, Stopped> {
        let settings = &Arc::clone(&self.inner).settings;
        let began = Instant::now();
        let (mut splits, mut polls) = (0, 0);
        loop {
            let asked = Instant::now();
            let (retry_after, split) = match self.attempt(Caller(Some(&mut *grant))).await {
                Ok(acquired) => return Ok(acquired),
                Err(Missed::Stopped(stopped)) => return Err(stopped),
                Err(Missed::Contended { retry_after, split }) => (retry_after, split),
                Err(Missed::Undecided) if asked < deadline => (None, false),
                Err(Missed::Undecided) => return Err(Stopped::NotGranted(NotGranted::Undecided)),
            };
            let now = Instant::now();
            let delay = if split && now < began + settings.node_timeout {
                splits += 1;
                // Timers know no less than a tick: shorter delays would all be the same, and on a
                // paused clock there would be none at all.
                let round_trip = (now - asked).max(TICK);
                let delay = Retry::split_delay(splits - 1, round_trip, random_u64());
                // They double: the last would take longer than all before it.
                delay.min(began + settings.node_timeout - now)
            } else if now < deadline {
                let begun = waiting.begin();
                begun.map_err(|error| Stopped::NotGranted(error.into()))?;
                polls += 1;
                let delay = settings.retry.delay(polls - 1, retry_after, random_u64());
                delay.min(deadline - now)
            } else {
                let contended = LockError::Contended { retry_after };
                return Err(Stopped::NotGranted(contended.into()));
            };
            tokio::select! {
                biased;
                () = grant.closed() => return Err(Stopped::Abandoned),
                () = reached(&mut self.stage, registry::Stage::Draining) => {
                    return Err(Stopped::NotGranted(LockError::Closed.into()));
                }
                () = sleep(delay.max(TICK)) => {}
            }
        }
    }
}
