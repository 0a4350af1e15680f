//! An axum service whose requests hold a lock per account or order, or pay once per idempotency key.
//!
//! Run with
//!
//! ```not_rust
//! cargo run --example quickstart
//! ```
//!
//! and try the printed curl lines. The example needs only Rust: three lock nodes run in the process.
//! To lock on Redis servers, start some and name them:
//!
//! ```not_rust
//! REDLOCK_URLS=redis://127.0.0.1:7001,redis://127.0.0.1:7002,redis://127.0.0.1:7003 \
//!     cargo run --example quickstart
//! ```
//!
//! Other variables that begin with `REDLOCK_` are settings of the lock; `RedlockConfig` has the list.
//! Start a second process with `LISTEN=127.0.0.1:3001`: the two exclude each other.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

#[path = "shared/stop_signal.rs"]
mod stop_signal;

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::net::SocketAddr;
use std::process;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::{FromRef, Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tower_redlock::{
    BuildError, IdempotencyLayer, KeyExtractor, LockHandle, LockKey, LockKeys, LockResource,
    Locked, NodeState, Redlock, RedlockBuilder, RedlockConfig, RedlockLayer, health_router, key,
};

use crate::stop_signal::stop_signal;

/// How long requests may continue after Ctrl-C or SIGTERM.
const GRACE: Duration = Duration::from_secs(10);

/// Balances by account. Every account starts with 100.
type Balances = Arc<Mutex<HashMap<String, u64>>>;

#[derive(Clone, FromRef)]
struct AppState {
    redlock: Redlock,
    balances: Balances,
}

fn app(redlock: Redlock) -> Router {
    let state = AppState {
        redlock: redlock.clone(),
        balances: Balances::default(),
    };
    // The scope of the keys. Behind authentication it would be the authenticated user.
    let caller = key::header("x-user").or("anonymous");
    let idempotency = IdempotencyLayer::new(redlock.clone(), caller);
    Router::new()
        .route("/accounts/{id}/withdraw", post(withdraw))
        // Applies to the routes above: one lock per account; different accounts run in parallel.
        .route_layer(
            RedlockLayer::new(redlock.clone(), ("account", key::path("id")))
                // A refused client hears which of the processes holds the lock.
                .expose_holder(true),
        )
        .route("/accounts/{id}", get(balance))
        // The handler's signature takes the lock.
        .route("/orders/{id}/ship", post(ship))
        .route("/payments", post(pay).layer(idempotency))
        .with_state(state)
        .nest("/healthz", health_router(redlock))
}

#[derive(Deserialize)]
struct Withdrawal {
    #[serde(default = "one")]
    amount: u64,
}

#[derive(Deserialize)]
struct Hold {
    /// The delay between reading and writing, in milliseconds.
    #[serde(default = "two_hundred")]
    hold_ms: u64,
}

impl Hold {
    async fn think(&self) {
        tokio::time::sleep(Duration::from_millis(self.hold_ms)).await;
    }
}

fn one() -> u64 {
    1
}

fn two_hundred() -> u64 {
    200
}

/// Reads, waits, and writes: without the lock, one of two concurrent withdrawals would be lost.
async fn withdraw(
    State(balances): State<Balances>,
    Path(account): Path<String>,
    Query(withdrawal): Query<Withdrawal>,
    Query(hold): Query<Hold>,
    lock: LockHandle,
) -> (StatusCode, Json<Value>) {
    let before = read(&balances, &account);
    hold.think().await;
    let Some(balance) = before.checked_sub(withdrawal.amount) else {
        let problem = json!({"code": "insufficient-funds", "account": account, "balance": before});
        return (StatusCode::CONFLICT, Json(problem));
    };
    let mut all = balances.lock().unwrap_or_else(PoisonError::into_inner);
    all.insert(account.clone(), balance);
    // A database would refuse the write if it had seen a higher token for this account.
    let token = lock.fencing_token().map(|token| token.as_u64());
    let done = json!({"account": account, "balance": balance, "fencing_token": token});
    (StatusCode::OK, Json(done))
}

#[derive(Debug, Deserialize)]
struct OrderId(u64);

impl LockResource for OrderId {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from(("order", self.0)).into()
    }
}

/// Runs under the lock of its order, which is released before the last piece of the response is sent.
async fn ship(
    Locked(guard, Path(order)): Locked<Path<OrderId>>,
    Query(hold): Query<Hold>,
) -> Response {
    hold.think().await;
    let token = guard.fencing_token().map(|token| token.as_u64());
    let done = json!({"order": order.0, "shipped": true, "fencing_token": token});
    guard
        .hold_until_sent(Json(done).into_response())
        .into_response()
}

#[derive(Deserialize)]
struct Payment {
    account: String,
    amount: u64,
}

