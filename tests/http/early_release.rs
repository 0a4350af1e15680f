//! `LockHandle::release`: the lock ends before the response does.

use std::convert::Infallible;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::routing::{MethodRouter, post};
use axum::{Extension, Router};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderName, StatusCode};
use http_body_util::BodyExt;
use support::{
    Answer, ms, once, redlock, request, request_with, secs, send, set_all, spawn_send, three_nodes,
};
use tokio::time::{Instant, sleep};
use tower::ServiceExt;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    LockHandle, LockHandles, Locked, LostReason, OnLost, Redlock, RedlockLayer, ReleaseAt,
    Released, RunToCompletion, key,
};

use crate::shop::{OrderId, until_free};

fn layer(redlock: &Redlock) -> RedlockLayer {
    RedlockLayer::new(redlock.clone(), ("order", key::path("id")))
}

/// Gives the lock up, and works for half a minute more, which is longer than its ttl.
async fn early(State(redlock): State<Redlock>, handle: LockHandle) -> String {
    let first = handle.release().await;
    assert_eq!(first, Ok(Released::Freed));
    assert!(!handle.is_valid() && handle.upgrade().is_err());
    assert_eq!(handle.lost().await, LostReason::Released);
    // Free for all others, also in the same request.
    let guard = redlock.try_lock(("order", 7)).await.unwrap();
    guard.release().await.unwrap();
    sleep(secs(30)).await;
    assert_eq!(handle.release().await, first);
    "early".to_owned()
}

fn app(redlock: &Redlock, route: MethodRouter<Redlock>) -> Router {
    let app = Router::new().route("/orders/{id}", route);
    app.with_state(redlock.clone())
}

#[tokio::test(start_paused = true)]
async fn release_frees_the_lock_and_the_handler_goes_on() {
    let (nodes, redlock) = three_nodes();
    let token = HeaderName::from_static("x-fencing-token");
    let layer = layer(&redlock).expose_token(token.clone());
    let notify = layer.clone().on_lost(OnLost::Notify);
    let at_head = layer.clone().release_at(ReleaseAt::ResponseHead);
    let to_completion = layer.clone().on_disconnect(RunToCompletion);
    for (name, route) in [
        ("default", post(early).layer(layer)),
        ("notify", post(early).layer(notify)),
        ("at the head", post(early).layer(at_head)),
        ("to completion", post(early).layer(to_completion)),
    ] {
        let before = nodes.sent(0, OpKind::Release);
        let answer = send(&app(&redlock, route), "POST", "/orders/7").await;
        assert_eq!(answer.text(), "early", "{name}");
        // That of the lock under which the handler has worked.
        assert!(answer.headers.contains_key(&token), "{name}");
        // One release of the layer's lock, and one of the handler's own.
        assert_eq!(nodes.sent(0, OpKind::Release) - before, 2, "{name}");
        assert_eq!(nodes.locks(), [0, 0, 0], "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn release_lets_the_response_stream_without_the_lock() {
    async fn stream(handle: LockHandle) -> Body {
        handle.release().await.unwrap();
        let pieces = stream::unfold(0_u64, async |piece: u64| {
            sleep(secs(20)).await;
            (piece < 3).then(|| (Ok::<_, Infallible>(Bytes::from_static(b"x")), piece + 1))
        });
        Body::from_stream(Box::pin(pieces))
    }
    let (_nodes, redlock) = three_nodes();
    let app: Router = Router::new().route("/orders/{id}", post(stream).layer(layer(&redlock)));
    let response = app.oneshot(request("POST", "/orders/7")).await.unwrap();
    let guard = redlock.try_lock(("order", 7)).await.unwrap();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "xxx");
    assert!(guard.is_valid());
    drop(guard);
}

/// The nodes confirm late, and the handler does not wait for them.
#[tokio::test(start_paused = true)]
async fn response_waits_for_a_release_that_the_handler_has_not_awaited() {
    let (nodes, redlock) = three_nodes();
    let handler = async |Extension(nodes): Extension<ScriptedNodes>, handle: LockHandle| {
        set_all(&nodes, OpKind::Release, Gate::Slow(ms(20)));
        assert!(futures_util::poll!(std::pin::pin!(handle.release())).is_pending());
        "soon"
    };
    let app: Router = Router::new()
        .route("/orders/{id}", post(handler).layer(layer(&redlock)))
        .layer(Extension(nodes.clone()));
    let began = Instant::now();
    assert_eq!(send(&app, "POST", "/orders/7").await.body, "soon");
    assert!(began.elapsed() >= ms(20));
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn release_does_not_take_the_lock_from_an_extractor_or_another_layer() {
    async fn handler(
        handle: LockHandle,
        handles: LockHandles,
        Locked(guard, Path(_)): Locked<Path<OrderId>>,
    ) -> &'static str {
        assert_eq!(handle.release().await, Ok(Released::Shared));
        assert_eq!(handle.release().await, Ok(Released::Shared));
        // The outer layer has the lock, too.
        assert_eq!(handles.to_vec().len(), 1);
        assert!(guard.is_valid() && handle.is_valid());
        sleep(secs(30)).await;
        assert!(guard.is_valid() && handle.is_valid());
        assert_eq!(guard.release().await, Ok(Released::Shared));
        assert!(handle.is_valid());
        "served"
    }
    let (nodes, redlock) = three_nodes();
    let app = Router::new()
        .route("/orders/{id}", post(handler))
        .route_layer(layer(&redlock))
        .route_layer(layer(&redlock))
        .with_state(redlock.clone());
    let serving = spawn_send(&app, "POST", "/orders/7");
    sleep(secs(20)).await;
    assert_eq!(
        send(&app, "POST", "/orders/7").await.status,
        StatusCode::LOCKED
    );
    assert_eq!(serving.await.unwrap().body, "served");
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn release_by_the_handle_of_a_guard_gives_up_nothing() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let guard = redlock.lock("report").await.unwrap();
    assert_eq!(guard.handle().release().await, Ok(Released::Shared));
    assert!(guard.is_valid());
    // A share that outlives the request is one of its own.
    let handle = guard.handle();
    drop(guard);
    assert_eq!(handle.release().await, Ok(Released::Freed));
}

#[tokio::test(start_paused = true)]
async fn release_leaves_the_lock_to_an_upgraded_guard_and_to_an_execution() {
    let (nodes, redlock) = three_nodes();
    let upgraded = async |handle: LockHandle| {
        let guard = handle.upgrade().unwrap();
        assert_eq!(handle.release().await, Ok(Released::Shared));
        tokio::spawn(async move {
            sleep(secs(20)).await;
            drop(guard);
        });
        "upgraded"
    };
    let executed = async |handle: LockHandle| format!("{:?}", handle.release().await);
    let app: Router = Router::new()
        .route("/orders/{id}", post(upgraded))
        .route("/executed/{id}", post(executed).layer(once(&redlock)))
        .route_layer(layer(&redlock));
    assert_eq!(send(&app, "POST", "/orders/7").await.body, "upgraded");
    assert!(redlock.try_lock(("order", 7)).await.is_err());
    sleep(secs(21)).await;
    let keyed = request_with("POST", "/executed/7", &[("idempotency-key", "a")]);
    assert_eq!(Answer::to(&app, keyed).await.body, "Ok(Shared)");
    until_free(&nodes).await;
}
