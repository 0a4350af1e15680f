//! Keys whose outcome is recorded: execute once, replay to whoever asks again.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use crate::lock::error::LockError;
use crate::lock::front::Turn;
use crate::lock::guard::LockGuard;
use crate::lock::handle::LockHandle;
use crate::lock::lease::{Effect, Recording, Status, Wish};
use crate::lock::lost::LostReason;
use crate::lock::record::Asking;
use crate::lock::redlock::{Inner, Redlock};
use crate::lock::registry::Stage;
use crate::lock::settings::{Options, after, whole_millis};
use crate::lock::task::{Order, Story};
use crate::lock::waiters::{Waited, Waiters, Waiting};
use crate::node::sha256;
use crate::protocol::{Fingerprint, LockKey, LockKeys, Record, validity};

/// A request to execute something at most once per key.
#[derive(Debug)]
pub(crate) struct Once {
    pub(crate) key: LockKey,
    /// What is asked for: another request with the same key is told so.
    pub(crate) asked_for: Fingerprint,
    pub(crate) ttl: Option<Duration>,
    /// After what time the lock is not renewed any more. An execution that has begun keeps its lock until
    /// it ends, so the default of the builder does not count here.
    pub(crate) max_hold: Option<Duration>,
    /// How long to wait for somebody else's execution.
    pub(crate) wait: Duration,
    pub(crate) waiters: Option<Arc<Waiters>>,
    /// How long it is remembered that something may have been executed, if it is to be.
    pub(crate) intents: Option<Duration>,
    pub(crate) label: Option<&'static str>,
}

/// Why something is not to be executed.
#[derive(Debug, Clone)]
pub(crate) enum NotGranted {
    /// As with any lock.
    Lock(LockError),
    /// It was executed, and a majority of the nodes has this outcome; the head alone, if the rest is
    /// big.
    Done(Record),
    /// The key was used for another request.
    OtherRequest,
    /// It was executed, but the outcome cannot be told before more nodes answer.
    Undecided,
    /// It was executed more than once, with outcomes that no majority agrees on.
    Conflicting,
    /// It may have been executed, and nobody knows with what outcome.
    Unknown,
}

/// Why an execution that was granted must not begin.
#[derive(Debug, Clone)]
pub(crate) enum NotBegun {
    /// The lock is not held any more.
    Lost(LostReason),
    /// A record of another execution came in after the grant, and decides.
    NotGranted(NotGranted),
}

/// How a recording ended.
#[derive(Debug, Clone)]
pub(crate) enum Recorded {
    /// A majority of the nodes has the record.
    Yes,
    /// A majority has another: somebody else executed too.
    Another(Record),
    /// A majority could not be reached, or has nothing.
    No,
}

/// The right to execute, as long as the lock is held; to be used up by a recording.
///
/// Dropped before [`begin`](Self::begin), it gives the key back. Dropped after it, it leaves the lock to its
/// ttl: what was executed is not known to have had no effect.
#[derive(Debug)]
pub(crate) struct Execution {
    guard: LockGuard,
}

impl Redlock {
    /// Asks whether something may be executed.
    ///
    /// # Cancel safety
    ///
    /// As [`LockFuture`](crate::LockFuture).
    pub(crate) async fn once(&self, once: Once) -> Result<Execution, NotGranted> {
        let inner = self.inner();
        let nodes = inner.nodes.len();
        let keys = LockKeys::from(once.key.clone());
        let logged = inner.settings.log_keys.then_some(&keys);
        let asking = Asking::new(once.label, nodes, logged);
        let waited = Waited::default();
        let outcome = ask(inner, once, &keys, &asking, &waited).await;
        asking.tell_once(&outcome, waited.so_far());
        outcome
    }
}

impl Redlock {
    /// Reads the rest of a record of which the head is known, from whichever node has it.
    ///
    /// # Errors
    ///
    /// If no node that has it can be read.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(crate) async fn rest_of(&self, key: &LockKey, head: &Record) -> Result<Record, LockError> {
        self.inner().whole(key, head).await
    }
}

