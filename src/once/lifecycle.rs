//! The life of one execution, from its order to its end.
//!
//! It is the life of a plain lock, to which each step adds the record: an attempt may end in a replay, the hold
//! begins with a pending execution, and it ends with a recording.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::Span;

use crate::lock::{
    AcquireError, Backoff, Cleanup, Disposal, Handoff, HoldingLock, Inline, LockGuard, Permit,
    WaiterSlots,
};
use crate::node::Vote;
use crate::once::attempt::{AttemptError, GrantedExecution};
use crate::once::command::{ExecutionCommand, RecordCommand};
use crate::once::error::{BeginError, Denied};
use crate::once::execution::Execution;
use crate::once::pending::{Overtaken, Pending};
use crate::once::replay::Replay;
use crate::once::task::{KeyMemo, OnceTask};

/// The reason for which the hold of an execution ends.
enum Ending {
    /// The last share is gone.
    Released,
    /// The outcome is to be recorded.
    Recording(RecordCommand),
    /// A record arrived before the execution began, and decides instead.
    Overtaken(Box<Overtaken>),
}

type ExecutionResult = Result<Execution, Denied>;

/// Acquires the key of an execution.
///
/// # Cancel safety
///
/// May be dropped at any point: keys that the nodes have granted or will grant are released.
pub(super) async fn acquire(
    task: OnceTask,
    permit: Permit,
    slots: WaiterSlots,
    deadline: Instant,
    max_hold: Option<Duration>,
    span: &Span,
) -> ExecutionResult {
    let cluster = Arc::clone(&task.lease.cluster);
    let run = |handoff| run(task, permit, slots, deadline, max_hold, handoff);
    Inline::new(&cluster, run, span).outcome().await?
}

/// Runs an execution: attempts, hold, record or release.
#[expect(
    clippy::manual_async_fn,
    reason = "an async fn has room for its arguments twice"
)]
fn run(
    mut task: OnceTask,
    mut permit: Permit,
    slots: WaiterSlots,
    deadline: Instant,
    max_hold: Option<Duration>,
    mut handoff: Handoff<ExecutionResult>,
) -> impl Future<Output = ()> + Send {
    async move {
        let replay = 'held: {
            let granted = match task.acquire(slots, deadline, &permit, &mut handoff).await {
                Ok(granted) => granted,
                Err(error) => {
                    let (denied, replay) = error.conclude(&permit);
                    if let Some(Denied::Lock(error)) = &denied {
                        permit.set_failed(true, error);
                    }
                    drop(permit);
                    if let Some(denied) = denied {
                        handoff.send(Err(denied));
                    }
                    break 'held replay;
                }
            };
            let (holding, ending) = {
                let (acquired, pending) = Pending::from_granted(granted);
                let mut pending = Some(pending);
                let memo = KeyMemo::Executing(task.fingerprint).into_memo();
                let unused = Disposal::ReleaseUnused;
                let lease = &mut task.lease;
                let (mut holding, share) =
                    lease.begin_holding(acquired, max_hold, unused, Some(memo), &permit);
                // Bounded by the holder: it begins the execution once or a few times, and records it once.
                let (sender, mut commands) = mpsc::unbounded_channel();
                let execution = Execution::new(LockGuard::new(share), sender);
                handoff.hand_out(Ok(execution)).await;
                let ending = task
                    .hold(&mut holding, &mut pending, &mut commands, &mut permit)
                    .await;
                (holding, ending)
            };
            Box::pin(task.end(holding, ending, permit)).await;
            None
        };
        if let Some(replay) = replay {
            Box::pin(task.finish_replay(*replay)).await;
        }
        task.lease.settle().await;
    }
}

impl OnceTask {
    /// Makes attempts until one is granted or decided.
    async fn acquire(
        &mut self,
        slots: WaiterSlots,
        deadline: Instant,
        permit: &Permit,
        handoff: &mut Handoff<ExecutionResult>,
    ) -> Result<GrantedExecution, AttemptError> {
        let mut backoff = Backoff::new(deadline, slots, false);
        self.lease.set_places(permit);
        backoff
            .let_remote_first(&self.lease.caller(permit), handoff)
            .await?;
        loop {
            backoff.begin_attempt();
            let refusal = match Box::pin(self.attempt(handoff.closed())).await {
                Err(AttemptError::Lock(refusal)) => refusal,
                // More nodes may answer before the deadline.
                Err(AttemptError::Undecided) if backoff.is_in_time() => AcquireError::Contended {
                    retry_after: None,
                    is_split: false,
                    is_shared: false,
                    free: 0,
                },
                ended => return ended,
            };
            let caller = self.lease.caller(permit);
            backoff.back_off(&caller, refusal, handoff).await?;
        }
    }

