//! The life of one lock, from its request to its end.
//!
//! # Implementation details
//!
//! The task of a lock may outlive its caller, so it must be a spawned task in the end. A task that is spawned at once
//! would make each lock wait for the scheduler twice: to start the task, and to wake the caller. Instead, the caller
//! polls the attempts *inline*. A lock that is granted then [rests](crate::lock::rest), because most are released
//! before they need to be renewed. What is left is spawned in the home of the lock service as soon as one of these happens:
//!
//! * Something is due for a lock that rests, or its holders ask for something. Who waits for its release polls that inline.
//! * The next step is to wait for other holders. The task then has a deadline to keep, and callers wait behind it in the
//!   queue, whether its own caller polls or not.
//! * The task is begun by a caller elsewhere, whose runtime may rest or end before the home does.
//!
//! No task waits for the answers to releases that no caller waits for, but behind an execution: the drop of the driver
//! leaves them to the [registry](crate::lock::registry).
//!
//! A panic while the caller polls the task is caught, as the runtime catches it in a spawned task: the drop of the task
//! cleans up, and the caller gets an error.

use std::future::{pending, poll_fn};
use std::mem::take;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task;
use tokio::time::Instant;
use tracing::{Instrument, Span};

use crate::lock::backoff::Backoff;
use crate::lock::cluster::Cluster;
use crate::lock::driver::lease::Driver;
use crate::lock::error::{Denied, LockError};
use crate::lock::guard::LockGuard;
use crate::lock::queue::{Permit, Wait};
use crate::lock::registry::Ticket;
use crate::lock::rest::Rest;
use crate::lock::slots::{SlotTable, slot_at_random};
use crate::lock::span::millis;
use crate::lock::state::{LockSpec, LockState};
use crate::node::random_u64;
use crate::node::telemetry::{self, Counted};
use crate::protocol::acquire::Contention;
use crate::protocol::lease::Decided;

/// How often in a row a caller goes on to another slot before it waits. The nodes name those that may be free, so more than
/// one move mostly means that other callers were faster.
const MAX_MOVES: u32 = 4;

/// Where a caller waits for the outcome of its task.
type Caller = oneshot::Sender<Result<LockGuard, Denied>>;

/// The task of one lock.
pub(crate) struct LockTask {
    spec: Arc<LockSpec>,
    /// The slots of a caller that takes any of them, until it has one.
    slot_table: Option<Box<SlotTable>>,
    permit: Permit,
    /// Taken by the drop.
    ticket: Option<Ticket>,
    /// Since when it is held, and its count in the metrics, until the last share is gone.
    held: Option<(Instant, Counted)>,
    /// The task that requested the lock, which is not the one that owns it from the grant on.
    requester: Option<task::Id>,
    wait: Wait,
    /// The waits between attempts, from the first one on.
    backoff: Option<Box<Backoff>>,
    /// The attempt under way, and the lock once it is granted.
    driver: Option<Driver>,
    span: Span,
}

impl LockTask {
    /// Creates the task of a lock, which takes a slot of the table if there is one.
    ///
    /// # Errors
    ///
    /// Returns [`LockError::Closed`] while the service is drained.
    pub(crate) fn new(
        spec: Arc<LockSpec>,
        slot_table: Option<SlotTable>,
        permit: Permit,
        wait: Wait,
        span: Span,
    ) -> Result<Box<Self>, LockError> {
        let ticket = spec.registry.enter().ok_or(LockError::Closed)?;
        // Boxed, because it moves from the caller to the runtime; and written in place, because it is large.
        let task = Self {
            spec,
            slot_table: slot_table.map(Box::new),
            permit,
            ticket: Some(ticket),
            held: None,
            requester: task::try_id(),
            wait,
            backoff: None,
            driver: None,
            span,
        };
        Ok(Box::write(Box::new_uninit(), task))
    }

