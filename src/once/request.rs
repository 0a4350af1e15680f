//! Requests for executions: their settings, and the acquisition of the key, in its group, or in two while the key moves
//! from one to the other.
//!
//! # Implementation details
//!
//! Processes that know only the present group of a key that moves, or only its next one, execute and record there. A
//! process that knows both therefore executes and records in both: it acquires the key in the present group first and
//! then in the next, and an outcome is recorded once both groups have it.
//!
//! If only one group has a record, the other may not have got it in time, or the process that executed knows only the one.
//! The record counts when the other has it too, so it is copied there, and not replayed before: a process that
//! knows only the other group could otherwise execute again and record another outcome, and callers would be answered
//! both. If the groups have different records, the key was executed twice.

use std::sync::Arc;
use std::time::Duration;

use crate::lock::{
    Core, Denied, Group, LockError, LockOptions, LockSpan, LockSpec, LockTask, Reading, Redlock,
    Wait, option_setters,
};
use crate::node::{after, sha256, telemetry};
use crate::once::error::name_of;
use crate::once::execution::Execution;
use crate::once::fetch::{fetch, is_undamaged};
use crate::once::inspect::{names, request};
use crate::protocol::lease::{Decided, Effect, Input, OnceSpec};
use crate::protocol::message::{Op, Reply};
use crate::protocol::{Fingerprint, LockKey, LockKeys, Record, validity};

/// The default retention of a record, and the retention of an intent.
pub(crate) const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// An allowance for rounding, and for the drift within the allowance itself.
const SLACK: Duration = Duration::from_millis(4);

/// Request to execute work once per key; created by [`Redlock::once`].
///
/// [`run`](Self::run) executes it. The first call with a key executes the work and records its result on a majority
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
/// While leases hold, one caller at a time executes the work of a key. Once a majority has recorded a result, no
/// caller executes the work for as long as the result is kept. An execution that has begun runs in a task of its
/// own, and keeps its lock until it ends, even if its caller goes away.
///
/// If a process dies between the effect and the record, or is paused for longer than its lock, a later call executes
/// again. With [`at_most_once`](Self::at_most_once), that call gets
/// [`OnceError::Unknown`](crate::OnceError::Unknown) instead.
#[must_use = "the work is not executed until `run` is awaited"]
pub struct ExecuteOnce {
    pub(super) core: Arc<Core>,
    pub(crate) key: LockKey,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) options: LockOptions,
    pub(crate) at_most_once: bool,
    pub(crate) retention: Duration,
    pub(super) max_result: usize,
}

impl Redlock {
    /// Requests the execution of work once per key, for queue consumers and jobs.
    ///
    /// Keys are the caller's choice: whose key it is belongs into the key. An execution holds the
    /// [`lock`](Self::lock) of its key, so work that locks or executes its own key is refused after `wait`.
    pub fn once(&self, key: impl Into<LockKey>) -> ExecuteOnce {
        ExecuteOnce {
            core: Arc::clone(self.core()),
            key: key.into(),
            fingerprint: Fingerprint::from_digest(sha256(&[])),
            options: LockOptions::default(),
            at_most_once: false,
            retention: DAY,
            max_result: 64 * 1024,
        }
    }
}

option_setters!(
    ExecuteOnce.options,
    ttl: "Default: the builder's ttl.",
    wait: "Default: zero. A caller that waits for an execution of the same key gets its result.",
    max_hold: "Default: without end; the builder's `max_hold` does not apply.\n\nAt this bound, and not before two \
node timeouts, the work is stopped, because two executions must not run at once, and the call gets \
[`OnceError::Unknown`](crate::OnceError::Unknown). The key stays locked until its ttl."
);