    /// Holds and renews the lock of an execution until it ends.
    async fn hold(
        &mut self,
        holding: &mut HoldingLock,
        pending: &mut Option<Box<Pending>>,
        commands: &mut mpsc::UnboundedReceiver<ExecutionCommand>,
        permit: &mut Permit,
    ) -> Ending {
        loop {
            if !holding.is_held_with(permit) {
                // The caller may have dropped the last share right after its command to record.
                while let Ok(command) = commands.try_recv() {
                    if let ExecutionCommand::Record(command) = command {
                        return Ending::Recording(command);
                    }
                }
                return Ending::Released;
            }
            if let Some(overtaken) = self.try_begin(holding, pending) {
                return Ending::Overtaken(overtaken);
            }
            let mut observe = |vote: &Vote, cleanup: &mut Cleanup| {
                if let Some(pending) = pending {
                    pending.observe(vote, cleanup);
                }
            };
            let command = tokio::select! {
                biased;
                Some(command) = commands.recv(), if !holding.is_extending() => command,
                () = self.lease.hold_step(holding, &mut observe) => continue,
            };
            match (command, pending.as_mut()) {
                (ExecutionCommand::Record(command), _) => return Ending::Recording(command),
                (ExecutionCommand::Begin(beginning), Some(pending)) => {
                    pending.set_beginning(beginning)
                }
                // It has begun already. Its receiver may be gone with the caller.
                (ExecutionCommand::Begin(beginning), None) => drop(beginning.send(Ok(()))),
            }
        }
    }

    /// Records what is to be recorded, and frees the key if that may be done.
    async fn end(&mut self, mut holding: HoldingLock, ending: Ending, permit: Permit) {
        holding.end();
        match ending {
            Ending::Recording(command) => self.record(holding, command, permit).await,
            Ending::Overtaken(overtaken) => self.yield_to_record(holding, *overtaken, permit).await,
            Ending::Released if holding.cleanup.disposal() == Disposal::Expire => {
                holding.set_released();
                let HoldingLock {
                    cleanup, control, ..
                } = holding;
                self.lease.leave_to_expire(cleanup);
                drop(permit);
                control.close(Ok(()));
            }
            Ending::Released => self.lease.release(holding, permit).await,
        }
    }

    /// Goes on with the record that overtook an execution.
    async fn yield_to_record(
        &mut self,
        holding: HoldingLock,
        overtaken: Overtaken,
        permit: Permit,
    ) {
        let Overtaken {
            progress,
            step,
            beginning,
        } = overtaken;
        holding.set_released();
        let HoldingLock {
            mut cleanup,
            control,
            ..
        } = holding;
        cleanup.forget_lease();
        let error = match self.resume(cleanup, progress, step).await {
            Err(AttemptError::Lock(AcquireError::Contended { .. })) => AttemptError::Undecided,
            Err(error) => error,
            Ok(granted) => {
                // A round with a record grants nothing. A grant would not be used.
                self.lease.give_up(granted.acquired.cleanup);
                AttemptError::Undecided
            }
        };
        let (denied, replay) = error.conclude(&permit);
        drop(permit);
        if let Some(denied) = denied {
            // The receiver may be gone with the caller.
            drop(beginning.send(Err(BeginError::Denied(denied))));
        }
        if let Some(replay) = replay {
            self.finish_replay(*replay).await;
        }
        control.close(Ok(()));
    }
}

impl AttemptError {
    /// Leaves the record, if there is one, to the next callers of the key. Returns the error for the caller, unless
    /// the caller has gone away, and the replay to finish.
    fn conclude(self, permit: &Permit) -> (Option<Denied>, Option<Box<Replay>>) {
        let denied = match self {
            Self::Lock(error) => return (error.into_lock_error().map(Denied::from), None),
            Self::Undecided => Denied::Undecided,
            Self::Denied(denied) => denied,
            Self::Recorded(record, replay) => {
                permit.set_memo(KeyMemo::recorded(&record));
                return (Some(Denied::Recorded(record)), Some(replay));
            }
        };
        (Some(denied), None)
    }
}
