//! The restart guard on real servers: a server that lost its memory votes only after its locks have expired.

use std::time::Duration;

use axum::Router;
use axum::routing::post;
use futures_util::future::join_all;
use http::StatusCode;
use support::{
    Cluster, RedisServer, assert_matches, lock_and_release, ms, not_run, once, secs, send, until,
    until_all_up,
};
use tower_redlock::{
    Health, LockError, NodeFailure, NodeHealth, NodeState, Redlock, health_router,
};

use crate::patient::{failures, guarded, pay};

/// The window, and one more: servers tell their uptime in whole seconds.
const LONGEST: Duration = secs(6);

fn redlock(cluster: &Cluster) -> Redlock {
    guarded(cluster.urls()).build().unwrap()
}

/// Waits until all nodes may vote.
async fn admitted(redlock: &Redlock) {
    until_all_up(redlock, LONGEST).await;
}

/// Waits until a majority may vote.
async fn with_quorum(redlock: &Redlock) {
    wait_until(redlock, Health::has_quorum).await;
}

async fn wait_until(redlock: &Redlock, holds: impl Fn(&Health) -> bool) {
    until("admitted", LONGEST, || async {
        holds(&redlock.health().await)
    })
    .await;
}

fn flush_majority(cluster: &Cluster) {
    for server in &cluster.servers[..2] {
        server.command(&["FLUSHALL"]);
    }
}

fn is_out(node: &NodeHealth) -> bool {
    matches!(node.state, NodeState::Quarantined { .. })
}

/// Returns how many nodes did not vote because they are quarantined.
fn quarantined(refused: &LockError) -> usize {
    let is_quarantined = |node: &&NodeFailure| matches!(node, NodeFailure::Quarantined { .. });
    failures(refused).iter().filter(is_quarantined).count()
}

/// All that a load balancer can be told, in the order in which a cluster may come to it.
#[tokio::test]
async fn health_router_goes_from_quarantined_to_ready_degraded_and_down() {
    let mut cluster = Cluster::start(3);
    let redlock = redlock(&cluster);
    let health = health_router(redlock.clone());
    let states = ready_until(&health, "quarantined", StatusCode::SERVICE_UNAVAILABLE).await;
    assert_eq!(states, ["quarantined"; 3]);

    let states = ready_until(&health, "ready", StatusCode::OK).await;
    assert_eq!(states, ["up"; 3]);

    cluster.servers[0].kill();
    let states = ready_until(&health, "degraded", StatusCode::OK).await;
    assert_eq!(states, ["unreachable", "up", "up"]);
    assert!(redlock.try_lock("degraded").await.is_ok());

    // It answers again and does not vote: with one that does not answer there is no majority.
    cluster.servers[0].restart();
    cluster.servers[1].kill();
    let states = ready_until(&health, "quarantined", StatusCode::SERVICE_UNAVAILABLE).await;
    assert_eq!(states, ["quarantined", "unreachable", "up"]);
    let refused = redlock.try_lock("quarantined").await.unwrap_err();
    assert_eq!(quarantined(&refused), 1, "{refused:?}");

    cluster.servers[2].kill();
    let states = ready_until(&health, "down", StatusCode::SERVICE_UNAVAILABLE).await;
    assert_eq!(states, ["quarantined", "unreachable", "unreachable"]);
    let refused = redlock.try_lock("down").await.unwrap_err();
    assert_matches!(refused, LockError::Unavailable { .. });
}

/// Asks until the readiness is this one, and returns the nodes' states.
async fn ready_until(health: &Router, readiness: &str, code: StatusCode) -> Vec<String> {
    let asking = async {
        loop {
            let answer = send(health, "GET", "/").await;
            let body = answer.json();
            if body["status"] == readiness {
                assert_eq!(
                    (answer.status, &body["quorum"]),
                    (code, &(code == 200).into())
                );
                return body;
            }
            tokio::time::sleep(ms(20)).await;
        }
    };
    let asked = tokio::time::timeout(LONGEST, asking).await;
    let body = asked.unwrap_or_else(|_| panic!("not {readiness} after {LONGEST:?}"));
    let nodes = body["nodes"].as_array().expect("there are nodes");
    let states = nodes.iter().filter_map(|node| node["state"].as_str());
    states.map(str::to_owned).collect()
}

// Rules: guard.connection
#[tokio::test]
async fn restarted_node_is_quarantined_while_the_others_grant() {
    let mut cluster = Cluster::start(3);
    let redlock = redlock(&cluster);
    admitted(&redlock).await;
    cluster.servers[0].kill();
    cluster.servers[0].restart();
    // An idle connection is seen to be broken when it is used.
    redlock.health().await;
    tokio::time::sleep(ms(300)).await;
    let state = redlock.health().await.nodes[0].state.clone();
    assert_matches!(state, NodeState::Quarantined { .. });
    lock_and_release(&redlock, "k").await;
    let was_asked = cluster.servers[0].exists("redlock:{k}:fence");
    assert!(!was_asked, "it was asked for a vote");
    admitted(&redlock).await;
}

