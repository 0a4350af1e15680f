//! Two accounts locked at once, by keys from the body.
//!
//! Run with
//!
//! ```not_rust
//! cargo run --example transfer
//! ```
//!
//! and type the printed commands in another terminal:
//!
//! ```not_rust
//! curl -s -w '\n' -X POST http://127.0.0.1:3000/transfers -H content-type:application/json -d '{"from":"alice","to":"bob","amount":5}'
//! {"alice":95,"bob":105}
//!
//! curl -s -w '\n' -X POST http://127.0.0.1:3000/transfers -H content-type:application/json -d '{"from":"alice","amount":5}'
//! {"type":"tag:tower-redlock,2026:key-missing","title":"Key missing or invalid","status":400,"detail":"the request lacks a required key: JSON pointer `/from` and JSON pointer `/to`","code":"key-missing"}
//! ```
//!
//! The layer locks both accounts or neither: two transfers between the same accounts in opposite
//! directions cannot wait for each other. `LISTEN` changes the address.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::collections::BTreeMap;
use std::env;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use axum::serve::ListenerExt;
use axum::{Json, Router};
use serde::Deserialize;
use tokio::net::TcpListener;
use tower_redlock::{BufferBodyLayer, Redlock, RedlockLayer, key};

/// Balances by account. Every account starts with 100.
type Balances = Arc<Mutex<BTreeMap<String, u64>>>;

fn app(redlock: Redlock) -> Router {
    let both_accounts = (
        "account",
        key::each(key::json_pointer("/from"), key::json_pointer("/to")),
    );
    // The body is read first: it contains the keys, and a slow upload must not hold the locks.
    let locked = (
        BufferBodyLayer::new(4 * 1024),
        RedlockLayer::new(redlock, both_accounts).wait(Duration::from_secs(1)),
    );
    Router::new()
        .route("/transfers", post(transfer).layer(locked))
        .with_state(Balances::default())
}

#[derive(Deserialize)]
struct Transfer {
    from: String,
    to: String,
    amount: u64,
}

/// Reads both balances, waits, and writes both: without the locks, some money would be lost.
async fn transfer(
    State(balances): State<Balances>,
    Json(transfer): Json<Transfer>,
) -> Result<Json<BTreeMap<String, u64>>, StatusCode> {
    let (from, to) = (
        read(&balances, &transfer.from),
        read(&balances, &transfer.to),
    );
    tokio::time::sleep(Duration::from_millis(50)).await;
    let from = from
        .checked_sub(transfer.amount)
        .ok_or(StatusCode::CONFLICT)?;
    let changed = if transfer.from == transfer.to {
        // The withdrawal and the deposit would yield two balances; only one can be written.
        BTreeMap::from([(transfer.from, to)])
    } else {
        BTreeMap::from([(transfer.from, from), (transfer.to, to + transfer.amount)])
    };
    let mut balances = balances.lock().unwrap_or_else(PoisonError::into_inner);
    balances.extend(changed.clone());
    Ok(Json(changed))
}

fn read(balances: &Balances, account: &str) -> u64 {
    let balances = balances.lock().unwrap_or_else(PoisonError::into_inner);
    balances.get(account).copied().unwrap_or(100)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&listen).await?;
    let address = listener.local_addr()?;
    // The last piece of a response waits for the release of its lock; see "TCP_NODELAY" in docs/settings.md.
    let listener = listener.tap_io(|stream| {
        stream.set_nodelay(true).unwrap_or_default();
    });
    println!(
        "\
Listening on http://{address}. Try:

  curl -s -w '\\n' -X POST http://{address}/transfers -H content-type:application/json -d '{{\"from\":\"alice\",\"to\":\"bob\",\"amount\":5}}'

  curl -s -w '\\n' -X POST http://{address}/transfers -H content-type:application/json -d '{{\"from\":\"alice\",\"amount\":5}}'

Ctrl-C stops it."
    );
    Ok(axum::serve(listener, app(Redlock::in_memory(3))).await?)
}
