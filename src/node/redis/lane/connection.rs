//! The connection of a lane: the transitions between its states.
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

use std::sync::Arc;
use std::time::Duration;

use deadpool::managed::Manager;
use tokio::time::{Instant, timeout};

use crate::node::redis::describe::describe_timeout;
use crate::node::redis::lane::state::{KEEPALIVE, Lane, Live, Next, PROBE_PAUSE};
use crate::node::redis::server::RedisServer;
use crate::node::redis::table::load_all;

/// The minimum time limit of an attempt. With the pause, it bounds how long after its recovery a server is back that
/// was reached before.
const PROBE_LIMIT: Duration = Duration::from_millis(500);

impl Lane {
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

    pub(super) fn on_attempted(&mut self, attempted: Result<Live, Arc<str>>) {
        let now = Instant::now();
        match attempted {
            Ok(opened) if self.is_silent() => {
                let until = now + self.server.timeouts.node;
                self.next = Next::Standby(Box::new(opened), until);
            }
            Ok(opened) => self.adopt(opened),
            Err(why) => {
                self.server.set_down(&why);
                self.next = Next::Paused(now + PROBE_PAUSE);
                if self.server.duplicate().is_some() {
                    // Gives up the connection to a server that is another node too, after which the other node may vote.
                    // This node is admitted again before it does.
                    self.live = None;
                    self.park_in_flight(&why);
                    self.server.guard.forget(&self.server.name);
                }
                self.refuse_parked();
            }
        }
    }

    /// Uses a new connection from now on. Unconfirmed releases and records are sent again.
    pub(super) fn adopt(&mut self, mut opened: Live) {
        self.park_in_flight(&"replaced by a new connection".into());
        let now = Instant::now();
        // With its admission, because the next attempt is measured with that as well.
        self.last_took = Some(now - opened.since);
        self.attempts = 0;
        opened.since = now;
        let left = opened.admission.left;
        self.live = Some(opened);
        self.next = Next::None;
        if left.is_zero() {
            self.server.set_up();
        } else {
            self.server.set_quarantined(left);
        }
        // Jobs that waited for a server which turns out to be quarantined.
        self.refuse_parked();
        self.send_parked();
    }

    /// Uses the standby, and returns whether there was one.
    pub(super) fn adopt_standby(&mut self) -> bool {
        match std::mem::replace(&mut self.next, Next::None) {
            Next::Standby(opened, _) => {
                self.adopt(*opened);
                true
            }
            next => {
                self.next = next;
                false
            }
        }
    }

    /// Ends the live connection in favour of the next one.
    pub(super) fn give_up(&mut self, why: &Arc<str>) {
        self.park_in_flight(why);
        self.live = None;
        // Without a live connection there always is a next one. A probe that has been planned already stays as it is, with
        // its pause: the server has not become easier to reach.
        if matches!(self.next, Next::None) {
            self.start_attempt();
        }
        self.adopt_standby();
    }

    pub(super) fn on_lost(&mut self, why: &Arc<str>) {
        self.park_in_flight(why);
        let now = Instant::now();
        let is_unused = self.live.take().is_some_and(|live| !live.is_used);
        // A probe beside it becomes the connection, or is it already.
        if self.adopt_standby() || matches!(self.next, Next::Connecting(..)) {
            return;
        }
        let was_unused = std::mem::replace(&mut self.was_unused, is_unused);
        let lost_before = self.lost_at.replace(now);
        if is_unused && was_unused && self.parked.is_empty() {
            // The server, or a proxy, closes idle connections: the next job opens one.
            self.next = Next::Resting(now + KEEPALIVE);
        } else if lost_before.is_some_and(|at| now - at < PROBE_PAUSE) {
            // The server, or a proxy, closes every connection at once.
            self.next = Next::Paused(now + PROBE_PAUSE);
        } else {
            // A closed idle connection is no outage, so jobs wait for this attempt.
            self.start_attempt();
        }
    }

