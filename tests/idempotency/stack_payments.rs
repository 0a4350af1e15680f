//! Payments with a body, and handlers that answer them.

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::request::Builder;
use axum::response::IntoResponse;
use axum::routing::{any, post};
use support::{Answer, Executed, redlock, secs};
use tokio::time::sleep;
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{IdempotencyLayer, scope};

pub(crate) fn layer(nodes: &ScriptedNodes) -> IdempotencyLayer {
    IdempotencyLayer::new(redlock(nodes), scope::public())
}

pub(crate) fn payment(target: &str, key: &str) -> Builder {
    Request::post(target).header(KEY, key)
}

pub(crate) async fn pay(app: &Router, key: &str) -> Answer {
    let request = payment("/payments", key).body(Body::from("amount=5"));
    Answer::to(app, request.expect("it is a request")).await
}

/// A service that answers each payment with the same function.
pub(crate) fn answering<R: IntoResponse>(
    executed: &Executed,
    answer: impl Fn() -> R + Clone + Send + Sync + 'static,
) -> Router {
    let executed = executed.clone();
    let pay = async move || {
        executed.one_more();
        answer().into_response()
    };
    Router::new().route("/payments", any(pay))
}

/// A service that takes its time.
pub(crate) fn slow(executed: &Executed) -> Router {
    let executed = executed.clone();
    let pay = async move || {
        sleep(secs(2)).await;
        format!("payment {}", executed.one_more())
    };
    Router::new().route("/payments", post(pay))
}

pub(crate) const KEY: &str = "idempotency-key";
