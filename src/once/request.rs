//! An execution as it is asked for.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use crate::lock::{
    Core, DrainStage, LeaseTask, LockError, LockOptions, LockSpan, Permit, Redlock, Waited,
    WaiterCap, WaiterSlots, after, option_setters, whole_millis,
};
use crate::node::sha256;
use crate::once::error::Denied;
use crate::once::execution::Execution;
use crate::once::fetch::Fetches;
use crate::once::lifecycle::acquire;
use crate::once::task::{KeyMemo, OnceTask};
use crate::protocol::{Fingerprint, LockKey, LockKeys, Record, validity};

/// For how long a result is kept by default, and an intent.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// For rounding, and for the drift of the drift.
const SLACK: Duration = Duration::from_millis(4);

/// Work that is to be executed once per key; [`run`](Self::run) runs it.
///
/// Made by [`Redlock::once`]. The first call with a key executes the work and records its result on a majority
/// of the nodes; later calls return the recorded result.
///
/// ```
/// use tower_redlock::{OnceError, Outcome, Redlock};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), OnceError<std::io::Error, u64>> {
/// let redlock = Redlock::in_memory(3);
/// for number in 0..2 {
///     let outcome = redlock
///         .once(("invoice", "message-17"))
///         .fingerprint(b"amount=5")
///         .run(move |_execution| async move { Ok::<_, std::io::Error>(number) })
///         .await?;
///     assert_eq!(outcome.into_inner(), 0); // executed once, replayed after that
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Guarantee
///
/// While leases hold, the work of a key is executed by one caller at a time, and after a majority has recorded a
/// result, by none for as long as it is kept. An execution that has begun keeps its lock until it ends, whatever
/// becomes of the caller: it is a task of its own. A process that dies between the effect and the record, or
/// that is paused for longer than its lock, lets a later call execute again; with
/// [`at_most_once`](Self::at_most_once) that gets [`OnceError::Unknown`](crate::OnceError::Unknown) instead.
#[must_use = "the work is not executed until `run` is awaited"]
pub struct ExecuteOnce {
    pub(super) core: Arc<Core>,
    pub(super) key: LockKey,
    pub(super) fingerprint: Fingerprint,
    pub(super) options: LockOptions,
    /// A cap on waiting calls besides that of the lock service.
    cap: Option<Arc<WaiterCap>>,
    /// For how long an intent is kept, if it is.
    intents: Option<Duration>,
    pub(super) retention: Duration,
    pub(super) max_result: usize,
}

impl Redlock {
    /// Asks for work to be executed once per key, without HTTP: for queue consumers and jobs.
    ///
    /// Keys are the caller's choice: whose key it is belongs into the key. An execution holds the
    /// [`lock`](Self::lock) of its key, so work that locks or executes its own key is refused after `wait`.
    pub fn once(&self, key: impl Into<LockKey>) -> ExecuteOnce {
        ExecuteOnce {
            core: Arc::clone(self.core()),
            key: key.into(),
            fingerprint: Fingerprint::from_digest(sha256(&[])),
            options: LockOptions::default(),
            cap: None,
            intents: None,
            retention: DAY,
            max_result: 64 * 1024,
        }
    }
}

option_setters!(
    ExecuteOnce,
    ttl: "Default: the builder's ttl.",
    wait: "Default: zero. A caller that waits for an execution of the same key gets its result.",
    max_hold: "Default: without end; the builder's `max_hold` does not apply.\n\nAt this bound, and not before two \
node timeouts, the work is stopped, because two executions must not run at once, and the call gets \
[`OnceError::Unknown`](crate::OnceError::Unknown). The key stays locked until its ttl."
);

impl ExecuteOnce {
    /// Sets what makes two calls with one key the same request: the payload, say, of which the SHA-256 digest is
    /// kept. Another call with the key gets [`OnceError::OtherRequest`](crate::OnceError::OtherRequest).
    /// Default: empty, all calls with one key are the same request.
    pub fn fingerprint(mut self, payload: impl AsRef<[u8]>) -> Self {
        self.fingerprint = Fingerprint::from_digest(sha256(payload.as_ref()));
        self
    }

