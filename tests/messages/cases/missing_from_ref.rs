//! A handler locks, but the router's state has no `Redlock`.

use axum::extract::Path;
use axum::routing::post;
use axum::{Router, debug_handler};
use serde::Deserialize;
use tower_redlock::{LockKey, LockKeys, LockResource, Locked};

#[derive(Clone)]
struct AppState;

#[derive(Deserialize)]
struct OrderId(u64);

impl LockResource for OrderId {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from(("order", self.0.to_string())).into()
    }
}

#[debug_handler(state = AppState)]
async fn ship(Locked(_guard, Path(_id)): Locked<Path<OrderId>>) -> &'static str {
    "shipped"
}

fn main() {
    let _: Router = Router::new()
        .route("/orders/{id}/ship", post(ship))
        .with_state(AppState);
}
