//! The connection of a lane: its states and their transitions.
//!
//! # Implementation details
//!
//! There may be a *live* connection, and there may be a *next* one: an attempt to open it is under way, or planned for an
//! instant. Without a live connection, there always is a next one. It is *paused* after a failed attempt, and *resting*
//! if the server closes idle connections and no job needs one; a job wakes it from its rest but not from its pause.
//!
//! ```text
//!             opened                     lost                    when
//!   next ────────────────▶ live  ──────────────▶ connecting   usually
//!                                                paused       lost twice within the pause
//!                                                resting      lost twice without any use
//! ```
//!
//! A live connection may be silent or out of date. The next one is a *probe* then, opened beside it. If the old connection
//! is silent when the new one is ready, the new one stands by: the old one may still answer, and everything on it is
//! in order. The standby replaces it if it stays silent.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use deadpool::managed::Manager;
use deadpool_redis::redis::Value;
use tokio::time::{Instant, timeout};

use crate::node::redis::describe::describe_timeout;
use crate::node::redis::guard::Admission;
use crate::node::redis::link::Link;
use crate::node::redis::server::RedisServer;
use crate::node::redis::table::{GenerationCheck, load_all};

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
    server: Arc<RedisServer>,
    pub(super) live: Option<Live>,
    pub(super) next: Next,
    /// When a connection was last lost.
    lost_at: Option<Instant>,
    /// Whether the connection before was lost without any use.
    was_unused: bool,
    /// How long the last successful attempt took.
    last_took: Option<Duration>,
    /// The number of attempts since then.
    attempts: u32,
}

/// A connection that is ready for lock commands.
pub(super) struct Live {
    pub(super) link: Link,
    /// The run id of its process, if it was asked and told.
    run_id: Option<Arc<str>>,
    pub(super) check: GenerationCheck,
    /// For how long its server must not vote, or zero.
    pub(super) left: Duration,
    /// Since when it is used; before that, since when it was being opened.
    pub(super) since: Instant,
    /// Whether any job was sent on it.
    pub(super) is_used: bool,
    /// From when on several requests can share a call.
    shares_from: Instant,
}

/// The next connection. Beside a live one, it is a probe.
pub(super) enum Next {
    /// None is planned, because there is a live one.
    None,
    /// An attempt to open it is under way, which ends by this instant.
    Connecting(Opening, Instant),
    /// It replaces the silent live one at this instant.
    Standby(Box<Live>, Instant),
    /// No attempt before this instant, because one has failed.
    Paused(Instant),
    /// No attempt before this instant unless a job comes.
    Resting(Instant),
}

type Opening = Pin<Box<dyn Future<Output = Result<Live, Arc<str>>> + Send>>;

impl Connection {
    /// Creates a connection that is down until the first attempt.
    pub(super) fn new(server: &Arc<RedisServer>) -> Self {
        Self {
            server: Arc::clone(server),
            live: None,
            next: Next::Paused(Instant::now()),
            lost_at: None,
            was_unused: false,
            last_took: None,
            attempts: 0,
        }
    }

    /// Returns whether an attempt is under way or planned. That is always so without a connection.
    pub(super) fn is_probing(&self) -> bool {
        !matches!(self.next, Next::None)
    }

    /// Returns when more is known of the server at the latest: the next attempt begins, or the current one ends.
    pub(super) fn knows_more_at(&self) -> Option<Instant> {
        match &self.next {
            Next::Connecting(_, ends_at) => Some(*ends_at),
            _ => self.next_timer(),
        }
    }

    /// Returns when [`on_timer`](Self::on_timer) has something to do, if nothing else happens before.
    pub(super) fn next_timer(&self) -> Option<Instant> {
        match &self.next {
            Next::None | Next::Connecting(..) => None,
            Next::Standby(_, at) | Next::Paused(at) | Next::Resting(at) => Some(*at),
        }
    }

    /// Returns the check with which requests can share a call, if they can.
    pub(super) fn shared_check(&self, now: Instant) -> Option<&GenerationCheck> {
        let live = self.live.as_ref().filter(|live| live.shares_from <= now);
        live.map(|live| &live.check)
    }

