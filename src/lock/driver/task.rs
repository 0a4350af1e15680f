//! The life of one lock, from its request to its end.

use std::convert::identity;
use std::future::Future;
use std::sync::Arc;

use tokio::task;
use tokio::time::Instant;
use tracing::Span;

use crate::lock::backoff::{AcquireError, Backoff};
use crate::lock::driver::lease::{Driver, Reader};
use crate::lock::handoff::{Handoff, Inline};
use crate::lock::queue::{CapPermits, Permit};
use crate::lock::registry::Ticket;
use crate::lock::slots::{SlotTable, slot_at_random};
use crate::lock::span::HeldSpan;
use crate::lock::spec::LockSpec;
use crate::lock::state::Share;
use crate::node::random_u64;

/// How often in a row a caller goes on to another free slot before it waits. The nodes name those that are free, so
/// more than one move means that other callers were faster.
const MAX_MOVES: u32 = 4;

/// The task of one lock.
pub(crate) struct LockTask {
    spec: Arc<LockSpec>,
    /// The slots of a caller that takes any of them, until it has one.
    slot_table: Option<Box<SlotTable>>,
    reader: Option<Arc<Reader>>,
    permit: Permit,
    ticket: Ticket,
    /// The task that requested the lock, which is not the one that owns it from the grant on.
    requester: Option<task::Id>,
    /// Attempts that were refused, and are releasing.
    refused: Vec<Driver>,
}

/// Acquires a lock, and returns the first share of it.
///
/// # Cancel safety
///
/// May be dropped at any point; what the nodes granted or will grant is released. The task exists from the call on, not
/// from the first poll.
///
/// Not an `async fn`, whose future would store the task twice: as an argument and in the box.
pub(crate) fn acquire(
    task: LockTask,
    slots: CapPermits,
    deadline: Instant,
    span: &Span,
) -> impl Future<Output = Result<Share, AcquireError>> + Send + use<> {
    let cluster = Arc::clone(&task.spec.cluster);
    let run = |handoff| task.run(slots, deadline, handoff);
    let inline = Inline::new(&cluster, run, span);
    async move {
        let outcome = inline.outcome().await;
        outcome.map_err(AcquireError::from).and_then(identity)
    }
}

impl LockTask {
    /// Creates the task of a lock, which takes a slot of the table if there is one.
    pub(crate) fn new(
        spec: LockSpec,
        slot_table: Option<SlotTable>,
        permit: Permit,
        ticket: Ticket,
    ) -> Self {
        Self {
            spec: Arc::new(spec),
            slot_table: slot_table.map(Box::new),
            reader: None,
            permit,
            ticket,
            requester: task::try_id(),
            refused: Vec::new(),
        }
    }

    /// Sets who reads what the lease asks for.
    pub(crate) fn read_with(mut self, reader: Arc<Reader>) -> Self {
        self.reader = Some(reader);
        self
    }

