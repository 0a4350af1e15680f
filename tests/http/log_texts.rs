//! What the log says of mistakes in the set-up of layers and handlers: the place, the remedy, and only once.

use std::sync::Arc;

use axum::extract::Path;
use axum::routing::post;
use axum::{Extension, Router};
use http::StatusCode;
use http::request::Parts;
use support::{
    Answer, Executed, Log, assert_matches, once, redlock, request_with, secs, send, spawn_send,
    users,
};
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{
    FencingToken, IdempotencyKey, IdempotencyLayer, KeyError, KeyExtractor, LockError, LockHandle,
    LockKey, LockKeys, LockOptions, LockResource, Locked, Redlock, RedlockLayer, key,
};

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

#[derive(Debug, Clone)]
struct Caller(&'static str);

impl Caller {
    fn name(&self) -> &str {
        self.0
    }
}

#[tokio::test(start_paused = true)]
async fn missing_idempotency_key_or_scope_is_logged_once_with_what_was_looked_for() {
    let (redlock, executed) = (redlock(&ScriptedNodes::new(3)), Executed::default());
    let by_header = IdempotencyLayer::new(redlock.clone(), key::header("x-caller"));
    let by_caller = IdempotencyLayer::new(redlock.clone(), key::extension(Caller::name));
    for (layer, key, told, logged) in [
        (
            once(&redlock).required(true),
            None,
            (400, "key-missing"),
            "they lack the header `idempotency-key`, which `required(true)` of an IdempotencyLayer demands",
        ),
        (
            by_header,
            Some("8e03978e"),
            (500, "scope-missing"),
            "the scope of an IdempotencyLayer found no caller in header `x-caller`",
        ),
        (
            by_caller,
            Some("8e03978e"),
            (500, "scope-missing"),
            "found no caller in extension `http::log_texts::Caller`",
        ),
    ] {
        let app = users(&executed, layer).layer(Extension(Caller("")));
        let (log, _guard) = Log::subscribed();
        for _ in 0..2 {
            let headers: Vec<_> = key
                .map(|key| ("idempotency-key", key))
                .into_iter()
                .collect();
            let request = request_with("POST", "/users/bob", &headers);
            let answer = Answer::to(&app, request).await;
            assert_eq!(answer.told(), told, "{logged}");
            assert!(!answer.text().contains("Caller"), "{answer:?}");
        }
        let log = log.text();
        assert_eq!(log.lines().count(), 1, "{log}");
        assert!(log.contains(logged), "{log}");
    }
    assert_eq!(executed.count(), 0);
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
    let of_function = ["no shard for /shards/0", "no shard for /regions/0"];
    let of_path = ["`/shards/{id}`", "`/regions/{id}`"];
    let keys: [(Arc<dyn KeyExtractor>, [&str; 2]); 2] = [
        (Arc::new(by_shard), of_function),
        (Arc::new(key::path("nonsense")), of_path),
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
    let redlock = redlock(&ScriptedNodes::new(3));
    let layer = RedlockLayer::new(redlock.clone(), "report");
    let layer = layer.options(|_| LockOptions::default().ttl(secs(1_000_000)));
    let locked = async |_: Locked<Path<Hourly>>| "reported";
    let app = Router::new()
        .route("/layer", post(async || "reported").layer(layer))
        .route("/locked/{id}", post(locked))
        .with_state(redlock);
    for (target, text) in [
        ("/layer", "raise max_ttl"),
        ("/locked/report", "redlock handler cannot lock its resource"),
    ] {
        let (refused, lines) = refused_twice(&app, target).await;
        assert_eq!(refused.told(), (500, "misconfigured"));
        assert!(!refused.text().contains("ttl"), "{refused:?}");
        let [line] = &lines[..] else {
            panic!("not one line: {lines:?}");
        };
        assert!(line.contains(text), "{line}");
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
}
