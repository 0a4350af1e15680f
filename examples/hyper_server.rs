//! The layer on a plain hyper server, without axum.
//!
//! Run with
//!
//! ```not_rust
//! cargo run --example hyper_server
//! ```
//!
//! and type the printed commands in another terminal:
//!
//! ```not_rust
//! curl -s -X POST 'http://127.0.0.1:3000/render?video=7' & sleep 0.5; curl -s -w '\n%{http_code}\n' -X POST 'http://127.0.0.1:3000/render?video=7'; wait
//! {"type":"tag:tower-redlock,2026:lock-contended","title":"Resource is locked","status":423,"detail":"another request holds the lock on this resource","code":"lock-contended"}
//! 423
//! rendered under token 1763659999000000
//!
//! curl -s -w '\n%{http_code}\n' -X POST http://127.0.0.1:3000/render
//! {"type":"tag:tower-redlock,2026:key-missing","title":"Key missing or invalid","status":400,"detail":"the request lacks a required key: query parameter `video`","code":"key-missing"}
//! 400
//! ```
//!
//! `LISTEN` changes the address.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::convert::Infallible;
use std::env;
use std::error::Error;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tower::ServiceBuilder;
use tower_redlock::{LockHandle, Redlock, RedlockLayer, key};

async fn render(request: Request<Incoming>) -> Result<Response<String>, Infallible> {
    tokio::time::sleep(Duration::from_secs(2)).await;
    let lock = request.extensions().get::<LockHandle>();
    let rendered = match lock.and_then(LockHandle::fencing_token) {
        Some(token) => format!("rendered under token {token}\n"),
        // For example a GET, which passes the layer without a lock.
        None => "rendered without a lock\n".to_owned(),
    };
    Ok(Response::new(rendered))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let layer = RedlockLayer::new(Redlock::in_memory(3), ("video", key::query("video")));
    let service = ServiceBuilder::new().layer(layer).service_fn(render);
    let service = TowerToHyperService::new(service);

    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&listen).await?;
    let address = listener.local_addr()?;
    println!(
        "\
Listening on http://{address}. Try:

  # two at once: the second is refused
  curl -s -X POST 'http://{address}/render?video=7' & sleep 0.5; curl -s -w '\\n%{{http_code}}\\n' -X POST 'http://{address}/render?video=7'; wait

  # a request that names no video
  curl -s -w '\\n%{{http_code}}\\n' -X POST http://{address}/render

Ctrl-C stops it."
    );
    loop {
        let (stream, _) = listener.accept().await?;
        // The last piece of a response waits for the release of its lock; see "TCP_NODELAY" in docs/settings.md.
        stream.set_nodelay(true)?;
        let service = service.clone();
        tokio::spawn(async move {
            let server = auto::Builder::new(TokioExecutor::new());
            let connection = server.serve_connection(TokioIo::new(stream), service);
            if let Err(error) = connection.await {
                eprintln!("a connection broke: {error}");
            }
        });
    }
}
