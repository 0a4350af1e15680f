//! The intents of `at_most_once`: a request that ends before its execution withdraws them from every node,
//! however long a node was unreachable.

use axum::http::StatusCode;
use support::{Cluster, Executed, Proxy, ms, once, secs, until_all_up, wait_until};
use tokio::time::sleep;
use tower_redlock::{Redlock, RestartGuard};

use crate::payments::{counts_begun, pay};

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
    let layer = once(&redlock).at_most_once(true);
    let app = counts_begun(&Executed::default()).layer(layer);
    until_all_up(&redlock, secs(10)).await;
    // The nodes carry it out, and their answers are lost.
    wires.iter().for_each(|wire| wire.delay(secs(60)));
    let intents = || {
        let servers = cluster.servers.iter();
        servers.flat_map(|server| server.keys("*:intent")).count()
    };
    let (refused, ()) = tokio::join!(pay(&app, "/payments", "k"), async {
        wait_until("asked for", secs(10), || intents() == 3).await;
        wires.iter().for_each(Proxy::cut);
    });
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    // The lock itself has certainly expired.
    sleep(3 * ttl).await;
    assert_eq!(intents(), 3);
    wires.iter().for_each(Proxy::pass);
    wait_until("rid of its intents", secs(10), || intents() == 0).await;
    assert_eq!(pay(&app, "/payments", "k").await.status, StatusCode::OK);
}
