//! Refusals are as the OpenAPI responses of their layers say: status, headers, body.

use std::collections::BTreeSet;
use std::io;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, RawQuery};
use axum::response::IntoResponse;
use axum::routing::post;
use futures_util::{StreamExt, stream};
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{Method, Request, StatusCode};
use serde_json::{Value, json};
use support::{Answer, keyed_request, ms, once, request_with, secs};
use tokio::time::sleep;
use tower_redlock::test_util::{Gate, ScriptedNodes};
use tower_redlock::{
    BufferBodyLayer, IdempotencyLayer, LockError, LockKey, LockKeys, LockOptions, LockResource,
    Locked, NodeFailure, Redlock, RedlockLayer, Rejection, key,
};
use utoipa::{IntoResponses, PartialSchema};

use crate::scripted_bodies::{layer, lose};

/// The status and the code of each refusal that a test has met.
#[derive(Default)]
struct Met(BTreeSet<(String, String)>);

impl Met {
    /// Compares a refusal with the responses of `L`.
    fn check<L: IntoResponses>(&mut self, answer: &Answer, expected: &str) {
        let status = answer.status.as_str();
        let code = answer.code();
        assert_eq!(code, expected, "{answer:?}");
        // Nothing of the key, the holder and the token.
        let shown = format!("{:?} {:?}", answer.headers, answer.body);
        let digits = shown.split(|char: char| !char.is_ascii_digit());
        let mut lengths = digits.map(str::len);
        assert!(lengths.all(|length| length < 13), "{shown}");
        for hidden in ["secret", "embedded"] {
            assert!(!shown.contains(hidden), "{shown}");
        }
        let responses = serde_json::to_value(L::responses()).unwrap();
        let response = &responses[status];
        assert!(!response.is_null(), "{status} {code} is not listed");
        let content = answer.headers[CONTENT_TYPE].to_str().unwrap();
        let schema = &response["content"][content]["schema"];
        let body: Value = serde_json::from_slice(&answer.body).unwrap();
        for schema in [schema, &serde_json::to_value(Rejection::schema()).unwrap()] {
            jsonschema::validate(schema, &body).unwrap_or_else(|error| panic!("{code}: {error}"));
            let members = schema["properties"].as_object().unwrap();
            // Only a layer that exposes the holder sends it.
            let members = members.keys().filter(|member| *member != "holder");
            assert!(body.as_object().unwrap().keys().eq(members), "{body}");
        }
        assert_eq!(body["status"], answer.status.as_u16());
        let mut titles = response["description"].as_str().unwrap().split("; ");
        assert!(titles.any(|title| body["title"] == title), "{body}");
        let header = &response["headers"]["Retry-After"]["description"];
        let after = header.as_str().and_then(|text| text.split_once("after "));
        let is_listed = after.is_some_and(|(_, codes)| codes.split(", ").any(|one| one == code));
        let is_sent = answer.headers.contains_key(RETRY_AFTER);
        assert_eq!(is_listed, is_sent, "{code}");
        self.0.insert((status.to_owned(), code.to_owned()));
    }
}

fn sent(target: &str) -> Request<Body> {
    Request::post(target).body(Body::from("text")).unwrap()
}

fn broken(kind: io::ErrorKind) -> Request<Body> {
    let frames = stream::iter([Ok("text"), Err(io::Error::from(kind))]);
    // Not all at once, or the whole is known to be small.
    let body = Body::from_stream(frames.then(async |frame| frame));
    Request::post("/")
        .header("idempotency-key", "broken")
        .body(body)
        .unwrap()
}

/// A process that has a label, which no refusal may show.
fn redlock(nodes: &ScriptedNodes) -> Redlock {
    let builder = Redlock::builder().scripted(nodes).holder("secret label");
    builder.build().unwrap()
}

/// A service that does what the query says.
fn app(nodes: &ScriptedNodes) -> Router {
    let nodes = nodes.clone();
    let work = async move |RawQuery(query): RawQuery| {
        match query.as_deref() {
            Some("lose") => lose(&nodes),
            Some("fail") => return StatusCode::SERVICE_UNAVAILABLE.into_response(),
            Some("slow") => {}
            _ => return "done".into_response(),
        }
        sleep(secs(60)).await;
        "late".into_response()
    };
    Router::new().route("/", post(work))
}

