//! A service that exports metrics of its locks to Prometheus and Grafana.
//!
//! Run with
//!
//! ```not_rust
//! cargo run --example metrics
//! ```
//!
//! and type the printed commands in another terminal:
//!
//! ```not_rust
//! curl -s -X POST 'http://127.0.0.1:3000/accounts/alice/withdraw?hold_ms=20'
//! done
//!
//! curl -s -o /dev/null -X POST 'http://127.0.0.1:3000/accounts/bob/withdraw?hold_ms=2000' & sleep 0.5; curl -s -w '\n' -X POST http://127.0.0.1:3000/accounts/bob/withdraw; wait
//! {"type":"tag:tower-redlock,2026:lock-contended","title":"Resource is locked","status":423,"detail":"another request holds the lock on this resource","code":"lock-contended"}
//!
//! curl -s http://127.0.0.1:3000/metrics | grep '^redlock_acquire_total.* [1-9]' | sort
//! redlock_acquire_total{resource="account",outcome="contended"} 1
//! redlock_acquire_total{resource="account",outcome="granted"} 2
//!
//! curl -s -w '\n' http://127.0.0.1:3000/healthz
//! {"needed":2,"nodes":[{"latency_us":22,"node":"embedded-0","state":"up"},{"latency_us":24,"node":"embedded-1","state":"up"},{"latency_us":25,"node":"embedded-2","state":"up"}],"quorum":true,"status":"ready"}
//! ```
//!
//! Import `grafana_dashboard.json` into Grafana to draw all of `/metrics`. Some metrics need Redis
//! nodes: `LISTEN`, `REDLOCK_URLS` and the other variables work as in `quickstart`.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::time::Duration;

use axum::Router;
use axum::extract::Query;
use axum::http::header::CONTENT_TYPE;
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::net::TcpListener;
use tower_redlock::{
    LATENCY_BUCKETS, OnUnavailable, Redlock, RedlockBuilder, RedlockConfig, RedlockLayer,
    health_router, key,
};

fn app(redlock: Redlock, metrics: PrometheusHandle) -> Router {
    let account = RedlockLayer::new(redlock.clone(), ("account", key::path("id")))
        .wait(Duration::from_millis(100));
    // Two simultaneous reports are a waste, but better than none.
    let report = RedlockLayer::new(redlock.clone(), ("report", key::path("id")))
        .wait(Duration::from_secs(10))
        .on_unavailable(OnUnavailable::Proceed);
    let prometheus = [(CONTENT_TYPE, "text/plain; version=0.0.4")];
    let scrape = || async move { (prometheus, metrics.render()) };
    Router::new()
        .route("/accounts/{id}/withdraw", post(work).layer(account))
        .route("/reports/{id}", post(work).layer(report))
        .route("/metrics", get(scrape))
        .nest("/healthz", health_router(redlock))
}

async fn work(Query(query): Query<HashMap<String, u64>>) -> &'static str {
    let hold_ms = query.get("hold_ms").copied().unwrap_or_default();
    tokio::time::sleep(Duration::from_millis(hold_ms)).await;
    "done\n"
}

/// Sets buckets, because the default summaries have quantiles that cannot be aggregated over servers.
fn recorder() -> Result<PrometheusHandle, BuildError> {
    let locks = Matcher::Prefix("redlock_".into());
    PrometheusBuilder::new()
        .set_buckets_for_metric(locks, LATENCY_BUCKETS)?
        .install_recorder()
}

/// Uses the Redis servers in `REDLOCK_URLS`, or three embedded nodes.
fn redlock() -> Result<Redlock, tower_redlock::BuildError> {
    let config = RedlockConfig::from_env()?;
    let has_servers = !config.urls().is_empty();
    let mut builder = RedlockBuilder::from(config).ttl(Duration::from_secs(3));
    if !has_servers {
        builder = builder.embedded(3);
    }
    builder.build()
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // Before the first lock, because locks describe their metrics to the recorder.
    let metrics = recorder()?;
    let app = app(redlock()?, metrics);
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(listen).await?;
    let address = listener.local_addr()?;
    println!(
        "\
Listening on http://{address}. Try:

  # a withdrawal, under the lock of its account
  curl -s -X POST 'http://{address}/accounts/alice/withdraw?hold_ms=20'

  # two at once: the second waits for 100 ms and is refused
  curl -s -o /dev/null -X POST 'http://{address}/accounts/bob/withdraw?hold_ms=2000' & sleep 0.5; curl -s -w '\\n' -X POST http://{address}/accounts/bob/withdraw; wait

  # the outcomes that were counted
  curl -s http://{address}/metrics | grep '^redlock_acquire_total.* [1-9]' | sort

  # the health of the nodes
  curl -s -w '\\n' http://{address}/healthz

Ctrl-C stops it."
    );
    // The last piece of a response waits for the release of its lock; see "TCP_NODELAY" in docs/settings.md.
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap_or_default());
    Ok(axum::serve(listener, app).await?)
}