    /// Lets no requests share a call for a while, because the server refused one.
    pub(super) fn pause_sharing(&mut self, now: Instant) {
        if let Some(live) = &mut self.live {
            live.shares_from = now + SHARING_PAUSE;
        }
    }

    /// Starts an attempt, beside the live connection if there is one.
    pub(super) fn start_attempt(&mut self) {
        let (server, began) = (Arc::clone(&self.server), Instant::now());
        let limit = self.attempt_limit();
        let opening = async move {
            let opened = timeout(limit, open(&server, began)).await;
            opened.unwrap_or_else(|_| Err(describe_timeout(limit)))
        };
        self.next = Next::Connecting(Box::pin(opening), began + limit);
        self.attempts += 1;
    }

    /// Starts an attempt if the connection is resting.
    pub(super) fn wake(&mut self) {
        if matches!(self.next, Next::Resting(_)) {
            self.start_attempt();
        }
    }

    /// Keeps a new connection beside the live one, which it replaces at this instant.
    pub(super) fn stand_by(&mut self, opened: Live, at: Instant) {
        self.next = Next::Standby(Box::new(opened), at);
    }

    /// Uses a new connection from now on.
    pub(super) fn replace(&mut self, mut opened: Live) {
        let now = Instant::now();
        // With its admission, because the next attempt is measured with that as well.
        self.last_took = Some(now - opened.since);
        self.attempts = 0;
        opened.since = now;
        self.live = Some(opened);
        self.next = Next::None;
    }

    /// Pauses after a failed attempt. A live connection stays.
    pub(super) fn on_attempt_failed(&mut self, now: Instant) {
        self.next = Next::Paused(now + PROBE_PAUSE);
    }

    /// Ends a live connection and its probe, and pauses.
    pub(super) fn close(&mut self, now: Instant) {
        self.live = None;
        self.on_attempt_failed(now);
    }

    /// Ends a live connection in favour of the next one. Returns the standby to use, if there is one.
    #[must_use]
    pub(super) fn give_up(&mut self) -> Option<Live> {
        self.live = None;
        // Without a live connection there always is a next one. A probe that has been planned already stays as it is, with
        // its pause: the server has not become easier to reach.
        if matches!(self.next, Next::None) {
            self.start_attempt();
        }
        self.take_standby()
    }

    /// Ends a connection that was lost. Returns the standby to use, if there is one.
    #[must_use]
    pub(super) fn on_lost(&mut self, now: Instant, has_parked: bool) -> Option<Live> {
        let is_unused = self.live.take().is_some_and(|live| !live.is_used);
        // A probe beside it becomes the connection, or is it already.
        if matches!(self.next, Next::Standby(..) | Next::Connecting(..)) {
            return self.take_standby();
        }
        let was_unused = std::mem::replace(&mut self.was_unused, is_unused);
        let lost_before = self.lost_at.replace(now);
        if is_unused && was_unused && !has_parked {
            // The server, or a proxy, closes idle connections: the next job opens one.
            self.next = Next::Resting(now + KEEPALIVE);
        } else if lost_before.is_some_and(|at| now - at < PROBE_PAUSE) {
            // The server, or a proxy, closes every connection at once.
            self.on_attempt_failed(now);
        } else {
            // A closed idle connection is no outage, so jobs wait for this attempt.
            self.start_attempt();
        }
        None
    }

    /// Ends the probe, because the live connection answers again. Returns the standby to use if it leads to another
    /// memory: the state of the node is that of the memory found last.
    #[must_use]
    pub(super) fn on_recovered(&mut self) -> Option<Live> {
        let live = self.live.as_ref()?;
        let Next::Standby(opened, _) = std::mem::replace(&mut self.next, Next::None) else {
            return None;
        };
        // The standby was admitted last, so the guard and callers know the node by its memory. With the restart guard off,
        // only the run id tells servers apart.
        let is_same =
            opened.check.generation == live.check.generation && opened.run_id == live.run_id;
        (!is_same).then_some(*opened)
    }