impl Execution {
    pub(super) fn new(guard: LockGuard) -> Self {
        Self { guard }
    }

    /// Asks whether the execution may begin; from then on something may have been executed.
    ///
    /// Between the grant and this there may be a long wait for the inner service. Answers that came in
    /// meanwhile are looked at, and after more than a node timeout all nodes are asked once more: a record
    /// that is heard of before the execution begins decides instead (PROTOCOL, section 2.3.4).
    ///
    /// # Errors
    ///
    /// [`NotBegun`]: then nothing may be executed.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point; the execution counts as begun then if the lease task was faster.
    pub(crate) async fn begin(&self) -> Result<(), NotBegun> {
        let lease = self.guard.lease();
        let lost = || NotBegun::Lost(Status::over(&lease.status).unwrap_or(LostReason::Expired));
        let (done, outcome) = oneshot::channel();
        if !lease.wish(Wish::Begin(done)) {
            return Err(lost());
        }
        outcome.await.unwrap_or_else(|_| Err(lost()))?;
        if self.guard.is_valid() {
            return Ok(());
        }
        // The thread was busy, or the process was stopped, after the lease task had answered.
        lease.set_effect(Effect::None);
        Err(lost())
    }

    /// Gives the key back without a record, because nothing was executed.
    ///
    /// # Cancel safety
    ///
    /// Once begun it goes on in the background.
    pub(crate) async fn release(self) {
        self.release_with(Effect::None).await;
    }

    /// Gives the key back without a record, because what was executed is known to have had no effect.
    /// A retry may execute, unless intents are kept.
    ///
    /// # Cancel safety
    ///
    /// Once begun it goes on in the background.
    pub(crate) async fn release_without_effect(self) {
        self.release_with(Effect::Denied).await;
    }

    async fn release_with(self, effect: Effect) {
        self.guard.lease().set_effect(effect);
        // Unconfirmed or lost, the lock ends by its ttl.
        if let Err(error) = self.guard.release().await {
            tracing::debug!(%error, "an idempotency key was released without confirmation");
        }
    }

    /// Returns a handle for the handler that executes.
    pub(crate) fn handle(&self) -> LockHandle {
        self.guard.handle()
    }

    pub(super) fn guard(&self) -> &LockGuard {
        &self.guard
    }

    /// Keeps the outcome on the nodes, also if the lock was lost meanwhile, and gives the key back.
    ///
    /// # Cancel safety
    ///
    /// Once begun it goes on in the background.
    pub(crate) async fn record(self, record: Record, retention: Duration) -> Recorded {
        let (done, outcome) = oneshot::channel();
        let wish = Wish::Record(Recording {
            record,
            retention,
            done,
        });
        // The lease task is gone with its runtime.
        if !self.guard.lease().wish(wish) {
            return Recorded::No;
        }
        outcome.await.unwrap_or(Recorded::No)
    }
}

impl NotGranted {
    /// The name of the case in spans and metrics.
    pub(super) fn outcome(&self) -> &'static str {
        match self {
            Self::Lock(error) => error.outcome(),
            Self::Done(_) => "replayed",
            Self::OtherRequest => "other_request",
            Self::Undecided => "undecided",
            Self::Conflicting => "conflicting",
            Self::Unknown => "unknown",
        }
    }

    /// As the outcome of a lock, whose key has no records.
    pub(super) fn into_lock_error(self) -> LockError {
        match self {
            Self::Lock(error) => error,
            _ => LockError::Contended { retry_after: None },
        }
    }
}

