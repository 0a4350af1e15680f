//! Crowds of requests for one free key in a fault: none is told that another request holds it.

use axum::Router;
use axum::extract::Path;
use axum::routing::any;
use http::Method;
use support::{Answer, ms, once, redlock, request_with, secs, set_all, three_nodes};
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, sleep};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{LockKeys, LockResource, Locked, Redlock, RedlockLayer, key};

/// The resource that handlers lock by their signature.
#[derive(serde::Deserialize)]
struct Page(#[allow(dead_code, reason = "only its name is a key")] u32);

impl LockResource for Page {
    fn lock_keys(&self) -> LockKeys {
        LockKeys::from_iter([("page", "7")])
    }
}

async fn locked(_: Locked<Path<Page>>) {}

/// Returns all ways to lock a request.
fn apps(redlock: &Redlock) -> [(&'static str, Router); 7] {
    let layer = || RedlockLayer::new(redlock.clone(), ("page", key::path("id")));
    let handler = || any(async || sleep(ms(50)).await);
    let routed = |layer: RedlockLayer| Router::new().route("/pages/{id}", handler().layer(layer));
    let sharing = |method| routed(layer().shared_methods([method]));
    let extracted = Router::new().route("/pages/{id}", any(locked));
    let idempotent = Router::new().route("/pages/{id}", handler().layer(once(redlock)));
    [
        ("layer", routed(layer())),
        ("layer that waits", routed(layer().wait(ms(5)))),
        ("writers", sharing(Method::GET)),
        ("readers", sharing(Method::POST)),
        ("at most two", routed(layer().max_concurrent(2))),
        ("extractor", extracted.with_state(redlock.clone())),
        ("idempotency", idempotent),
    ]
}

/// Sends 16 equal requests at once.
async fn crowd(app: &Router) -> Vec<Answer> {
    let mut answers = JoinSet::new();
    for _ in 0..16 {
        let key = [("idempotency-key", "\"k\"")];
        let (app, request) = (app.clone(), request_with("POST", "/pages/7", &key));
        answers.spawn(async move { Answer::to(&app, request).await });
    }
    answers.join_all().await
}

// Rules: http.queue, lock-unavailable
#[tokio::test(start_paused = true)]
async fn crowd_in_an_outage_gets_503_and_never_that_the_key_is_held() {
    for gate in [Gate::Never, Gate::Failing, Gate::Down] {
        let (nodes, redlock) = three_nodes();
        for (name, app) in apps(&redlock) {
            (1..3).for_each(|node| nodes.set(node, gate));
            let began = Instant::now();
            for answer in crowd(&app).await {
                let told = answer.told();
                assert_eq!(told, (503, "lock-unavailable"), "{name}, {gate:?}");
            }
            assert!(began.elapsed() <= ms(55), "{name}: {:?}", began.elapsed());
            (1..3).for_each(|node| nodes.set(node, Gate::Ready));
            sleep(secs(30)).await;
        }
    }
}

/// Each of two services is nearer to one of the two nodes that work, so their votes are split, and the silent node would have
/// to decide.
// Rules: lock.tie
#[tokio::test(start_paused = true)]
async fn crowds_at_two_services_beside_a_silent_node_have_a_winner() {
    for third in [Gate::Never, Gate::Down, Gate::Slow(ms(60))] {
        for kind in ["layer", "idempotency"] {
            for _ in 0..20 {
                let nodes = ScriptedNodes::new(3);
                nodes.set(2, third);
                let mut answers = JoinSet::new();
                for near in 0..2 {
                    nodes.set(near, Gate::Slow(ms(1)));
                    nodes.set(1 - near, Gate::Slow(ms(3)));
                    let apps = apps(&redlock(&nodes));
                    let (_, app) = apps.into_iter().find(|app| app.0 == kind).unwrap();
                    answers.spawn(async move { crowd(&app).await });
                    // It asks its nodes before they change.
                    for _ in 0..50 {
                        yield_now().await;
                    }
                }
                let answers = answers.join_all().await.concat();
                let granted = answers.iter().any(|answer| answer.status == 200);
                assert!(granted, "{third:?}, {kind}: {}", answers[0].code());
            }
        }
    }
}

// Rules: http.queue
#[tokio::test(start_paused = true)]
async fn one_late_attempt_refuses_no_other_request_that_waits() {
    let (nodes, redlock) = three_nodes();
    let layer = RedlockLayer::new(redlock, ("page", key::path("id"))).wait(secs(2));
    let app = Router::new().route("/pages/{id}", any(async || ()).layer(layer));
    set_all(&nodes, OpKind::Acquire, Gate::Slow(ms(55)));
    let answers = tokio::spawn(async move { crowd(&app).await });
    sleep(ms(1)).await;
    set_all(&nodes, OpKind::Acquire, Gate::Ready);
    let answers = answers.await.unwrap();
    let refused = answers.iter().filter(|answer| answer.status == 503);
    assert_eq!(refused.count(), 1);
}
