//! Every real server gets a copy of a record.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use axum::routing::post;
use support::{Cluster, secs, wait_until};
use tower::ServiceExt;
use tower_redlock::{IdempotencyLayer, Redlock, RestartGuard, scope};

const LONGEST: Duration = secs(5);

fn redlock(cluster: &Cluster) -> Redlock {
    let builder = Redlock::builder().urls(cluster.urls());
    // Not what is tested: a busy machine may be slow.
    let builder = builder.node_timeout(secs(1));
    let builder = builder.restart_guard(RestartGuard::Off);
    builder.build().expect("the settings are valid")
}

fn app(layer: IdempotencyLayer) -> Router {
    let pay = post(async || "paid");
    Router::new().route("/payments", pay).layer(layer)
}

/// Sends a payment, and returns whether it was replayed and whether it is said to be unrecorded.
async fn pay(app: &Router) -> (bool, bool) {
    let request = Request::post("/payments").header("idempotency-key", "a");
    let request = request
        .body(Body::empty())
        .expect("the request is well-formed");
    let response = app.clone().oneshot(request).await;
    let response = response.unwrap_or_else(|never| match never {});
    assert_eq!(response.status(), StatusCode::OK);
    let is = |name, value| response.headers().get(name).is_some_and(|v| v == value);
    (
        is("idempotency-replayed", "true"),
        is("idempotency-recorded", "false"),
    )
}

/// Waits until every server has the record.
async fn recorded_everywhere(cluster: &Cluster) {
    wait_until("recorded everywhere", LONGEST, || {
        cluster.servers.iter().all(|s| !s.keys("*:done").is_empty())
    })
    .await;
}

#[tokio::test]
async fn replay_restores_the_record_on_a_flushed_server() {
    let cluster = Cluster::start(3);
    let app = app(IdempotencyLayer::new(redlock(&cluster), scope::public()));
    assert_eq!(pay(&app).await, (false, false));
    recorded_everywhere(&cluster).await;
    for server in &cluster.servers {
        server.command(&["FLUSHALL"]);
        assert_eq!(pay(&app).await, (true, false));
        recorded_everywhere(&cluster).await;
    }
}

#[tokio::test]
async fn retention_of_zero_and_duration_max_is_accepted_by_redis() {
    for retention in [Duration::ZERO, Duration::MAX] {
        let cluster = Cluster::start(3);
        let layer = IdempotencyLayer::new(redlock(&cluster), scope::public());
        let paid = pay(&app(layer.retention(retention))).await;
        assert_eq!(paid, (false, false), "{retention:?}");
    }
}