impl From<LockError> for NotGranted {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

async fn ask(
    inner: &Arc<Inner>,
    once: Once,
    keys: &LockKeys,
    asking: &Asking,
    waited: &Waited,
) -> Result<Execution, NotGranted> {
    let settings = &inner.settings;
    let namespace = &settings.namespace;
    let names = namespace.names_with_record(&once.key, once.intents, sha256);
    let names = names.map_err(LockError::Key)?;
    let ttl = settings.ttl_of(&Options {
        ttl: once.ttl,
        ..Options::default()
    })?;
    let ttl = match once.max_hold {
        // Its validity ends with the execution then, also where one ttl is more than that.
        Some(max_hold) => ttl.min(ttl_to_hold(max_hold).max(2 * settings.node_timeout)),
        None => ttl,
    };
    let asked = Instant::now();
    let deadline = after(asked, once.wait);
    let caps = [settings.waiters.clone(), once.waiters.clone()];
    let caps = caps.into_iter().flatten().collect();
    let mut waiting = Waiting::new(caps, waited.clone());
    let turn = take_turn(inner, keys, &once, deadline, &mut waiting).await?;
    if let Some(record) = turn.recorded_since(asked) {
        return Err(if record.fingerprint() == once.asked_for {
            NotGranted::Done(record)
        } else {
            NotGranted::OtherRequest
        });
    }
    let ticket = inner.registry.enter(keys).ok_or(LockError::Closed)?;
    let order = Order {
        keys: keys.clone(),
        names: [names].into(),
        ttl,
        max_hold: once.max_hold,
        deadline,
        turn,
        waiting,
        ticket,
        label: asking.label(),
        asked_for: Some(once.asked_for),
        inner: Arc::clone(inner),
    };
    Story::of(order, asking.span()).await.map(Execution::new)
}

/// Returns the ttl with which a lock is valid for so long, and a little longer, lest it be renewed for that.
fn ttl_to_hold(max_hold: Duration) -> Duration {
    whole_millis(max_hold.saturating_add(validity::drift(max_hold) + SLACK))
}

/// Waits until this call is the only one in the process that asks the nodes for its key.
///
/// Behind somebody who executes it waits as long as it may; behind somebody who is only asking, in
/// any case: that is over as soon as the nodes have answered, and may end in a replay.
async fn take_turn(
    inner: &Arc<Inner>,
    keys: &LockKeys,
    once: &Once,
    deadline: Instant,
    waiting: &mut Waiting,
) -> Result<Turn, NotGranted> {
    let asking = 2 * inner.settings.node_timeout;
    let asked_until = deadline.max(Instant::now() + asking);
    loop {
        if inner.registry.stage() != Stage::Open {
            return Err(LockError::Closed.into());
        }
        let mut busy = match inner.front.try_take(keys) {
            Ok(turn) => return Ok(turn),
            Err(busy) => busy,
        };
        let other = |asked_for| asked_for != once.asked_for;
        let now = Instant::now();
        // Whoever asks may execute soon, and perhaps another request.
        let holder = busy.holder.borrow_and_update().clone();
        let is_held = holder.is_some();
        let (until, look_again) = match holder {
            // About to be given back: who comes next is decided in a moment.
            Some(holder) if holder.lease.is_ending() => (asked_until, asked_until),
            Some(holder) if holder.asked_for.is_some_and(other) => {
                return Err(NotGranted::OtherRequest);
            }
            Some(_) => (deadline, deadline),
            None => (asked_until, asked_until.min(now + asking)),
        };
        let contended = LockError::Contended {
            retry_after: busy.retry_after,
        };
        if until <= now {
            return Err(contended.into());
        }
        if let Err(overloaded) = waiting.begin() {
            let is_patient = now < deadline;
            return Err(if is_patient { overloaded } else { contended }.into());
        }
        tokio::select! {
            biased;
            turn = timeout_at(look_again, inner.front.take(keys)) => {
                if let Ok(turn) = turn {
                    return Ok(turn);
                }
            }
            Ok(()) = busy.holder.changed(), if !is_held => {}
            () = inner.registry.reached(Stage::Draining) => {}
        }
    }
}

/// What rounding and the drift of the drift may take.
const SLACK: Duration = Duration::from_millis(4);
