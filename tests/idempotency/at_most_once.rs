//! The intents of `at_most_once`: a request that ends before its execution withdraws them from every node,
//! however long a node was unreachable.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use http::StatusCode;
use support::{Cluster, Executed, Proxy, ms, once, secs, wait_until};
use tokio::time::{Instant, sleep, timeout};
use tower_redlock::test_util::{SimNetwork, SimRequest};
use tower_redlock::{Redlock, RestartGuard};

use crate::payments::{self, counts_begun};

const HOUR: Duration = secs(3600);

fn app(redlock: &Redlock, at_most_once: bool) -> Router {
    let layer = once(redlock).at_most_once(at_most_once);
    counts_begun(&Executed::default()).layer(layer)
}

async fn pay(app: &Router, key: &str) -> StatusCode {
    payments::pay(app, "/payments", key).await.status
}

/// A wire to nodes that are away: nothing is answered, and releases are kept, as a lane does.
#[derive(Debug, Default)]
struct Away {
    releases: Mutex<Vec<SimRequest>>,
    others: Mutex<Vec<SimRequest>>,
}

impl SimNetwork for Away {
    fn carry(&self, _node: usize, parcel: SimRequest) {
        let kept = match parcel.is_release() {
            true => &self.releases,
            false => &self.others,
        };
        kept.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(parcel);
    }
}

impl Away {
    /// Returns how many releases would still be sent, and of how many.
    fn wanted(&self, now: Instant) -> (usize, usize) {
        let releases = self.releases.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = releases.iter().filter(|parcel| parcel.is_wanted(now));
        (wanted.count(), releases.len())
    }
}

#[tokio::test(start_paused = true)]
async fn release_is_kept_as_long_as_the_intent_that_it_withdraws() {
    for (at_most_once, lives) in [(true, 24 * HOUR), (false, secs(20))] {
        let away = Arc::new(Away::default());
        let redlock = Redlock::builder()
            .simulated(3, Arc::clone(&away) as _)
            .build();
        let redlock = redlock.expect("the settings are valid");
        let began = Instant::now();
        // It is not granted; nor is one that its client does not wait for.
        let status = pay(&app(&redlock, at_most_once), "k").await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        let app = app(&redlock, at_most_once);
        let gone = timeout(ms(1), pay(&app, "l")).await;
        assert!(gone.is_err());
        sleep(secs(1)).await;
        let (wanted, of) = away.wanted(Instant::now());
        assert_eq!(wanted, of, "{:?}", began.elapsed());
        assert!(of >= 6, "{of}");
        assert_eq!(away.wanted(began + lives - HOUR.min(lives / 2)).0, of);
        assert_eq!(away.wanted(began + lives + HOUR).0, 0);
        // It is not waited for.
        let drained = timeout(secs(5), redlock.drain(HOUR)).await;
        assert!(
            drained.is_ok(),
            "the shutdown waits for nodes that are away"
        );
    }
}

#[tokio::test]
async fn request_that_ends_before_its_execution_leaves_no_intent_on_unreachable_nodes() {
    let cluster = Cluster::start(3);
    let wires = cluster.proxies().await;
    let ttl = ms(800);
    let redlock = Redlock::builder()
        .urls(wires.iter().map(Proxy::url))
        .ttl(ttl)
        // Long enough for a busy machine to cut the wires before the request is given up.
        .node_timeout(ms(700))
        .restart_guard(RestartGuard::Off)
        .build()
        .expect("the settings are valid");
    let app = app(&redlock, true);
    let deadline = support::Deadline::after(secs(10));
    while redlock.health().await.up() < 3 {
        assert!(!deadline.is_over(), "the nodes are not reached");
    }
    // The nodes carry it out, and their answers are lost.
    wires.iter().for_each(|wire| wire.delay(secs(60)));
    let asked = tokio::spawn({
        let app = app.clone();
        async move { pay(&app, "k").await }
    });
    let intents = || {
        let servers = cluster.servers.iter();
        servers.flat_map(|server| server.keys("*:intent")).count()
    };
    while intents() < 3 {
        assert!(!deadline.is_over(), "it is not asked for");
        sleep(ms(5)).await;
    }
    wires.iter().for_each(Proxy::cut);
    let status = asked.await.expect("it does not panic");
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    // The lock itself has certainly expired.
    sleep(3 * ttl).await;
    assert_eq!(intents(), 3);
    wires.iter().for_each(Proxy::pass);
    wait_until("rid of its intents", secs(10), || intents() == 0).await;
    assert_eq!(pay(&app, "k").await, StatusCode::OK);
}
