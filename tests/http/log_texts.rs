//! What the log says of mistakes in the set-up of layers and handlers: the place, the remedy, and only once.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;

use axum::extract::FromRequestParts;
use axum::routing::{get, post};
use axum::{Extension, Router};
use futures_util::FutureExt;
use http::StatusCode;
use http::request::Parts;
use support::{
    Answer, Log, assert_matches, once, redlock, request, request_with, secs, send, spawn_send,
};
use tower::ServiceExt;
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{
    FencingToken, IdempotencyKey, IdempotencyLayer, KeyError, KeyExtractor, LockError, LockHandle,
    LockKey, LockKeys, LockOptions, LockResource, Locked, Redlock, RedlockLayer, key,
};

use crate::shop::shop;

/// Sends a request twice, and returns the code of the refusals and the lines of the log.
async fn refused_twice(app: &Router, target: &str) -> (&'static str, Vec<String>) {
    let (log, _guard) = Log::subscribed();
    let mut code = "";
    for _ in 0..2 {
        let answer = send(app, "POST", target).await;
        assert!(answer.status.is_client_error() || answer.status.is_server_error());
        code = answer.code();
    }
    (code, log.text().lines().map(str::to_owned).collect())
}

#[track_caller]
fn assert_logged_once(lines: &[String], text: &str) {
    let [line] = lines else {
        panic!("not one line: {lines:?}");
    };
    assert!(line.ends_with(text), "{line}\nis not\n{text}");
}

#[tokio::test(start_paused = true)]
async fn missing_key_is_logged_once_with_the_part_that_was_looked_for() {
    let nodes = ScriptedNodes::new(3);
    let upload = RedlockLayer::new(redlock(&nodes), ("upload", key::header("x-upload-id")));
    let tenant = RedlockLayer::new(redlock(&nodes), ("tenant", key::query("t").or(key::host())));
    let unnamed = RedlockLayer::new(redlock(&nodes), |_: &Parts| None::<String>);
    for (layer, named) in [
        (
            upload,
            "`upload`, whose key comes from header `x-upload-id`",
        ),
        (
            tenant,
            "`tenant`, whose key comes from query parameter `t` or header `host`",
        ),
        (unnamed, "`unnamed`, whose key comes from a function"),
    ] {
        let app = Router::new().route("/", post(async || "served").layer(layer));
        let (code, lines) = refused_twice(&app, "/").await;
        assert_eq!(code, "key-missing");
        let text = format!(
            "WARN tower_redlock::middleware::response: redlock layer refuses requests: they name no resource of \
             {named}; set `missing_key` or `skip` if they need no lock"
        );
        assert_logged_once(&lines, &text);
    }
}

#[tokio::test(start_paused = true)]
async fn missing_idempotency_key_is_logged_once_with_its_header() {
    let nodes = ScriptedNodes::new(3);
    let layer = once(&redlock(&nodes)).required(true);
    let app = Router::new().route("/", post(async || "served").layer(layer));
    let (code, lines) = refused_twice(&app, "/").await;
    assert_eq!(code, "key-missing");
    assert_logged_once(
        &lines,
        "redlock layer refuses requests: they lack the header `idempotency-key`, which `required(true)` of an \
         IdempotencyLayer demands",
    );
}

#[tokio::test(start_paused = true)]
async fn missing_scope_is_logged_once_with_the_part_that_was_looked_for() {
    let nodes = ScriptedNodes::new(3);
    let layer = IdempotencyLayer::new(redlock(&nodes), key::header("x-caller"));
    let app = Router::new().route("/", post(async || "served").layer(layer));
    let (log, _guard) = Log::subscribed();
    for _ in 0..2 {
        let request = request_with("POST", "/", &[("idempotency-key", "8e03978e")]);
        assert_eq!(Answer::to(&app, request).await.code(), "scope-missing");
    }
    let lines: Vec<String> = log.text().lines().map(str::to_owned).collect();
    assert_logged_once(
        &lines,
        "redlock layer refuses requests because it is misconfigured error=the scope of an IdempotencyLayer found no \
         caller in header `x-caller`",
    );
}

/// The error of a function may name the request; the log has one line for each route all the same.
#[tokio::test(start_paused = true)]
async fn misconfigured_key_is_logged_once_for_each_route_whatever_its_text() {
    let by_shard = |parts: &Parts| {
        let shard = parts.uri.path();
        Err::<LockKey, _>(KeyError::misconfigured(format!("no shard for {shard}")))
    };
    let layer = RedlockLayer::new(redlock(&ScriptedNodes::new(3)), by_shard);
    let app = Router::new()
        .route("/shards/{id}", post(async || "served"))
        .route("/regions/{id}", post(async || "served"))
        .layer(layer);
    let (log, _guard) = Log::subscribed();
    for route in ["shards", "regions"] {
        for id in 0..40 {
            let refused = send(&app, "POST", &format!("/{route}/{id}")).await;
            assert_eq!(refused.code(), "misconfigured");
        }
    }
    let text = log.text();
    let lines: Vec<&str> = text.lines().collect();
    let [shards, regions] = lines[..] else {
        panic!("not two lines: {lines:?}");
    };
    assert!(shards.ends_with("no shard for /shards/0"), "{shards}");
    assert!(regions.ends_with("no shard for /regions/0"), "{regions}");
}

