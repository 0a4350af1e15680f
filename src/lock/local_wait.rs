//! The wait for callers of this process: a caller acquires the permits of its keys, or is refused without a request to
//! the nodes.
//!
//! # Implementation details
//!
//! A caller that meets a busy key learns from the one that has it. *Contended* is said only of a key that is held:
//!
//! * The key is *held* in this process, or the nodes have just refused the caller that has its permits. A caller that does
//!   not wait is refused.
//! * The key is *asked for*: whether it is held is not known. Every caller waits for the decision, also one that does not
//!   wait, and one whose wait is over. If the lock is granted, the key is held. If the asking caller goes away, the next
//!   one asks. If it fails because of the nodes, all callers that want the same fail with it: in an outage, each would
//!   otherwise ask in turn, and get the same answer one node timeout later than the one before.
//! * The key is *ending*: dropping a guard, a response body or a future only wakes the lease task. A caller that continues
//!   at once, such as `tower::retry` after it has dropped a response, would meet the lock of its own last request. The
//!   task sends the release within moments, so the first caller behind it waits for that, for at most the node timeout.
//!
//! *Idle callers.* The task of a lock may be in a runtime that is not run, and the future of an asking caller may not be
//! polled. The next callers would wait for ever. A caller that does not react in the time that an attempt takes loses its
//! permits, and the nodes decide.
//!
//! *Chains.* Callers may ask one after the other, each without a decision. A caller that does not wait goes past them, and
//! asks the nodes itself, after the time of one attempt.

use std::pin::pin;

use tokio::time::{Instant, sleep_until};

use crate::lock::error::{Denied, LockError};
use crate::lock::layout::Group;
use crate::lock::queue::{Occupancy, Permit, Wait, permits};
use crate::lock::registry::DrainStage;
use crate::lock::state::LockSpec;
use crate::protocol::lease::Decided;

impl Group {
    /// Waits for the permits of all keys.
    pub(super) async fn wait_for_all(
        &self,
        spec: &LockSpec,
        permit: Permit,
        wait: &mut Wait,
    ) -> Result<Permit, Denied> {
        let acquiring = async {
            let (mut rounds, mut over_since) = (0, None);
            while let Some(busy) = permit.next_busy(&mut rounds) {
                self.wait_at(spec, &permit, busy, wait, &mut over_since)
                    .await?;
            }
            Ok(())
        };
        tokio::select! {
            biased;
            () = spec.registry.reached(DrainStage::Draining) => Err(LockError::Closed.into()),
            acquired = acquiring => acquired.map(|()| permit),
        }
    }

    /// Waits for the permits of one key. Notes since when the caller only waits for decisions.
    async fn wait_at(
        &self,
        spec: &LockSpec,
        permit: &Permit,
        number: usize,
        wait: &mut Wait,
        over_since: &mut Option<Instant>,
    ) -> Result<(), Denied> {
        let (place, access) = (&permit.places[number], spec.lease.access);
        let is_execution = spec.lease.once.is_some();
        // Of those that fail from now on, one may have asked for the same.
        let failures = place.failures();
        let _waiting = place.waiter();
        // Who comes later would wait for the attempt of the first as well.
        let is_first = place.waiters() == 1;
        let mut acquiring = pin!(place.permits.acquire_many(permits(access)));
        // The longest time from the first request of a caller to its decision, split votes included.
        let nodes = self.cluster.nodes.iter();
        let connecting = nodes.map(|node| node.extra_patience()).max();
        let allowance = 2 * self.cluster.settings.node_timeout + connecting.unwrap_or_default();
        let mut seen: Option<(u64, Instant)> = None;
        loop {
            // Created before the checks, so that no notification is missed.
            let (changed, failed) = (place.changed.notified(), place.failed.notified());
            let now = Instant::now();
            // `None` once it is over, and for a caller that does not wait.
            let deadline = Some(wait.deadline).filter(|deadline| now < *deadline);
            let failure = place.failed_since(failures, &spec.keys, access, spec.lease.once);
            let shares = |(since, error): &(u64, LockError)| match error {
                LockError::Contended { .. } => deadline.is_none(),
                // One failure may be a pause of this process; two in a row are an outage, which no caller waits for.
                LockError::Unavailable { .. } => deadline.is_none() || *since > 1,
                LockError::Expired { ttl, .. } => spec.lease.ttl <= *ttl,
                _ => false,
            };
            if let Some((_, error)) = failure.filter(shares) {
                return Err(error.into());
            }
            let state = place.state(access);
            let holder = state.holder.as_ref();
            let holder = holder.filter(|holder| !holder.is_ending());
            let executed = holder.and_then(|holder| holder.spec.lease.once);
            if let (Some(asked), Some(executed)) = (spec.lease.once, executed)
                && !asked.is_same_request(executed)
            {
                return Err(Denied::Decided(Decided::OtherRequest));
            }
            // Each change restarts the time in which the callers before this one are to take their next step.
            let (_, since) = *match &mut seen {
                Some(seen) if seen.0 == state.changes => seen,
                seen => seen.insert((state.changes, now)),
            };
            let is_asked = state.occupancy == Occupancy::Asked;
            // Not so for a caller that does not wait: callers that ask one after the other would keep it for ever.
            let decides_since = match deadline {
                Some(_) => since,
                None => *over_since.get_or_insert(now),
            };
            let asked_until = is_asked.then(|| decides_since + allowance);
            let idle_at = state.idle_at.map(|at| at + allowance);
            let mut until = deadline.or(asked_until).unwrap_or(now);
            if let Some(at) = idle_at.into_iter().chain(asked_until).min() {
                if at <= now {
                    let asks_too_long = is_asked && since + allowance <= now;
                    if !place.remove_idle(allowance, asks_too_long) {
                        // The asking callers follow each other in time, but too many of them. The nodes decide.
                        permit.admit(place, None);
                        return Ok(());
                    }
                    continue;
                }
                until = until.min(at);
            }
            if deadline.is_some() {
                wait.occupy()?;
            } else {
                let blocked = permit.blocked();
                let refused = match (state.occupancy, &blocked) {
                    (Occupancy::Asked, None) => false,
                    (Occupancy::Ending, None) => {
                        let grace = if is_execution { 2 } else { 1 };
                        until = since + grace * self.cluster.settings.node_timeout;
                        !is_first || until <= now
                    }
                    _ => true,
                };
                if refused {
                    let state = blocked.unwrap_or(state);
                    return Err(LockError::contended(state.retry_after, state.held_by).into());
                }
            }
            // A caller that waits in any case is not woken for each lock of another one.
            let listens = deadline.is_none() || (is_execution && is_asked);
            tokio::select! {
                biased;
                // Before the permit of the caller that failed.
                () = failed => {}
                acquired = acquiring.as_mut() => {
                    // The semaphore is never closed.
                    permit.admit(place, acquired.ok());
                    return Ok(());
                }
                () = changed, if listens => {}
                () = sleep_until(until) => {}
            }
        }
    }
}
