//! Tests of the transitions between the states of a connection.

use tokio::net::{TcpListener, TcpStream};
use tokio::time::advance;

use super::*;
use crate::node::redis::link::Link;
use crate::node::redis::server::tests::server;

const LIMIT: Duration = Duration::from_secs(1);

/// Connects to a new server, which it returns too.
pub(in super::super) async fn candidate() -> (Live, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap());
    let (client, server) = tokio::join!(client, listener.accept());
    let opened = Live {
        link: Link::new(client.unwrap()),
        check: GenerationCheck::default(),
        quarantined_until: None,
        since: Instant::now(),
        sent: Instant::now(),
        shares_from: Instant::now(),
    };
    (opened, server.unwrap().0)
}

fn is_connecting(lane: &Lane) -> bool {
    lane.live.is_none() && matches!(lane.next, Some(Next::Connecting(..)))
}

fn is_paused(lane: &Lane) -> bool {
    matches!(lane.next, Some(Next::Paused(_)))
}

impl Lane {
    /// Uses a connection to a new server.
    async fn adopt_new(&mut self) {
        self.adopt(candidate().await.0);
        assert!(self.live.is_some() && self.next.is_none());
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
    lane.lose();
    assert!(is_connecting(&lane));
    for (after, is_down) in [(PROBE_PAUSE / 2, true), (2 * PROBE_PAUSE, false)] {
        lane.adopt_new().await;
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
async fn a_standby_replaces_a_live_connection_when_it_is_due_or_lost() {
    for way in [Lane::on_timer, Lane::lose] {
        let mut lane = live().await;
        lane.start_attempt();
        assert!(lane.live.is_some() && lane.next.is_some());
        let mut standby = candidate().await.0;
        standby.check.generation = Some("r:1:1:standby".into());
        lane.next = Some(Next::Standby(Box::new(standby), Instant::now() + LIMIT));
        lane.on_timer();
        assert!(lane.next.is_some());
        advance(LIMIT).await;
        way(&mut lane);
        let live = lane.live.as_ref().unwrap();
        assert!(live.check.generation.is_some());
    }
}

#[tokio::test]
async fn a_recovered_connection_drops_a_standby_to_the_same_memory_only() {
    for (generation, is_used) in [("r:1:1:run", false), ("r:2:1:run", true)] {
        let mut lane = Lane::new(server());
        let mut live = candidate().await.0;
        live.check.generation = Some("r:1:1:run".into());
        lane.adopt(live);
        let mut standby = candidate().await.0;
        standby.check.generation = Some(generation.into());
        lane.next = Some(Next::Standby(Box::new(standby), Instant::now()));
        assert_eq!(lane.on_recovered(), !is_used);
        assert!(lane.live.is_some() && lane.next.is_none());
    }
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