#[tokio::test(start_paused = true)]
async fn extractor_without_its_layer_names_the_route_and_is_logged_once() {
    async fn handle(_: LockHandle) {}
    async fn token(_: FencingToken) {}
    async fn idempotent(_: IdempotencyKey) {}
    let app: Router = Router::new()
        .route("/log-texts/{id}/handle", post(handle))
        .route("/log-texts/{id}/token", post(token))
        .route("/log-texts/{id}/once", post(idempotent));
    let no_lock = "the handler of `ROUTE` has no lock: no RedlockLayer is around it; apply one with `route_layer`, \
        or take the guard of `Locked`";
    let no_key = "the handler of `ROUTE` has no idempotency key; apply an IdempotencyLayer with `required(true)`, \
                  or extract Option<IdempotencyKey>";
    for (extracted, text) in [("handle", no_lock), ("token", no_lock), ("once", no_key)] {
        let (code, lines) = refused_twice(&app, &format!("/log-texts/7/{extracted}")).await;
        assert_eq!(code, "misconfigured");
        let route = format!("/log-texts/{{id}}/{extracted}");
        assert_logged_once(&lines, &text.replace("ROUTE", &route));
    }
}

#[tokio::test(start_paused = true)]
async fn lock_that_a_handler_can_never_take_is_logged_once() {
    struct Hourly;
    impl<S: Sync> FromRequestParts<S> for Hourly {
        type Rejection = Infallible;

        async fn from_request_parts(_: &mut Parts, _: &S) -> Result<Self, Infallible> {
            Ok(Self)
        }
    }
    impl LockResource for Hourly {
        fn lock_keys(&self) -> LockKeys {
            LockKey::from("report").into()
        }

        fn options(&self) -> LockOptions {
            LockOptions::default().ttl(secs(1_000_000))
        }
    }
    let report = async |_: Locked<Hourly>| "reported";
    let app = Router::new().route("/", post(report));
    let app = app.with_state(redlock(&ScriptedNodes::new(3)));
    let (code, lines) = refused_twice(&app, "/").await;
    assert_eq!(code, "misconfigured");
    let [line] = &lines[..] else {
        panic!("not one line: {lines:?}");
    };
    assert!(line.contains("redlock handler cannot lock its resource because it is misconfigured"));
}

/// The handler runs in the task that took the lock for it.
#[tokio::test]
async fn lock_that_is_requested_again_by_its_own_task_is_logged_as_not_re_entrant() {
    async fn again(redlock: Extension<Redlock>) -> String {
        let refused = redlock.try_lock(("order", "7")).await.unwrap_err();
        assert_matches!(refused, LockError::Contended { .. });
        refused.to_string()
    }
    let redlock = redlock(&ScriptedNodes::new(3));
    let layer = RedlockLayer::new(redlock.clone(), ("order", key::path("id")));
    let app = Router::new()
        .route("/orders/{id}", post(again).layer(layer))
        .layer(Extension(redlock.clone()));
    let (log, _guard) = Log::subscribed();
    for _ in 0..2 {
        let served = spawn_send(&app, "POST", "/orders/7");
        assert_eq!(served.await.unwrap().status, StatusCode::OK);
    }
    // Another task that meets the lock does nothing wrong.
    let guard = redlock.try_lock(("order", "7")).await.unwrap();
    let other = redlock.clone();
    let contended = tokio::spawn(async move { other.try_lock(("order", "7")).await.is_err() });
    assert!(contended.await.unwrap());
    drop(guard);
    let text = log.text();
    let reentry = "a task requests a lock again that it acquired and that is still held; redlock locks are not \
                   re-entrant, so it gets the lock only after its release";
    assert_eq!(text.matches(reentry).count(), 1, "{text}");
    // `Locked` under a layer of the same key shares the lock.
    let layer = RedlockLayer::new(redlock.clone(), ("order", key::path("id")));
    let app = shop(&redlock).layer(layer);
    let shared = send(&app, "POST", "/orders/7/ship").await;
    assert_eq!(shared.status, StatusCode::OK);
}

#[test]
fn futures_panic_outside_of_a_runtime() {
    let redlock = Redlock::in_memory(3);
    let layer = RedlockLayer::new(Redlock::in_memory(3), "resource");
    let served = Router::new().route("/", get(async || "served").post(async || "served"));
    let served = served.layer(layer);
    let panics = |polled: Box<dyn FnOnce() + '_>| {
        let panic = std::panic::catch_unwind(AssertUnwindSafe(polled)).expect_err("a panic");
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        let text = text.expect("a text");
        let expected = "must be called from the context of a Tokio 1.x runtime";
        assert!(text.contains(expected), "{text}");
    };
    panics(Box::new(|| {
        drop(redlock.try_lock("k").into_future().now_or_never())
    }));
    panics(Box::new(|| drop(redlock.health().now_or_never())));
    panics(Box::new(|| drop(redlock.drain(secs(1)).now_or_never())));
    let call = served.clone().oneshot(request("POST", "/"));
    panics(Box::new(move || drop(call.now_or_never())));
    // A request that is not locked needs none.
    let passing = served.oneshot(request("GET", "/")).now_or_never();
    assert_eq!(passing.unwrap().unwrap().status(), StatusCode::OK);
}
