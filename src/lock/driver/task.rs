//! The task of one lock: passes votes and time to its lease, and sends what the lease asks for.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use tokio::task;
use tokio::time::Instant;

use crate::lock::cluster::Cluster;
use crate::lock::driver::owned::OwnedLease;
use crate::lock::driver::reading::{Reading, read};
use crate::lock::failures::Failures;
use crate::lock::queue::Place;
use crate::lock::registry::{DrainStage, Ticket, Unsettled};
use crate::lock::terms::Terms;
use crate::lock::time::Timer;
use crate::node::telemetry::LockLabels;
use crate::node::{Job, Request, Threshold, Vote, VoteReceiver};
use crate::protocol::LockKeys;
use crate::protocol::lease::{Event, Input};

/// The task of one lock.
pub(crate) struct Driver {
    pub(super) cluster: Arc<Cluster>,
    pub(super) terms: Terms,
    pub(super) max_hold: Option<Duration>,
    pub(super) keys: LockKeys,
    /// The number of the slot, if the lock is one of several.
    pub(super) slot: Option<usize>,
    pub(super) votes: VoteReceiver,
    /// The current attempt, and the lock once it is granted.
    pub(super) attempt: Option<Box<OwnedLease>>,
    /// Attempts that were refused, and are releasing.
    pub(super) earlier: Vec<OwnedLease>,
    pub(super) ticket: Ticket,
    /// The task that requested the lock, which is not the one that owns it from the grant on.
    pub(super) task: Option<task::Id>,
    /// The labels of the lock in spans and metrics.
    pub(super) labels: LockLabels,
    /// The places of the keys in the queue, which know the processes that wait for each key.
    pub(super) places: Arc<[Arc<Place>]>,
    pub(super) timer: Timer,
    /// Present if the lease may ask for a read.
    pub(super) reading: Option<Box<Reading>>,
}

impl Driver {
    pub(crate) fn new(
        cluster: &Arc<Cluster>,
        keys: LockKeys,
        terms: Terms,
        max_hold: Option<Duration>,
        ticket: Ticket,
        labels: LockLabels,
    ) -> Self {
        Self {
            votes: VoteReceiver::new(&cluster.names),
            cluster: Arc::clone(cluster),
            terms,
            max_hold,
            keys,
            slot: None,
            attempt: None,
            earlier: Vec::new(),
            ticket,
            task: task::try_id(),
            labels,
            places: Arc::default(),
            timer: Timer::default(),
            reading: None,
        }
    }

    /// Tells the lease what its holders have done.
    pub(super) fn tell(&mut self) {
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        let Some(state) = &attempt.state else {
            return;
        };
        let (delivered_at, is_revoked) = state.done_by_holders();
        if let Some(at) = delivered_at {
            let at = at.saturating_duration_since(attempt.origin);
            attempt.handle(Input::Delivered { at });
        }
        if is_revoked {
            attempt.handle(Input::Revoked);
        }
    }

    /// Waits until every node has answered every release or is overdue, and passes the unconfirmed ones to the registry.
    pub(super) async fn settle(&mut self) {
        loop {
            while !self.is_settled() {
                self.next_event(pin!(std::future::pending::<()>())).await;
            }
            let is_settling = |attempt: &&mut OwnedLease| !attempt.lease.is_settled();
            let settling = self.earlier.iter_mut().find(is_settling);
            match (&mut self.attempt, settling) {
                (Some(attempt), Some(settling)) => std::mem::swap(&mut **attempt, settling),
                _ => break,
            }
        }
        let (last, earlier) = (self.attempt.take(), std::mem::take(&mut self.earlier));
        let releases = last.map(|last| *last).into_iter().chain(earlier);
        let now = Instant::now();
        let mut releases = releases.filter(|release| release.is_open(now)).peekable();
        if releases.peek().is_none() {
            return;
        }
        let votes = std::mem::replace(&mut self.votes, VoteReceiver::new(&self.cluster.names));
        // Only releases go on.
        votes.next_phase();
        self.ticket.registry().keep_unsettled(Unsettled {
            votes,
            names: Arc::clone(&self.cluster.names),
            releases: releases.map(OwnedLease::unsettled).collect(),
        });
    }

    /// Waits for the next event of the current attempt; `None` if something else happens before.
    pub(super) async fn next_event(
        &mut self,
        mut other: Pin<&mut (impl Future<Output = ()> + Send)>,
    ) -> Option<Event> {
        // One look at the clock serves all votes that had arrived by then.
        let (mut now, mut arrived) = (Duration::ZERO, 0);
        loop {
            match self.poll_event() {
                Some(Event::Unread(unread)) => {
                    if let Some(reading) = &mut self.reading {
                        reading.read = Some((reading.reader)(unread));
                    }
                    continue;
                }
                Some(event) => return Some(event),
                None => {}
            }
            let attempt = self.attempt.as_ref()?;
            if let Some((vote, others)) = self.votes.try_recv_of_several() {
                if arrived == 0 {
                    (now, arrived) = (attempt.origin.elapsed(), others + 1);
                }
                arrived -= 1;
                self.on_vote(vote, now);
                continue;
            }
            arrived = 0;
            let awaited = attempt.lease.awaited();
            let threshold = awaited.map_or_else(Threshold::any, |awaited| match awaited.answers {
                0 => Threshold::any(),
                answers => Threshold::new(attempt.phase + awaited.number, answers),
            });
            // Without a time, the lease waits for its holders only.
            let due = attempt.lease.poll_timeout();
            let due = attempt.origin + due.unwrap_or(Duration::from_secs(60 * 60));
            let vote = tokio::select! {
                biased;
                () = other.as_mut() => return None,
                input = read(&mut self.reading), if self.reading.is_some() => {
                    if let Some(reading) = &mut self.reading {
                        reading.read = None;
                    }
                    self.handle(input);
                    continue;
                }
                vote = self.votes.recv(threshold), if awaited.is_some() => Some(vote),
                // Votes below the threshold have arrived in time.
                () = self.timer.at(due) => self.votes.try_recv(),
            };
            let now = self.now();
            match vote {
                Some(vote) => self.on_vote(vote, now),
                None => self.on_timeout(now),
            }
        }
    }

