//! A proxy that locks for the service behind it and forwards the fencing token.
//!
//! Run with
//!
//! ```not_rust
//! cargo run --example reverse_proxy
//! ```
//!
//! and type the printed commands in another terminal:
//!
//! ```not_rust
//! curl -s -X POST -H 'x-fencing-token: 1' http://127.0.0.1:3000/accounts/alice
//! begun with token 1763659999000000
//! done
//!
//! curl -s -H 'x-fencing-token: 1' http://127.0.0.1:3000/accounts/alice
//! begun without a token
//! done
//!
//! curl -sN -X POST 'http://127.0.0.1:3000/accounts/bob?ms=2000' & sleep 0.5; curl -s -w '\n' -X POST http://127.0.0.1:3000/accounts/bob; wait
//! begun with token 1763659999000000
//! {"type":"tag:tower-redlock,2026:lock-contended","title":"Resource is locked","status":423,"detail":"another request holds the lock on this resource","code":"lock-contended"}
//! done
//! ```
//!
//! A client does not choose the token: the proxy replaces the client's header, and removes it if it locks
//! nothing. The third response streams line by line, and the account is locked until the last line. A
//! service should refuse a token lower than one that it has seen, as in `fenced_writes`. The example omits
//! other duties of a proxy (timeouts, `forwarded`, hop-by-hop headers). `LISTEN` changes the address.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::collections::HashMap;
use std::convert::Infallible;
use std::env;
use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, HeaderName, StatusCode, Uri};
use axum::response::Response;
use axum::routing::any;
use axum::serve::ListenerExt;
use futures_util::{StreamExt, stream};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tower_redlock::{Redlock, RedlockLayer, key};

const TOKEN: HeaderName = HeaderName::from_static("x-fencing-token");

fn proxy(redlock: Redlock, upstream: SocketAddr) -> Router {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let layer = RedlockLayer::new(redlock, ("account", key::path("id"))).forward_token(TOKEN);
    Router::new()
        .route("/accounts/{id}", any(forward))
        .route_layer(layer)
        .with_state((client, upstream))
}

/// Streams bodies piece by piece, in both directions.
async fn forward(
    State((client, upstream)): State<(Client<HttpConnector, Body>, SocketAddr)>,
    mut request: Request,
) -> Result<Response, (StatusCode, String)> {
    let path = request.uri().path_and_query();
    let path = path.map_or("/", |path| path.as_str());
    let uri = format!("http://{upstream}{path}").parse::<Uri>();
    *request.uri_mut() = uri.map_err(|error| (StatusCode::BAD_REQUEST, error.to_string()))?;
    let response = client.request(request).await;
    let response = response.map_err(|error| (StatusCode::BAD_GATEWAY, error.to_string()))?;
    Ok(response.map(Body::new))
}

/// The service behind the proxy. It trusts its callers, so only the proxy may reach it.
async fn serve(Query(query): Query<HashMap<String, u64>>, headers: HeaderMap) -> Body {
    let begun = match headers.get(TOKEN).map(|token| token.to_str()) {
        Some(Ok(token)) => format!("begun with token {token}\n"),
        _ => "begun without a token\n".to_owned(),
    };
    let ms = query.get("ms").copied().unwrap_or_default();
    let done = async move {
        tokio::time::sleep(Duration::from_millis(ms)).await;
        "done\n".to_owned()
    };
    let lines = stream::iter([begun]).chain(stream::once(done));
    Body::from_stream(lines.map(Ok::<_, Infallible>))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let service = TcpListener::bind("127.0.0.1:0").await?;
    let proxy = proxy(Redlock::in_memory(3), service.local_addr()?);
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&listen).await?;
    let address = listener.local_addr()?;
    // The last piece of a response waits for the release of its lock; see "TCP_NODELAY" in docs/settings.md.
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap_or_default());
    println!(
        "\
Listening on http://{address}. Try:

  # the proxy replaces a token that the client chose
  curl -s -X POST -H '{TOKEN}: 1' http://{address}/accounts/alice

  # and removes it from a request without a lock
  curl -s -H '{TOKEN}: 1' http://{address}/accounts/alice

  # two at once: the second is refused until the first response is sent
  curl -sN -X POST 'http://{address}/accounts/bob?ms=2000' & sleep 0.5; curl -s -w '\\n' -X POST http://{address}/accounts/bob; wait

Ctrl-C stops it."
    );
    tokio::spawn(axum::serve(service, Router::new().fallback(serve)).into_future());
    Ok(axum::serve(listener, proxy).await?)
}