    /// Acquires the lock.
    ///
    /// # Panics
    ///
    /// Panics outside of a runtime.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point; what the nodes granted or will grant is released.
    pub(crate) async fn acquire(mut self: Box<Self>) -> Result<LockGuard, Denied> {
        let cluster = Arc::clone(&self.spec.cluster);
        let is_here = cluster.home.is(&Handle::current());
        if is_here && let Some(outcome) = self.decide_inline().await {
            if outcome.is_ok() {
                self.rest(&cluster);
            }
            return outcome;
        }
        let (caller, outcome) = oneshot::channel();
        let span = self.span.clone();
        cluster.home.spawn(self.run(Some(caller)).instrument(span));
        if is_here {
            let closed = |_| Err(LockError::Closed.into());
            return outcome.await.unwrap_or_else(closed);
        }
        // Boxed, so that the usual case has no room for it.
        Box::pin(outcome_elsewhere(&cluster, outcome)).await
    }

    /// Makes attempts while the caller polls. Returns `None` if the rest is to be spawned.
    async fn decide_inline(&mut self) -> Option<Result<LockGuard, Denied>> {
        let span = self.span.clone();
        let mut deciding = pin!(self.decide(None));
        poll_fn(|context| {
            let poll = || deciding.as_mut().poll(context);
            let polled = catch_unwind(AssertUnwindSafe(|| span.in_scope(poll)));
            let panicked = |_| Poll::Ready(Some(Err(LockError::Closed.into())));
            polled.unwrap_or_else(panicked)
        })
        .await
    }

    /// Leaves a lock that is granted at rest.
    fn rest(self: Box<Self>, cluster: &Cluster) {
        // Both are there from the grant up to the drop.
        let (Some(driver), Some(ticket)) = (&self.driver, &self.ticket) else {
            return;
        };
        let (state, id, due) = (Arc::clone(&driver.state), ticket.id, driver.due());
        let span = self.span.clone();
        // Without room for a disabled one, because many locks may be held.
        let rest = match span.is_none() {
            true => Rest::new(self.run(None)),
            false => Rest::new(self.run(None).instrument(span)),
        };
        match state.set_rest(rest) {
            Some(rest) => state.spawn(rest),
            None => state.spec.registry.wake_at(id, due, &cluster.home),
        }
    }

    /// Makes attempts for a caller that waits for the outcome; then holds the lock, and releases it.
    async fn run(mut self: Box<Self>, caller: Option<Caller>) {
        if let Some(mut caller) = caller {
            // Boxed, because most of a lock's time is after it.
            let outcome = Box::pin(self.decide(Some(&mut caller))).await;
            // If the caller has gone away, this drops the guard, and the hold ends at once.
            drop(outcome.map(|outcome| caller.send(outcome)));
            // Without a grant, the drop does what is left.
            if self.held.is_none() {
                return;
            }
        }
        let Some(driver) = &mut self.driver else {
            return;
        };
        driver.hold(&mut self.permit).await;
        self.end_holding();
        let Some(driver) = &mut self.driver else {
            return;
        };
        // Given to the release, which decides when the next caller may ask: not before its requests are sent.
        let permit = take(&mut self.permit);
        match driver.lease.is_holding() {
            true => driver.release(permit).await,
            false => Box::pin(driver.finish(permit)).await,
        }
        let majority = self.spec.cluster.quorum.majority();
        if !driver.lease.is_releasing()
            && driver.lease.release_round().1.released() >= majority
            && let Some(ticket) = &self.ticket
        {
            ticket.set_released();
        }
        driver.send_releases().await;
    }

    /// Makes attempts until the lock is decided. Without a caller whose going away is heard of, returns `None` before it
    /// waits for other holders.
    async fn decide(&mut self, caller: Option<&mut Caller>) -> Option<Result<LockGuard, Denied>> {
        let decided = self.attempts(caller).await;
        decided.inspect_err(|denied| self.fail(denied)).transpose()
    }

