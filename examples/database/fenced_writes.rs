//! A database that refuses writes from a holder that lost its lock without noticing.
//!
//! Run with
//!
//! ```not_rust
//! cargo run --example fenced_writes
//! ```
//!
//! and type the printed commands in another terminal:
//!
//! ```not_rust
//! curl -s -w '\n' -X POST 'http://127.0.0.1:3000/accounts/alice/deposit?amount=5'
//! {"account":"alice","balance":105,"fencing_token":1763659999000000}
//!
//! curl -s -w '\n' -X POST 'http://127.0.0.1:3000/accounts/alice/deposit?amount=5&token=1'
//! {"balance":105,"code":"stale-token","fencing_token":1,"last_seen":1763659999000000}
//! ```
//!
//! The second deposit has an older token than the first, as if its server had been paused before its
//! write until its lock had expired, and the first deposit had been made under the next lock. No lock
//! can prevent this; the database refuses the deposit, with 409.
//!
//! `LISTEN` changes the address.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::routing::post;
use axum::serve::ListenerExt;
use axum::{Json, Router};
use rusqlite::{Connection, OptionalExtension, params};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tower_redlock::{LockHandle, Redlock, RedlockLayer, key};

type Database = Arc<Mutex<Connection>>;

const SCHEMA: &str = "
    CREATE TABLE account (id TEXT PRIMARY KEY, balance INTEGER NOT NULL, fence INTEGER NOT NULL);
    INSERT INTO account VALUES ('alice', 100, 0);";

/// Changes no row if a newer holder of the lock has written. PostgreSQL takes the same statement, with
/// `$1` for `?1`.
///
/// The comparison is `<=`, because one holder may write many times. One statement checks the fence and
/// updates the row, so that no other write comes between. Further writes of the operation belong to the
/// same transaction, which is rolled back if no row was changed.
const DEPOSIT: &str = "
    UPDATE account SET balance = balance + ?1, fence = ?2 WHERE id = ?3 AND fence <= ?2
    RETURNING balance";

type Answer = Result<Json<Value>, (StatusCode, Json<Value>)>;

async fn deposit(
    State(database): State<Database>,
    Path(account): Path<String>,
    Query(query): Query<HashMap<String, i64>>,
    lock: LockHandle,
) -> Answer {
    let amount = query.get("amount").copied().unwrap_or(1);
    let granted = lock.fencing_token().map(i64::from);
    // For the demonstration only: a token that the client chooses protects nothing.
    let token = query.get("token").copied().or(granted);
    let database = database.lock().unwrap_or_else(PoisonError::into_inner);
    let changed = database.query_row(DEPOSIT, params![amount, token, account], |row| row.get(0));
    let balance: Option<i64> = changed.optional().map_err(|error| failed(&error))?;
    if let Some(balance) = balance {
        let done = json!({"account": account, "balance": balance, "fencing_token": token});
        return Ok(Json(done));
    }
    let seen = "SELECT balance, fence FROM account WHERE id = ?1";
    let seen = database.query_row(seen, [account], |row| Ok((row.get(0)?, row.get(1)?)));
    let (balance, seen): (i64, i64) = seen.map_err(|error| failed(&error))?;
    let stale = json!({"code": "stale-token", "balance": balance, "fencing_token": token,
        "last_seen": seen});
    Err((StatusCode::CONFLICT, Json(stale)))
}

fn failed(error: &rusqlite::Error) -> (StatusCode, Json<Value>) {
    let status = match error {
        rusqlite::Error::QueryReturnedNoRows => StatusCode::NOT_FOUND,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    (status, Json(json!({"error": error.to_string()})))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let connection = Connection::open_in_memory()?;
    connection.execute_batch(SCHEMA)?;
    let one_at_a_time = RedlockLayer::new(Redlock::in_memory(3), ("account", key::path("id")));
    let app = Router::new()
        .route("/accounts/{id}/deposit", post(deposit))
        .route_layer(one_at_a_time)
        .with_state(Arc::new(Mutex::new(connection)));
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&listen).await?;
    let address = listener.local_addr()?;
    println!(
        "\
Listening on http://{address}. Try:

  # a deposit, under the lock of its account
  curl -s -w '\\n' -X POST 'http://{address}/accounts/alice/deposit?amount=5'

  # a deposit with an older token, as from a paused server: refused, nothing is written
  curl -s -w '\\n' -X POST 'http://{address}/accounts/alice/deposit?amount=5&token=1'

Ctrl-C stops it."
    );
    // The last piece of a response waits for the release of its lock; see "TCP_NODELAY" in docs/settings.md.
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap_or_default());
    Ok(axum::serve(listener, app).await?)
}
