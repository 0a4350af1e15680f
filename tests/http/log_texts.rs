//! What the log says of mistakes in the set-up of layers and handlers: the place, the remedy, and only once.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use axum::extract::{Path, State};
use axum::routing::{get, post};
use axum::{Extension, Router};
use futures_util::FutureExt;
use http::request::Parts;
use http::{Method, StatusCode};
use support::{
    Answer, Executed, Log, assert_matches, keyed_request, once, redlock, request, secs, send,
    spawn_send, users,
};
use tower::ServiceExt;
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{
    FencingToken, IdempotencyKey, IdempotencyLayer, KeyError, KeyExtractor, LockError, LockHandle,
    LockKey, LockKeys, LockOptions, LockResource, Locked, Redlock, RedlockLayer, key,
};

use crate::shop::shop;

/// Sends a request twice, and returns the refusal and the lines of the log.
async fn refused_twice(app: &Router, target: &str) -> (Answer, Vec<String>) {
    let (log, _guard) = Log::subscribed();
    let refused = send(app, "POST", target).await;
    assert_ne!(refused.code(), "");
    assert_eq!(send(app, "POST", target).await.code(), refused.code());
    (refused, log.text().lines().map(str::to_owned).collect())
}

#[track_caller]
fn assert_logged_once(lines: &[String], text: &str) {
    let [line] = lines else {
        panic!("not one line: {lines:?}");
    };
    assert!(line.ends_with(text), "{line}\nis not\n{text}");
}

/// The client is told what its request lacks, and not what the service has named.
#[tokio::test(start_paused = true)]
async fn missing_key_is_told_to_the_client_and_logged_once_with_the_part_that_was_looked_for() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let layer = |key: Arc<dyn KeyExtractor>| RedlockLayer::new(redlock.clone(), key);
    let named = key::extension::<String>(String::as_str);
    for (layer, logged, told) in [
        (
            layer(Arc::new(("upload", key::header("x-upload-id")))),
            "`upload`, whose key comes from header `x-upload-id`",
            "a required key: header `x-upload-id`",
        ),
        (
            layer(Arc::new(("tenant", key::query("t").or(key::host())))),
            "`tenant`, whose key comes from query parameter `t` or header `host`",
            "a required key: query parameter `t` or header `host`",
        ),
        (
            layer(Arc::new(key::from_fn(|_| None::<String>))),
            "`unnamed`, whose key comes from a function",
            "a required key",
        ),
        (
            layer(Arc::new((key::header("x-a"), named))),
            "`unnamed`, whose key comes from header `x-a` and extension `alloc::string::String`",
            "a required key",
        ),
    ] {
        let app = Router::new().route("/", post(async || "served").layer(layer));
        let (refused, lines) = refused_twice(&app, "/").await;
        assert_eq!(refused.code(), "key-missing");
        let detail = refused.json()["detail"].to_string();
        assert!(detail.ends_with(&format!("{told}\"")), "{detail}");
        let text = format!(
            "WARN tower_redlock::middleware::response: redlock layer refuses requests: they name no resource of \
             {logged}; set `missing_key` or `skip` if they need no lock"
        );
        assert_logged_once(&lines, &text);
    }
}

#[tokio::test(start_paused = true)]
async fn missing_idempotency_key_is_logged_once_with_its_header() {
    let nodes = ScriptedNodes::new(3);
    let layer = once(&redlock(&nodes)).required(true);
    let app = Router::new().route("/", post(async || "served").layer(layer));
    let (refused, lines) = refused_twice(&app, "/").await;
    assert_eq!(refused.code(), "key-missing");
    assert_logged_once(
        &lines,
        "redlock layer refuses requests: they lack the header `idempotency-key`, which `required(true)` of an \
         IdempotencyLayer demands",
    );
}