    async fn attempts(
        &mut self,
        mut caller: Option<&mut Caller>,
    ) -> Result<Option<LockGuard>, Denied> {
        if self.backoff.is_none()
            && let Some(waiters) = self.permit.notified()
        {
            let backoff = Backoff::for_remote(waiters, &self.spec, &self.permit, &self.wait);
            self.backoff = backoff.map(Box::new);
        }
        loop {
            if let Some(backoff) = &mut self.backoff {
                let Some(caller) = caller.as_deref_mut() else {
                    return Ok(None);
                };
                let (spec, permit, deadline) = (&self.spec, &self.permit, self.wait.deadline);
                // Boxed, because most locks do not wait.
                Box::pin(backoff.pause(spec, permit, deadline, caller.closed())).await?;
            }
            self.take_any_slot();
            let first_began = Instant::now();
            let (mut began, mut tried, mut is_split) = (first_began, 0_u64, false);
            let mut contention = loop {
                let contention = match self.attempt(began, caller.as_deref_mut()).await? {
                    Ok(guard) => return Ok(Some(guard)),
                    Err(contention) => contention,
                };
                is_split |= contention.is_split;
                tried |= self.spec.slot.map_or(0, |slot| 1 << slot);
                // Those that the nodes named when they refused this one, each once.
                if tried.count_ones() > MAX_MOVES || !self.take_slot(contention.free & !tried) {
                    break contention;
                }
                began = Instant::now();
            };
            // Given back: another caller may take the slot meanwhile.
            self.permit.take_number(0, 0);
            // Callers that move from slot to slot together refuse each other, which the last refusal may not show. Those that go
            // on to wait need no other attempt at once.
            is_split |= contention.free & self.wanted() != 0;
            contention.is_split |= is_split && Instant::now() >= self.wait.deadline;
            let new = || Box::new(Backoff::new(first_began));
            let backoff = self.backoff.get_or_insert_with(new);
            backoff.back_off(&self.spec, &self.permit, &mut self.wait, began, contention)?;
        }
    }

    /// Makes one attempt. Returns what is known of other callers if another one may succeed.
    async fn attempt(
        &mut self,
        began: Instant,
        caller: Option<&mut Caller>,
    ) -> Result<Result<LockGuard, Contention>, Denied> {
        if let Some(backoff) = &mut self.backoff {
            backoff.forget_releases();
        }
        // Kept in the task, whose drop releases it.
        let driver = Driver::new(&self.spec, began, &self.permit.places);
        let driver = self.driver.insert(driver);
        driver.begin();
        let abandoned = async {
            match caller {
                Some(caller) => caller.closed().await,
                None => pending().await,
            }
        };
        let refused = match driver.attempt(abandoned).await {
            Ok(Ok((guard, granted))) => {
                self.begin_holding(granted);
                return Ok(Ok(guard));
            }
            Ok(Err(contention)) => Ok(contention),
            // More nodes may answer before the deadline.
            Err(Denied::Decided(Decided::Undecided)) if began < self.wait.deadline => {
                Ok(Contention::default())
            }
            Err(denied) => Err(denied),
        };
        // Nothing waits for its release: each node gets it before the request of the next attempt, which has another
        // owner.
        self.driver.take_if(|driver| driver.lease.is_releasing());
        refused.map(Err)
    }

    /// Shows a lock that so many nodes have granted to the other callers of this process, and to those that shut it down.
    fn begin_holding(&mut self, granted: usize) {
        self.span.record("quorum.granted", granted);
        let since = Instant::now();
        self.held = Some((since, Counted::held()));
        if let Some(driver) = &self.driver {
            self.permit.set_holder(&driver.state, self.requester);
            if let Some(ticket) = &self.ticket {
                ticket.set_held(Arc::<LockState>::clone(&driver.state), since);
            }
        }
        self.permit.unsubscribe();
        (self.slot_table, self.backoff) = (None, None);
        self.wait.end();
    }

