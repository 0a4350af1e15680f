//! The connection of a lane: its states and their transitions.
//!
//! # Implementation details
//!
//! ```text
//!                 opened                lost
//!   Connecting ────────────────▶ Live ────────┬─▶ Connecting, usually
//!     │     ▲                    │  ▲         ├─▶ Down, if lost twice within the pause
//!     │     │ due, or            │  │         └─▶ Resting, if lost twice without any use
//!     │     │ woken by a job     ▼  │ opened
//!     ▼     │                    Probe
//!   Down, Resting
//! ```
//!
//! Without a connection, the lane is `Connecting`, or waits until an instant to connect again: it is `Down` after a
//! failed attempt, and `Resting` if the server closes idle connections and no job needs one. A job wakes it from
//! `Resting` but not from `Down`.
//!
//! A live connection may be silent or out of date. A *probe* then opens another one beside it. If the old connection
//! is silent when the new one is ready, the new one stands by: the old one may still answer, and everything on it is
//! in order. The standby replaces it if it stays silent.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use deadpool_redis::redis::{Pipeline, Value};
use tokio::time::Instant;

use crate::node::job::Request;
use crate::node::redis::connect::{Opened, open};
use crate::node::redis::encode::GenerationCheck;
use crate::node::redis::link::Link;
use crate::node::redis::shared::Shared;

/// The interval at which an idle connection is checked.
pub(super) const KEEPALIVE: Duration = Duration::from_secs(5);
/// The pause between two attempts to reach a server that does not answer.
pub(super) const PROBE_PAUSE: Duration = Duration::from_millis(150);
/// How long no requests share a call after the server has refused one. A server that refuses all, because its user may
/// not run some command of the scripts, then costs little; and a single key that the user must not touch does not end
/// the sharing for all others.
pub(super) const SHARING_PAUSE: Duration = Duration::from_secs(1);
/// The minimum time limit of an attempt. With the pause, it bounds how long after its recovery a server is back that
/// was reached before.
const PROBE_LIMIT: Duration = Duration::from_millis(500);

/// The connection of a lane.
pub(super) struct Connection {
    shared: Arc<Shared>,
    state: State,
    /// When a connection was last lost.
    lost_at: Option<Instant>,
    /// Whether the connection before was lost without any use.
    was_unused: bool,
    /// How long the last successful attempt took.
    last_took: Option<Duration>,
    /// The number of attempts since then.
    attempts: u32,
}

#[expect(
    clippy::large_enum_variant,
    reason = "one value for each lane, which is nearly always live"
)]
enum State {
    /// There is no connection yet; an attempt to open one is under way.
    Connecting(ConnectAttempt),
    /// There is a connection.
    Live(Live),
    /// There is no connection, and none is needed before this instant unless a job comes.
    Resting { until: Instant },
    /// There is no connection, and no attempt before this instant.
    Down { until: Instant },
}

struct Live {
    link: Link,
    /// The run id of its process, if it was asked and told.
    run_id: Option<Arc<str>>,
    check: GenerationCheck,
    since: Instant,
    /// Whether any job was sent on it.
    is_used: bool,
    /// From when on several requests can share a call.
    shares_from: Instant,
    probe: Probe,
}

/// The opening of another connection beside the live one.
enum Probe {
    None,
    Connecting(ConnectAttempt),
    /// The new connection replaces the silent one at this instant.
    Standby(Candidate, Instant),
    /// An attempt has failed; the next one starts at this instant.
    Paused(Instant),
}

struct ConnectAttempt {
    opening: Opening,
    started: Instant,
    ends_at: Instant,
}

type Opening = Pin<Box<dyn Future<Output = Result<Opened, Arc<str>>> + Send>>;

/// A new connection that is ready for use.
pub(super) struct Candidate {
    pub(super) opened: Opened,
    /// When the attempt to open it started.
    pub(super) started: Instant,
}

/// An event on the connection.
pub(super) enum ConnectionEvent {
    /// All replies to the oldest batch have arrived, or the connection is lost.
    Replied(Result<(), Arc<str>>),
    /// An attempt has ended.
    Attempted(Result<Candidate, Arc<str>>),
}

