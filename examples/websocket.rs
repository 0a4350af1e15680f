//! A document that one person edits at a time: a lock as long as a WebSocket.
//!
//! Run with
//!
//! ```not_rust
//! cargo run --example websocket
//! ```
//!
//! and type what it prints:
//!
//! ```not_rust
//! curl -s -o /dev/null -w 'first: %{http_code}\n' -m 2 -H 'connection: upgrade' -H 'upgrade: websocket' -H 'sec-websocket-version: 13' -H 'sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==' http://127.0.0.1:3000/documents/7/edit & sleep 0.5; curl -s -w '\nsecond: %{http_code}\n' -H 'connection: upgrade' -H 'upgrade: websocket' -H 'sec-websocket-version: 13' -H 'sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==' http://127.0.0.1:3000/documents/7/edit; wait
//! {"type":"tag:tower-redlock,2026:lock-contended","title":"Resource is locked","status":423,"detail":"another request holds the lock on this resource","code":"lock-contended"}
//! second: 423
//! first: 101
//! ```
//!
//! All that curl does is to open the socket and to keep it for two seconds. A WebSocket client gets
//! the document first; each text that it sends then replaces the document, and is answered
//! `saved`. If the lock is lost, the socket is closed with 1013 and the reason.
//!
//! `LISTEN`, `REDLOCK_URLS` and `REDLOCK_RESTART_GUARD` are as in `quickstart`.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket, WebSocketUpgrade, close_code};
use axum::extract::{Path, State};
use axum::http::Method;
use axum::response::Response;
use axum::routing::get;
use axum::serve::ListenerExt;
use tokio::net::TcpListener;
use tokio::time::timeout;
use tower_redlock::{LockGuard, LockHandle, Redlock, RedlockLayer, RestartGuard, key};

/// The layer's 60 s are meant for requests. Without an end at all, a client that vanished without
/// closing its connection would keep the document for ever.
const MAX_HOLD: Duration = Duration::from_secs(30 * 60);

type Documents = Arc<Mutex<HashMap<String, Utf8Bytes>>>;

fn app(redlock: Redlock) -> Router {
    let one_editor = RedlockLayer::new(redlock, ("document", key::path("id")))
        .methods([Method::GET]) // what asks for the upgrade; not locked unless named
        .max_hold(MAX_HOLD);
    Router::new()
        .route("/documents/{id}/edit", get(edit))
        .route_layer(one_editor)
        .with_state(Documents::default())
}

async fn edit(
    upgrade: WebSocketUpgrade,
    lock: LockHandle,
    Path(id): Path<String>,
    State(documents): State<Documents>,
) -> Response {
    // Here and not in the closure: that runs when the response is sent, and the layer's share of
    // the lock gone with it.
    let guard = lock.detach().expect("the layer holds it until we respond");
    upgrade.on_upgrade(move |socket| serve(socket, guard, documents, id))
}

async fn serve(mut socket: WebSocket, guard: LockGuard, documents: Documents, id: String) {
    let lost = tokio::select! {
        biased;
        reason = guard.lost() => Some(reason),
        // An error means that the client went away.
        _ = converse(&mut socket, &documents, &id) => None,
    };
    // First: whoever sees the socket closed can open it again.
    drop(guard.release().await);
    let goodbye = async {
        if let Some(reason) = lost {
            let frame = CloseFrame {
                code: close_code::AGAIN,
                reason: reason.to_string().into(),
            };
            socket.send(Message::Close(Some(frame))).await?;
        }
        // Until both sides have closed; whatever else comes is no edit any more.
        while let Some(message) = socket.recv().await {
            message?;
        }
        Ok::<_, axum::Error>(())
    };
    // Not for ever: the client may have stopped reading.
    drop(timeout(Duration::from_secs(1), goodbye).await);
}

/// Ends when the client closes the socket, or at any `await` when the lock is lost.
///
/// A document in a database is written together with [`LockGuard::fencing_token`]; see
/// `fenced_writes`.
async fn converse(
    socket: &mut WebSocket,
    documents: &Mutex<HashMap<String, Utf8Bytes>>,
    id: &str,
) -> Result<(), axum::Error> {
    let locked = || documents.lock().unwrap_or_else(PoisonError::into_inner);
    let document = locked().get(id).cloned().unwrap_or_default();
    socket.send(Message::Text(document)).await?;
    while let Some(message) = socket.recv().await {
        match message? {
            Message::Text(text) => {
                locked().insert(id.to_owned(), text);
                socket.send(Message::text("saved")).await?;
            }
            Message::Close(_) => break,
            Message::Binary(_) | Message::Ping(_) | Message::Pong(_) => {}
        }
    }
    Ok(())
}

/// Three embedded nodes, or the Redis servers that `REDLOCK_URLS` names.
fn redlock() -> Result<Redlock, Box<dyn Error>> {
    let Ok(urls) = env::var("REDLOCK_URLS") else {
        return Ok(Redlock::in_memory(3));
    };
    let mut builder = Redlock::builder().urls(urls.split(',').map(str::trim));
    if env::var("REDLOCK_RESTART_GUARD").is_ok_and(|guard| guard == "off") {
        builder = builder.restart_guard(RestartGuard::Off);
    }
    Ok(builder.build()?)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&listen).await?;
    let address = listener.local_addr()?;
    let listener = listener.tap_io(|stream| {
        stream.set_nodelay(true).unwrap_or_default();
    });
    let upgrade = "-H 'connection: upgrade' -H 'upgrade: websocket' -H 'sec-websocket-version: 13' \
                   -H 'sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=='";
    println!(
        "\
Listening on http://{address}. Try:

  # two editors at once: the second is refused, as long as the first is there
  curl -s -o /dev/null -w 'first: %{{http_code}}\\n' -m 2 {upgrade} http://{address}/documents/7/edit & sleep 0.5; \
  curl -s -w '\\nsecond: %{{http_code}}\\n' {upgrade} http://{address}/documents/7/edit; wait

Ctrl-C stops it."
    );
    Ok(axum::serve(listener, app(redlock()?)).await?)
}