/// Also without fencing, where a single key needs no script, and of readers.
// Rules: node.memory, shared.memory
#[tokio::test]
async fn flushed_majority_is_detected_on_open_connections() {
    let rows = [
        (true, &["k"][..], false),
        (false, &["k"], false),
        (false, &["k", "l"], false),
        (true, &["k"], true),
    ];
    let detected = rows.map(async |(fencing, keys, shares)| {
        let what = format!("{keys:?}, fencing: {fencing}, shared: {shares}");
        let cluster = Cluster::start(3);
        let build = || guarded(cluster.urls()).fencing(fencing).build().unwrap();
        let (ours, theirs) = (build(), build());
        admitted(&ours).await;
        admitted(&theirs).await;
        let ask = |redlock: &Redlock| {
            let lock = redlock.lock_all(keys.iter().copied());
            if shares { lock.shared() } else { lock }
        };
        let guard = ask(&ours).await.unwrap();
        flush_majority(&cluster);
        let refused = ask(&theirs).wait(Duration::ZERO).await.expect_err(&what);
        assert!(quarantined(&refused) >= 1, "{what}: {refused:?}");
        assert!(guard.is_valid());
        guard.lost().await;
        admitted(&theirs).await;
        lock_and_release(&theirs, "k").await;
    });
    join_all(detected).await;
}

/// Three nodes, and a fourth server that one of them may replicate, if servers may.
fn three_and_a_master() -> Option<(Cluster, Redlock)> {
    let cluster = Cluster::start(4);
    if cluster.servers[0].is_in_cluster_mode() {
        not_run("a replica: REPLICAOF is not allowed in cluster mode");
        return None;
    }
    let redlock = guarded(cluster.urls().into_iter().take(3)).build();
    Some((cluster, redlock.unwrap()))
}

// Rules: guard.replica
#[tokio::test]
async fn replica_does_not_vote() {
    let Some((cluster, redlock)) = three_and_a_master() else {
        return;
    };
    let master = cluster.servers[3].port().to_string();
    cluster.servers[0].command(&["REPLICAOF", "127.0.0.1", &master]);
    with_quorum(&redlock).await;
    lock_and_release(&redlock, "k").await;
    let state = redlock.health().await.nodes[0].state.clone();
    let NodeState::Unreachable { why, .. } = state else {
        panic!("{state:?}");
    };
    assert!(why.contains("slave") && why.contains("masters"), "{why}");
}

// Rules: guard.replica
#[tokio::test]
async fn promoted_replica_is_quarantined() {
    let Some((cluster, redlock)) = three_and_a_master() else {
        return;
    };
    admitted(&redlock).await;
    let server = &cluster.servers[0];
    cluster.servers[3].command(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]);
    let master = cluster.servers[3].port().to_string();
    server.command(&["REPLICAOF", "127.0.0.1", &master]);
    // Until it has the other's data, and with it no generation of its own.
    let has_synced = || {
        let info = server.command(&["INFO", "replication"]);
        info.as_str().unwrap().contains("master_link_status:up")
    };
    support::wait_until("synced", secs(15), has_synced).await;
    server.command(&["REPLICAOF", "NO", "ONE"]);
    tokio::time::sleep(ms(300)).await;
    lock_and_release(&redlock, "k").await;
    tokio::time::sleep(ms(400)).await;
    let state = redlock.health().await.nodes[0].state.clone();
    assert_matches!(state, NodeState::Quarantined { .. });
}

// Rules: guard.info
#[tokio::test]
async fn server_without_info_rights_does_not_vote_and_reports_the_reason() {
    let server = RedisServer::start();
    server.command(&["ACL", "SETUSER", "default", "-info"]);
    let redlock = guarded([server.url()]).build().unwrap();
    let refused = redlock.try_lock("k").await.unwrap_err().to_string();
    let addr = server.addr().to_string();
    for said in ["INFO was refused", &addr, "its user needs", "+info"] {
        assert!(refused.contains(said), "{said}: {refused}");
    }
}

/// What such a node has is a record; what it does not have may have been forgotten.
// Rules: guard.quarantine
#[tokio::test]
async fn quarantined_node_is_still_asked_for_records() {
    let mut cluster = Cluster::start(3);
    let redlock = redlock(&cluster);
    admitted(&redlock).await;
    let app = Router::new().route("/", post(async || "executed"));
    let app = app.layer(once(&redlock));
    let pay = async |key: &str| {
        let answer = pay(&app, key).await;
        (answer.status, answer.is_replayed())
    };
    assert_eq!(pay("a").await, (StatusCode::OK, false));
    let has_record = |server: &RedisServer| server.keys("*:done").len() == 1;
    wait_until(&redlock, |_| cluster.servers.iter().all(has_record)).await;

    // Their memory as a whole: a process that forgot which one it is cannot tell what else it forgot.
    for server in &cluster.servers[..2] {
        server.command(&["DEL", "redlock:generation"]);
    }
    assert_eq!(pay("b").await.0, StatusCode::SERVICE_UNAVAILABLE);
    wait_until(&redlock, |health| health.nodes[..2].iter().all(is_out)).await;
    cluster.servers[2].kill();
    // What is on its way while such a node gets its new connection is lost, and is no answer.
    let mut again = pay("a").await;
    for _ in 0..5 {
        if again.0 == StatusCode::SERVICE_UNAVAILABLE {
            again = pay("a").await;
        }
    }
    assert_eq!(again, (StatusCode::OK, true));
    assert_eq!(pay("c").await.0, StatusCode::SERVICE_UNAVAILABLE);
    let fences = cluster.servers[0].keys("*:fence");
    assert_eq!(fences.len(), 1, "it was asked for a vote: {fences:?}");
}
