//! An idempotency layer, requests with a key, and routes below `/users` that count executions.

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderValue, Method};
use axum::routing::any;
use tower_redlock::{IdempotencyLayer, Redlock, scope};

use crate::executed::Executed;

/// Returns a layer whose scope is shared by all callers.
pub fn once(redlock: &Redlock) -> IdempotencyLayer {
    IdempotencyLayer::new(redlock.clone(), scope::public())
}

/// Returns a request with an idempotency key of any bytes that a header may have.
#[track_caller]
pub fn keyed_request(method: Method, target: &str, key: &[u8]) -> Request {
    let mut request = Request::new(Body::from("amount=5"));
    *request.method_mut() = method;
    *request.uri_mut() = target.parse().expect("the target is a URI");
    let key = HeaderValue::from_bytes(key).expect("the key is a header value");
    request.headers_mut().insert("idempotency-key", key);
    request
}

/// A service for all paths of one and of two segments below `/users`, and all below `/files`.
pub fn users(executed: &Executed, layer: IdempotencyLayer) -> Router {
    let executed = executed.clone();
    let pay = async move || format!("payment {}", executed.one_more());
    Router::new()
        .route("/users/{name}", any(pay.clone()))
        .route("/users/{name}/{more}", any(pay.clone()))
        .route("/files/{*path}", any(pay))
        .layer(layer)
}