    /// Starts an attempt that is due. Returns the standby to use, if that is due.
    #[must_use]
    pub(super) fn on_timer(&mut self, now: Instant) -> Option<Live> {
        if self.next_timer().is_none_or(|due| due > now) {
            return None;
        }
        let standby = self.take_standby();
        if standby.is_none() {
            self.start_attempt();
        }
        standby
    }

    fn take_standby(&mut self) -> Option<Live> {
        match std::mem::replace(&mut self.next, Next::None) {
            Next::Standby(opened, _) => Some(*opened),
            next => {
                self.next = next;
                None
            }
        }
    }

    /// Returns the time limit of the next attempt. It is short once the usual time is known, so that a server is
    /// back soon after its recovery; every eighth attempt may take as long as the settings allow, because the
    /// server may have become slower.
    fn attempt_limit(&self) -> Duration {
        let longest = self.server.timeouts.connect;
        match self.last_took {
            Some(took) if self.attempts % 8 != 7 => PROBE_LIMIT.max(2 * took).min(longest),
            _ => longest,
        }
    }
}

/// Appends the replies that have arrived to `replies`; ready if there are any, or if the connection is lost behind them.
pub(super) fn poll_replies(
    live: &mut Option<Live>,
    context: &mut Context<'_>,
    replies: &mut Vec<Value>,
) -> Poll<Result<(), Arc<str>>> {
    let Some(live) = live else {
        return Poll::Pending;
    };
    // Until no more is there: the lane handles them together, which reads the clock and looks at its state once. They are
    // kept if the connection is lost behind them, because the server has executed what it answered.
    loop {
        match live.link.poll_reply(context) {
            Poll::Ready(Ok(reply)) => replies.push(reply),
            Poll::Ready(Err(why)) => return Poll::Ready(Err(why)),
            Poll::Pending if replies.is_empty() => return Poll::Pending,
            Poll::Pending => return Poll::Ready(Ok(())),
        }
    }
}

/// Waits for the end of an attempt, if one is under way.
pub(super) fn poll_attempt(
    next: &mut Next,
    context: &mut Context<'_>,
) -> Poll<Result<Live, Arc<str>>> {
    match next {
        Next::Connecting(opening, _) => opening.as_mut().poll(context),
        _ => Poll::Pending,
    }
}

