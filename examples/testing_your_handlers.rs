//! How handlers that lock are tested: without Redis, without a server, and in no time.
//!
//! The tests are at the end of this file. Run them with
//!
//! ```not_rust
//! cargo test --example testing_your_handlers
//! test result: ok. 6 passed
//! ```
//!
//! (`cargo run` serves what they test.) A crate of your own needs
//!
//! ```toml
//! [dev-dependencies]
//! tokio = { version = "1", features = ["full", "test-util"] }   # for `start_paused`
//! tower = { version = "0.5", features = ["util"] }              # for `oneshot`
//! ```
//!
//! On the paused clock time passes only when nothing else is left to do, and then at once: an hour of
//! waiting takes no time, and instants can be compared to the millisecond.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::env;
use std::error::Error;
use std::time::Duration;

use axum::Router;
use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::serve::ListenerExt;
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::time::sleep;
use tower_redlock::{
    LockHandle, LockKey, LockKeys, LockResource, Locked, OnLost, Redlock, RedlockLayer, key,
};

#[derive(Debug, Deserialize)]
struct OrderId(u64);

impl LockResource for OrderId {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from(("order", self.0.to_string())).into()
    }
}

/// Everything but the nodes, so that a test can bring its own.
fn app(redlock: Redlock) -> Router {
    let one_at_a_time = RedlockLayer::new(redlock.clone(), ("report", key::path("id")))
        .max_hold(Duration::from_secs(30))
        .on_lost(OnLost::Notify);
    Router::new()
        .route("/reports/{id}", post(report))
        .route_layer(one_at_a_time)
        .route("/orders/{id}/ship", post(ship))
        .with_state(redlock)
}

async fn ship(Locked(guard, Path(id)): Locked<Path<OrderId>>) -> Response {
    sleep(Duration::from_millis(100)).await;
    let response = format!("order {} is shipped\n", id.0).into_response();
    guard.hold_until_sent(response).into_response()
}

/// Tells how far it came when its lock is lost.
async fn report(lock: LockHandle) -> Response {
    let mut lost = lock.lost();
    for page in 0..PAGES {
        tokio::select! {
            biased;
            reason = &mut lost => {
                let stopped = format!("stopped at page {page}: {reason}");
                return (StatusCode::SERVICE_UNAVAILABLE, stopped).into_response();
            }
            () = sleep(Duration::from_secs(1)) => {}
        }
    }
    format!("{PAGES} pages").into_response()
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&listen).await?;
    let address = listener.local_addr()?;
    println!(
        "\
Listening on http://{address}. The handlers are tested, rather than tried, with

  cargo test --example testing_your_handlers

Ctrl-C stops it."
    );
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap_or_default());
    Ok(axum::serve(listener, app(Redlock::in_memory(3))).await?)
}

/// A second each.
const PAGES: u32 = 60;

#[cfg(test)]
mod tests {
    use axum::Extension;
    use axum::body::{Body, to_bytes};
    use axum::http::Request;
    use tokio::time::Instant;
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
        // Somebody else is the test itself. The literal notices when the key is changed, and with it
        // what the order excludes.
        let guard = redlock.try_lock(("order", "7")).await.unwrap();
        let (status, problem) = post_to(&app, "/orders/7/ship").await;
        assert_eq!(status, StatusCode::LOCKED);
        assert!(problem.contains("lock-contended"), "{problem}");
        assert_eq!(post_to(&app, "/orders/8/ship").await.0, StatusCode::OK);

        guard.release().await.unwrap();
        assert_eq!(post_to(&app, "/orders/7/ship").await.0, StatusCode::OK);
    }

    #[tokio::test(start_paused = true)]
    async fn an_order_is_shipped_once_at_a_time() {
        let app = app(Redlock::in_memory(3));
        let ship = || post_to(&app, "/orders/7/ship");
        let (first, second) = tokio::join!(ship(), ship());
        assert_eq!((first.0, second.0), (StatusCode::OK, StatusCode::LOCKED));
    }

    #[tokio::test(start_paused = true)]
    async fn a_handler_is_called_like_the_function_that_it_is() {
        let redlock = Redlock::in_memory(3);
        let guard = redlock.try_lock(("order", "7")).await.unwrap();
        let response = ship(Locked(guard, Path(OrderId(7)))).await;
        assert_eq!(response.status(), StatusCode::OK);

        // The response holds the lock until it is sent, or dropped.
        assert!(redlock.lock(("order", "7")).await.is_err());
        drop(response);
        assert!(redlock.lock(("order", "7")).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_handler_that_takes_a_handle_needs_no_layer() {
        let guard = Redlock::in_memory(3).try_lock("anything").await.unwrap();
        let app = Router::new()
            .route("/", post(report))
            .layer(Extension(guard.handle()));
        let made = (StatusCode::OK, "60 pages".to_owned());
        assert_eq!(post_to(&app, "/").await, made);
    }

    #[tokio::test(start_paused = true)]
    async fn a_report_that_takes_too_long_is_stopped() {
        let app = app(Redlock::in_memory(3));
        let began = Instant::now();
        let (status, stopped) = post_to(&app, "/reports/7").await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(stopped.starts_with("stopped at page 30: "), "{stopped}");
        assert!(stopped.contains("max_hold"), "{stopped}");
        assert_eq!(began.elapsed().as_secs(), 30);
    }

    #[tokio::test(start_paused = true)]
    async fn a_report_whose_lock_expires_is_stopped() {
        // A lock that nobody renews is lost as if no node had answered in time.
        let redlock = Redlock::builder().embedded(3).renew(false);
        let redlock = redlock.ttl(Duration::from_secs(10)).build().unwrap();
        let began = Instant::now();
        let (status, stopped) = post_to(&app(redlock), "/reports/7").await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(stopped.starts_with("stopped at page 9: "), "{stopped}");
        assert_eq!(began.elapsed().as_secs(), 9);
    }
}
