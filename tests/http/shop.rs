//! A shop whose handlers lock orders and accounts.

use axum::extract::{FromRef, Path};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Router, debug_handler};
use serde::Deserialize;
use support::{ms, secs};
use tokio::time::sleep;
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{LockKey, LockKeys, LockOptions, LockResource, Locked, Redlock};

#[derive(Debug, Deserialize)]
pub(crate) struct OrderId(pub(crate) u64);

impl LockResource for OrderId {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from(("order", self.0.to_string())).into()
    }
}

/// Two accounts, locked together, for which one waits.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Transfer {
    pub(crate) from: String,
    pub(crate) to: String,
}

impl LockResource for Transfer {
    fn lock_keys(&self) -> LockKeys {
        [("account", &self.from), ("account", &self.to)]
            .into_iter()
            .collect()
    }

    fn options(&self) -> LockOptions {
        LockOptions::default().wait(secs(2)).ttl(secs(5))
    }
}

#[derive(Clone, FromRef)]
pub(crate) struct AppState {
    pub(crate) redlock: Redlock,
}

/// Waits until no node holds a lock: what is dropped is released in the background.
pub(crate) async fn until_free(nodes: &ScriptedNodes) {
    while nodes.locks().iter().any(|locks| *locks > 0) {
        sleep(ms(1)).await;
    }
}

#[debug_handler(state = AppState)]
pub(crate) async fn ship(Locked(guard, Path(id)): Locked<Path<OrderId>>) -> Response {
    assert!(guard.is_valid() && guard.fencing_token().is_some());
    let response = format!("{} {:?}", id.0, guard.keys()).into_response();
    guard.hold_until_sent(response).into_response()
}

pub(crate) fn shop(redlock: &Redlock) -> Router {
    let redlock = redlock.clone();
    Router::new()
        .route("/orders/{id}/ship", post(ship))
        .with_state(AppState { redlock })
}