    pub(super) fn on_vote(&mut self, vote: Vote, now: Duration) {
        if let Some(subscribers) = vote.subscribers {
            for place in self.places.iter() {
                place.remote.set_subscribers(subscribers);
            }
        }
        match &mut self.attempt {
            Some(attempt) if attempt.is_asked(&vote) => attempt.on_vote(vote, now),
            _ => {
                // An answered release needs no time.
                let mut earlier = self.earlier.iter_mut();
                if let Some(attempt) = earlier.find(|attempt| attempt.is_asked(&vote)) {
                    attempt.on_vote(vote, now);
                }
            }
        }
        self.send(Cluster::submit);
    }

    pub(super) fn on_timeout(&mut self, now: Duration) {
        if self.ticket.registry().stage() >= DrainStage::TimedOut {
            self.handle(Input::StopRenewing);
        }
        if let Some(attempt) = &mut self.attempt {
            let after = match attempt.lease.is_acquiring() {
                true => now,
                false => self.cluster.settings.node_timeout,
            };
            let number = attempt.lease.number();
            for node in attempt.lease.overdue(now).iter() {
                let failure = self.cluster.timed_out(node, after);
                attempt.failures(number).set(node, failure);
            }
        }
        self.tell();
        self.handle(Input::TimedOut);
    }

    pub(super) fn handle(&mut self, input: Input) {
        if let Some(attempt) = &mut self.attempt {
            attempt.handle(input);
        }
        self.send(Cluster::submit);
    }

    /// Sends what the lease asks for.
    pub(super) fn send(&mut self, submit: fn(&Cluster, usize, Job)) {
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        // Asked first, because most votes lead to no request.
        let is_asking = attempt.lease.is_asking();
        let Some(request) = is_asking.then(|| attempt.lease.poll_request()).flatten() else {
            return;
        };
        // Another attempt may have asked meanwhile.
        attempt.phase = self.votes.next_phase() - request.number;
        let publishes = request.publishes && self.cluster.settings.wake_ups;
        let gone_at = attempt.origin + request.gone_at;
        let packet = attempt.packet(request.op, publishes, gone_at);
        for node in request.nodes.iter() {
            let request = Request::Command(Arc::clone(&packet));
            let job = Job::new(request, self.votes.sender(node), gone_at);
            submit(&self.cluster, node, job);
        }
    }

    pub(super) fn poll_event(&mut self) -> Option<Event> {
        let lease = &mut self.attempt.as_mut()?.lease;
        lease.has_news().then(|| lease.poll_event()).flatten()
    }

    /// Takes the votes that have arrived.
    pub(super) fn take_votes(&mut self) {
        while let Some(vote) = self.votes.try_recv() {
            self.on_vote(vote, self.now());
        }
    }

    pub(super) fn is_holding(&self) -> bool {
        let attempt = self.attempt.as_ref();
        attempt.is_some_and(|attempt| attempt.lease.is_holding())
    }

    pub(super) fn is_settled(&self) -> bool {
        let attempt = self.attempt.as_ref();
        attempt.is_none_or(|attempt| attempt.lease.is_settled())
    }

    pub(super) fn is_extending(&self) -> bool {
        let attempt = self.attempt.as_ref();
        attempt.is_some_and(|attempt| attempt.lease.is_extending())
    }

    /// Returns the time as the current attempt counts it.
    pub(super) fn now(&self) -> Duration {
        let attempt = self.attempt.as_ref();
        attempt.map_or(Duration::ZERO, |attempt| attempt.origin.elapsed())
    }

    pub(super) fn instant(&self, at: Duration) -> Instant {
        let origin = self.attempt.as_ref().map(|attempt| attempt.origin);
        origin.unwrap_or_else(Instant::now) + at
    }

    pub(super) fn take_failures(&mut self) -> Failures {
        let attempt = self.attempt.as_mut();
        let failures = attempt.map(|attempt| std::mem::take(&mut attempt.failures));
        failures.unwrap_or_default()
    }
}

impl Drop for Driver {
    /// Releases a lock whose task ends early. It stays while it has holders, because they get it from no one else.
    fn drop(&mut self) {
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        let state = attempt.state.clone();
        if attempt.lease.is_releasing() {
            return;
        }
        // Nothing begins under an unused lock without the task.
        let is_shared = state.as_ref().is_some_and(|state| state.is_shared());
        if !is_shared || attempt.lease.is_unused() {
            // There is no task that would pass it on.
            while attempt.lease.poll_event().is_some() {}
            attempt.handle(Input::Abandoned);
            let effect = state.as_ref().map(|state| state.effect());
            attempt.handle(Input::Dropped {
                publishes: true,
                effect: effect.unwrap_or_default(),
            });
            self.send(Cluster::submit_in_drop);
        }
        if let Some(attempt) = self.attempt.take().filter(|_| state.is_some()) {
            let votes = std::mem::replace(&mut self.votes, VoteReceiver::new(&self.cluster.names));
            // No task is left to count the answers.
            self.ticket.registry().keep_unsettled(Unsettled {
                votes,
                names: Arc::clone(&self.cluster.names),
                releases: vec![attempt.unsettled()],
            });
        }
    }
}
