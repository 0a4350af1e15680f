//! A service whose OpenAPI document has the refusals of its locks.
//!
//! Run with
//!
//! ```not_rust
//! cargo run --example openapi
//! ```
//!
//! and type the printed commands in another terminal:
//!
//! ```not_rust
//! curl -s -X POST http://127.0.0.1:3000/orders/7/ship
//! order 7 is shipped
//!
//! curl -s http://127.0.0.1:3000/openapi.json | grep -o '"[45][0-9]*":{"description":"[^"]*"' | sort -u
//! "400":{"description":"Body unreadable; Key missing or invalid"
//! "408":{"description":"Body unreadable"
//! "409":{"description":"Conflicting outcomes; Outcome unknown; Request in progress; Response not kept"
//! "413":{"description":"Body too large"
//! "422":{"description":"Idempotency key reused"
//! "423":{"description":"Resource is locked"
//! "429":{"description":"Too many concurrent requests"
//! "500":{"description":"Service misconfigured"
//! "503":{"description":"Lock lost; Lock service started recently; Lock unavailable; Service is shutting down"
//! ```

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::env;
use std::error::Error;

use axum::extract::Path;

use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tower_redlock::{
    IdempotencyLayer, LockKey, LockKeys, LockResource, Locked, Redlock, RedlockLayer, key, scope,
};
use utoipa::{OpenApi, ToSchema};

#[derive(Clone, Deserialize, Serialize, ToSchema)]
struct Payment {
    amount: u64,
}

#[derive(Deserialize)]
struct OrderId(u64);

impl LockResource for OrderId {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from(("order", self.0)).into()
    }
}

/// Takes money from an account, under the lock of a layer.
#[utoipa::path(
    post,
    path = "/accounts/{id}/withdraw",
    params(("id" = String, Path)),
    responses((status = 200, description = "Withdrawn"), RedlockLayer)
)]
async fn withdraw(Path(id): Path<String>) -> String {
    format!("withdrawn from {id}\n")
}

/// Pays once per idempotency key.
#[utoipa::path(
    post,
    path = "/payments",
    params(("idempotency-key" = String, Header)),
    responses((status = 200, description = "Paid", body = Payment), IdempotencyLayer)
)]
async fn pay(Json(payment): Json<Payment>) -> Json<Payment> {
    Json(payment)
}

/// Ships an order, which the handler names in its arguments.
#[utoipa::path(
    post,
    path = "/orders/{id}/ship",
    params(("id" = u64, Path)),
    responses((status = 200, description = "Shipped"), Locked<Path<OrderId>>)
)]
async fn ship(Locked(guard, Path(id)): Locked<Path<OrderId>>) -> Response {
    let response = format!("order {} is shipped\n", id.0).into_response();
    guard.hold_until_sent(response).into_response()
}

#[derive(OpenApi)]
#[openapi(
    info(title = "Payments", version = "1.0.0", license(name = "MIT")),
    paths(withdraw, pay, ship)
)]
struct Document;

fn app(redlock: Redlock) -> Router {
    let account = RedlockLayer::new(redlock.clone(), ("account", key::path("id")));
    let once = IdempotencyLayer::new(redlock.clone(), scope::public()).required(true);
    Router::new()
        .route("/accounts/{id}/withdraw", post(withdraw).layer(account))
        .route("/payments", post(pay).layer(once))
        .route("/orders/{id}/ship", post(ship))
        .route("/openapi.json", get(async || Json(Document::openapi())))
        .with_state(redlock)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let app = app(Redlock::in_memory(3));
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(listen).await?;
    let address = listener.local_addr()?;
    println!(
        "\
Listening on http://{address}. Try:

  # a handler under a lock
  curl -s -X POST http://{address}/orders/7/ship

  # what the document says of refusals
  curl -s http://{address}/openapi.json | grep -o '\"[45][0-9]*\":{{\"description\":\"[^\"]*\"' | sort -u

Ctrl-C stops it."
    );
    // The last piece of a response waits for the release of its lock; see "TCP_NODELAY" in docs/settings.md.
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap_or_default());
    Ok(axum::serve(listener, app).await?)
}