    /// Sets whether work that may have been executed is never executed again. Default: false.
    ///
    /// Then a call after an execution that ended without a record, by a crash, a panic or an error of the work,
    /// gets [`OnceError::Unknown`](crate::OnceError::Unknown) for a day, as long as a majority of the nodes
    /// remembers that an execution began. This needs the setting in every call with the key.
    pub fn at_most_once(mut self, at_most_once: bool) -> Self {
        self.intents = at_most_once.then_some(DAY);
        self
    }

    /// Makes a waiting call count against one more cap.
    #[cfg(feature = "idempotency")]
    pub(crate) fn cap(mut self, cap: Option<Arc<WaiterCap>>) -> Self {
        self.cap = cap;
        self
    }

    /// Sets all options of the lock.
    #[cfg(feature = "idempotency")]
    pub(crate) fn options(mut self, options: LockOptions) -> Self {
        self.options = options;
        self
    }

    /// Sets a digest that has been made before.
    #[cfg(feature = "idempotency")]
    pub(crate) fn digest(mut self, fingerprint: Fingerprint) -> Self {
        self.fingerprint = fingerprint;
        self
    }

    /// Reads a large record of the key, of which the head is known.
    ///
    /// # Errors
    ///
    /// [`LockError`] if no node that has it can be read.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(crate) async fn fetch(&self, head: &Record) -> Result<Record, LockError> {
        let fetches: Arc<Fetches> = self.core.extensions.get();
        fetches.fetch(&self.core.cluster, &self.key, head).await
    }

    fn options_mut(&mut self) -> &mut LockOptions {
        &mut self.options
    }

    /// Asks whether the work may be executed.
    ///
    /// # Cancel safety
    ///
    /// As [`LockFuture`](crate::LockFuture).
    pub(crate) async fn acquire(&self) -> Result<Execution, Denied> {
        let settings = &self.core.cluster.settings;
        let keys = LockKeys::from(self.key.clone());
        let logged = settings.log_keys.then_some(&keys);
        let span = LockSpan::new(self.options.label, settings.quorum.nodes(), logged);
        let waited = Waited::default();
        let outcome = self.acquire_in(&keys, &span, &waited).await;
        match &outcome {
            Ok(execution) => {
                span.granted(execution.handle().fencing_token(), waited.so_far());
            }
            Err(denied) => span.refused(denied.outcome(), waited.so_far()),
        }
        outcome
    }

    async fn acquire_in(
        &self,
        keys: &LockKeys,
        span: &LockSpan,
        waited: &Waited,
    ) -> Result<Execution, Denied> {
        let Self { core, options, .. } = self;
        let settings = &core.cluster.settings;
        let names = settings
            .namespace
            .names_with_record(&self.key, self.intents, sha256);
        let names = names.map_err(LockError::Key)?;
        let ttl = settings.ttl(options.ttl)?;
        let ttl = match options.max_hold {
            // The validity is to end with the execution, also if one ttl is longer.
            Some(max_hold) => ttl.min(ttl_to_hold(max_hold).max(2 * settings.node_timeout)),
            None => ttl,
        };
        let asked = Instant::now();
        let deadline = after(asked, options.wait.unwrap_or_default());
        let caps = [settings.max_waiters.clone(), self.cap.clone()];
        let mut slots = WaiterSlots::new(caps.into_iter().flatten(), waited.clone());
        let permit = self.permit(keys, deadline, &mut slots).await?;
        if let Some(KeyMemo::Recorded(at, record)) = permit.memo().as_deref().and_then(memo)
            // Read behind the question: an older one may have expired.
            && *at >= asked
        {
            return Err(if record.fingerprint() == self.fingerprint {
                Denied::Recorded(record.clone())
            } else {
                Denied::OtherRequest
            });
        }
        let ticket = core.registry.enter(keys).ok_or(LockError::Closed)?;
        let lease = LeaseTask::new(
            &core.cluster,
            keys.clone(),
            [names].into(),
            ttl,
            // A record is only written where its writer was the last to be granted the key, which the fence
            // tells.
            true,
            ticket,
            span.label(),
        );
        let task = OnceTask {
            lease,
            fingerprint: self.fingerprint,
            fetches: core.extensions.get(),
        };
        acquire(task, permit, slots, deadline, options.max_hold, span.span()).await
    }

    /// Waits until this call is the one in this process that may ask the nodes for its key.
    ///
    /// Behind an execution it waits until the deadline. Behind a call that is only asking it waits in any case:
    /// that is over as soon as the nodes have answered, and may end in a replay.
    async fn permit(
        &self,
        keys: &LockKeys,
        deadline: Instant,
        slots: &mut WaiterSlots,
    ) -> Result<Permit, Denied> {
        let Core {
            cluster,
            queue,
            registry,
            ..
        } = &*self.core;
        let asking = 2 * cluster.settings.node_timeout;
        let asked_until = deadline.max(Instant::now() + asking);
        loop {
            if registry.stage() != DrainStage::Open {
                return Err(LockError::Closed.into());
            }
            let mut busy = match queue.try_acquire(keys) {
                Ok(permit) => return Ok(permit),
                Err(busy) => busy,
            };
            let now = Instant::now();
            let holder = busy.holder.borrow_and_update().clone();
            let is_held = holder.is_some();
            let (until, look_again) = match holder {
                // About to be released: which call comes next is decided in a moment.
                Some(lease) if lease.is_ending() => (asked_until, asked_until),
                Some(lease) => match lease.purpose().and_then(|purpose| memo(&**purpose)) {
                    Some(KeyMemo::Executing(other)) if *other != self.fingerprint => {
                        return Err(Denied::OtherRequest);
                    }
                    _ => (deadline, deadline),
                },
                // A call that asks may execute soon, and perhaps another request.
                None => (asked_until, asked_until.min(now + asking)),
            };
            let contended = LockError::Contended {
                retry_after: busy.retry_after,
            };
            if until <= now {
                return Err(contended.into());
            }
            if let Err(overloaded) = slots.occupy() {
                let is_patient = now < deadline;
                return Err(if is_patient { overloaded } else { contended }.into());
            }
            tokio::select! {
                biased;
                permit = timeout_at(look_again, queue.acquire(keys)) => {
                    if let Ok(permit) = permit {
                        return Ok(permit);
                    }
                }
                Ok(()) = busy.holder.changed(), if !is_held => {}
                () = registry.reached(DrainStage::Draining) => {}
            }
        }
    }
}