impl ExecuteOnce {
    setters! {
        /// Sets the payload by which two calls with one key are the same request. Default: empty, so that all calls with
        /// one key are.
        ///
        /// A call with another payload gets [`OnceError::OtherRequest`](crate::OnceError::OtherRequest). The record
        /// contains the SHA-256 digest of the payload only.
        fingerprint(payload: impl AsRef<[u8]>) => fingerprint = Fingerprint::from_digest(sha256(payload.as_ref()));

        /// Sets whether work that may have been executed is never executed again. Default: false.
        ///
        /// Then a call after an execution that ended without a record, by a crash, a panic or an error of the work,
        /// gets [`OnceError::Unknown`](crate::OnceError::Unknown) for a day, as long as a majority of the nodes
        /// remembers that an execution began. This needs the setting in every call with the key.
        at_most_once(at_most_once: bool) => at_most_once = at_most_once;
    }

    /// Acquires the right to execute the work.
    ///
    /// # Errors
    ///
    /// Returns [`Denied`] if the work must not be executed, with the record if there is one.
    ///
    /// # Cancel safety
    ///
    /// As for [`LockFuture`](crate::LockFuture).
    pub(crate) async fn acquire(&self) -> Result<Execution, Denied> {
        let layout = &self.core.layout;
        let keys = LockKeys::from(self.key.clone());
        let group = layout.group_of(&self.key);
        let mut span = LockSpan::new(self.options.label, &group.cluster, &keys);
        let outcome = match layout.next_group_of(&self.key) {
            None => self.acquire_in(group, |_| (), &keys, &span).await,
            Some(next) => {
                let groups = [group, next];
                Box::pin(self.acquire_in_both(groups, &keys, &span)).await
            }
        };
        match &outcome {
            Ok(execution) => span.finish("lock acquired", "granted", execution.0.fencing_token()),
            Err(Denied::Decided(decided @ Decided::Recorded(_))) => {
                span.finish("outcome replayed", name_of(decided), None);
            }
            Err(Denied::Decided(decided)) => span.refuse(name_of(decided), None),
            Err(Denied::Lock(error)) => span.refuse(error.outcome(), error.holder()),
            Err(Denied::Lost(_)) => span.refuse("lost", None),
        }
        outcome
    }

