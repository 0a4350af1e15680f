//! A document with one editor at a time: a lock held for the life of a WebSocket.
//!
//! Run with
//!
//! ```not_rust
//! cargo run --example websocket
//! ```
//!
//! and type the printed commands in another terminal:
//!
//! ```not_rust
//! curl -s -o /dev/null -w 'first: %{http_code}\n' -m 2 -H 'connection: upgrade' -H 'upgrade: websocket' -H 'sec-websocket-version: 13' -H 'sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==' http://127.0.0.1:3000/documents/7/edit & sleep 0.5; curl -s -m 2 -w '\nsecond: %{http_code}\n' -H 'connection: upgrade' -H 'upgrade: websocket' -H 'sec-websocket-version: 13' -H 'sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==' http://127.0.0.1:3000/documents/7/edit; wait
//! {"type":"tag:tower-redlock,2026:lock-contended","title":"Resource is locked","status":423,"detail":"another request holds the lock on this resource","code":"lock-contended"}
//! second: 423
//! first: 101
//! ```
//!
//! curl only keeps the socket open for two seconds. A WebSocket client gets the document; each text that
//! it sends replaces the document, and the server replies `saved`. When the lock is lost, after half an
//! hour or `MAX_HOLD_MS`, the server closes the socket with 1013 and the reason. `LISTEN` changes the address.

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
use tower_redlock::{BuildError, LockGuard, LockHandle, Redlock, RedlockLayer, key};

type Documents = Arc<Mutex<HashMap<String, Utf8Bytes>>>;

fn app(redlock: Redlock, max_hold: Duration) -> Result<Router, BuildError> {
    let one_editor = RedlockLayer::new(redlock, ("document", key::path("id")))
        .methods([Method::GET]) // the method of the upgrade; not locked by default
        .max_hold(max_hold) // the default of 60 s suits requests
        .ttl(Duration::from_secs(2))?; // how long a document stays locked after a crash
    Ok(Router::new()
        .route("/documents/{id}/edit", get(edit).layer(one_editor))
        .with_state(Documents::default()))
}

async fn edit(
    upgrade: WebSocketUpgrade,
    lock: LockHandle,
    Path(id): Path<String>,
    State(documents): State<Documents>,
) -> Response {
    // Not in the closure, which runs after the response, and with it the layer's share, is dropped.
    let guard = lock.upgrade().expect("the layer holds it until we respond");
    upgrade.on_upgrade(move |socket| serve(socket, guard, documents, id))
}

async fn serve(mut socket: WebSocket, guard: LockGuard, documents: Documents, id: String) {
    let locked = || documents.lock().unwrap_or_else(PoisonError::into_inner);
    // Dropped at any `await` when the lock is lost. A database also gets `guard.fencing_token()`.
    let edits = async {
        let document = locked().get(&id).cloned().unwrap_or_default();
        socket.send(Message::Text(document)).await?;
        while let Some(message) = socket.recv().await {
            match message? {
                Message::Text(text) => {
                    locked().insert(id.clone(), text);
                    socket.send(Message::text("saved")).await?;
                }
                Message::Close(_) => break,
                _ => {}
            }
        }
        Ok::<_, axum::Error>(())
    };
    let goodbye = tokio::select! {
        biased;
        reason = guard.lost() => Some(CloseFrame {
            code: close_code::AGAIN,
            reason: reason.to_string().into(),
        }),
        _ = edits => None, // also after an error: the client disconnected
    };
    // Before the close: a client that sees the closed socket can open it again.
    drop(guard.release().await);
    let close = async {
        drop(socket.send(Message::Close(goodbye)).await);
        // Until the client has closed, too; later messages are no edits.
        while let Some(Ok(_)) = socket.recv().await {}
    };
    // Bounded: the client may have stopped reading.
    drop(tokio::time::timeout(Duration::from_secs(1), close).await);
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let max_hold = env::var("MAX_HOLD_MS").unwrap_or_else(|_| "1800000".into());
    let max_hold = Duration::from_millis(max_hold.parse()?);
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&listen).await?;
    let address = listener.local_addr()?;
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap_or_default());
    let upgrade = "-H 'connection: upgrade' -H 'upgrade: websocket' -H 'sec-websocket-version: 13' \
                   -H 'sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=='";
    println!(
        "\
Listening on http://{address}. Try:

  # two editors at once: the second is refused until the first disconnects
  curl -s -o /dev/null -w 'first: %{{http_code}}\\n' -m 2 {upgrade} http://{address}/documents/7/edit & sleep 0.5; curl -s -m 2 -w '\\nsecond: %{{http_code}}\\n' {upgrade} http://{address}/documents/7/edit; wait

Ctrl-C stops it."
    );
    Ok(axum::serve(listener, app(Redlock::in_memory(3), max_hold)?).await?)
}