impl Connection {
    /// Creates a connection that is down until the first attempt.
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        let until = Instant::now();
        Self {
            shared: Arc::clone(shared),
            state: State::Down { until },
            lost_at: None,
            was_unused: false,
            last_took: None,
            attempts: 0,
        }
    }

    pub(super) fn is_live(&self) -> bool {
        matches!(self.state, State::Live(_))
    }

    /// Returns since when the connection has been live, if it is.
    pub(super) fn live_since(&self) -> Option<Instant> {
        match &self.state {
            State::Live(live) => Some(live.since),
            _ => None,
        }
    }

    /// Returns whether an attempt is under way or planned. That is always so without a connection.
    pub(super) fn is_probing(&self) -> bool {
        !matches!(&self.state, State::Live(live) if matches!(live.probe, Probe::None))
    }

    /// Returns when more is known of the server at the latest: the next attempt begins, or the current one ends.
    pub(super) fn knows_more_at(&self) -> Option<Instant> {
        match &self.state {
            State::Connecting(attempt) => Some(attempt.ends_at),
            State::Live(Live {
                probe: Probe::Connecting(attempt),
                ..
            }) => Some(attempt.ends_at),
            _ => self.next_timer(),
        }
    }

    /// Returns when [`on_timer`](Self::on_timer) has something to do, if nothing else happens before.
    pub(super) fn next_timer(&self) -> Option<Instant> {
        match &self.state {
            State::Connecting(_) => None,
            State::Resting { until } | State::Down { until } => Some(*until),
            State::Live(live) => match &live.probe {
                Probe::None | Probe::Connecting(_) => None,
                Probe::Standby(_, until) | Probe::Paused(until) => Some(*until),
            },
        }
    }

    /// Returns the check with which requests can share a call, if they can.
    pub(super) fn shared_check(&self, now: Instant) -> Option<&GenerationCheck> {
        match &self.state {
            State::Live(live) if live.shares_from <= now => Some(&live.check),
            _ => None,
        }
    }

    /// Lets no requests share a call for a while, because the server refused one.
    pub(super) fn pause_sharing(&mut self, now: Instant) {
        if let State::Live(live) = &mut self.state {
            live.shares_from = now + SHARING_PAUSE;
        }
    }

    /// Sends calls, each with its requests, if the connection is live.
    pub(super) fn send<'a, Requests>(&mut self, calls: impl ExactSizeIterator<Item = Requests>)
    where
        Requests: ExactSizeIterator<Item = &'a Request> + Clone,
    {
        if let State::Live(live) = &mut self.state {
            live.is_used = true;
            live.link.send(calls, &live.check);
        }
    }

    /// Sends a ping that counts as no use, and returns whether the connection is live.
    pub(super) fn ping(&mut self) -> bool {
        let State::Live(live) = &mut self.state else {
            return false;
        };
        let ping = [&Request::Ping].into_iter();
        live.link.send([ping].into_iter(), &live.check);
        true
    }

    /// Sends a pipeline that counts as no use, and returns whether the connection is live.
    pub(super) fn send_pipeline(&mut self, pipeline: &Pipeline) -> bool {
        let State::Live(live) = &mut self.state else {
            return false;
        };
        live.link.send_pipeline(pipeline);
        true
    }

    /// Waits for the next event, and appends replies as they arrive.
    pub(super) fn poll_event(
        &mut self,
        context: &mut Context<'_>,
        replies: &mut Vec<Value>,
    ) -> Poll<ConnectionEvent> {
        let attempt = match &mut self.state {
            State::Connecting(attempt) => attempt,
            State::Resting { .. } | State::Down { .. } => return Poll::Pending,
            State::Live(live) => {
                if let Poll::Ready(replied) = live.link.poll_replies(context, replies) {
                    return Poll::Ready(ConnectionEvent::Replied(replied));
                }
                match &mut live.probe {
                    Probe::Connecting(attempt) => attempt,
                    _ => return Poll::Pending,
                }
            }
        };
        let started = attempt.started;
        let opened = std::task::ready!(attempt.opening.as_mut().poll(context));
        let candidate = opened.map(|opened| Candidate { opened, started });
        Poll::Ready(ConnectionEvent::Attempted(candidate))
    }

    /// Starts an attempt, beside the live connection if there is one.
    pub(super) fn start_attempt(&mut self) {
        let attempt = self.next_attempt();
        match &mut self.state {
            State::Live(live) => live.probe = Probe::Connecting(attempt),
            state => *state = State::Connecting(attempt),
        }
    }

    /// Starts an attempt if the connection is resting.
    pub(super) fn wake(&mut self) {
        if matches!(self.state, State::Resting { .. }) {
            self.start_attempt();
        }
    }

    /// Keeps a new connection beside the live one, which it replaces at this instant.
    pub(super) fn stand_by(&mut self, candidate: Candidate, until: Instant) {
        if let State::Live(live) = &mut self.state {
            live.probe = Probe::Standby(candidate, until);
        }
    }

    /// Uses a new connection from now on.
    pub(super) fn replace(&mut self, candidate: Candidate) {
        let Opened { link, admission } = candidate.opened;
        let guard = self.shared.guard.as_ref();
        self.last_took = Some(candidate.started.elapsed());
        self.attempts = 0;
        let now = Instant::now();
        let (run_id, generation) = match admission {
            Some(admission) => (admission.run_id, admission.generation),
            None => (None, None),
        };
        self.state = State::Live(Live {
            link,
            run_id,
            check: GenerationCheck {
                key: guard.and_then(|guard| guard.generation_key.clone()),
                generation,
            },
            since: now,
            shares_from: now,
            is_used: false,
            probe: Probe::None,
        });
    }

    /// Pauses after a failed attempt. A live connection stays.
    pub(super) fn on_attempt_failed(&mut self, now: Instant) {
        let until = now + PROBE_PAUSE;
        match &mut self.state {
            State::Live(live) => live.probe = Probe::Paused(until),
            state => *state = State::Down { until },
        }
    }

    /// Ends a live connection and its probe, and pauses.
    pub(super) fn close(&mut self, now: Instant) {
        self.state = State::Down {
            until: now + PROBE_PAUSE,
        };
    }

    /// Ends a live connection in favour of its probe. Returns the standby to use, if there is one.
    #[must_use]
    pub(super) fn give_up(&mut self) -> Option<Candidate> {
        match self.take_probe() {
            Probe::None => self.state = State::Connecting(self.next_attempt()),
            Probe::Connecting(attempt) => self.state = State::Connecting(attempt),
            Probe::Standby(candidate, _) => return Some(candidate),
            Probe::Paused(until) => self.state = State::Down { until },
        }
        None
    }

    /// Ends a connection that was lost. Returns the standby to use, if there is one.
    #[must_use]
    pub(super) fn on_lost(&mut self, now: Instant, has_parked: bool) -> Option<Candidate> {
        let is_unused = matches!(&self.state, State::Live(live) if !live.is_used);
        match self.take_probe() {
            Probe::Standby(candidate, _) => return Some(candidate),
            Probe::Connecting(attempt) => {
                self.state = State::Connecting(attempt);
                return None;
            }
            Probe::None | Probe::Paused(_) => {}
        }
        let was_unused = std::mem::replace(&mut self.was_unused, is_unused);
        let lost_before = self.lost_at.replace(now);
        if is_unused && was_unused && !has_parked {
            // The server, or a proxy, closes idle connections: the next job opens one.
            let until = now + KEEPALIVE;
            self.state = State::Resting { until };
        } else if lost_before.is_some_and(|at| now - at < PROBE_PAUSE) {
            // The server, or a proxy, closes every connection at once.
            self.close(now);
        } else {
            // A closed idle connection is no outage, so jobs wait for this attempt.
            self.state = State::Connecting(self.next_attempt());
        }
        None
    }

    /// Ends the probe, because the live connection answers again. Returns the standby to use if it leads to another
    /// memory: the state of the node is that of the memory found last.
    #[must_use]
    pub(super) fn on_recovered(&mut self) -> Option<Candidate> {
        let State::Live(live) = &mut self.state else {
            return None;
        };
        match std::mem::replace(&mut live.probe, Probe::None) {
            Probe::Standby(candidate, _) => {
                let admission = candidate.opened.admission.as_ref();
                let generation = admission.and_then(|admission| admission.generation.as_ref());
                // With the restart guard off, only the run id tells servers apart.
                let run_id = admission.and_then(|admission| admission.run_id.as_ref());
                let is_same =
                    generation == live.check.generation.as_ref() && run_id == live.run_id.as_ref();
                (!is_same).then_some(candidate)
            }
            _ => None,
        }
    }

    /// Starts an attempt that is due. Returns the standby to use, if that is due.
    #[must_use]
    pub(super) fn on_timer(&mut self, now: Instant) -> Option<Candidate> {
        if self.next_timer().is_none_or(|due| due > now) {
            return None;
        }
        if let Probe::Standby(candidate, _) = self.take_probe() {
            return Some(candidate);
        }
        self.start_attempt();
        None
    }

    fn take_probe(&mut self) -> Probe {
        match &mut self.state {
            State::Live(live) => std::mem::replace(&mut live.probe, Probe::None),
            _ => Probe::None,
        }
    }

    fn next_attempt(&mut self) -> ConnectAttempt {
        let attempt = ConnectAttempt::new(&self.shared, self.attempt_limit());
        self.attempts += 1;
        attempt
    }

    /// Returns the time limit of the next attempt. It is short once the usual time is known, so that a server is
    /// back soon after its recovery; every eighth attempt may take as long as the settings allow, because the
    /// server may have become slower.
    fn attempt_limit(&self) -> Duration {
        let longest = self.shared.timeouts.connect;
        match self.last_took {
            Some(took) if self.attempts % 8 != 7 => PROBE_LIMIT.max(2 * took).min(longest),
            _ => longest,
        }
    }
}

