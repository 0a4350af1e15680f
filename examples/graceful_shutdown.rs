//! A service that releases all its locks before it exits.
//!
//! Run with
//!
//! ```not_rust
//! cargo run --example graceful_shutdown
//! ```
//!
//! type the printed command in another terminal, and press Ctrl-C (or send SIGTERM) in the meantime:
//!
//! ```not_rust
//! curl -s -X POST 'http://127.0.0.1:3000/jobs/7?ms=3000'
//! done
//! ```
//!
//! The job finishes, its caller gets a response, and the process prints `drained: nothing left`.
//! If the job takes longer than the grace period (`GRACE_MS`, default 10000), the process reports the
//! job's key as still held: drain never releases a held lock, which ends by its ttl.
//!
//! The nodes are the Redis servers in `REDLOCK_URLS` (comma-separated), or embedded ones. `/readyz` and `/livez` are for
//! an orchestrator, such as that of the manifests in `kubernetes`.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

#[path = "shared/stop_signal.rs"]
mod stop_signal;

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::time::Duration;

use axum::Router;
use axum::extract::Query;
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use tokio::net::TcpListener;
use tower_redlock::{
    BuildError, Redlock, RedlockBuilder, RedlockConfig, RedlockLayer, health_router, key,
};

use crate::stop_signal::stop_signal;

fn app(redlock: Redlock) -> Router {
    let job_lock = RedlockLayer::new(redlock.clone(), ("job", key::path("id")));
    Router::new()
        .route("/jobs/{id}", post(job).layer(job_lock))
        .route("/livez", get(|| async { "ok\n" }))
        .nest("/readyz", health_router(redlock))
}

async fn job(Query(query): Query<HashMap<String, u64>>) -> &'static str {
    let ms = query.get("ms").copied().unwrap_or(100);
    tokio::time::sleep(Duration::from_millis(ms)).await;
    "done\n"
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
    let grace = env::var("GRACE_MS").ok().map(|ms| ms.parse()).transpose()?;
    let grace = Duration::from_millis(grace.unwrap_or(10_000));
    let redlock = redlock()?;
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(listen).await?;
    let address = listener.local_addr()?;
    // Before the address is printed: from here on a signal stops the server gracefully.
    let stop = stop_signal()?;
    println!(
        "\
Listening on http://{address}. Try:

  # a job that takes three seconds
  curl -s -X POST 'http://{address}/jobs/7?ms=3000'

Ctrl-C stops it."
    );
    let listener = listener.tap_io(|stream| {
        stream.set_nodelay(true).unwrap_or_default();
    });

    // After the signal: no new connections, then no new locks; running requests continue.
    let app = app(redlock.clone());
    let serve = |stopping| axum::serve(listener, app).with_graceful_shutdown(stopping);
    let (output, drained) = redlock.serve_until(stop, grace, serve).await;
    if output.is_some() && drained.is_clean() {
        println!("drained: nothing left");
    } else {
        println!("drained: still held {:?}", drained.held);
        println!("drained: unconfirmed {:?}", drained.unconfirmed);
    }
    output.transpose()?;
    Ok(())
}