    /// Reports for how long the lock was held, if it was.
    fn end_holding(&mut self) {
        if let Some((since, _counted)) = self.held.take() {
            // Without a look at the clock in vain.
            if !self.span.is_none() {
                self.span.record("hold_ms", millis(since.elapsed()));
            }
            telemetry::held(&self.spec.labels, since);
        }
    }

    /// Tells the callers behind this one why it gets no lock, before it hears that itself.
    fn fail(&mut self, denied: &Denied) {
        let permit = take(&mut self.permit);
        // While the permit is here, so that callers behind this one find it before they get that.
        match denied {
            // The caller has gone away, or none gets a lock any more.
            Denied::Lock(LockError::Closed) => {}
            Denied::Lock(error) => permit.set_failed(self.spec.lease.once, error),
            Denied::Decided(decided) if decided.is_memorable() => permit.set_memo(decided.clone()),
            Denied::Decided(_) | Denied::Lost(_) => {}
        }
    }

    /// Chooses a slot at random, if the caller takes one of several. Callers of several processes should not all ask for the
    /// same one.
    fn take_any_slot(&mut self) {
        let wanted = self.wanted();
        if wanted != 0 && !self.take_slot(wanted) {
            // Other callers of this process ask for all of them, perhaps with another number of slots. The nodes decide.
            self.set_slot(slot_at_random(wanted, random_u64()).unwrap_or_default());
        }
    }

    /// Chooses one of these slots, if the caller may take it and no other one of this process has it.
    fn take_slot(&mut self, slots: u64) -> bool {
        let slots = slots & self.wanted();
        let slot = (slots != 0).then(|| self.permit.take_number(slots, random_u64()));
        slot.flatten().map(|slot| self.set_slot(slot)).is_some()
    }

    /// Returns the slots that the caller may take, if it takes one of several.
    fn wanted(&self) -> u64 {
        self.slot_table.as_ref().map_or(0, |table| table.wanted)
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

impl Drop for LockTask {
    fn drop(&mut self) {
        // First the releases, so that the requests of the next caller follow them on every node.
        let going_on = self.driver.take_if(|driver| driver.lease.outlives_caller());
        self.driver = None;
        drop(take(&mut self.permit));
        self.end_holding();
        if let Some(mut driver) = going_on {
            let ticket = self.ticket.take();
            let going_on = async move {
                driver.send_releases().await;
                drop(driver);
                // Last: a drain waits for it.
                drop(ticket);
            };
            let home = &self.spec.cluster.home;
            home.spawn(going_on.instrument(self.span.clone()));
        }
    }
}

/// Waits for the outcome of a task in a home that is not the runtime of the caller. If the home ends before, the keys are
/// released by a new one.
async fn outcome_elsewhere(
    cluster: &Cluster,
    outcome: oneshot::Receiver<Result<LockGuard, Denied>>,
) -> Result<LockGuard, Denied> {
    let nodes = match cluster.home.report(outcome).await {
        Some(Ok(outcome)) => return outcome,
        Some(Err(_)) => {
            cluster.resume().await;
            cluster.all_ended()
        }
        None => cluster.all_not_run(),
    };
    Err(LockError::without_quorum(cluster.quorum.majority(), Vec::new(), nodes).into())
}

#[cfg(test)]
mod tests {
    use std::mem::size_of_val;

    use super::*;
    use crate::lock::state::tests::granted;

    /// Of a lock that is held, this is all that its task keeps beside what is boxed: it counts for each of many locks.
    #[tokio::test]
    async fn future_of_a_held_lock_is_small() {
        let (state, _guard) = granted("k");
        let wait = Wait::new(Instant::now(), [None, None], None);
        let (spec, permit) = (Arc::clone(&state.spec), Permit::default());
        let task = LockTask::new(spec, None, permit, wait, Span::none()).unwrap();
        let size = size_of_val(&task.run(None));
        assert!(size <= 300, "{size} bytes");
    }
}
