//! Tests of handlers that lock: without Redis, without a server, and without real delays.
//!
//! The tests are at the end of this file; `cargo run` serves the tested router. They need the features
//! `test-util` of tokio, for `start_paused`, and `util` of tower, for `oneshot`. A paused clock advances
//! only when all tasks are idle, and then at once: an hour of waiting takes no time.
//!
//! ```not_rust
//! cargo test --example testing_your_handlers
//! test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s
//! ```

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::time::Duration;

use axum::Router;
use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde::Deserialize;
use tokio::net::TcpListener;
use tower_redlock::{
    LockHandle, LockKey, LockKeys, LockResource, Locked, OnLost, Redlock, RedlockLayer, key,
};

#[derive(Debug, Deserialize)]
struct OrderId(u64);

impl LockResource for OrderId {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from(("order", self.0)).into()
    }
}

/// Builds everything except the nodes, so that a test can use its own.
fn app(redlock: Redlock) -> Router {
    let one_at_a_time = RedlockLayer::new(redlock.clone(), ("report", key::path("id")))
        .max_hold(Duration::from_secs(30))
        .on_lost(OnLost::Notify);
    Router::new()
        .route("/reports/{id}", post(report).layer(one_at_a_time))
        .route("/orders/{id}/ship", post(ship))
        .with_state(redlock)
}

async fn ship(Locked(guard, Path(id)): Locked<Path<OrderId>>) -> Response {
    let response = format!("order {} is shipped\n", id.0).into_response();
    guard.hold_until_sent(response).into_response()
}

async fn report(lock: LockHandle) -> Result<&'static str, (StatusCode, String)> {
    tokio::select! {
        () = tokio::time::sleep(Duration::from_secs(60)) => Ok("60 pages"),
        reason = lock.lost() => Err((StatusCode::SERVICE_UNAVAILABLE, reason.to_string())),
    }
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    println!("Listening on http://127.0.0.1:3000. Ctrl-C stops it.");
    axum::serve(listener, app(Redlock::in_memory(3))).await
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};
    use axum::http::Request;
    use tower::ServiceExt;

    use super::*;

    async fn post_to(app: &Router, target: &str) -> (StatusCode, String) {
        let request = Request::post(target).body(Body::empty()).unwrap();
        let response = app.clone().oneshot(request).await.unwrap();
        let status = response.status();
        let body = to_bytes(response.into_body(), 4096).await.unwrap();
        (status, String::from_utf8(body.into()).unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn an_order_that_somebody_else_works_on_is_not_shipped() {
        let redlock = Redlock::in_memory(3);
        let app = app(redlock.clone());
        // The test is the other client. The literal fails the test when the key is changed.
        let guard = redlock.try_lock(("order", "7")).await.unwrap();
        let ship = || post_to(&app, "/orders/7/ship");
        assert_eq!(ship().await.0, StatusCode::LOCKED);
        guard.release().await.unwrap();
        assert_eq!(ship().await.0, StatusCode::OK);
    }

    #[tokio::test(start_paused = true)]
    async fn a_handler_is_called_like_the_function_that_it_is() {
        let redlock = Redlock::in_memory(3);
        let guard = redlock.try_lock(("order", "7")).await.unwrap();
        let response = ship(Locked(guard, Path(OrderId(7)))).await;
        // The response holds the lock until it is sent or dropped.
        assert!(redlock.try_lock(("order", "7")).await.is_err());
        drop(response);
        assert!(redlock.lock(("order", "7")).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_handler_that_takes_a_handle_needs_no_layer() {
        let guard = Redlock::in_memory(3).try_lock("anything").await.unwrap();
        assert_eq!(report(guard.handle()).await, Ok("60 pages"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_report_that_takes_too_long_is_stopped() {
        let began = tokio::time::Instant::now();
        let (status, reason) = post_to(&app(Redlock::in_memory(3)), "/reports/7").await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(reason.contains("max_hold"), "{reason}");
        assert_eq!(began.elapsed().as_secs(), 30);
    }
}
