//! A database that refuses the writes of whoever lost the lock without noticing.
//!
//! Run with
//!
//! ```not_rust
//! cargo run --example fenced_writes
//! ```
//!
//! and type what it prints:
//!
//! ```not_rust
//! curl -s -X POST 'http://127.0.0.1:3000/accounts/alice/deposit?amount=5'
//! {"account":"alice","balance":105,"fencing_token":1763659999000000}
//!
//! curl -s -X POST 'http://127.0.0.1:3000/accounts/alice/deposit?amount=5&token=1'
//! {"code":"stale-token","fencing_token":1,"last_seen":1763659999000000}
//!
//! curl -s http://127.0.0.1:3000/accounts/alice
//! {"account":"alice","balance":105,"last_seen":1763659999000000}
//! ```
//!
//! The second deposit has an older token than the first, as if its server had been paused before it
//! wrote, for so long that its lock ran out and the first deposit was made under the next one. No
//! lock can prevent that; the database refuses it with 409.
//!
//! `LISTEN`, `REDLOCK_URLS` and `REDLOCK_RESTART_GUARD` are as in `quickstart`.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use axum::{Extension, Json, Router};
use rusqlite::{Connection, OptionalExtension, params};
use serde_json::json;
use tokio::net::TcpListener;
use tower_redlock::{LockHandle, Redlock, RedlockLayer, RestartGuard, key};

type Database = Arc<Mutex<Connection>>;

const SCHEMA: &str =
    "CREATE TABLE account (id TEXT PRIMARY KEY, balance INTEGER NOT NULL, fence INTEGER NOT NULL)";

/// Changes no row if a newer holder of the lock has written. In PostgreSQL it is the same statement,
/// with `$1` for `?1`.
///
/// `<=`, not `<`: one holder may write many times. One statement, so that no other write comes
/// between the look at the fence and the update; whatever else belongs to the write goes into the
/// same transaction, which is not committed if no row was changed.
const DEPOSIT: &str =
    "UPDATE account SET balance = balance + ?1, fence = ?2 WHERE id = ?3 AND fence <= ?2";

/// Writes all or nothing; returns the new balance, or else the highest token that was here before.
fn write(
    database: &mut Connection,
    account: &str,
    amount: i64,
    token: i64,
) -> rusqlite::Result<Result<i64, i64>> {
    let all = database.transaction()?;
    let open = "INSERT INTO account VALUES (?1, 100, 0) ON CONFLICT DO NOTHING";
    all.execute(open, [account])?;
    let changed = all.execute(DEPOSIT, params![amount, token, account])?;
    let (balance, seen) = read(&all, account)?;
    if changed == 0 {
        return Ok(Err(seen));
    }
    all.commit()?;
    Ok(Ok(balance))
}

/// Returns the balance, 100 at first, and the highest token seen.
fn read(database: &Connection, account: &str) -> rusqlite::Result<(i64, i64)> {
    let row = "SELECT balance, fence FROM account WHERE id = ?1";
    let found = database.query_row(row, [account], |row| Ok((row.get(0)?, row.get(1)?)));
    Ok(found.optional()?.unwrap_or((100, 0)))
}

async fn deposit(
    State(database): State<Database>,
    Path(account): Path<String>,
    Query(query): Query<HashMap<String, i64>>,
    Extension(lock): Extension<LockHandle>,
) -> Response {
    // Only so that it can be tried: a token that a client may choose protects nothing.
    let chosen = query.get("token").copied();
    let granted = lock.fencing_token().map(i64::from);
    let token = chosen.or(granted).unwrap_or_default();
    let amount = query.get("amount").copied().unwrap_or(1);
    let mut database = database.lock().unwrap_or_else(PoisonError::into_inner);
    match write(&mut database, &account, amount, token) {
        Ok(Ok(balance)) => {
            Json(json!({"account": account, "balance": balance, "fencing_token": token}))
                .into_response()
        }
        Ok(Err(seen)) => {
            let problem = json!({"code": "stale-token", "fencing_token": token, "last_seen": seen});
            (StatusCode::CONFLICT, Json(problem)).into_response()
        }
        Err(error) => failed(&error),
    }
}

async fn balance(State(database): State<Database>, Path(account): Path<String>) -> Response {
    let database = database.lock().unwrap_or_else(PoisonError::into_inner);
    match read(&database, &account) {
        Ok((balance, seen)) => {
            Json(json!({"account": account, "balance": balance, "last_seen": seen})).into_response()
        }
        Err(error) => failed(&error),
    }
}

fn failed(error: &rusqlite::Error) -> Response {
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response()
}

/// Three embedded nodes, or the Redis servers that `REDLOCK_URLS` names.
fn redlock() -> Result<Redlock, Box<dyn Error>> {
    let Ok(urls) = env::var("REDLOCK_URLS") else {
        return Ok(Redlock::in_memory(3));
    };
    let mut builder = Redlock::builder().urls(urls.split(',').map(str::trim));
    if env::var("REDLOCK_RESTART_GUARD").is_ok_and(|guard| guard == "off") {
        builder = builder.restart_guard(RestartGuard::Off);
    }
    Ok(builder.build()?)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let connection = Connection::open_in_memory()?;
    connection.execute_batch(SCHEMA)?;
    let app = Router::new()
        .route("/accounts/{id}/deposit", post(deposit))
        .route_layer(RedlockLayer::new(redlock()?, ("account", key::path("id"))))
        .route("/accounts/{id}", get(balance))
        .with_state(Arc::new(Mutex::new(connection)));
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&listen).await.map_err(|error| {
        format!("cannot listen on {listen}: {error}; set LISTEN to another address")
    })?;
    let url = format!("http://{}/accounts/alice", listener.local_addr()?);
    println!(
        "\
  # a deposit, under the lock of its account
  curl -s -X POST '{url}/deposit?amount=5'

  # one by a server that was paused and has an older token: refused, nothing is written
  curl -s -X POST '{url}/deposit?amount=5&token=1'

  # the balance, and the highest token that the database has seen
  curl -s {url}

Ctrl-C stops it."
    );
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap_or_default());
    Ok(axum::serve(listener, app).await?)
}