    /// Runs a lock: attempts, hold, release.
    ///
    /// Not an `async fn`, which would have room for its arguments twice in every lock that is held.
    #[expect(
        clippy::manual_async_fn,
        reason = "an async fn has room for its arguments twice"
    )]
    fn run(
        mut self,
        slots: CapPermits,
        deadline: Instant,
        mut handoff: Handoff<Result<Share, AcquireError>>,
    ) -> impl Future<Output = ()> + Send {
        async move {
            // Boxed, because most of a lock's time is after it. Until it returns, the caller polls this task, unless it
            // waits for other holders; from `hand_out` on, the home does.
            match Box::pin(self.acquire(slots, deadline, &mut handoff)).await {
                Ok((mut driver, share)) => {
                    let span = HeldSpan::new(self.spec.labels.clone());
                    // If the caller has gone away, this drops the share, and the hold ends at once.
                    handoff.hand_out(Ok(share)).await;
                    driver.hold(&mut self.permit).await;
                    // Given to the release, which decides when the next caller may ask: not before its requests are sent.
                    let permit = std::mem::take(&mut self.permit);
                    match driver.lease.is_holding() {
                        true => driver.release(span, permit).await,
                        false => Box::pin(driver.finish(span, permit)).await,
                    }
                    driver.settle().await;
                }
                Err(error) => self.fail(error, handoff),
            }
            // The ticket is dropped behind this: a drain waits until all that this lock asked for has an answer, or none in
            // time. Each has its own timer, so the waits for silent nodes overlap.
            for refused in &mut self.refused {
                refused.settle().await;
            }
        }
    }

    /// Makes attempts until one is granted. Returns its driver, and the first share of the lock.
    async fn acquire<T: Send>(
        &mut self,
        slots: CapPermits,
        deadline: Instant,
        handoff: &mut Handoff<T>,
    ) -> Result<(Box<Driver>, Share), AcquireError> {
        let mut backoff = Backoff::new(deadline, slots, self.slot_table.is_some());
        backoff
            .let_remote_first(&self.spec, &self.permit, handoff)
            .await?;
        self.take_any_slot();
        let mut moves = 0;
        loop {
            let now = Instant::now();
            backoff.begin_attempt(now);
            let (places, reader) = (self.permit.places(), self.reader.as_ref());
            let mut driver = Driver::new(&self.spec, now, places, reader);
            let attempt = driver.attempt(handoff.closed()).await;
            let refusal = match attempt {
                Ok(share) => {
                    self.begin_holding(&driver);
                    return Ok((driver, share));
                }
                // More nodes may answer before the deadline.
                Err(AcquireError::Decided(decided))
                    if decided.may_change() && backoff.is_in_time() =>
                {
                    AcquireError::Contended {
                        retry_after: None,
                        is_split: false,
                        is_shared: false,
                        free: 0,
                    }
                }
                Err(error) => error,
            };
            // Nothing waits for its release: each node gets it before the request of the next attempt, which has another
            // owner.
            self.refused.retain_mut(|earlier| earlier.is_open());
            self.refused.push(*driver);
            // Those that the nodes named when they refused this one.
            let free = match &refusal {
                AcquireError::Contended { free, .. } => *free,
                _ => 0,
            };
            if moves < MAX_MOVES && self.take_slot(free) {
                moves += 1;
                continue;
            }
            // Another caller may take the slot meanwhile.
            self.permit.give_number_back();
            let (spec, permit) = (&self.spec, &self.permit);
            backoff.back_off(spec, permit, refusal, handoff).await?;
            backoff.queue_again(spec, permit, handoff).await?;
            self.take_any_slot();
            moves = 0;
        }
    }

    /// Shows a granted lock to the other callers of this process, and to those that shut it down.
    fn begin_holding(&mut self, driver: &Driver) {
        self.slot_table = None;
        self.permit.set_holder(&driver.state, self.requester);
        self.permit.unsubscribe();
        self.ticket
            .set_held(self.spec.slot.map(|_| &self.spec.keys));
    }

    /// Passes an error on: to the callers behind this one, and then to its own.
    fn fail(&mut self, error: AcquireError, handoff: Handoff<Result<Share, AcquireError>>) {
        let permit = std::mem::take(&mut self.permit);
        // While the permit is here, so that callers behind this one find the error before they get it.
        if let Some(error) = error.for_others() {
            permit.set_failed(self.spec.lease.once.is_some(), &error);
        }
        if let AcquireError::Decided(decided) = &error
            && decided.is_memorable()
        {
            permit.set_memo(decided.clone());
        }
        drop(permit);
        if !matches!(error, AcquireError::Abandoned) {
            handoff.send(Err(error));
        }
    }

    /// Chooses a slot at random, if the caller takes one of several. Where no free slot is known, callers of several
    /// processes should not all ask for the same one.
    fn take_any_slot(&mut self) {
        let Some(table) = &self.slot_table else {
            return;
        };
        let wanted = table.wanted();
        if !self.take_slot(wanted) {
            // Other callers of this process ask for all of them, perhaps with another number of slots. The nodes decide.
            self.set_slot(slot_at_random(wanted, random_u64()).unwrap_or_default());
        }
    }

    /// Chooses one of these slots, if the caller may take it and no other one of this process has it.
    fn take_slot(&mut self, slots: u64) -> bool {
        let wanted = self.slot_table.as_ref().map_or(0, |table| table.wanted());
        let slot = self.permit.take_number(slots & wanted, random_u64());
        slot.is_some_and(|slot| {
            self.set_slot(slot);
            true
        })
    }

    fn set_slot(&mut self, slot: usize) {
        if let Some(table) = &self.slot_table {
            // Refused attempts keep theirs.
            let spec = Arc::make_mut(&mut self.spec);
            (spec.keys, spec.names) = table.get(slot);
            spec.slot = Some(slot);
        }
    }
}
