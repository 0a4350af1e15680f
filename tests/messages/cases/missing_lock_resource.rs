//! A handler locks something that does not say which resource it is.

use axum::Router;
use axum::extract::{FromRef, Path};
use axum::routing::post;
use serde::Deserialize;
use tower_redlock::{Locked, Redlock};

#[derive(Clone, FromRef)]
struct AppState {
    redlock: Redlock,
}

#[derive(Deserialize)]
struct OrderId(u64);

async fn ship(Locked(_guard, Path(_id)): Locked<Path<OrderId>>) -> &'static str {
    "shipped"
}

fn main() {
    let redlock = Redlock::in_memory(3);
    let _: Router = Router::new()
        .route("/orders/{id}/ship", post(ship))
        .with_state(AppState { redlock });
}