async fn of_redlock_layer(met: &mut Met) {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let locked = |layer: RedlockLayer| app(&nodes).layer(layer);
    let mut check = async |layer: RedlockLayer, target: &str, expected: &str| {
        let answer = Answer::to(&locked(layer), sent(target)).await;
        met.check::<RedlockLayer>(&answer, expected);
    };
    let keyed = |key| RedlockLayer::new(redlock.clone(), key::query(key));
    check(keyed("id"), "/", "key-missing").await;
    check(keyed("id"), "/?id=7&id=8", "key-invalid").await;
    let no_path = RedlockLayer::new(redlock.clone(), key::path("other"));
    check(no_path, "/", "misconfigured").await;
    check(layer(&redlock), "/?lose", "lock-lost").await;
    let both = ["resource", "secret-7"];
    let schema = serde_json::to_value(Rejection::schema()).unwrap();
    let holder = &schema["properties"]["holder"]["properties"];
    assert_eq!(holder["note"]["type"], json!(["string", "null"]));
    // Held by another process, and by this one.
    for process in [&self::redlock(&nodes), &redlock] {
        let guard = process.lock_all(both).note("secret").await.unwrap();
        check(layer(&redlock), "/", "lock-contended").await;
        check(keyed("id"), "/?id=secret-7", "lock-contended").await;
        let exposing = locked(layer(&redlock).expose_holder(true));
        let named = Answer::to(&exposing, sent("/")).await.json();
        jsonschema::validate(&schema, &named).unwrap();
        assert_eq!(
            named["holder"],
            json!({ "label": "secret label", "note": "secret" })
        );
        let grpc = request_with("POST", "/", &[("content-type", "application/grpc")]);
        let refused = Answer::to(&exposing, grpc).await;
        let shown = format!("{:?} {:?}", refused.headers, refused.body);
        assert!(!shown.contains("secret"), "{shown}");
        guard.release().await.unwrap();
    }
    let guard = redlock.lock("resource").await.unwrap();
    let waiting = layer(&redlock).wait(ms(1_000)).max_waiters(1);
    let waiter = app(&nodes).layer(waiting.clone());
    let first = Answer::to(&waiter, sent("/"));
    tokio::join!(first, check(waiting, "/", "lock-overloaded"));
    guard.release().await.unwrap();
    let _slot = redlock.try_lock("resource").slots(1).await.unwrap();
    let full = layer(&redlock).max_concurrent(1);
    check(full, "/", "too-many-concurrent").await;
    (0..3).for_each(|node| nodes.set(node, Gate::Slow(ms(20))));
    let late = RedlockLayer::new(redlock.clone(), "late").ttl(ms(15));
    check(late.unwrap(), "/", "lock-expired").await;
    (0..3).for_each(|node| nodes.set(node, Gate::Down));
    check(layer(&redlock), "/", "lock-unavailable").await;
    redlock.drain(ms(1)).await;
    check(layer(&redlock), "/", "shutting-down").await;
}

async fn of_bodies(met: &mut Met) {
    let nodes = ScriptedNodes::new(3);
    let buffered = app(&nodes).layer(BufferBodyLayer::new(5));
    let executed = app(&nodes).layer(once(&redlock(&nodes)).max_request_body(5));
    for kind in [io::ErrorKind::ConnectionReset, io::ErrorKind::TimedOut] {
        let [buffered, executed] = [&buffered, &executed].map(|app| Answer::to(app, broken(kind)));
        met.check::<BufferBodyLayer>(&buffered.await, "body-unreadable");
        met.check::<IdempotencyLayer>(&executed.await, "body-unreadable");
    }
    let large = || keyed_request(Method::POST, "/", b"large");
    met.check::<BufferBodyLayer>(&Answer::to(&buffered, large()).await, "body-too-large");
    met.check::<IdempotencyLayer>(&Answer::to(&executed, large()).await, "body-too-large");
}

