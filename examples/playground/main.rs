//! A playground in the browser: five nodes that you can break while two servers and their callers use a lock.
//!
//! Run with
//!
//! ```not_rust
//! cargo run --example playground
//! ```
//!
//! and open the URL that it prints. The nodes are embedded, so it needs only Rust; `-- --redis` starts five real
//! redis-servers instead, really kills, stops and wipes them, and ends them at exit. `LISTEN` changes the address.
//!
//! The page only watches and gives orders. What it shows happens in this process: `server.rs` has the bank, an axum
//! service with this crate's layers, `instance.rs` its callers, `embedded.rs` and `redis.rs` the nodes, `checker.rs`
//! the counters of what must never happen, and `tour.rs` the tour.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::convert::Infallible;
use std::env;
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::stream::{self, Stream, StreamExt};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::{MissedTickBehavior, interval};

use crate::playground::{Order, Playground, Refused};

mod board;
mod checker;
mod client;
mod cluster;
mod embedded;
mod events;
mod instance;
mod monitor;
mod playground;
mod proxy;
mod redis;
mod server;
mod storage;
mod tour;

/// The number of nodes.
const NODES: usize = 5;

/// The servers of the bank.
const SERVERS: [&str; 2] = ["A", "B"];

/// The callers, who use the two servers in turn.
const CALLERS: [&str; 8] = ["Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gil", "Hana"];

/// The key of the account's lock.
const ACCOUNT: (&str, &str) = ("account", "joint");

/// Short, so that nobody waits long for a lock to expire.
const TTL: Duration = Duration::from_secs(2);

/// The quarantine that `RestartGuard::Auto` makes of the ttl.
const RESTART_GUARD: Duration = Duration::from_secs(7);

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Box<dyn Error + Send + Sync>> {
    tracing_subscriber::fmt()
        .with_env_filter(env::var("RUST_LOG").unwrap_or_else(|_| "error".into()))
        .init();
    let arguments: Vec<String> = env::args().skip(1).collect();
    let with_redis = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--redis"] => true,
        _ => return Err("usage: playground [--redis]".into()),
    };
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:0".into());
    let listener = TcpListener::bind(&listen).await.map_err(|error| {
        format!("cannot listen on {listen}: {error}; set LISTEN to another address")
    })?;
    let playground = Playground::start(with_redis).await?;
    println!(
        "Open http://{} in a browser; Ctrl-C ends it.",
        listener.local_addr()?
    );
    tokio::select! {
        served = axum::serve(listener, router(Arc::clone(&playground))) => served?,
        () = stop_signal() => {}
    }
    // Ends the servers that it started.
    playground.end();
    Ok(())
}

fn router(playground: Arc<Playground>) -> Router {
    Router::new()
        .route(
            "/",
            get(|| page("text/html; charset=utf-8", include_str!("page/index.html"))),
        )
        .route(
            "/playground.css",
            get(|| page("text/css", include_str!("page/playground.css"))),
        )
        .route(
            "/playground.js",
            get(|| page("text/javascript", include_str!("page/playground.js"))),
        )
        .route("/tour", get(|| async { Json(tour::texts()) }))
        .route("/state", get(state))
        .route("/events", get(events))
        .route("/commands", post(execute))
        .with_state(playground)
}

async fn page(content_type: &'static str, text: &'static str) -> Response {
    let mut response = text.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// Returns the present state, for a look with curl.
async fn state(State(playground): State<Arc<Playground>>) -> Json<Value> {
    Json(playground.view())
}

/// Streams what happens: the state ten times a second, and each event.
async fn events(
    State(playground): State<Arc<Playground>>,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let receiver = playground.events.subscribe();
    let news = stream::unfold(receiver, |mut receiver| async {
        loop {
            match receiver.recv().await {
                Ok(text) => return Some((text.to_string(), receiver)),
                // A page that is far behind goes on with the present.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return None,
            }
        }
    });
    let mut ticks = interval(instance::TICK);
    // A reader that was slow gets the present, and not all that it missed.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let views = stream::unfold((ticks, None), move |(mut ticks, shown)| {
        let playground = Arc::clone(&playground);
        async move {
            ticks.tick().await;
            let view = playground.view();
            let instance = view["instance"].as_u64();
            // A page forgets the past when it is shown another instance.
            let past = match instance {
                Some(instance) if Some(instance) != shown => playground.events.recent(instance),
                _ => Vec::new(),
            };
            let past = past.into_iter().map(|text| text.to_string());
            let texts: Vec<_> = [view.to_string()].into_iter().chain(past).collect();
            Some((stream::iter(texts), (ticks, instance)))
        }
    });
    let all = stream::select(news, views.flatten());
    Sse::new(all.map(|text| Ok(Event::default().data(text)))).keep_alive(KeepAlive::default())
}

async fn execute(State(playground): State<Arc<Playground>>, Json(order): Json<Value>) -> Response {
    let executed = match serde_json::from_value::<Order>(order) {
        Ok(order) => playground.execute(order).await,
        Err(error) => Err(Refused::Invalid(error.to_string())),
    };
    match executed {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(Refused::Invalid(why)) => (StatusCode::BAD_REQUEST, why).into_response(),
        Err(Refused::Conflict(why)) => (StatusCode::CONFLICT, why).into_response(),
    }
}

/// Resolves at Ctrl-C, at SIGTERM, and when the terminal is closed.
async fn stop_signal() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};

        let signals = (
            signal(SignalKind::terminate()),
            signal(SignalKind::hangup()),
        );
        if let (Ok(mut terminate), Ok(mut hangup)) = signals {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminate.recv() => {}
                _ = hangup.recv() => {}
            }
            return;
        }
    }
    drop(tokio::signal::ctrl_c().await);
}