    /// Ends the probe, because the live connection answers again. Returns whether that stays: not if the standby leads to
    /// another memory, because the state of the node is that of the memory found last.
    pub(super) fn on_recovered(&mut self) -> bool {
        // The standby was admitted last, so the guard and callers know the node by its memory.
        if let (Some(live), Next::Standby(opened, _)) = (&self.live, &self.next)
            && opened.admission.check.generation != live.admission.check.generation
        {
            return !self.adopt_standby();
        }
        self.next = Next::None;
        self.server.set_answering();
        true
    }

    /// Returns when more is known of a server that is down or must not vote, at the latest: the next attempt begins, or the
    /// current one ends.
    pub(super) fn knows_more_at(&self) -> Option<Instant> {
        match &self.next {
            Next::Connecting(_, ends_at) => Some(*ends_at),
            _ => self.next_due().or_else(|| self.recheck_at()),
        }
    }

    /// Returns the time limit of the next attempt. It is short once the usual time is known, so that a server is
    /// back soon after its recovery; every eighth attempt may take as long as the settings allow, because the
    /// server may have become slower.
    fn attempt_limit(&self) -> Duration {
        let longest = self.server.timeouts.connect;
        let connecting = match self.last_took {
            Some(took) if self.attempts % 8 != 7 => PROBE_LIMIT.max(2 * took).min(longest),
            _ => longest,
        };
        // Added, so that a provider of credentials is given up first: that error names it.
        connecting + self.server.pool.manager().login_limit()
    }
}

