//! Layers and extractors that lock for one request: shared keys, tokens per key, and no deadlock.

use std::convert::Infallible;

use axum::extract::{FromRequestParts, Path, Query};
use axum::routing::{MethodRouter, any, post};
use axum::{Router, debug_handler};
use http::Method;
use http::request::Parts;
use serde::Deserialize;
use support::{redlock, secs, send, three_nodes, three_nodes_with};
use tokio::time::sleep;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    LockHandle, LockHandles, LockKey, LockKeys, LockResource, Locked, OnLost, OnMissingKey,
    OnUnavailable, Redlock, RedlockLayer, key,
};

use crate::shop::{AppState, OrderId, Transfer, until_free};

/// A layer that locks the account which a transfer is from.
fn transfers(handler: MethodRouter<Redlock>, redlock: Redlock) -> Router {
    let by_from = ("account", key::query("from"));
    Router::new()
        .route("/transfer", handler)
        .route_layer(RedlockLayer::new(redlock.clone(), by_from))
        .with_state(redlock)
}

// Rules: http.shared
#[tokio::test(start_paused = true)]
async fn locked_shares_the_lock_of_a_layer_with_the_same_key() {
    async fn handler(
        handle: LockHandle,
        handles: LockHandles,
        Locked(guard, _): Locked<Path<OrderId>>,
    ) -> String {
        assert_eq!(guard.fencing_token(), handle.fencing_token());
        assert_eq!(handles.to_vec().len(), 1);
        // The layer's share keeps the lock.
        drop(guard);
        assert!(handle.is_valid());
        "shared".to_owned()
    }
    let (nodes, redlock) = three_nodes();
    let (by_order, by_id) = (key::typed_path::<OrderId>(), ("order", key::path("id")));
    let app = Router::new()
        .route("/orders/{id}", post(handler))
        .route_layer(RedlockLayer::new(redlock.clone(), by_order))
        .route_layer(RedlockLayer::new(redlock.clone(), by_id))
        .with_state(redlock);
    assert_eq!(send(&app, "POST", "/orders/7").await.text(), "shared");
    assert_eq!(nodes.sent(0, OpKind::Acquire), 1);
    assert_eq!(nodes.sent(0, OpKind::Release), 1);
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn locked_takes_only_keys_that_the_request_does_not_hold() {
    #[debug_handler(state = AppState)]
    async fn handler(handles: LockHandles, Locked(guard, _): Locked<Query<Transfer>>) -> String {
        let handles = handles.to_vec();
        let held: usize = handles.iter().map(|handle| handle.keys().len()).sum();
        assert_eq!(guard.keys(), [LockKey::from(("account", "b"))]);
        format!("{held}")
    }
    let (nodes, redlock) = three_nodes();
    let app = transfers(post(handler), redlock);
    let answer = send(&app, "POST", "/transfer?from=a&to=b").await;
    assert_eq!(answer.text(), "2");
    until_free(&nodes).await;
}

/// The second extractor takes one account, and shares the other with the first.
#[tokio::test(start_paused = true)]
async fn locked_guard_extends_and_releases_shared_and_own_keys() {
    #[derive(Deserialize)]
    struct From {
        from: String,
    }
    impl LockResource for From {
        fn lock_keys(&self) -> LockKeys {
            LockKey::from(("account", &*self.from)).into()
        }
    }
    let handler = async |Locked(first, _): Locked<Query<From>>,
                         Locked(both, _): Locked<Query<Transfer>>| {
        drop(first);
        both.extend(secs(20)).await.unwrap();
        let extended = both.valid_for() > secs(15);
        let handle = both.handle();
        let released = both.release().await;
        format!("{extended} {released:?} {}", handle.is_valid())
    };
    let (nodes, redlock) = three_nodes_with(|builder| builder.max_ttl(secs(20)));
    let app = Router::new().route("/transfer", post(handler));
    let app = app.with_state(redlock);
    let answer = send(&app, "POST", "/transfer?from=a&to=b").await;
    assert_eq!(answer.text(), "true Ok(Freed) false");
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

/// An extractor that takes longer than a lock lasts.
struct SlowBody;

impl<S: Send + Sync> FromRequestParts<S> for SlowBody {
    type Rejection = Infallible;

    async fn from_request_parts(_: &mut Parts, _: &S) -> Result<Self, Infallible> {
        sleep(secs(60)).await;
        Ok(Self)
    }
}

#[tokio::test(start_paused = true)]
async fn locked_does_not_share_a_lost_lock() {
    async fn handler(_: SlowBody, Locked(guard, _): Locked<Path<OrderId>>) -> String {
        format!("{}", guard.is_valid())
    }
    let (nodes, redlock) = three_nodes();
    let layer = RedlockLayer::new(redlock.clone(), ("order", key::path("id")));
    let app = Router::new()
        .route("/orders/{id}", post(handler))
        .route_layer(layer.on_lost(OnLost::Notify).max_hold(secs(5)))
        .with_state(redlock);
    assert_ne!(send(&app, "POST", "/orders/7").await.text(), "false");
    until_free(&nodes).await;
}

#[tokio::test(start_paused = true)]
async fn locked_does_not_share_the_same_key_of_another_redlock() {
    async fn handler(handles: LockHandles, _: Locked<Path<OrderId>>) -> String {
        format!("{}", handles.to_vec().len())
    }
    let nodes = ScriptedNodes::new(3);
    let others = Redlock::in_memory(1);
    let app = Router::new()
        .route("/orders/{id}", post(handler))
        .route_layer(RedlockLayer::new(others, ("order", key::path("id"))))
        .with_state(redlock(&nodes));
    assert_eq!(send(&app, "POST", "/orders/7").await.text(), "2");
    assert_eq!(nodes.sent(0, OpKind::Acquire), 1);
}

#[tokio::test(start_paused = true)]
async fn lock_handle_is_none_when_only_an_outer_layer_locked() {
    async fn handler(handle: Option<LockHandle>) -> String {
        format!("{:?}", handle.map(|handle| handle.keys().to_vec()))
    }
    let nodes = ScriptedNodes::new(3);
    let inner = RedlockLayer::new(redlock(&nodes), ("account", key::query("id")))
        .on_unavailable(OnUnavailable::Proceed)
        .missing_key(OnMissingKey::Pass)
        .skip(|parts| parts.uri.path() == "/skipped");
    let outer = RedlockLayer::new(Redlock::in_memory(1), "tenant");
    let outer = outer.methods([Method::POST, Method::GET]);
    let app: Router = Router::new()
        .route("/", any(handler))
        .route("/skipped", any(handler))
        .layer(inner)
        .layer(outer);
    assert_eq!(send(&app, "POST", "/").await.text(), "None");
    assert_eq!(send(&app, "GET", "/?id=7").await.text(), "None");
    assert_eq!(send(&app, "POST", "/skipped?id=7").await.text(), "None");
    (0..3).for_each(|node| nodes.set(node, Gate::Down));
    assert_eq!(send(&app, "POST", "/?id=7").await.text(), "None");
}