    /// Returns the whole record: that of another node if this one is only a head, or is damaged. `None` if it is damaged, and
    /// no node has a better copy.
    ///
    /// # Errors
    ///
    /// Returns a [`LockError`] if the record must be fetched and cannot be.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(crate) async fn read(&self, record: &Record) -> Result<Option<Record>, LockError> {
        if is_undamaged(record) {
            return Ok(Some(record.clone()));
        }
        let layout = &self.core.layout;
        let fetched = fetch(layout.group_of(&self.key), &self.key, record).await;
        let fetched = match layout.next_group_of(&self.key) {
            // The record may have been found there.
            Some(next) if fetched.is_err() => fetch(next, &self.key, record).await,
            _ => fetched,
        };
        match fetched {
            Err(LockError::Contended { .. }) if record.is_whole() => Ok(None),
            fetched => fetched.map(Some),
        }
    }

    /// Records the outcome of an execution and releases its key.
    ///
    /// # Errors
    ///
    /// Returns what counts in its place: the outcome of another execution, or none that a majority has recorded.
    pub(crate) async fn conclude(
        &self,
        execution: Execution,
        record: &Record,
    ) -> Result<(), Option<Decided>> {
        match execution.record(record, self.retention).await {
            Some(recorded) if recorded.execution() == record.execution() => Ok(()),
            Some(other) if other.fingerprint() == self.fingerprint => {
                telemetry::conflict();
                tracing::warn!(
                    "work was executed twice; the outcome that was recorded first is returned"
                );
                Err(Some(Decided::Recorded(other)))
            }
            // The outcome of another request is not for this caller.
            Some(_) => Err(Some(Decided::Conflicting)),
            None => {
                telemetry::unrecorded();
                tracing::warn!(
                    "no majority recorded the outcome of an execution; a later call may execute it again"
                );
                Err(None)
            }
        }
    }

    /// Acquires the right to execute the work in both groups.
    async fn acquire_in_both(
        &self,
        [present, next]: [&Arc<Group>; 2],
        keys: &LockKeys,
        span: &LockSpan,
    ) -> Result<Execution, Denied> {
        let join = |spec: &mut LockSpec| spec.join(None);
        let first = self.acquire_in(present, join, keys, span).await;
        let token = match &first {
            Ok(first) => first.0.fencing_token(),
            Err(Denied::Decided(Decided::Recorded(_))) => None,
            Err(_) => return first,
        };
        let join = |spec: &mut LockSpec| spec.join(token);
        let second = self.acquire_in(next, join, keys, span).await;
        let decided = match (first, second) {
            (Ok(first), Ok(second)) => {
                return first.join(second).await.map_err(|error| {
                    let (names, elapsed) = (&present.cluster.names, span.began.elapsed());
                    LockError::from_raise(error, names, self.effective_ttl(), elapsed).into()
                });
            }
            (Ok(free), Err(Denied::Decided(Decided::Recorded(record)))) => {
                self.copied(next, record, free).await
            }
            (Err(Denied::Decided(Decided::Recorded(record))), Ok(free)) => {
                self.copied(present, record, free).await
            }
            (
                Err(Denied::Decided(Decided::Recorded(one))),
                Err(Denied::Decided(Decided::Recorded(other))),
            ) => match one.execution() == other.execution() {
                true => Decided::Recorded(one),
                false => Decided::Conflicting,
            },
            (Ok(first), Err(denied)) => {
                first.release(Effect::NotBegun).await;
                return Err(denied);
            }
            (Err(_), second) => return second,
        };
        Err(Denied::Decided(decided))
    }

    /// Copies the record of one group to the other, in which the key is free, and returns what is to be answered.
    async fn copied(&self, from: &Arc<Group>, record: Record, to: Execution) -> Decided {
        let left = self.expires_in(from, &record).await;
        let whole = self.read(&record).await;
        let (Some(left), Ok(Some(whole))) = (left, whole) else {
            // It has expired meanwhile, or its nodes have failed, or all copies are damaged.
            to.release(Effect::NotBegun).await;
            return Decided::Undecided;
        };
        match to.record(&whole, left).await {
            Some(other) if other.execution() != record.execution() => Decided::Conflicting,
            Some(_) => Decided::Recorded(record),
            None => Decided::Undecided,
        }
    }

    /// Returns how much longer a group keeps a record; `None` if no node says so.
    async fn expires_in(&self, group: &Group, record: &Record) -> Option<Duration> {
        let names = names(&group.cluster, &self.key).ok()?;
        let asked = group.cluster.ask_all(request(&names, Op::Look, false));
        let replies = asked.await.into_iter();
        let left = replies.filter_map(|asked| match asked.outcome {
            Ok(Reply::Done {
                record: found,
                expires_in,
            }) if found.execution() == record.execution() => Some(expires_in),
            _ => None,
        });
        left.max()
    }

    /// Acquires the key in one group. In one of several, it joins those before.
    async fn acquire_in(
        &self,
        group: &Arc<Group>,
        join: impl FnOnce(&mut LockSpec),
        keys: &LockKeys,
        span: &LockSpan,
    ) -> Result<Execution, Denied> {
        let Self { core, options, .. } = self;
        let settings = &core.settings;
        let labels = span.in_group(group.label.clone());
        let intents = self.at_most_once.then_some(DAY);
        let names = settings
            .namespace
            .names_with_record(&self.key, intents, sha256);
        let names = names.map_err(LockError::Key)?;
        let ttl = settings.ttl(options.ttl)?;
        let ttl = match options.max_hold {
            // The validity must not exceed the longest execution, even if the ttl does.
            Some(max_hold) => ttl.min(ttl_to_hold(max_hold).max(2 * settings.node_timeout)),
            None => ttl,
        };
        let asked = span.began;
        let deadline = after(asked, options.wait.unwrap_or_default());
        let caps = [core.cap.clone(), options.cap.clone()];
        let mut wait = Wait::new(deadline, caps, span.waits_since(deadline));
        let (cluster, registry, names) = (&group.cluster, &core.registry, [names].into());
        let mut spec = LockSpec::new(cluster, registry, keys, names, ttl, labels);
        join(&mut spec);
        // By the fence, a node accepts a record only from the last owner that it granted the key.
        spec.is_fenced = true;
        // A second execution must not begin beside the first.
        spec.lease.renews = true;
        spec.lease.max_hold = options.max_hold;
        spec.note.clone_from(&options.note);
        spec.lease.once = Some(OnceSpec {
            fingerprint: self.fingerprint,
            executes: true,
        });
        let of = (Arc::clone(group), self.key.clone());
        // The nodes answer a lock with the head of a large record only.
        spec.reader = Some(Arc::new(move |head: Record| -> Reading {
            let (group, key) = of.clone();
            Box::pin(async move { Input::Read(fetch(&group, &key, &head).await.ok()) })
        }));
        let spec = Arc::new(spec);
        let permit = group.admit(&spec, &mut wait).await?;
        if let Some((at, Decided::Recorded(record))) = permit.memo()
            // Found after this call began; an older one may have expired.
            && at >= asked
        {
            return Err(Denied::Decided(
                match record.fingerprint() == self.fingerprint {
                    true => Decided::Recorded(record),
                    false => Decided::OtherRequest,
                },
            ));
        }
        let task = LockTask::new(spec, None, permit, wait, span.span.clone())?;
        Ok(Execution(task.acquire().await?))
    }

    pub(super) fn effective_ttl(&self) -> Duration {
        self.options.ttl.unwrap_or(self.core.settings.ttl)
    }
}

