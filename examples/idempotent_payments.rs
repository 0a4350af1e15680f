//! Payments that are made once per `Idempotency-Key`, and a client that retries until it gets a response.
//!
//! Run with
//!
//! ```not_rust
//! cargo run --example idempotent_payments
//! ```
//!
//! and type the printed commands in another terminal:
//!
//! ```not_rust
//! curl -s -m 0.5 -X POST http://127.0.0.1:3000/payments -H 'idempotency-key: a1' -H 'x-user: alice' -d 5; sleep 2; curl -s -w '\n' -X POST http://127.0.0.1:3000/payments -H 'idempotency-key: a1' -H 'x-user: alice' -d 5
//! alice has paid 5: payment 1
//!
//! curl -s -w '\n' -X POST http://127.0.0.1:3000/payments -H 'idempotency-key: a1' -H 'x-user: alice' -d 6
//! {"type":"tag:tower-redlock,2026:idempotency-key-reused","title":"Idempotency key reused","status":422,"detail":"the idempotency key was used for another request before","code":"idempotency-key-reused"}
//!
//! curl -s -w '\n' -X POST http://127.0.0.1:3000/payments -H 'idempotency-key: a1' -H 'x-user: bob' -d 6
//! bob has paid 6: payment 2
//!
//! curl -s -w '\n' -X POST http://127.0.0.1:3000/payments -H 'x-user: bob' -d 6
//! {"type":"tag:tower-redlock,2026:key-missing","title":"Key missing or invalid","status":400,"detail":"the request lacks a required key: header `idempotency-key`","code":"key-missing"}
//! ```
//!
//! The first client gives up after half a second, while the payment takes one second; its second attempt
//! gets the recorded response. `LISTEN`, `REDLOCK_URLS` and the other variables work as in
//! `quickstart`: two processes on the same Redis nodes form one service.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::env;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use axum::serve::ListenerExt;
use axum::{Router, http::HeaderValue};
use tokio::net::TcpListener;
use tower_redlock::{BuildError, IdempotencyLayer, Redlock, RedlockBuilder, RedlockConfig, key};

fn app(redlock: Redlock) -> Router {
    // The header names the caller here; in a real service, authentication does.
    let once = IdempotencyLayer::new(redlock, key::header("x-user"))
        .required(true)
        .wait(Duration::from_secs(2))
        .max_request_body(1024);
    Router::new()
        .route("/payments", post(pay))
        .route_layer(once)
        .with_state(Arc::default())
}

async fn pay(
    State(payments): State<Arc<AtomicU64>>,
    headers: HeaderMap,
    amount: String,
) -> Result<String, StatusCode> {
    let amount: u64 = amount.parse().map_err(|_| StatusCode::BAD_REQUEST)?;
    let user = headers.get("x-user").map(HeaderValue::to_str);
    let Some(Ok(user)) = user else {
        return Err(StatusCode::UNAUTHORIZED);
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    let number = payments.fetch_add(1, Ordering::SeqCst) + 1;
    Ok(format!("{user} has paid {amount}: payment {number}"))
}

/// Uses the Redis servers in `REDLOCK_URLS`, or three embedded nodes.
fn redlock() -> Result<Redlock, BuildError> {
    let config = RedlockConfig::from_env()?;
    if config.urls().is_empty() {
        return Ok(Redlock::in_memory(3));
    }
    RedlockBuilder::from(config).build()
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&listen).await?;
    let address = listener.local_addr()?;
    let url = format!("http://{address}/payments");
    let (key, alice, bob) = (
        "-H 'idempotency-key: a1'",
        "-H 'x-user: alice'",
        "-H 'x-user: bob'",
    );
    println!(
        "\
Listening on http://{address}. Try:

  # a client that times out and retries: paid once
  curl -s -m 0.5 -X POST {url} {key} {alice} -d 5; sleep 2; curl -s -w '\\n' -X POST {url} {key} {alice} -d 5

  # the same key for another payment, and from another caller
  curl -s -w '\\n' -X POST {url} {key} {alice} -d 6
  curl -s -w '\\n' -X POST {url} {key} {bob} -d 6

  # no key
  curl -s -w '\\n' -X POST {url} {bob} -d 6

Ctrl-C stops it."
    );
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap_or_default());
    Ok(axum::serve(listener, app(redlock()?)).await?)
}
