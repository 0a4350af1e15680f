//! Requests that a handler sends on with its extensions, as batches and gateways do: each target is a request of its own.

use axum::Router;
use axum::extract::Request;
use axum::routing::post;
use support::{Answer, Executed, keyed_request, once, redlock};
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{IdempotencyLayer, Redlock};

use crate::payments::pay;

/// A router that sends each request on to all targets, with its extensions and its key, and answers what it got.
fn sending_on(within: &Router, targets: [&'static str; 2]) -> Router {
    let within = within.clone();
    let batch = async move |request: Request| {
        let key = request.headers()["idempotency-key"].clone();
        let mut answers = Vec::new();
        for target in targets {
            let mut call = keyed_request(http::Method::POST, target, key.as_bytes());
            *call.extensions_mut() = request.extensions().clone();
            let answer = Answer::to(&within, call).await;
            let replayed = if answer.is_replayed() { " again" } else { "" };
            let text = String::from_utf8(answer.body.to_vec()).unwrap();
            answers.push(format!("{} {text}{replayed}", answer.status.as_u16()));
        }
        answers.join(", ")
    };
    Router::new().route("/batch", post(batch))
}

/// The routers that may be within: with routes, with nested routers, and with a parameter before the nested router.
fn within(executed: &Executed, layer: &dyn Fn() -> IdempotencyLayer) -> Router {
    let executed = executed.clone();
    let handler = post(async move || format!("payment {}", executed.one_more()));
    let pay = || Router::new().route("/pay", handler.clone()).layer(layer());
    Router::new()
        .route("/credit", handler.clone())
        .route("/debit", handler.clone())
        .layer(layer())
        .nest("/v1", pay())
        .nest("/v2", pay())
        .nest("/tenants/{tenant}", pay())
}

#[tokio::test(start_paused = true)]
async fn requests_with_the_extensions_of_another_are_executed_per_target() {
    for targets in [
        ["/credit", "/debit"],
        ["/v1/pay", "/v2/pay"],
        ["/tenants/a/pay", "/tenants/b/pay"],
    ] {
        // Without a layer around the batch, and with one that executes the batch.
        for is_recorded in [false, true] {
            let (redlock, executed) = (redlock(&ScriptedNodes::new(3)), Executed::default());
            let within = within(&executed, &|| once(&redlock));
            let mut app = sending_on(&within, targets);
            if is_recorded {
                app = app.layer(once(&redlock));
            }
            let first = pay(&app, "/batch", "a").await;
            assert_eq!(first.body, "200 payment 1, 200 payment 2", "{targets:?}");
            let again = pay(&app, "/batch", "a").await;
            let expected = match is_recorded {
                true => "200 payment 1, 200 payment 2",
                false => "200 payment 1 again, 200 payment 2 again",
            };
            assert_eq!(
                (&again.body[..], executed.count()),
                (expected.as_bytes(), 2)
            );
        }
    }
}

/// The inner layer may be the same, or another with the same scope.
#[tokio::test(start_paused = true)]
async fn layer_within_an_execution_passes_its_own_request_through_and_executes_those_of_others_once()
 {
    let layer = |redlock: &Redlock, same: &IdempotencyLayer, is_same| {
        if is_same { same.clone() } else { once(redlock) }
    };
    for (is_same, expected) in [
        (true, "200 payment 1, 200 payment 2"),
        (false, "200 payment 1, 200 payment 1 again"),
    ] {
        let (redlock, executed) = (redlock(&ScriptedNodes::new(3)), Executed::default());
        let same = once(&redlock);
        let counted = executed.clone();
        let handler = post(async move || format!("payment {}", counted.one_more()));
        let inner = Router::new().route("/batch", handler);
        let inner = inner.layer(layer(&redlock, &same, is_same));
        let app = sending_on(&inner, ["/batch", "/batch"]).layer(same);
        let first = pay(&app, "/batch", "a").await;
        assert_eq!(first.body, expected, "{is_same}");
        assert!(pay(&app, "/batch", "a").await.is_replayed());
    }
}