async fn of_idempotency_layer(met: &mut Met) {
    let nodes = ScriptedNodes::new(3);
    let once = || once(&redlock(&nodes)).at_most_once(true);
    let once = || once().fingerprint(|_, _| Vec::new());
    let mut check = async |layer: IdempotencyLayer, target: &str, key: &str, expected: &str| {
        let request = keyed_request(Method::POST, target, key.as_bytes());
        let answer = Answer::to(&app(&nodes).layer(layer), request).await;
        match expected {
            "" => assert_eq!(answer.code(), "", "{answer:?}"),
            _ => met.check::<IdempotencyLayer>(&answer, expected),
        }
    };
    let scoped = IdempotencyLayer::new(redlock(&nodes), key::header("x-user"));
    check(scoped, "/", "a", "scope-missing").await;
    check(once(), "/", "", "key-invalid").await;
    check(once(), "/?fail", "b", "").await;
    check(once(), "/?fail", "b", "outcome-unknown").await;
    check(once().max_response_body(1), "/", "c", "").await;
    check(once(), "/", "c", "result-not-kept").await;
    let by_query = once().fingerprint(|parts, _| parts.uri.to_string().into());
    check(by_query.clone(), "/?a", "d", "").await;
    check(by_query, "/?b", "d", "idempotency-key-reused").await;
    check(once().max_hold(ms(100)), "/?slow", "e", "lock-lost").await;
    (0..3).for_each(|node| nodes.set(node, Gate::Down));
    check(once(), "/", "f", "lock-unavailable").await;
    (0..3).for_each(|node| nodes.set(node, Gate::Ready));
    let first = app(&nodes).layer(once());
    let slow = keyed_request(Method::POST, "/?slow", b"g");
    let mut executed = Box::pin(Answer::to(&first, slow));
    assert!(futures_util::poll!(&mut executed).is_pending());
    sleep(ms(10)).await;
    check(once(), "/?slow", "g", "request-in-progress").await;
    let required = app(&nodes).layer(once().required(true));
    met.check::<IdempotencyLayer>(&Answer::to(&required, sent("/")).await, "key-missing");
}

/// One key more than a lock may have.
fn many() -> Vec<LockKey> {
    (0..33).map(|key: u64| LockKey::from(key)).collect()
}

/// A resource of one slot whose key is that of a path.
#[derive(Debug, serde::Deserialize)]
struct Slot(String);

impl LockResource for Slot {
    fn lock_keys(&self) -> LockKeys {
        match self.0.as_str() {
            "many" => many().into_iter().collect(),
            key => LockKey::from(key).into(),
        }
    }

    fn options(&self) -> LockOptions {
        LockOptions::default().slots(1)
    }
}

async fn of_handlers(met: &mut Met) {
    let redlock = Redlock::in_memory(3);
    let _guards = (
        redlock.try_lock("taken").slots(1).await.unwrap(),
        redlock.try_lock("resource").await.unwrap(),
    );
    let app = Router::new()
        .route("/{key}", post(async |_: Locked<Path<Slot>>| "done"))
        .with_state(redlock.clone());
    for (target, expected) in [("/taken", "too-many-concurrent"), ("/many", "key-invalid")] {
        let answer = Answer::to(&app, sent(target)).await;
        met.check::<Locked<Path<Slot>>>(&answer, expected);
    }
    let held = redlock.try_lock("resource").await.unwrap_err();
    let too_short = redlock.try_lock("other").ttl(ms(1)).await.unwrap_err();
    let invalid = redlock.lock_all(many()).await.unwrap_err();
    // Of Redis only: embedded nodes may vote at once.
    let quarantined = LockError::Unavailable {
        reached: 0,
        needed: 1,
        voted: Vec::new(),
        nodes: vec![NodeFailure::Quarantined {
            node: "node".into(),
            left: ms(7_000),
        }],
    };
    for (error, expected) in [
        (held, "lock-contended"),
        (too_short, "misconfigured"),
        (invalid, "key-invalid"),
        (quarantined, "lock-quarantined"),
        (LockError::Closed, "shutting-down"),
    ] {
        let handler = post(async move || error.clone().into_response());
        let handler = Router::new().route("/", handler);
        met.check::<LockError>(&Answer::to(&handler, sent("/")).await, expected);
    }
    // tests/idempotency shows how it comes about.
    let conflicting = post(async || Rejection::ConflictingOutcomes);
    let conflicting = Router::new().route("/", conflicting);
    let answer = Answer::to(&conflicting, sent("/")).await;
    met.check::<IdempotencyLayer>(&answer, "conflicting-outcomes");
}

// Rules: lock-contended, lock-expired, lock-overloaded
#[tokio::test(start_paused = true)]
async fn each_refusal_is_as_the_openapi_responses_of_its_layer_say() {
    let mut met = Met::default();
    of_redlock_layer(&mut met).await;
    of_bodies(&mut met).await;
    of_idempotency_layer(&mut met).await;
    of_handlers(&mut met).await;
    // And the responses list no other.
    let responses = serde_json::to_value(Rejection::responses()).unwrap();
    let mut listed = BTreeSet::new();
    for (status, response) in responses.as_object().unwrap() {
        let schema = &response["content"]["application/problem+json"]["schema"];
        let codes = schema["properties"]["code"]["enum"].as_array().unwrap();
        let codes = codes.iter().map(|code| code.as_str().unwrap().to_owned());
        listed.extend(codes.map(|code| (status.clone(), code)));
    }
    assert_eq!(met.0, listed);
}