/// Runs once per `Idempotency-Key` and caller; a retry gets the same response, with the id of the same
/// payment.
async fn pay(
    State(balances): State<Balances>,
    Query(hold): Query<Hold>,
    Json(payment): Json<Payment>,
) -> (StatusCode, Json<Value>) {
    hold.think().await;
    let Payment { account, amount } = payment;
    let mut all = balances.lock().unwrap_or_else(PoisonError::into_inner);
    let balance = all.entry(account.clone()).or_insert(100);
    let Some(left) = balance.checked_sub(amount) else {
        let problem =
            json!({"code": "insufficient-funds", "account": account, "balance": *balance});
        return (StatusCode::CONFLICT, Json(problem));
    };
    *balance = left;
    let id = format!("{:016x}", fastrand::u64(..));
    let done = json!({"payment": id, "account": account, "amount": amount, "balance": left});
    (StatusCode::OK, Json(done))
}

async fn balance(State(balances): State<Balances>, Path(account): Path<String>) -> Json<Value> {
    let balance = read(&balances, &account);
    Json(json!({"account": account, "balance": balance}))
}

fn read(balances: &Balances, account: &str) -> u64 {
    let all = balances.lock().unwrap_or_else(PoisonError::into_inner);
    all.get(account).copied().unwrap_or(100)
}

/// Uses the Redis servers in `REDLOCK_URLS`, or three embedded nodes.
fn redlock() -> Result<(Redlock, String), BuildError> {
    let config = RedlockConfig::from_env()?;
    let servers = config.urls().len();
    let mut builder = RedlockBuilder::from(config);
    if env::var_os("REDLOCK_HOLDER").is_none() {
        builder = builder.holder(format!("quickstart/{}", process::id()));
    }
    if servers == 0 {
        return Ok((builder.embedded(3).build()?, "3 embedded nodes".into()));
    }
    Ok((builder.build()?, format!("{servers} Redis nodes")))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt()
        .with_env_filter(env::var("RUST_LOG").unwrap_or_else(|_| "warn".into()))
        .init();
    let (redlock, nodes) = redlock()?;
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&listen).await.map_err(|error| {
        format!("cannot listen on {listen}: {error}; set LISTEN to another address")
    })?;
    // The last piece of a response waits for the release of its lock. Nagle's algorithm would also
    // make it wait for the client's delayed acknowledgement.
    let address = listener.local_addr()?;
    let listener = listener.tap_io(|stream| {
        stream.set_nodelay(true).unwrap_or_default();
    });
    // Before the address is printed: from here on a signal stops the server gracefully.
    let stop = stop_signal()?;
    print_what_to_try(address, &nodes);
    print_quarantine(&redlock).await;

    let app = app(redlock.clone());
    let serve = |stopping| axum::serve(listener, app).with_graceful_shutdown(stopping);
    let (output, drained) = redlock.serve_until(stop, GRACE, serve).await;
    let (released, held) = (drained.released, drained.held.len());
    println!("drained: {released} released, {held} still held");
    output.transpose()?;
    Ok(())
}

/// Prints why a fresh or restarted cluster refuses locks at first.
async fn print_quarantine(redlock: &Redlock) {
    let health = redlock.health().await;
    let left = health.nodes.iter().filter_map(|node| match node.state {
        NodeState::Quarantined { left } => Some(left.as_secs() + 1),
        _ => None,
    });
    if let Some(seconds) = left.max() {
        println!(
            "\nThe Redis nodes have not been up for long: they could have forgotten locks, so requests\n\
             are refused with 503 for another {seconds} s. REDLOCK_RESTART_GUARD=off turns that off."
        );
    }
}

fn print_what_to_try(address: SocketAddr, nodes: &str) {
    println!(
        "\
Listening on http://{address}, locking over {nodes}. Try:

  # a withdrawal, under the lock of its account
  curl -i -w '\\n' -X POST 'http://{address}/accounts/alice/withdraw?amount=5'

  # two at once: the second is refused with 423 and Retry-After
  curl -s -w '\\n' -X POST 'http://{address}/accounts/bob/withdraw?amount=5&hold_ms=2000' & sleep 0.5; curl -i -w '\\n' -X POST 'http://{address}/accounts/bob/withdraw?amount=5'; wait

  # an order is shipped under its own lock
  curl -i -w '\\n' -X POST http://{address}/orders/7/ship

  # a payment: a retry with the same key gets the same response, and pays once
  curl -i -w '\\n' -X POST http://{address}/payments -H 'idempotency-key: a1' -H content-type:application/json -d '{{\"account\":\"dave\",\"amount\":5}}'

  # the balance, not locked
  curl -s -w '\\n' http://{address}/accounts/alice

  # the health of the nodes
  curl -s -w '\\n' http://{address}/healthz

Ctrl-C stops it gracefully."
    );
}
