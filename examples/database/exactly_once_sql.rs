//! A payment that is booked once, regardless of locks and records.
//!
//! Run with
//!
//! ```not_rust
//! cargo run --example exactly_once_sql
//! ```
//!
//! and type the printed commands in another terminal:
//!
//! ```not_rust
//! curl -s -w '%{http_code}\n' -X POST 'http://127.0.0.1:3000/payments?amount=5&fail=true' -H 'idempotency-key: a1'
//! 503
//!
//! curl -s -w '\n' -X POST 'http://127.0.0.1:3000/payments?amount=5' -H 'idempotency-key: a1'
//! {"balance":95,"executions":2,"payment":1}
//! ```
//!
//! The first request is booked and then gets 503, as if its server had died before it recorded the
//! response. The second request is therefore executed again, which no lock and no record can prevent; the
//! database finds the key of the first transaction. A third request is replayed.
//!
//! With a file as `DATABASE`, and nodes and `LISTEN` as in `quickstart`, kill it and start it again.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::env;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::routing::post;
use axum::serve::ListenerExt;
use axum::{Json, Router};
use rusqlite::{Connection, params};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tower_redlock::{
    BuildError, IdempotencyKey, IdempotencyLayer, Redlock, RedlockBuilder, RedlockConfig, scope,
};

/// All clients share the keys here, as with `scope::public()`. For several callers, the index has the caller as well.
const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS payment (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE,
        amount INTEGER NOT NULL, executions INTEGER NOT NULL DEFAULT 1);
    CREATE TABLE IF NOT EXISTS account (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL);
    INSERT OR IGNORE INTO account VALUES (1, 100);";

/// Counts executions only to show that there can be two.
const BOOK: &str = "
    INSERT INTO payment (key, amount) VALUES (?1, ?2)
    ON CONFLICT (key) DO UPDATE SET executions = executions + 1
    RETURNING id, executions";
const PAY: &str = "UPDATE account SET balance = balance - ?1 RETURNING balance";

#[derive(Deserialize)]
struct Payment {
    amount: i64,
    #[serde(default)]
    fail: bool,
}

async fn pay(
    State(database): State<Arc<Mutex<Connection>>>,
    Query(payment): Query<Payment>,
    key: IdempotencyKey,
) -> Result<Json<Value>, StatusCode> {
    let mut database = database.lock().unwrap_or_else(PoisonError::into_inner);
    match book(&mut database, key.as_str(), payment.amount) {
        Ok(_) if payment.fail => Err(StatusCode::SERVICE_UNAVAILABLE),
        Ok(booked) => Ok(Json(booked)),
        Err(_) => Err(StatusCode::INTERNAL_SERVER_ERROR),
    }
}

/// Stores the key and the effect in one transaction: both, or neither.
fn book(database: &mut Connection, key: &str, amount: i64) -> rusqlite::Result<Value> {
    let transaction = database.transaction()?;
    let (payment, executions): (i64, i64) =
        transaction.query_row(BOOK, params![key, amount], |row| row.try_into())?;
    let amount = if executions == 1 { amount } else { 0 };
    let balance: i64 = transaction.query_row(PAY, [amount], |row| row.get(0))?;
    transaction.commit()?;
    Ok(json!({"payment": payment, "executions": executions, "balance": balance}))
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
    let file = env::var("DATABASE").unwrap_or_else(|_| ":memory:".into());
    let connection = Connection::open(file)?;
    connection.execute_batch(SCHEMA)?;
    let once = IdempotencyLayer::new(redlock()?, scope::public()).required(true);
    // The key alone identifies the payment; the requested outcome does not.
    let once = once.fingerprint(|_, _| Vec::new());
    let app = Router::new()
        .route("/payments", post(pay))
        .route_layer(once)
        .with_state(Arc::new(Mutex::new(connection)));
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&listen).await?;
    let address = listener.local_addr()?;
    let url = format!("http://{address}/payments");
    println!(
        "\
Listening on http://{address}. Try:

  # booked, then 503 as if the server had died: the retry is executed and books nothing
  curl -s -w '%{{http_code}}\\n' -X POST '{url}?amount=5&fail=true' -H 'idempotency-key: a1'
  curl -s -w '\\n' -X POST '{url}?amount=5' -H 'idempotency-key: a1'

Ctrl-C stops it."
    );
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap_or_default());
    Ok(axum::serve(listener, app).await?)
}