impl ConnectAttempt {
    fn new(shared: &Arc<Shared>, limit: Duration) -> Self {
        let shared = Arc::clone(shared);
        let started = Instant::now();
        Self {
            started,
            ends_at: started + limit,
            opening: Box::pin(async move {
                tokio::time::timeout(limit, open(&shared))
                    .await
                    .unwrap_or_else(|_| Err(format!("no connection within {limit:?}").into()))
            }),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::node::redis::endpoint::Endpoint;
    use crate::node::redis::guard::Admission;
    use crate::node::redis::shared::Timeouts;
    use crate::protocol::admission::Generation;

    const LIMIT: Duration = Duration::from_secs(1);

    pub(in super::super) fn shared() -> Arc<Shared> {
        let endpoint = Endpoint::from_url("redis://127.0.0.1:1", LIMIT).unwrap();
        let timeouts = Timeouts {
            node: LIMIT,
            connect: LIMIT,
        };
        Arc::new(Shared::new(endpoint, timeouts, None, &Arc::default()))
    }

    /// Connects to a new server, which it returns too.
    pub(in super::super) async fn candidate() -> (Candidate, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap());
        let (client, server) = tokio::join!(client, listener.accept());
        let opened = Opened {
            link: Link::new(Box::new(client.unwrap())),
            admission: None,
        };
        let started = Instant::now();
        (Candidate { opened, started }, server.unwrap().0)
    }

    async fn live() -> Connection {
        let mut connection = Connection::new(&shared());
        connection.replace(candidate().await.0);
        assert!(connection.is_live() && !connection.is_probing());
        connection
    }

    #[tokio::test]
    async fn a_lost_connection_is_opened_again_at_once_and_then_after_a_pause() {
        let mut connection = live().await;
        connection.send([[&Request::Ping].into_iter()].into_iter());
        let now = Instant::now();
        assert!(connection.on_lost(now, false).is_none());
        assert!(matches!(connection.state, State::Connecting(_)));
        for (after, is_down) in [(PROBE_PAUSE / 2, true), (2 * PROBE_PAUSE, false)] {
            connection.replace(candidate().await.0);
            connection.send([[&Request::Ping].into_iter()].into_iter());
            assert!(connection.on_lost(now + after, false).is_none());
            assert_eq!(matches!(connection.state, State::Down { .. }), is_down);
        }
    }

    #[tokio::test]
    async fn more_is_known_at_the_end_of_an_attempt() {
        let (mut first, mut probe) = (Connection::new(&shared()), live().await);
        assert_eq!(probe.knows_more_at(), None);
        for connection in [&mut first, &mut probe] {
            let began = Instant::now();
            connection.start_attempt();
            let at = connection.knows_more_at().unwrap();
            assert!(began < at && at <= Instant::now() + LIMIT);
        }
    }

    #[tokio::test]
    async fn a_connection_lost_twice_without_use_rests_until_a_job_wakes_it() {
        let mut connection = live().await;
        let now = Instant::now();
        assert!(connection.on_lost(now, false).is_none());
        connection.wake();
        assert!(matches!(connection.state, State::Connecting(_)));
        connection.replace(candidate().await.0);
        assert!(connection.on_lost(now + LIMIT, false).is_none());
        assert!(matches!(connection.state, State::Resting { .. }));
        assert_eq!(connection.next_timer(), Some(now + LIMIT + KEEPALIVE));
        connection.wake();
        assert!(matches!(connection.state, State::Connecting(_)));
        connection.on_attempt_failed(now);
        connection.wake();
        assert!(matches!(connection.state, State::Down { .. }));
    }

    #[tokio::test]
    async fn a_standby_replaces_a_live_connection_when_it_is_due_lost_or_given_up() {
        let now = Instant::now();
        let due = now + LIMIT;
        let ways: [fn(&mut Connection, Instant) -> Option<Candidate>; 3] = [
            |connection, due| connection.on_timer(due),
            |connection, due| connection.on_lost(due, false),
            |connection, _| connection.give_up(),
        ];
        for way in ways {
            let mut connection = live().await;
            connection.start_attempt();
            assert!(connection.is_live() && connection.is_probing());
            connection.stand_by(candidate().await.0, due);
            assert!(connection.on_timer(now).is_none());
            assert!(way(&mut connection, due).is_some());
        }
    }

    #[tokio::test]
    async fn a_recovered_connection_drops_a_standby_to_the_same_memory_only() {
        let admission = |run_id: &str, generation: Option<Generation>| Admission {
            run_id: Some(run_id.into()),
            generation,
            left: Duration::ZERO,
        };
        let first = || admission("run", None);
        let other_memory = admission("run", Generation::parse("r:1:1:run"));
        for (standby_admission, is_used) in [
            (first(), false),
            (other_memory, true),
            // With the restart guard off.
            (admission("other", None), true),
        ] {
            let mut connection = Connection::new(&shared());
            let mut live = candidate().await.0;
            live.opened.admission = Some(first());
            connection.replace(live);
            let mut standby = candidate().await.0;
            standby.opened.admission = Some(standby_admission);
            connection.stand_by(standby, Instant::now());
            assert_eq!(connection.on_recovered().is_some(), is_used);
            assert!(connection.is_live() && !connection.is_probing());
        }
    }

    #[tokio::test]
    async fn a_connection_that_is_given_up_leaves_its_probe() {
        let mut connection = live().await;
        assert!(connection.give_up().is_none());
        assert!(matches!(connection.state, State::Connecting(_)));
        connection.replace(candidate().await.0);
        connection.start_attempt();
        assert!(connection.give_up().is_none());
        assert!(matches!(connection.state, State::Connecting(_)));
        connection.replace(candidate().await.0);
        let now = Instant::now();
        connection.on_attempt_failed(now);
        assert!(connection.is_live());
        assert!(connection.give_up().is_none());
        assert_eq!(connection.next_timer(), Some(now + PROBE_PAUSE));
        assert!(connection.on_timer(now + PROBE_PAUSE).is_none());
        assert!(matches!(connection.state, State::Connecting(_)));
    }

    #[tokio::test]
    async fn every_eighth_attempt_may_take_as_long_as_connecting_may() {
        let mut connection = live().await;
        let mut limits = Vec::new();
        for _ in 0..9 {
            limits.push(connection.attempt_limit() == LIMIT);
            connection.start_attempt();
        }
        let longest = limits.iter().position(|is_longest| *is_longest);
        assert_eq!((longest, limits[8]), (Some(7), false));
    }
}