/// Returns the ttl with which a lock is valid for slightly longer than `max_hold`, so that it needs no renewal.
fn ttl_to_hold(max_hold: Duration) -> Duration {
    validity::whole_millis(max_hold.saturating_add(validity::drift(max_hold) + SLACK))
}

// Without the service, which has the keys of other callers.
opaque_debug! {
    ExecuteOnce [key = key, options = options, retention = retention, max_result = max_result]
}

#[cfg(test)]
mod tests {
    use crate::node::unguessable;
    use crate::protocol::ExecutionId;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn executed_and_replayed_keys_leave_no_slot_and_no_task() {
        let redlock = Redlock::in_memory(3);
        let tasks = tokio::runtime::Handle::current().metrics();
        let guard = redlock.lock("k").await.unwrap();
        guard.release().await.unwrap();
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
            let recorded = execution.record(&record, Duration::from_secs(1));
            assert_eq!(recorded.await.as_ref(), Some(&record));
            let head = match once.acquire().await {
                Err(Denied::Decided(Decided::Recorded(head))) => head,
                other => panic!("{other:?}"),
            };
            if !head.is_whole() {
                assert_eq!(once.read(&head).await.unwrap(), Some(record));
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(redlock.core().layout.groups[0].queue.is_empty());
        assert_eq!(tasks.num_alive_tasks(), before);
        assert!(redlock.drain(Duration::ZERO).await.is_clean());
    }

    #[cfg(feature = "test-util")]
    #[tokio::test(start_paused = true)]
    async fn a_damaged_record_is_not_copied_to_the_next_group() {
        use crate::lock::NodeGroup;
        use crate::test_util::ScriptedNodes;

        let nodes = [ScriptedNodes::new(3), ScriptedNodes::new(3)];
        let group = |number: usize| {
            let group = NodeGroup::new().name(number.to_string());
            group.scripted(&nodes[number])
        };
        let builder = || Redlock::builder().node_group(group(0));
        let present = builder().build().unwrap();
        let both = builder().moving_to([group(0), group(1)]).build().unwrap();
        let mut keys = (0..).map(|number: u32| LockKey::from(number.to_string()));
        let layout = &both.core().layout;
        let key = keys.find(|key| layout.next_group_of(key).is_some());
        let key = key.unwrap();
        let once = present.once(key.clone());
        let execution = once.acquire().await.unwrap();
        execution.begin().await.unwrap();
        let id = ExecutionId::from_random(unguessable());
        // The digest is that of another body.
        let record = Record::new(id, once.fingerprint, sha256(b"8"), b"7");
        assert!(execution.record(&record, DAY).await.is_some());
        for _ in 0..2 {
            let again = both.once(key.clone()).acquire().await;
            assert!(
                matches!(again, Err(Denied::Decided(Decided::Undecided))),
                "{again:?}"
            );
        }
    }

    #[tokio::test]
    async fn a_damaged_copy_is_not_returned() {
        let redlock = Redlock::in_memory(1);
        let once = redlock.once("k");
        let id = ExecutionId::from_random([1; 16]);
        let record = Record::new(id, once.fingerprint, sha256(b"7"), b"7");
        assert_eq!(once.read(&record).await, Ok(Some(record.clone())));
        let mut bytes = record.as_bytes().to_vec();
        *bytes.last_mut().unwrap() = b'8';
        let damaged = Record::from_bytes(bytes.into()).unwrap();
        assert_eq!(once.read(&damaged).await, Ok(None));
    }

    /// The share of the lock is dropped with the future, behind the command to record; also while a renewal is
    /// under way, behind which the command waits.
    #[cfg(feature = "test-util")]
    #[tokio::test(start_paused = true)]
    async fn a_recording_that_is_dropped_goes_on() {
        use crate::test_util::{Gate, OpKind, ScriptedNodes};

        for held in [Duration::ZERO, Duration::from_millis(3_340)] {
            let nodes = ScriptedNodes::new(3);
            let redlock = Redlock::builder().scripted(&nodes);
            let redlock = redlock.ttl(Duration::from_secs(10)).build().unwrap();
            let slow = Gate::Slow(Duration::from_millis(20));
            (0..3).for_each(|node| nodes.set_for(node, OpKind::Confirm, slow));
            let once = redlock.once("k");
            let execution = once.acquire().await.unwrap();
            execution.begin().await.unwrap();
            tokio::time::sleep(held).await;
            assert_eq!(nodes.sent(0, OpKind::Confirm), usize::from(!held.is_zero()));
            let id = ExecutionId::from_random(unguessable());
            let record = Record::new(id, once.fingerprint, sha256(b"r"), b"r");
            let mut recording = Box::pin(execution.record(&record, DAY));
            assert!(futures_util::poll!(&mut recording).is_pending());
            drop(recording);
            tokio::time::sleep(Duration::from_millis(30)).await;
            let again = once.acquire().await;
            assert!(
                matches!(again, Err(Denied::Decided(Decided::Recorded(_)))),
                "{again:?}"
            );
        }
    }

    /// The lease task lets it begin, and then the thread is busy until the validity is over.
    // Rules: once.begin
    #[tokio::test(start_paused = true)]
    async fn an_execution_does_not_begin_after_its_validity() {
        let redlock = Redlock::in_memory(3);
        let once = redlock.once("k").at_most_once(true);
        let execution = once.acquire().await.unwrap();
        let mut beginning = Box::pin(execution.begin());
        assert!(futures_util::poll!(&mut beginning).is_pending());
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert!(execution.handle().is_valid());
        // At once, so that nothing is renewed meanwhile.
        tokio::time::advance(Duration::from_secs(11)).await;
        let begun = beginning.await;
        assert!(matches!(begun, Err(Denied::Lost(_))), "{begun:?}");
        execution.release(Effect::NotBegun).await;
        // Nothing was executed, so no intent is left either.
        assert!(once.acquire().await.is_ok());
    }
}
