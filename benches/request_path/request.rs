//! One uncontended request, in a function of its own, for `benches/request_path.sh` to observe.
//!
//! Everything runs on one thread, so what the lanes and the lease task do for the request is seen as well.

use std::env;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::post;
use http::{Request, StatusCode};
use tokio::runtime::{Builder, Runtime};
use tokio::time::sleep;
use tower::ServiceExt;
use tower_redlock::{IdempotencyLayer, Redlock, RedlockLayer, key, scope};

fn main() {
    let (options, urls): (Vec<String>, Vec<String>) = env::args()
        .skip(1)
        .partition(|argument| argument == "--idempotent");
    let is_idempotent = !options.is_empty();
    // `cargo bench` only starts it.
    if urls.is_empty() || urls.iter().any(|url| !url.starts_with("redis://")) {
        return;
    }
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("the runtime starts");
    let redlock = Redlock::builder()
        .urls(urls)
        // Everything takes far longer under observation.
        .node_timeout(Duration::from_secs(5))
        .connect_timeout(Duration::from_secs(5));
    let app = runtime.block_on(async {
        let redlock = redlock.build().expect("the settings are valid");
        let route = post(async || "withdrawn");
        let route = if is_idempotent {
            route.route_layer(IdempotencyLayer::new(redlock, scope::public()))
        } else {
            route.route_layer(RedlockLayer::new(redlock, ("account", key::path("id"))))
        };
        // As `axum::serve` does, so that a request does not apply the layer anew.
        Router::new()
            .route("/accounts/{id}/withdraw", route)
            .with_state(())
    });
    let mut granted = 0;
    // Servers that were started just now may not vote yet. Later requests find every connection open.
    while granted < REQUESTS_BEFORE {
        if runtime.block_on(exchange(app.clone(), granted)) == StatusCode::OK {
            granted += 1;
        } else {
            runtime.block_on(async { sleep(Duration::from_secs(1)).await });
        }
    }
    let status = observed_request(&runtime, app.clone());
    assert_eq!(status, StatusCode::OK);
    // Behind it: the end of the service is on no path of a request.
    drop(app);
}

/// What is observed begins and ends with this function. No other symbol has its name.
#[inline(never)]
fn observed_request(runtime: &Runtime, app: Router) -> StatusCode {
    runtime.block_on(exchange(app, REQUESTS_BEFORE))
}

/// Sends the request with this number, by which it is no duplicate of another.
async fn exchange(app: Router, number: usize) -> StatusCode {
    let request = Request::post("/accounts/7/withdraw").header("idempotency-key", number);
    let request = request.body(Body::empty());
    let response = app.oneshot(request.expect("a valid request")).await;
    let response = match response {
        Ok(response) => response,
        Err(never) => match never {},
    };
    let status = response.status();
    let body = axum::body::to_bytes(response.into_body(), usize::MAX).await;
    body.expect("a body that is no stream");
    // Long enough for the answers of the slower nodes, which the lease task waits for.
    sleep(Duration::from_millis(300)).await;
    status
}

const REQUESTS_BEFORE: usize = 5;
