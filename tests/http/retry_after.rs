//! `Retry-After` of contended locks: the typical hold of the layer, or a fixed time.

use std::time::Duration;

use axum::body::Body;
use axum::extract::Path;
use axum::routing::post;
use axum::{Extension, Router};
use http::{Request, StatusCode};
use support::{Answer, ms, redlock, secs};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{LockGuard, LockHandle, RedlockLayer, ReleaseAt, key};

use crate::shop::{shop, until_free};

/// Orders whose requests hold their lock for as many milliseconds as the path says.
fn orders(layer: RedlockLayer) -> Router {
    let hold = async |Path((_, millis)): Path<(String, u64)>| sleep(ms(millis)).await;
    Router::new().route("/orders/{id}/{millis}", post(hold).layer(layer))
}

fn layer(nodes: &ScriptedNodes) -> RedlockLayer {
    RedlockLayer::new(redlock(nodes), ("order", key::path("id")))
}

fn request(target: &str) -> Request<Body> {
    let request = Request::post(target);
    request.body(Body::empty()).unwrap()
}

/// Serves an order, and returns the `Retry-After` of a second request for it.
async fn retry_after(app: &Router, held: Duration) -> String {
    let target = format!("/orders/7/{}", held.as_millis());
    let second = async {
        sleep(held / 2).await;
        Answer::to(app, request(&target)).await
    };
    let (first, refused) = tokio::join!(Answer::to(app, request(&target)), second);
    assert_eq!(first.status, StatusCode::OK);
    assert_eq!(refused.status, StatusCode::LOCKED);
    refused.headers["retry-after"].to_str().unwrap().to_owned()
}

#[tokio::test(start_paused = true)]
async fn retry_after_is_the_remaining_ttl_until_a_hold_is_known_and_then_the_typical_hold() {
    let nodes = ScriptedNodes::new(3);
    let app = orders(layer(&nodes));
    assert_eq!(retry_after(&app, ms(300)).await, "10");
    assert_eq!(retry_after(&app, ms(300)).await, "1");
    // A hold of another key counts as well, with an eighth of the weight: (7 * 0.3 s + 30 s) / 8.
    let other = Answer::to(&app, request("/orders/8/30000")).await;
    assert_eq!(other.status, StatusCode::OK);
    assert_eq!(retry_after(&app, ms(300)).await, "5");
    // A layer of its own knows nothing of it.
    assert_eq!(retry_after(&orders(layer(&nodes)), ms(300)).await, "10");
}

#[tokio::test(start_paused = true)]
async fn retry_after_is_never_above_the_remaining_ttl() {
    let nodes = ScriptedNodes::new(3);
    let app = orders(layer(&nodes).ttl(secs(2)).unwrap());
    let long = Answer::to(&app, request("/orders/8/50000")).await;
    assert_eq!(long.status, StatusCode::OK);
    assert_eq!(retry_after(&app, ms(200)).await, "2");
}

#[tokio::test(start_paused = true)]
async fn retry_after_that_is_set_is_fixed() {
    let nodes = ScriptedNodes::new(3);
    let app = orders(layer(&nodes).retry_after(ms(3_500)));
    for _ in 0..2 {
        assert_eq!(retry_after(&app, ms(300)).await, "4");
    }
}

#[tokio::test(start_paused = true)]
async fn retry_after_counts_holds_that_end_with_a_disconnect_or_without_waiting_for_the_release() {
    for ending in 0..3 {
        let nodes = ScriptedNodes::new(3);
        let layer = match ending {
            0 => layer(&nodes),
            1 => layer(&nodes).await_release(false),
            _ => layer(&nodes).release_at(ReleaseAt::ResponseHead),
        };
        let app = orders(layer);
        let serving = Answer::to(&app, request("/orders/8/4000"));
        let served = tokio::time::timeout(secs(3 + u64::from(ending > 0) * 2), serving);
        assert_eq!(served.await.is_ok(), ending > 0);
        until_free(&nodes).await;
        let expected = if ending == 0 { "3" } else { "4" };
        assert_eq!(retry_after(&app, ms(300)).await, expected, "{ending}");
    }
}

/// The handler is done with the resource by then.
#[tokio::test(start_paused = true)]
async fn retry_after_does_not_count_the_wait_for_the_release() {
    let nodes = ScriptedNodes::new(3);
    let app = orders(layer(&nodes));
    for node in 0..3 {
        nodes.set_for(node, OpKind::Release, Gate::Mute);
    }
    let began = Instant::now();
    let answer = Answer::to(&app, request("/orders/8/4000")).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert!(began.elapsed() > secs(4), "no wait");
    assert_eq!(retry_after(&app, ms(300)).await, "4");
}

/// The layer does not see when such a hold ends.
#[tokio::test(start_paused = true)]
async fn retry_after_does_not_count_a_hold_that_outlives_its_request() {
    let nodes = ScriptedNodes::new(3);
    let (keep, mut kept) = mpsc::unbounded_channel::<LockGuard>();
    let upgrade = async |handle: LockHandle, keep: Extension<mpsc::UnboundedSender<LockGuard>>| {
        keep.send(handle.upgrade().unwrap()).unwrap();
    };
    let app = Router::new()
        .route("/orders/{id}", post(upgrade).layer(layer(&nodes)))
        .layer(Extension(keep));
    let answer = Answer::to(&app, request("/orders/7")).await;
    assert_eq!(answer.status, StatusCode::OK);
    let refused = Answer::to(&app, request("/orders/7")).await;
    assert_eq!(refused.headers["retry-after"], "10");
    drop(kept.recv().await);
}

#[tokio::test(start_paused = true)]
async fn retry_after_of_locked_is_the_remaining_ttl() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let app = shop(&redlock);
    let served = Answer::to(&app, request("/orders/7/ship")).await;
    assert_eq!(served.status, StatusCode::OK);
    until_free(&nodes).await;
    let guard = redlock.try_lock(("order", "7")).await.unwrap();
    let began = Instant::now();
    sleep(secs(1)).await;
    let refused = Answer::to(&app, request("/orders/7/ship")).await;
    assert_eq!(
        (began.elapsed(), nodes.sent(0, OpKind::Confirm)),
        (secs(1), 0)
    );
    assert_eq!(refused.headers["retry-after"], "9");
    drop(guard);
}