#[derive(Debug, Clone)]
struct Caller(&'static str);

impl Caller {
    fn name(&self) -> &str {
        self.0
    }
}

#[tokio::test(start_paused = true)]
async fn missing_scope_is_logged_once_with_the_part_that_was_looked_for() {
    let (redlock, executed) = (redlock(&ScriptedNodes::new(3)), Executed::default());
    let by_header = IdempotencyLayer::new(redlock.clone(), key::header("x-caller"));
    let by_caller = IdempotencyLayer::new(redlock, key::extension(Caller::name));
    for (layer, caller, code, logged) in [
        (
            by_header,
            None,
            "scope-missing",
            "the scope of an IdempotencyLayer found no caller in header `x-caller`",
        ),
        (
            by_caller.clone(),
            None,
            "misconfigured",
            "the request has no extension `http::log_texts::Caller`",
        ),
        (
            by_caller.clone(),
            Some(""),
            "scope-missing",
            "found no caller in extension `http::log_texts::Caller`",
        ),
        (by_caller, Some("alice"), "", ""),
    ] {
        let app = users(&executed, layer);
        let (log, _guard) = Log::subscribed();
        for _ in 0..2 {
            let mut request = keyed_request(Method::POST, "/users/bob", b"8e03978e");
            if let Some(caller) = caller {
                request.extensions_mut().insert(Caller(caller));
            }
            let answer = Answer::to(&app, request).await;
            let status = if code.is_empty() { 200 } else { 500 };
            assert_eq!(answer.told(), (status, code), "{caller:?}");
            assert!(!answer.text().contains("Caller"), "{answer:?}");
        }
        let log = log.text();
        let lines: Vec<&str> = log.lines().collect();
        assert_eq!(lines.len(), usize::from(!code.is_empty()), "{log}");
        assert!(lines.iter().all(|line| line.contains(logged)), "{log}");
    }
    assert_eq!(executed.count(), 1);
}

/// The error of a function may name the request; the log has one line for each route all the same.
// Rules: misconfigured
#[tokio::test(start_paused = true)]
async fn misconfigured_key_is_logged_once_for_each_route_and_hidden_from_clients() {
    let by_shard = |parts: &Parts| {
        let shard = parts.uri.path();
        Err::<LockKey, _>(KeyError::misconfigured(format!("no shard for {shard}")))
    };
    let redlock = redlock(&ScriptedNodes::new(3));
    let keys: [(Arc<dyn KeyExtractor>, [&str; 2]); 2] = [
        (
            Arc::new(by_shard),
            ["no shard for /shards/0", "no shard for /regions/0"],
        ),
        (
            Arc::new(key::path("nonsense")),
            ["`/shards/{id}`", "`/regions/{id}`"],
        ),
    ];
    for (key, expected) in keys {
        let app = Router::new()
            .route("/shards/{id}", post(async || "served"))
            .route("/regions/{id}", post(async || "served"))
            .layer(RedlockLayer::new(redlock.clone(), key));
        let (log, _guard) = Log::subscribed();
        for route in ["shards", "regions"] {
            for id in 0..40 {
                let refused = send(&app, "POST", &format!("/{route}/{id}")).await;
                assert_eq!(refused.told(), (500, "misconfigured"));
                for hidden in ["no shard", "nonsense"] {
                    assert!(!refused.text().contains(hidden), "{refused:?}");
                }
            }
        }
        let log = log.text();
        assert_eq!(log.lines().count(), 2, "{log}");
        for (line, part) in log.lines().zip(expected) {
            assert!(line.contains(part), "{line}");
        }
    }
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
        let target = format!("/log-texts/7/{extracted}");
        let (refused, lines) = refused_twice(&app, &target).await;
        assert_eq!(refused.code(), "misconfigured");
        let route = format!("/log-texts/{{id}}/{extracted}");
        assert_logged_once(&lines, &text.replace("ROUTE", &route));
    }
}

#[tokio::test(start_paused = true)]
async fn lock_that_can_never_be_taken_is_logged_once() {
    #[derive(serde::Deserialize)]
    struct Hourly(String);
    impl LockResource for Hourly {
        fn lock_keys(&self) -> LockKeys {
            LockKey::from(self.0.as_str()).into()
        }

        fn options(&self) -> LockOptions {
            LockOptions::default().ttl(secs(1_000_000))
        }
    }
    let locked = async |_: Locked<Path<Hourly>>| "reported";
    let by_hand = async |State(redlock): State<Redlock>| {
        let _guard = redlock.try_lock("report").ttl(secs(1_000_000)).await?;
        Ok::<_, LockError>("reported")
    };
    let redlock = redlock(&ScriptedNodes::new(3));
    let layer = RedlockLayer::new(redlock.clone(), "report");
    let layer = layer.options(|_| LockOptions::default().ttl(secs(1_000_000)));
    let app = Router::new()
        .route("/layer", post(async || "reported").layer(layer))
        .route("/locked/{id}", post(locked))
        .route("/by-hand", post(by_hand))
        .with_state(redlock);
    for (target, text) in [
        ("/layer", "raise max_ttl"),
        (
            "/locked/report",
            "redlock handler cannot lock its resource because it is misconfigured",
        ),
        ("/by-hand", "raise max_ttl"),
    ] {
        let (refused, lines) = refused_twice(&app, target).await;
        assert_eq!(refused.told(), (500, "misconfigured"));
        assert!(!refused.text().contains("ttl"), "{refused:?}");
        assert!(lines.iter().all(|line| line.contains(text)), "{lines:?}");
        // The handler's own error has no place that it could be logged for once.
        assert!(lines.len() == 1 || target == "/by-hand", "{lines:?}");
    }
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