fn memo(memo: &(dyn std::any::Any + Send + Sync)) -> Option<&KeyMemo> {
    memo.downcast_ref()
}

/// Returns the ttl with which a lock is valid for this long, and a little longer, so that it is not renewed for
/// that.
fn ttl_to_hold(max_hold: Duration) -> Duration {
    whole_millis(max_hold.saturating_add(validity::drift(max_hold) + SLACK))
}

/// By hand: a derived one would show the whole service, with the keys that others hold.
impl fmt::Debug for ExecuteOnce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExecuteOnce")
            .field("key", &self.key)
            .field("options", &self.options)
            .field("retention", &self.retention)
            .field("max_result", &self.max_result)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use crate::node::unguessable;
    use crate::once::command::Recorded;
    use crate::protocol::ExecutionId;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn executed_and_replayed_keys_leave_no_slot_and_no_task() {
        let redlock = Redlock::in_memory(3);
        let tasks = tokio::runtime::Handle::current().metrics();
        let before = tasks.num_alive_tasks();
        // Some results are so large that they are fetched.
        let (small, large) = (vec![1; 64], vec![1; Record::MAX_INLINE]);
        for number in 0..1_000_u32 {
            let once = redlock.once(number.to_string());
            let execution = once.acquire().await.unwrap();
            execution.begin().await.unwrap();
            let rest = if number % 10 == 0 { &large } else { &small };
            let id = ExecutionId::from_random(unguessable());
            let record = Record::new(id, once.fingerprint, sha256(rest), rest);
            let recorded = execution.record(record.clone(), Duration::from_secs(1));
            assert!(matches!(recorded.await, Recorded::Yes));
            let head = match once.acquire().await {
                Err(Denied::Recorded(head)) => head,
                other => panic!("{other:?}"),
            };
            if !head.is_whole() {
                assert_eq!(once.fetch(&head).await.unwrap(), record);
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(redlock.core().queue.is_empty());
        assert_eq!(tasks.num_alive_tasks(), before);
        assert!(redlock.drain(Duration::ZERO).await.is_clean());
    }
}