/// Opens a connection and prepares it for lock commands, on the very connection that is kept.
///
/// It does not come out of the pool: the name may lead to another server since an idle connection was opened, and
/// that one may be dead.
async fn open(server: &RedisServer, began: Instant) -> Result<Live, Arc<str>> {
    let mut link = server.pool.manager().create().await?;
    // Before the admission, whose script is one of these.
    link.call_all(&load_all(false)).await?;
    let attempt = server.timeouts.connect + server.timeouts.node;
    let admission = server.guard.admit(&server.name, &mut link, attempt).await?;
    if admission.check.in_cluster_mode {
        link.call_all(&load_all(true)).await?;
    }
    Ok(Live {
        link,
        admission,
        since: began,
        is_used: false,
        shares_from: began,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use tokio::net::{TcpListener, TcpStream};
    use tokio::time::advance;

    use super::*;
    use crate::node::redis::guard::Admission;
    use crate::node::redis::link::Link;
    use crate::node::redis::server::tests::server;
    use crate::protocol::admission::Generation;

    const LIMIT: Duration = Duration::from_secs(1);

    /// Connects to a new server, which it returns too.
    pub(in super::super) async fn candidate() -> (Live, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap());
        let (client, server) = tokio::join!(client, listener.accept());
        let opened = Live {
            link: Link::new(client.unwrap()),
            admission: Admission::default(),
            since: Instant::now(),
            is_used: false,
            shares_from: Instant::now(),
        };
        (opened, server.unwrap().0)
    }

    fn is_connecting(lane: &Lane) -> bool {
        lane.live.is_none() && matches!(lane.next, Next::Connecting(..))
    }

    fn is_paused(lane: &Lane) -> bool {
        matches!(lane.next, Next::Paused(_))
    }

    impl Lane {
        /// Uses a connection to a new server.
        async fn adopt_new(&mut self) {
            self.adopt(candidate().await.0);
            assert!(self.live.is_some() && !self.is_probing());
        }

        fn lose(&mut self) {
            self.on_lost(&"lost".into());
        }
    }

    async fn live() -> Lane {
        let mut lane = Lane::new(server());
        lane.adopt_new().await;
        lane
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_connection_is_opened_again_at_once_and_then_after_a_pause() {
        let mut lane = live().await;
        lane.live.as_mut().unwrap().is_used = true;
        lane.lose();
        assert!(is_connecting(&lane));
        for (after, is_down) in [(PROBE_PAUSE / 2, true), (2 * PROBE_PAUSE, false)] {
            lane.adopt_new().await;
            lane.live.as_mut().unwrap().is_used = true;
            advance(after).await;
            lane.lose();
            assert_eq!(is_paused(&lane), is_down);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn more_is_known_at_the_end_of_an_attempt() {
        let (mut first, mut probe) = (Lane::new(server()), live().await);
        assert_eq!(probe.knows_more_at(), None);
        for lane in [&mut first, &mut probe] {
            lane.start_attempt();
            let at = lane.knows_more_at().unwrap();
            assert!(Instant::now() < at && at <= Instant::now() + LIMIT);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_lost_twice_without_use_rests_until_a_job_wakes_it() {
        let mut lane = live().await;
        lane.lose();
        lane.wake();
        assert!(is_connecting(&lane));
        lane.adopt_new().await;
        advance(LIMIT).await;
        lane.lose();
        assert!(matches!(lane.next, Next::Resting(_)));
        assert_eq!(lane.next_due(), Some(Instant::now() + KEEPALIVE));
        lane.wake();
        assert!(is_connecting(&lane));
        lane.on_attempted(Err("refused".into()));
        lane.wake();
        assert!(is_paused(&lane));
    }

    #[tokio::test(start_paused = true)]
    async fn a_standby_replaces_a_live_connection_when_it_is_due_lost_or_given_up() {
        let ways: [fn(&mut Lane); 3] = [Lane::on_timer, Lane::lose, |lane| {
            lane.give_up(&"given up".into())
        }];
        for way in ways {
            let mut lane = live().await;
            lane.start_attempt();
            assert!(lane.live.is_some() && lane.is_probing());
            let mut standby = candidate().await.0;
            standby.admission.check.generation = Generation::parse("r:1:1:standby");
            lane.next = Next::Standby(Box::new(standby), Instant::now() + LIMIT);
            lane.on_timer();
            assert!(lane.is_probing());
            advance(LIMIT).await;
            way(&mut lane);
            let live = lane.live.as_ref().unwrap();
            assert!(live.admission.check.generation.is_some());
        }
    }

    #[tokio::test]
    async fn a_recovered_connection_drops_a_standby_to_the_same_memory_only() {
        for (generation, is_used) in [("r:1:1:run", false), ("r:2:1:run", true)] {
            let mut lane = Lane::new(server());
            let mut live = candidate().await.0;
            live.admission.check.generation = Generation::parse("r:1:1:run");
            lane.adopt(live);
            let mut standby = candidate().await.0;
            standby.admission.check.generation = Generation::parse(generation);
            lane.next = Next::Standby(Box::new(standby), Instant::now());
            assert_eq!(lane.on_recovered(), !is_used);
            assert!(lane.live.is_some() && !lane.is_probing());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_is_given_up_leaves_its_probe() {
        let give_up = |lane: &mut Lane| lane.give_up(&"given up".into());
        let mut lane = live().await;
        give_up(&mut lane);
        assert!(is_connecting(&lane));
        lane.adopt_new().await;
        lane.start_attempt();
        give_up(&mut lane);
        assert!(is_connecting(&lane));
        lane.adopt_new().await;
        lane.on_attempted(Err("refused".into()));
        assert!(lane.live.is_some());
        give_up(&mut lane);
        assert_eq!(lane.next_due(), Some(Instant::now() + PROBE_PAUSE));
        advance(PROBE_PAUSE).await;
        lane.on_timer();
        assert!(is_connecting(&lane));
    }

    #[tokio::test]
    async fn every_eighth_attempt_may_take_as_long_as_connecting_may() {
        let mut lane = live().await;
        let mut limits = Vec::new();
        for _ in 0..9 {
            limits.push(lane.attempt_limit() == LIMIT);
            lane.start_attempt();
        }
        let longest = limits.iter().position(|is_longest| *is_longest);
        assert_eq!((longest, limits[8]), (Some(7), false));
    }
}