/// Opens a connection and prepares it for lock commands, on the very connection that is kept.
///
/// It does not come out of the pool: the name may lead to another server since an idle connection was opened, and
/// that one may be dead.
async fn open(server: &RedisServer, began: Instant) -> Result<Live, Arc<str>> {
    let mut link = server.pool.manager().create().await?;
    // Before the admission, whose script is one of these.
    link.call_all(&load_all()).await?;
    let guard = server.guard.as_deref();
    let admission = match guard {
        Some(guard) => {
            let attempt = server.timeouts.connect + server.timeouts.node;
            guard.admit(&server.name, &mut link, attempt).await?
        }
        None => Admission::default(),
    };
    Ok(Live {
        link,
        run_id: admission.run_id,
        check: GenerationCheck {
            key: guard.and_then(|guard| guard.generation_key.clone()),
            generation: admission.generation,
        },
        left: admission.left,
        since: began,
        is_used: false,
        shares_from: began,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::node::redis::link::Socket;
    use crate::node::redis::server::tests::server;
    use crate::protocol::admission::Generation;

    const LIMIT: Duration = Duration::from_secs(1);

    /// Connects to a new server, which it returns too.
    pub(in super::super) async fn candidate() -> (Live, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap());
        let (client, server) = tokio::join!(client, listener.accept());
        let opened = Live {
            link: Link::Own(Box::new(Socket::new(Box::new(client.unwrap())))),
            run_id: None,
            check: GenerationCheck::default(),
            left: Duration::ZERO,
            since: Instant::now(),
            is_used: false,
            shares_from: Instant::now(),
        };
        (opened, server.unwrap().0)
    }

    fn is_connecting(connection: &Connection) -> bool {
        connection.live.is_none() && matches!(connection.next, Next::Connecting(..))
    }

    async fn live() -> Connection {
        let mut connection = Connection::new(&server());
        connection.replace(candidate().await.0);
        assert!(connection.live.is_some() && !connection.is_probing());
        connection
    }

    #[tokio::test]
    async fn a_lost_connection_is_opened_again_at_once_and_then_after_a_pause() {
        let mut connection = live().await;
        connection.live.as_mut().unwrap().is_used = true;
        let now = Instant::now();
        assert!(connection.on_lost(now, false).is_none());
        assert!(is_connecting(&connection));
        for (after, is_down) in [(PROBE_PAUSE / 2, true), (2 * PROBE_PAUSE, false)] {
            connection.replace(candidate().await.0);
            connection.live.as_mut().unwrap().is_used = true;
            assert!(connection.on_lost(now + after, false).is_none());
            assert_eq!(matches!(connection.next, Next::Paused(_)), is_down);
        }
    }

    #[tokio::test]
    async fn more_is_known_at_the_end_of_an_attempt() {
        let (mut first, mut probe) = (Connection::new(&server()), live().await);
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
        assert!(is_connecting(&connection));
        connection.replace(candidate().await.0);
        assert!(connection.on_lost(now + LIMIT, false).is_none());
        assert!(matches!(connection.next, Next::Resting(_)));
        assert_eq!(connection.next_timer(), Some(now + LIMIT + KEEPALIVE));
        connection.wake();
        assert!(is_connecting(&connection));
        connection.on_attempt_failed(now);
        connection.wake();
        assert!(matches!(connection.next, Next::Paused(_)));
    }

    #[tokio::test]
    async fn a_standby_replaces_a_live_connection_when_it_is_due_lost_or_given_up() {
        let now = Instant::now();
        let due = now + LIMIT;
        let ways: [fn(&mut Connection, Instant) -> Option<Live>; 3] = [
            |connection, due| connection.on_timer(due),
            |connection, due| connection.on_lost(due, false),
            |connection, _| connection.give_up(),
        ];
        for way in ways {
            let mut connection = live().await;
            connection.start_attempt();
            assert!(connection.live.is_some() && connection.is_probing());
            connection.stand_by(candidate().await.0, due);
            assert!(connection.on_timer(now).is_none());
            assert!(way(&mut connection, due).is_some());
        }
    }

    #[tokio::test]
    async fn a_recovered_connection_drops_a_standby_to_the_same_memory_only() {
        let other_memory = Generation::parse("r:1:1:run");
        for (run_id, generation, is_used) in [
            ("run", None, false),
            ("run", other_memory, true),
            // With the restart guard off.
            ("other", None, true),
        ] {
            let mut connection = Connection::new(&server());
            let mut live = candidate().await.0;
            live.run_id = Some("run".into());
            connection.replace(live);
            let mut standby = candidate().await.0;
            standby.run_id = Some(run_id.into());
            standby.check.generation = generation;
            connection.stand_by(standby, Instant::now());
            assert_eq!(connection.on_recovered().is_some(), is_used);
            assert!(connection.live.is_some() && !connection.is_probing());
        }
    }

    #[tokio::test]
    async fn a_connection_that_is_given_up_leaves_its_probe() {
        let mut connection = live().await;
        assert!(connection.give_up().is_none());
        assert!(is_connecting(&connection));
        connection.replace(candidate().await.0);
        connection.start_attempt();
        assert!(connection.give_up().is_none());
        assert!(is_connecting(&connection));
        connection.replace(candidate().await.0);
        let now = Instant::now();
        connection.on_attempt_failed(now);
        assert!(connection.live.is_some());
        assert!(connection.give_up().is_none());
        assert_eq!(connection.next_timer(), Some(now + PROBE_PAUSE));
        assert!(connection.on_timer(now + PROBE_PAUSE).is_none());
        assert!(is_connecting(&connection));
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
