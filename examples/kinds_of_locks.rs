//! Readers and writers, at most n requests, a job once per period, one leader, and a router for operators.
//!
//! Run with
//!
//! ```not_rust
//! cargo run --example kinds_of_locks
//! ```
//!
//! and try
//!
//! ```not_rust
//! curl -s localhost:3000/pages/7 & curl -s -X PUT localhost:3000/pages/7
//! curl -s -X POST -H 'x-tenant: a' localhost:3000/convert
//! curl -s -X POST localhost:3000/jobs/report
//! curl -s localhost:3000/admin/locks/job/report
//! ```
//!
//! Each request takes `TAKES_MS` (default 1000). It listens on `LISTEN` (default `127.0.0.1:3000`). The nodes are the
//! Redis servers in `REDLOCK_URLS` (comma-separated), or embedded ones.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::env;
use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::{get, post};
use tokio::net::TcpListener;
use tokio::time::sleep;
use tower_redlock::{
    BuildError, LockError, LockGuard, LockHandle, Redlock, RedlockBuilder, RedlockConfig,
    RedlockLayer, admin_router, key,
};

#[path = "shared/stop_signal.rs"]
mod stop_signal;

use crate::stop_signal::stop_signal;

const GRACE: Duration = Duration::from_secs(10);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let redlock = redlock()?;
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&listen).await?;
    let address = listener.local_addr()?;
    // Before the address is printed: from here on a signal stops the server gracefully.
    let stop = stop_signal()?;
    println!("listening on http://{address}");
    let leading = tokio::spawn(redlock.lead("dispatcher", dispatch));
    let app = app(&redlock);
    let (output, drained) = redlock
        .serve_until(stop, GRACE, |stopping| {
            let app = app.into_make_service_with_connect_info::<SocketAddr>();
            axum::serve(listener, app).with_graceful_shutdown(stopping)
        })
        .await;
    leading.await??;
    println!("drained: {}", output.is_some() && drained.is_clean());
    Ok(output.unwrap_or(Ok(()))?)
}

fn app(redlock: &Redlock) -> Router {
    let page = RedlockLayer::new(redlock.clone(), ("page", key::path("id")));
    let page = page.shared_methods([Method::GET]);
    let convert = RedlockLayer::new(redlock.clone(), ("convert", key::header("x-tenant")));
    let convert = convert.max_concurrent(2).wait(Duration::from_millis(200));
    Router::new()
        .route("/pages/{id}", get(read).put(write).route_layer(page))
        .route("/convert", post(convert_a_file).layer(convert))
        .route("/jobs/{name}", post(on_timer))
        .with_state(redlock.clone())
        .nest(
            "/admin",
            admin_router(redlock.clone()).layer(from_fn(for_operators)),
        )
}

async fn read(Path(id): Path<String>) -> String {
    sleep(takes()).await;
    format!("read page {id}\n")
}

async fn write(Path(id): Path<String>) -> String {
    sleep(takes()).await;
    format!("wrote page {id}\n")
}

async fn convert_a_file(lock: LockHandle) -> String {
    sleep(takes()).await;
    let slot = lock.slot().unwrap_or_default();
    format!("converted in slot {slot}\n")
}

/// What the timer of each server would call.
async fn on_timer(
    State(redlock): State<Redlock>,
    Path(name): Path<String>,
) -> Result<String, LockError> {
    let lock = redlock.try_lock(("job", &name));
    match lock.hold_at_least(Duration::from_secs(30)).await {
        Ok(guard) => {
            // The release keeps the key taken for the rest of the 30 s.
            drop(guard.release().await);
            Ok(format!("wrote the {name}\n"))
        }
        Err(LockError::Contended { .. }) => Ok("another server has written it\n".into()),
        Err(error) => Err(error),
    }
}

/// Runs in one process at a time.
async fn dispatch(guard: LockGuard) {
    if let Some(token) = guard.fencing_token() {
        println!("leading with token {token}");
    }
    loop {
        // One step of the work; its writes carry the token.
        sleep(Duration::from_secs(1)).await;
    }
}

/// Stands for the authentication of the application: lets in requests from this computer only.
async fn for_operators(request: Request, next: Next) -> Result<Response, StatusCode> {
    let from = request
        .extensions()
        .get::<axum::extract::ConnectInfo<SocketAddr>>();
    match from {
        Some(from) if from.ip().is_loopback() => Ok(next.run(request).await),
        _ => Err(StatusCode::FORBIDDEN),
    }
}

fn takes() -> Duration {
    let millis = env::var("TAKES_MS")
        .ok()
        .and_then(|millis| millis.parse().ok());
    Duration::from_millis(millis.unwrap_or(1_000))
}

fn redlock() -> Result<Redlock, BuildError> {
    let config = RedlockConfig::from_env()?;
    if config.urls().is_empty() {
        return Ok(Redlock::in_memory(3));
    }
    RedlockBuilder::from(config).build()
}
