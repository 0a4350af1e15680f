//! Attempts: one after the other until a majority grants the lock.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::Span;

use crate::lock::backoff::{AcquireError, Backoff, Caller};
use crate::lock::cluster::Cluster;
use crate::lock::driver::owned::OwnedLease;
use crate::lock::driver::task::Driver;
use crate::lock::error::LockError;
use crate::lock::failures::Failures;
use crate::lock::handoff::Handoff;
use crate::lock::queue::{CapPermits, Permit};
use crate::lock::slots::slot_at_random;
use crate::node::{Trail, next_proposal, random_u64, unguessable};
#[cfg(feature = "test-util")]
use crate::protocol::lease::Trace;
use crate::protocol::lease::{Event, Input, Lease, LeaseSpec, OnceEvent};
use crate::protocol::round::{Answer, Refusal, RefusalKind};
use crate::protocol::{FencingToken, OwnerToken};

/// How often in a row a caller goes on to another free slot before it waits. The nodes name those that are free, so
/// more than one move means that other callers were faster.
const MAX_MOVES: u32 = 4;

impl Driver {
    /// Makes attempts until one is granted. Returns its token and the end of its validity.
    pub(super) async fn acquire<T: Send>(
        &mut self,
        slots: CapPermits,
        deadline: Instant,
        permit: &Permit,
        handoff: &mut Handoff<T>,
    ) -> Result<(Option<FencingToken>, Instant), AcquireError> {
        self.places = Arc::clone(permit.places());
        let is_for_slot = self.terms.slot_table.is_some();
        let mut backoff = Backoff::new(deadline, slots, is_for_slot);
        backoff
            .let_remote_first(&self.caller(permit), handoff)
            .await?;
        self.take_any_slot(permit);
        let mut moves = 0;
        loop {
            backoff.begin_attempt();
            let refusal = match self.attempt(handoff.closed()).await {
                Ok(granted) => {
                    self.terms.slot_table = None;
                    return Ok(granted);
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
            if moves < MAX_MOVES && self.take_free_slot(permit, &refusal) {
                moves += 1;
                continue;
            }
            // Another caller may take the slot meanwhile.
            permit.give_number_back();
            let caller = self.caller(permit);
            backoff.back_off(&caller, refusal, handoff).await?;
            backoff.queue_again(&caller, handoff).await?;
            self.take_any_slot(permit);
            moves = 0;
        }
    }

    pub(super) fn caller<'a>(&'a self, permit: &'a Permit) -> Caller<'a> {
        let registry = self.ticket.registry();
        Caller::new(&self.cluster, registry, &self.terms, permit)
    }

    /// Chooses a slot at random, if the caller takes one of several. Where no free slot is known, callers of several
    /// processes should not all ask for the same one.
    pub(super) fn take_any_slot(&mut self, permit: &Permit) {
        let Some(wanted) = self.terms.slot_table.as_ref().map(|table| table.wanted()) else {
            return;
        };
        if !self.take_slot(permit, wanted) {
            // Other callers of this process ask for all of them, perhaps with another number of slots. The nodes decide.
            self.set_slot(slot_at_random(wanted, random_u64()).unwrap_or_default());
        }
    }

    /// Chooses one of the slots that the nodes named as free when they refused another one.
    pub(super) fn take_free_slot(&mut self, permit: &Permit, refusal: &AcquireError) -> bool {
        match refusal {
            AcquireError::Contended { free, .. } => self.take_slot(permit, *free),
            _ => false,
        }
    }

    pub(super) fn take_slot(&mut self, permit: &Permit, slots: u64) -> bool {
        let Some(table) = &self.terms.slot_table else {
            return false;
        };
        let slot = permit.take_number(slots & table.wanted(), random_u64());
        if let Some(slot) = slot {
            self.set_slot(slot);
        }
        slot.is_some()
    }

    pub(super) fn set_slot(&mut self, slot: usize) {
        if let Some(table) = &self.terms.slot_table {
            (self.keys, self.terms.names) = table.get(slot);
            self.slot = Some(slot);
        }
    }

    /// Makes one attempt.
    pub(super) async fn attempt(
        &mut self,
        abandoned: impl Future<Output = ()> + Send,
    ) -> Result<(Option<FencingToken>, Instant), AcquireError> {
        self.begin_attempt();
        let mut abandoned = pin!(abandoned);
        match self.next_event(abandoned.as_mut()).await {
            Some(Event::Granted {
                number,
                acknowledged,
                valid_until,
            }) => {
                Span::current().record("quorum.granted", acknowledged);
                let token = self.terms.is_fenced.then(|| FencingToken::try_from(number));
                // Cannot fail: the nodes never exceed the largest token.
                let token = token.transpose().unwrap_or_default();
                Ok((token, self.instant(valid_until)))
            }
            Some(Event::Refused(refusal)) => Err(self.refused(refusal)),
            Some(Event::Once(OnceEvent::Decided(decided))) => Err(AcquireError::Decided(decided)),
            Some(Event::TooLate { elapsed }) => {
                let ttl = self.terms.ttl;
                Err(LockError::Expired { ttl, elapsed }.into())
            }
            // No other event comes before these.
            Some(_) | None => {
                self.handle(Input::Abandoned);
                Err(AcquireError::Abandoned)
            }
        }
    }

    /// Sends the `ACQUIRE` of a new attempt to every node.
    pub(super) fn begin_attempt(&mut self) {
        let (settings, terms) = (&self.cluster.settings, &self.terms);
        let earlier = terms.earlier.and_then(|earlier| earlier.token);
        // Where the caller has a lock in another group, it proposes the token of that one, so that both have the same
        // token unless a fence is higher here.
        let proposal = || earlier.map_or_else(next_proposal, FencingToken::as_u64);
        let spec = LeaseSpec {
            access: terms.access,
            ttl: terms.ttl,
            proposal: terms.is_fenced.then(proposal),
            retention: settings.fence_retention(),
            node_timeout: settings.node_timeout,
            // A second execution must not begin beside the first.
            renews: settings.renew || terms.once.is_some(),
            is_partial: terms.earlier.is_some(),
            max_hold: self.max_hold,
            hold_at_least: terms.hold_at_least,
            once: terms.once,
        };
        let patience = |node: usize| self.cluster.nodes[node].extra_patience();
        #[cfg(feature = "test-util")]
        let trace = settings.traces.as_ref().map(|traces| {
            let quorum = self.cluster.quorum;
            let trace = Trace::new(spec.clone(), quorum, Duration::ZERO, patience);
            traces.begin(&self.keys, trace)
        });
        let attempt = OwnedLease {
            lease: Lease::new(spec, self.cluster.quorum, Duration::ZERO, patience),
            origin: Instant::now(),
            phase: self.votes.phase(),
            owner: match &terms.once {
                None => OwnerToken::from_random(unguessable()),
                Some(once) => once.owner(unguessable()),
            },
            trail: Trail::default(),
            names: Arc::clone(&terms.names),
            keys: self.keys.clone(),
            failures: Failures::default(),
            decision: 0,
            state: None,
            #[cfg(feature = "test-util")]
            trace,
        };
        let earlier = self.attempt.replace(Box::new(attempt));
        self.earlier.extend(earlier.map(|attempt| *attempt));
        let now = Instant::now();
        self.earlier.retain(|attempt| attempt.is_open(now));
        self.send(Cluster::submit);
    }

    pub(super) fn refused(&mut self, refusal: Refusal) -> AcquireError {
        match refusal.kind {
            RefusalKind::Contended { expires_in } => AcquireError::Contended {
                retry_after: expires_in,
                is_split: refusal.is_split,
                is_shared: refusal.is_shared,
                free: refusal.free,
            },
            RefusalKind::Unavailable => {
                let (mut voted, mut failures) = (refusal.voted, self.take_failures());
                // What has arrived since, so that the error names every node.
                while let Some(vote) = self.votes.try_recv() {
                    let attempt = self.attempt.as_ref();
                    if attempt.is_some_and(|attempt| attempt.is_late(&vote)) {
                        if let Answer::Replied(_) = failures.note(vote.node, vote.outcome) {
                            voted.insert(vote.node);
                        }
                    } else {
                        self.on_vote(vote, self.now());
                    }
                }
                let unanswered = refusal.unanswered.without(voted);
                let names = voted
                    .iter()
                    .map(|node| Arc::clone(&self.cluster.names[node]));
                AcquireError::Failed(LockError::Unavailable {
                    reached: voted.len(),
                    needed: self.cluster.quorum.majority(),
                    voted: names.collect(),
                    nodes: failures.list(&self.cluster, unanswered.iter()),
                })
            }
        }
    }
}
