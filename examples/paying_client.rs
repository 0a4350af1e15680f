//! A client that pays once, although its first connection is lost: hyper-util with the layers of the feature `client`.
//!
//! Run with
//!
//! ```not_rust
//! cargo run --example paying_client
//! attempt 1: lost, again
//! attempt 2: 409, again
//! attempt 3: 200
//! payment 1
//! ```
//!
//! The server takes a second for the payment, and the client hangs up after half of it. Its second attempt has the same
//! key, finds that the payment is being made, and waits for as long as `Retry-After` says. The third gets the recorded
//! response.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::Router;
use axum::routing::post;
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tower::{ServiceBuilder, ServiceExt};
use tower_redlock::client::{Attempt, Decision, IdempotentLayer, RetryLockedLayer};
use tower_redlock::{IdempotencyLayer, Redlock, scope};

/// Serves payments, each of which takes a second.
async fn serve(listener: TcpListener) -> std::io::Result<()> {
    let payments = Arc::new(AtomicU32::new(0));
    let pay = async move || {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let before = payments.fetch_add(1, Ordering::Relaxed);
        format!("payment {}", before + 1)
    };
    let once = IdempotencyLayer::new(Redlock::in_memory(3), scope::public());
    axum::serve(
        listener,
        Router::new().route("/payments", post(pay).layer(once)),
    )
    .await
}

fn show(attempt: &Attempt) {
    let what = match attempt.status {
        Some(status) => status.as_str().to_owned(),
        None => "lost".to_owned(),
    };
    let again = match attempt.decision {
        Decision::SendAgain(_) => ", again",
        _ => "",
    };
    println!("attempt {}: {what}{again}", attempt.number);
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(serve(listener));
    let client = ServiceBuilder::new()
        .layer(IdempotentLayer::new())
        .layer(RetryLockedLayer::new().on_attempt(show))
        // Of each attempt. Its error counts as a lost connection.
        .timeout(Duration::from_millis(500))
        .service(Client::builder(TokioExecutor::new()).build_http());
    let request = Request::post(format!("http://{address}/payments"));
    let request = request.body(Full::<Bytes>::from("amount=5"))?;
    let response = client.oneshot(request).await?;
    let body = response.into_body().collect().await?.to_bytes();
    println!("{}", String::from_utf8_lossy(&body));
    Ok(())
}
