//! A proxy that locks for a service behind it, and hands the fencing token on.
//!
//! Run with
//!
//! ```not_rust
//! cargo run --example reverse_proxy
//! ```
//!
//! and type what it prints:
//!
//! ```not_rust
//! curl -s -X POST -H 'x-fencing-token: 1' http://127.0.0.1:3000/accounts/alice
//! written with token 1763659999000000
//! that was all
//!
//! curl -s -H 'x-fencing-token: 1' http://127.0.0.1:3000/accounts/alice
//! read without a token
//!
//! curl -sN -X POST 'http://127.0.0.1:3000/accounts/alice?ms=2000' & sleep 0.5; curl -s -w '\n' -X POST http://127.0.0.1:3000/accounts/alice; wait
//! written with token 1763659999000001
//! {"type":"tag:tower-redlock,2026:lock-contended","title":"Resource is locked","status":423,"detail":"another request holds the lock on this resource","code":"lock-contended"}
//! that was all
//!
//! curl -s -o /dev/null -D - -X POST -H 'te: trailers' http://127.0.0.1:3000/accounts/alice | grep '^x-lines'
//! x-lines: 2
//!
//! curl -s -X POST -H 'x-fencing-token: 1' http://127.0.0.1:40233/accounts/alice
//! token 1 is stale, 1763659999000002 was here
//! ```
//!
//! A client does not choose the token: what it sends is replaced, and removed where nothing is locked.
//! The third command streams an answer through the proxy, its last line after two seconds; the first
//! line is there at once, and the account locked until the last. The fourth shows trailers. The last
//! goes past the proxy, straight to the service, which is on another port each time.
//!
//! What else a proxy does (timeouts, `forwarded`, headers that are for one hop) is left out. `LISTEN`
//! changes the address.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::collections::HashMap;
use std::convert::Infallible;
use std::env;
use std::error::Error;
use std::future::ready;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Query, Request, State};
use axum::http::header::TRAILER;
use axum::http::uri::{InvalidUri, PathAndQuery};
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use axum::serve::ListenerExt;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http_body::Frame;
use http_body_util::StreamBody;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tower_redlock::{FencingToken, Redlock, RedlockLayer, key};

const TOKEN: HeaderName = HeaderName::from_static("x-fencing-token");

#[derive(Clone)]
struct Upstream {
    client: Client<HttpConnector, Body>,
    address: SocketAddr,
}

fn proxy(redlock: Redlock, address: SocketAddr) -> Router {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let layer = RedlockLayer::new(redlock, ("account", key::path("id"))).forward_token(TOKEN);
    Router::new()
        .route("/accounts/{id}", any(forward))
        .route_layer(layer)
        .with_state(Upstream { client, address })
}

/// Bodies go through piece by piece, with their trailers, in both directions.
async fn forward(
    State(upstream): State<Upstream>,
    mut request: Request,
) -> Result<Response, (StatusCode, String)> {
    let path = request.uri().path_and_query();
    let path = path.map_or("/", PathAndQuery::as_str);
    *request.uri_mut() = format!("http://{}{path}", upstream.address)
        .parse()
        .map_err(|error: InvalidUri| (StatusCode::BAD_REQUEST, error.to_string()))?;
    match upstream.client.request(request).await {
        Ok(response) => Ok(response.map(Body::new)),
        Err(error) => Err((StatusCode::BAD_GATEWAY, error.to_string())),
    }
}

/// The highest token with which each account was written.
type Fences = Arc<Mutex<HashMap<String, FencingToken>>>;

/// The service behind the proxy. It believes whoever reaches it, so nobody else may.
fn upstream() -> Router {
    Router::new()
        .route("/accounts/{id}", get(read).post(write))
        .with_state(Fences::default())
}

async fn read(headers: HeaderMap) -> String {
    match token_of(&headers) {
        Some(token) => format!("read under token {token}\n"),
        None => "read without a token\n".to_owned(),
    }
}

async fn write(
    State(fences): State<Fences>,
    Path(account): Path<String>,
    Query(query): Query<HashMap<String, u64>>,
    headers: HeaderMap,
) -> Response {
    let Some(token) = token_of(&headers) else {
        return (StatusCode::BAD_REQUEST, format!("{TOKEN} is missing\n")).into_response();
    };
    let mut fences = fences.lock().unwrap_or_else(PoisonError::into_inner);
    let highest = fences.entry(account).or_insert(token);
    if token < *highest {
        let stale = format!("token {token} is stale, {highest} was here\n");
        return (StatusCode::CONFLICT, stale).into_response();
    }
    *highest = token;
    slowly(token, query.get("ms").copied().unwrap_or_default())
}

fn token_of(headers: &HeaderMap) -> Option<FencingToken> {
    headers.get(TOKEN)?.to_str().ok()?.parse().ok()
}

/// Streams a line, another line some milliseconds later, and trailers.
fn slowly(token: FencingToken, ms: u64) -> Response {
    let first = Frame::data(Bytes::from(format!("written with token {token}\n")));
    let last = async move {
        tokio::time::sleep(Duration::from_millis(ms)).await;
        Frame::data(Bytes::from("that was all\n"))
    };
    let lines = HeaderName::from_static("x-lines");
    let trailers = HeaderMap::from_iter([(lines.clone(), 2.into())]);
    let frames = stream::once(ready(first))
        .chain(stream::once(last))
        .chain(stream::once(ready(Frame::trailers(trailers))))
        .map(Ok::<_, Infallible>);
    let body = Body::new(StreamBody::new(frames));
    ([(TRAILER, lines.as_str())], body).into_response()
}

async fn serve(listener: TcpListener, app: Router) -> io::Result<()> {
    // The end of a response waits for the release of its lock; see the README.
    let listener = listener.tap_io(|stream| {
        stream.set_nodelay(true).unwrap_or_default();
    });
    axum::serve(listener, app).await
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let behind = TcpListener::bind("127.0.0.1:0").await?;
    let hidden = behind.local_addr()?;
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&listen).await?;
    let address = listener.local_addr()?;
    println!(
        "\
Listening on http://{address}, in front of http://{hidden}. Try:

  # a token that the client chose is replaced
  curl -s -X POST -H '{TOKEN}: 1' http://{address}/accounts/alice

  # and removed from a request that is not locked
  curl -s -H '{TOKEN}: 1' http://{address}/accounts/alice

  # two at once: the second is refused while the first is being answered
  curl -sN -X POST 'http://{address}/accounts/alice?ms=2000' & sleep 0.5; curl -s -w '\\n' -X POST http://{address}/accounts/alice; wait

  # trailers go through too
  curl -s -o /dev/null -D - -X POST -H 'te: trailers' http://{address}/accounts/alice | grep '^x-lines'

  # past the proxy, with an old token: refused by the service itself
  curl -s -X POST -H '{TOKEN}: 1' http://{hidden}/accounts/alice

Ctrl-C stops it."
    );
    let proxy = proxy(Redlock::in_memory(3), hidden);
    tokio::try_join!(serve(behind, upstream()), serve(listener, proxy))?;
    Ok(())
}
