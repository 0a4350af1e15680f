//! The driver of one lease: passes answers and time to it, and sends what it asks for.

use std::collections::BTreeMap;
use std::future::{pending, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

use crate::lock::cluster::submit_in_drop;
use crate::lock::error::{Denied, LockError};
use crate::lock::guard::LockGuard;
use crate::lock::queue::Place;
use crate::lock::registry::{DrainStage, UnsettledRelease};
use crate::lock::state::{HolderCommand, LockSpec, LockState, Reading};
#[cfg(feature = "test-util")]
use crate::lock::traces::LeaseTrace;
use crate::node::{Job, LATE, NodeFailure, Packet, Vote, VoteReceiver, next_proposal, unguessable};
use crate::protocol::acquire::{Contention, Refusal};
#[cfg(feature = "test-util")]
use crate::protocol::lease::Trace;
use crate::protocol::lease::{Event, Input, Lease, LeaseRequest, LeaseSpec, TICK};
use crate::protocol::message::{Answer, Command, Op, Reply};
use crate::protocol::{FencingToken, Few, KeyNames, NodeSet, OwnerToken};

/// The driver of one lease: an attempt, and the lock once it is granted.
pub(super) struct Driver {
    pub(super) lease: Lease,
    /// What its holders see, once it is granted.
    pub(super) state: Arc<LockState>,
    /// The command of a holder that is being carried out.
    pub(super) command: Option<Box<HolderCommand>>,
    /// The time that the lease counts from.
    pub(super) origin: Instant,
    owner: OwnerToken,
    /// The answers. Their phase is the number of the request.
    pub(super) votes: VoteReceiver,
    /// The failures of nodes, by number, in the acquisition, or in the extension or release that followed it.
    failures: BTreeMap<usize, NodeFailure>,
    /// The request of that extension or release.
    decision: u32,
    /// With the number of the home whose timer it is.
    timer: Option<(usize, Pin<Box<Sleep>>)>,
    /// What was found to be due too late, and how long it is put off for that.
    put_off: Option<(Duration, Duration)>,
    /// Until when nodes may break a tie, since there is one.
    tie_ends: Option<Duration>,
    /// The places of the keys in the queue, which know the processes that wait for each key.
    places: Few<Arc<Place>>,
    /// Whether it is being dropped, so that no panic may come out of it.
    is_dropped: bool,
    /// A read under way.
    read: Option<Reading>,
    #[cfg(feature = "test-util")]
    trace: Option<LeaseTrace>,
}

impl Driver {
    /// Creates an attempt, which is to [begin](Self::begin) where it stays.
    pub(super) fn new(spec: &Arc<LockSpec>, origin: Instant, places: &Few<Arc<Place>>) -> Self {
        let cluster = &spec.cluster;
        let proposal = || spec.lease.proposal.unwrap_or_else(next_proposal);
        let state = LockState::new(spec, origin);
        let owner = spec.lease.owner(unguessable(), state.holder.clone());
        let patience = |node: usize| cluster.nodes[node].extra_patience();
        Self {
            command: None,
            origin,
            owner,
            state,
            #[cfg(feature = "test-util")]
            trace: None,
            lease: Lease::new(
                LeaseSpec {
                    proposal: spec.is_fenced.then(proposal),
                    ..spec.lease.clone()
                },
                cluster.quorum,
                Duration::ZERO,
                patience,
            ),
            votes: VoteReceiver::new(&cluster.names),
            failures: BTreeMap::new(),
            decision: 0,
            timer: None,
            put_off: None,
            tie_ends: None,
            places: places.clone(),
            is_dropped: false,
            read: None,
        }
    }

    /// Sends the first request to every node.
    pub(super) fn begin(&mut self) {
        #[cfg(feature = "test-util")]
        if let Some(traces) = &self.state.spec.cluster.settings.traces {
            let trace = Trace::new(self.lease.clone());
            self.trace = Some(traces.begin(&self.state.spec.keys, trace));
        }
        if let Some(acquire) = self.lease.poll_request() {
            self.send(acquire, Duration::ZERO);
        }
    }

    /// Returns a driver of another owner, which executes nothing.
    pub(super) fn repairer(&self) -> Self {
        let mut spec = LockSpec::clone(&self.state.spec);
        if let Some(once) = &mut spec.lease.once {
            once.executes = false;
        }
        Self::new(&Arc::new(spec), Instant::now(), &self.places)
    }

    /// Waits for the decision of the nodes. Returns the guard of a granted lock, and the number of nodes that granted it by
    /// then; or what is known of other callers that hold too many nodes, so that another attempt may succeed.
    pub(super) async fn attempt(
        &mut self,
        abandoned: impl Future<Output = ()> + Send,
    ) -> Result<Result<(LockGuard, usize), Contention>, Denied> {
        match self.next_event(pin!(abandoned)).await {
            Some(Event::Granted {
                number,
                acknowledged,
                valid_until,
            }) => {
                let is_fenced = self.state.spec.is_fenced;
                let token = is_fenced.then(|| FencingToken::try_from(number));
                // Cannot fail: the nodes never exceed the largest token.
                let token = token.transpose().unwrap_or_default();
                self.state.grant(token, self.instant(valid_until));
                Ok(Ok((LockGuard::new(&self.state), acknowledged)))
            }
            Some(Event::Refused(Refusal::Contended(contention))) => Ok(Err(contention)),
            Some(Event::Refused(Refusal::Unavailable { voted, unanswered })) => {
                Err(self.unavailable(voted, unanswered).into())
            }
            Some(Event::Decided(decided)) => Err(Denied::Decided(decided)),
            Some(Event::TooLate { elapsed }) => {
                let ttl = self.state.spec.lease.ttl;
                Err(LockError::Expired { ttl, elapsed }.into())
            }
            // No other event comes before these.
            Some(_) | None => {
                self.handle(self.dropped(true));
                // Which no one gets.
                Err(LockError::Closed.into())
            }
        }
    }

    /// Returns the error of an attempt that too few nodes answered.
    fn unavailable(&mut self, mut voted: NodeSet, unanswered: NodeSet) -> LockError {
        // What has arrived since, so that the error names every node.
        while let Some(vote) = self.votes.try_recv() {
            if self.lease.counts(vote.phase) {
                let failures = std::mem::take(&mut self.failures);
                self.on_vote(vote, self.origin.elapsed());
                self.failures = failures;
            } else if let Answer::Replied(_) = note(&mut self.failures, vote.node, vote.outcome) {
                voted.insert(vote.node);
            }
        }
        let nodes = self.take_failures(unanswered.without(voted));
        let cluster = &self.state.spec.cluster;
        let names = voted.iter().map(|node| Arc::clone(&cluster.names[node]));
        LockError::without_quorum(cluster.quorum.majority(), names.collect(), nodes)
    }

    /// Waits for the next event of the lease; `None` if something else happens before.
    pub(super) async fn next_event(
        &mut self,
        mut other: Pin<&mut (impl Future<Output = ()> + Send)>,
    ) -> Option<Event> {
        poll_fn(|context| {
            // In this order: what the holders and the nodes did in time counts before the time does.
            if let Some(event) = self.take_event() {
                return Poll::Ready(Some(event));
            }
            match other.as_mut().poll(context) {
                Poll::Ready(()) => Poll::Ready(None),
                Poll::Pending => self.poll_event(context).map(Some),
            }
        })
        .await
    }

    /// Returns the next event that follows from the votes that have arrived.
    fn take_event(&mut self) -> Option<Event> {
        // One look at the clock serves all votes that had arrived by then.
        let mut now = None;
        loop {
            match self.lease.poll_event() {
                Some(Event::Unread(unread)) => {
                    let reader = self.state.spec.reader.as_ref();
                    self.read = reader.map(|reader| reader(unread));
                }
                Some(event) => return Some(event),
                None => {
                    let vote = self.votes.try_recv()?;
                    let at = *now.get_or_insert_with(|| self.origin.elapsed());
                    self.on_vote(vote, at);
                    now = now.filter(|_| self.votes.has_more());
                }
            }
        }
    }

    /// Waits for what the lease waits for, and returns the next event.
    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Event> {
        loop {
            if let Some(read) = &mut self.read
                && let Poll::Ready(input) = read.as_mut().poll(context)
            {
                self.read = None;
                self.handle(input);
            } else if let Some(awaited) = self.lease.awaited()
                // The nodes that may decide wake the task once, with the last answer that is needed, and not with each. What
                // arrives later is taken with the next event.
                && let Poll::Ready(vote) = self.votes.poll_recv(context, awaited)
            {
                self.on_vote(vote, self.origin.elapsed());
            // Without a time, the lease waits for its holders only.
            } else if let Some(due) = self.lease.poll_timeout() {
                let due = due.min(self.tie_ends());
                let put_off = self.put_off.filter(|(what, _)| *what == due);
                let until = self.instant(put_off.map_or(due, |(_, until)| until));
                let home = self.state.spec.cluster.home.number();
                ready!(poll_timer(&mut self.timer, home, until, context));
                let now = self.origin.elapsed();
                match self.votes.try_recv() {
                    // Those that are there, although too few, have arrived in time.
                    Some(vote) => self.on_vote(vote, now),
                    // A loss is told at once.
                    None if put_off.is_none()
                        && now > due + LATE
                        && self.lease.awaited().is_some()
                        && !self.lease.is_holding() =>
                    {
                        self.put_off = Some((due, now + TICK));
                    }
                    None => self.on_timeout(now),
                }
            } else {
                return Poll::Pending;
            }
            // All that have arrived, before anything is awaited: the channel wakes this task for votes that it has not seen.
            if let Some(event) = self.take_event() {
                return Poll::Ready(event);
            }
        }
    }

    /// Returns until when to wait for nodes that would break a tie. Each of the callers keeps the others from the key while it
    /// waits for them, so that with a node that hangs all of them would fail: such a node gets as long again as the others took.
    fn tie_ends(&mut self) -> Duration {
        if self.lease.tie_breakers().is_empty() {
            return Duration::MAX;
        }
        let elapsed = self.origin.elapsed();
        let ends = elapsed + elapsed.max(TICK);
        *self.tie_ends.get_or_insert(ends)
    }

    /// Takes the votes that have arrived. The time may be before the last of them, because the lease is decided.
    pub(super) fn take_votes(&mut self, now: Duration) {
        while let Some(vote) = self.votes.try_recv() {
            self.on_vote(vote, now);
        }
    }

    fn on_vote(&mut self, vote: Vote, now: Duration) {
        if let Some(subscribers) = vote.subscribers {
            for place in self.places.iter() {
                place.set_subscribers(subscribers);
            }
        }
        let (node, number) = (vote.node, vote.phase);
        // An answer to a request that is over: it must not vouch for what a later one asked.
        if !self.lease.counts(number) {
            return;
        }
        let answer = match vote.outcome {
            // Most nodes never fail.
            Ok(reply) if self.failures.is_empty() => Answer::Replied(reply),
            outcome => note(self.failures_of(number), node, outcome),
        };
        #[cfg(feature = "test-util")]
        if let Some(trace) = &self.trace {
            let input = Input::Answered {
                node,
                number,
                answer: answer.clone(),
            };
            trace.lock().push(input, now);
        }
        // Not as an input, which would be moved several times: a lease takes more answers than anything else.
        self.lease.on_answer(node, number, &answer, now);
        if let Some(request) = self.lease.poll_request() {
            self.send(request, now);
        }
    }

    fn on_timeout(&mut self, now: Duration) {
        if self.state.spec.registry.stage() >= DrainStage::TimedOut {
            self.handle(Input::StopRenewing);
        }
        let cluster = Arc::clone(&self.state.spec.cluster);
        let after = match self.lease.is_acquiring() {
            true => now,
            false => cluster.settings.node_timeout,
        };
        let number = self.lease.number();
        let given_up = match self.tie_ends.is_some_and(|end| end <= now) {
            true => self.lease.tie_breakers(),
            false => NodeSet::default(),
        };
        for node in self.lease.overdue(now).union(given_up).iter() {
            let failure = cluster.timed_out(node, after);
            self.failures_of(number).insert(node, failure);
        }
        self.tell();
        for node in given_up.iter() {
            let answer = Answer::Failed;
            self.handle(Input::Answered {
                node,
                number,
                answer,
            });
        }
        self.handle(Input::TimedOut);
    }

    /// Tells the lease what its holders have done.
    pub(super) fn tell(&mut self) {
        let (delivered_at, is_revoked) = self.state.done_by_holders();
        if let Some(at) = delivered_at {
            let at = at.saturating_duration_since(self.origin);
            self.handle(Input::Delivered { at });
        }
        if is_revoked {
            self.handle(Input::Revoked);
        }
    }

    /// Passes an input to the lease, and sends what it asks for then.
    pub(super) fn handle(&mut self, input: Input) {
        let now = self.origin.elapsed();
        self.handle_at(input, now);
    }

    pub(super) fn handle_at(&mut self, input: Input, now: Duration) {
        #[cfg(feature = "test-util")]
        if let Some(trace) = &self.trace {
            trace.lock().push(input.clone(), now);
        }
        self.lease.handle(input, now);
        if let Some(request) = self.lease.poll_request() {
            self.send(request, now);
        }
    }

    /// Sends a request of the lease now.
    fn send(&mut self, request: LeaseRequest, now: Duration) {
        // First, so that no lane sends a request of before behind this one: the senders of an earlier phase are closed.
        let phase = self.votes.next_phase();
        debug_assert_eq!(phase, request.number, "each request is sent");
        let (spec, gone_at) = (&self.state.spec, self.lease.gone_at());
        let until = match request.op {
            Op::Release => {
                let retention = spec.names.first().and_then(KeyNames::intent_retention);
                retention.map(|retention| self.instant(gone_at + retention))
            }
            Op::ReleaseAfter { left } => Some(self.instant(now + left)),
            _ => None,
        };
        let command = Command {
            names: Arc::clone(&spec.names),
            owner: self.owner.clone(),
            op: request.op,
        };
        let packet = Packet::new(command, request.publishes, until);
        let (cluster, mut nodes) = (&spec.cluster, request.nodes);
        let embedded = nodes.intersection(cluster.embedded);
        if !self.is_dropped && !embedded.is_empty() {
            let now = cluster.home.epoch.at(self.origin) + now;
            self.votes.reserve(cluster.nodes.len());
            for number in embedded.iter() {
                if let Some(executed) = cluster.nodes[number].execute(&packet, now) {
                    self.votes.push(number, phase, executed);
                }
            }
            nodes = nodes.without(embedded);
        }
        if nodes.is_empty() {
            return;
        }
        let (packet, gone_at) = (Arc::new(packet), self.instant(gone_at));
        // This task is the only one that submits for this owner, and a lane keeps the order: on each node, the release
        // follows what it releases.
        for number in nodes.iter() {
            let node = &*cluster.nodes[number];
            let job = Job::new(Arc::clone(&packet), self.votes.sender(number), gone_at);
            match self.is_dropped {
                true => submit_in_drop(node, job),
                false => node.submit(job),
            }
        }
    }

    /// Returns when something is due for a lock that is held, if its holders do nothing before.
    pub(super) fn due(&self) -> Instant {
        self.instant(self.lease.poll_timeout().unwrap_or_default())
    }

    pub(super) fn instant(&self, at: Duration) -> Instant {
        self.origin + at
    }

    /// Returns the failures of the nodes in the decision to which this request belongs.
    fn failures_of(&mut self, number: u32) -> &mut BTreeMap<usize, NodeFailure> {
        if self.decision != number && !self.lease.is_acquiring() {
            (self.decision, self.failures) = (number, BTreeMap::new());
        }
        &mut self.failures
    }

    /// Takes the failures, and those of the nodes that had not answered when the others decided.
    pub(super) fn take_failures(&mut self, silent: NodeSet) -> Vec<NodeFailure> {
        let mut failures = std::mem::take(&mut self.failures);
        for number in silent.iter() {
            let node = Arc::clone(&self.state.spec.cluster.names[number]);
            let unanswered = NodeFailure::Unanswered { node };
            failures.entry(number).or_insert(unanswered);
        }
        failures.into_values().collect()
    }

    /// Tells the lease that its caller is gone, or its last holder.
    pub(super) fn dropped(&self, publishes: bool) -> Input {
        let effect = self.state.effect();
        Input::Dropped { publishes, effect }
    }

    /// Goes on until the releases are sent: behind an execution, also until they are answered. The drop of the driver leaves
    /// what is not answered to the registry.
    pub(super) async fn send_releases(&mut self) {
        while !self.lease.is_releasing() {
            self.next_event(pin!(pending::<()>())).await;
        }
    }
}

impl Drop for Driver {
    /// Releases what no caller gets any more, and a lock whose task ends early. That stays while it has holders, because they
    /// get it from no one else.
    fn drop(&mut self) {
        // Holders learn first that no task renews the lock any more. Without effect on one that has ended.
        self.state.close(None);
        // Nothing begins under an unused lock without the task.
        let is_unused = !self.state.is_shared() || self.lease.is_unused();
        if is_unused && !self.lease.is_releasing() {
            self.tell();
            // There is no task that would pass it on.
            while self.lease.poll_event().is_some() {}
            self.is_dropped = true;
            self.handle(self.dropped(true));
        }
        let (phase, round) = self.lease.release_round();
        if round.unreleased().is_empty() {
            return;
        }
        // No task waits for the answers that are still to come.
        let spec = &self.state.spec;
        let votes = self.votes.take();
        // Only releases go on.
        votes.next_phase();
        spec.registry.keep_unsettled(UnsettledRelease {
            votes,
            names: Arc::clone(&spec.cluster.names),
            keys: spec.keys.clone(),
            phase,
            round,
            // A lock that stays while it has holders is not released at all.
            due: match self.lease.is_releasing() {
                true => self.due(),
                false => self.origin,
            },
            gone_at: self.instant(self.lease.gone_at()),
        });
    }
}

/// Keeps the outcome of a node if it is a failure, and returns it as an answer for the rounds.
fn note(
    failures: &mut BTreeMap<usize, NodeFailure>,
    node: usize,
    outcome: Result<Reply, NodeFailure>,
) -> Answer {
    match outcome {
        Ok(reply) => {
            failures.remove(&node);
            Answer::Replied(reply)
        }
        Err(failure) => {
            let answer = match failure.never_sent() {
                true => Answer::NeverSent,
                false => Answer::Failed,
            };
            failures.insert(node, failure);
            answer
        }
    }
}

/// Waits until an instant, with the one timer of a task.
///
/// # Implementation details
///
/// The timer is reset only to fire sooner, or after it has fired too early. Otherwise, a lock that is held for a
/// moment would register and remove several timers that never fire.
///
/// The timer of a home that has ended panics when it is polled. What the next home finishes gets a new one.
fn poll_timer(
    timer: &mut Option<(usize, Pin<Box<Sleep>>)>,
    home: usize,
    due: Instant,
    context: &mut Context<'_>,
) -> Poll<()> {
    timer.take_if(|(of, _)| *of != home);
    let (_, timer) = timer.get_or_insert_with(|| (home, Box::pin(sleep_until(due))));
    if timer.deadline() > due {
        timer.as_mut().reset(due);
    }
    loop {
        ready!(timer.as_mut().poll(context));
        if timer.deadline() >= due {
            return Poll::Ready(());
        }
        timer.as_mut().reset(due);
    }
}
