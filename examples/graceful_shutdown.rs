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
//! The nodes are the Redis servers in `REDLOCK_URLS` (comma-separated), or embedded ones.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::io;
use std::time::Duration;

use axum::Router;
use axum::extract::Query;
use axum::routing::post;
use axum::serve::ListenerExt;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::timeout;
use tower_redlock::{BuildError, Redlock, RedlockBuilder, RedlockConfig, RedlockLayer, key};

fn app(redlock: Redlock) -> Router {
    Router::new()
        .route("/jobs/{id}", post(job))
        .route_layer(RedlockLayer::new(redlock, ("job", key::path("id"))))
}

async fn job(Query(query): Query<HashMap<String, u64>>) -> &'static str {
    let ms = query.get("ms").copied().unwrap_or(100);
    tokio::time::sleep(Duration::from_millis(ms)).await;
    "done\n"
}

/// Uses the Redis servers in `REDLOCK_URLS`, or three embedded nodes.
fn redlock() -> Result<Redlock, BuildError> {
    let config = RedlockConfig::from_env()?;
    if config.urls().len() == 0 {
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
    let stop_signal = stop_signal()?;
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

    let (stop, mut stopping) = watch::channel(());
    let server = axum::serve(listener, app(redlock.clone()))
        .with_graceful_shutdown(async move { drop(stopping.changed().await) });
    let server = tokio::spawn(server.into_future());
    stop_signal.await;

    // First refuse new connections, then new locks; running requests continue.
    stop.send_replace(());
    let drained = redlock.drain(grace).await;
    if drained.is_clean() {
        // The server sends the last bytes of a response after the release of its lock.
        timeout(grace, server).await???;
        println!("drained: nothing left");
    } else {
        println!("drained: still held {:?}", drained.held);
        println!("drained: unconfirmed {:?}", drained.unconfirmed);
    }
    Ok(())
}

/// Resolves at the first Ctrl-C or SIGTERM after the call, also if it came before the first poll.
#[cfg(unix)]
fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};

    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

/// Resolves at the first Ctrl-C after the call, also if it came before the first poll.
#[cfg(windows)]
fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    let mut ctrl_c = tokio::signal::windows::ctrl_c()?;
    Ok(async move { drop(ctrl_c.recv().await) })
}
