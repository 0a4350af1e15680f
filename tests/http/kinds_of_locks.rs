//! Layers whose locks several requests hold: readers, and up to n requests at a time.

use axum::Router;
use axum::body::Body;
use axum::extract::Path;
use axum::routing::{any, get};
use http::{HeaderValue, Method, Request, StatusCode};
use serde::Deserialize;
use support::{Answer, Log, assert_matches, ms, redlock, secs, three_nodes};
use tokio::time::{Instant, sleep};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    FencingToken, LockHandle, LockKey, LockKeys, LockOptions, LockResource, Locked, Redlock,
    RedlockLayer, Rejection, key,
};

use crate::shop::until_free;

fn layer(redlock: &Redlock) -> RedlockLayer {
    RedlockLayer::new(redlock.clone(), ("page", key::path("id")))
}

/// Takes a second, and answers with the slot and the token of its lock.
async fn slow(handle: LockHandle) -> String {
    sleep(secs(1)).await;
    format!("{:?} {:?}", handle.slot(), handle.fencing_token().is_some())
}

fn app(layer: RedlockLayer) -> Router {
    Router::new().route("/pages/{id}", any(slow).layer(layer))
}

fn request(method: &str, target: &str) -> Request<Body> {
    let request = Request::builder().method(method).uri(target);
    request.body(Body::empty()).unwrap()
}

async fn send(app: &Router, method: &str, target: &str) -> Answer {
    Answer::to(app, request(method, target)).await
}

/// Sends requests at the same time, and returns their answers.
async fn send_all(app: &Router, methods: &[&'static str]) -> Vec<Answer> {
    let requests = methods.iter().copied().map(|method| {
        let app = app.clone();
        tokio::spawn(async move { send(&app, method, "/pages/7").await })
    });
    let requests: Vec<_> = requests.collect();
    let mut answers = Vec::new();
    for request in requests {
        answers.push(request.await.unwrap());
    }
    answers
}

fn statuses(answers: &[Answer]) -> Vec<u16> {
    let statuses = answers.iter().map(|answer| answer.status.as_u16());
    let mut statuses: Vec<u16> = statuses.collect();
    statuses.sort_unstable();
    statuses
}

#[tokio::test(start_paused = true)]
async fn shared_methods_run_beside_each_other_and_exclude_the_others() {
    let nodes = ScriptedNodes::new(3);
    let app = app(layer(&redlock(&nodes)).shared_methods([Method::GET]));
    let began = Instant::now();
    let readers = send_all(&app, &["GET", "HEAD", "GET", "GET"]).await;
    assert_eq!(statuses(&readers), [200; 4]);
    assert_eq!(readers[0].body, "None false");
    assert!(began.elapsed() < ms(1_500));
    assert_eq!(
        statuses(&send_all(&app, &["GET", "GET", "PUT"]).await),
        [200, 200, 423]
    );
    assert_eq!(
        statuses(&send_all(&app, &["PUT", "GET", "GET"]).await),
        [200, 423, 423]
    );
    let writer = send(&app, "PUT", "/pages/7").await;
    assert_eq!(writer.body, "None true");
    // Another page is another resource.
    let (one, other) = tokio::join!(send(&app, "PUT", "/pages/7"), send(&app, "GET", "/pages/8"));
    assert_eq!((one.status, other.status), (StatusCode::OK, StatusCode::OK));
    until_free(&nodes).await;
}

#[tokio::test(start_paused = true)]
async fn shared_methods_are_locked_although_the_list_of_methods_lacks_them() {
    let nodes = ScriptedNodes::new(3);
    let layer = layer(&redlock(&nodes)).methods([Method::PUT]);
    let app = app(layer
        .shared_methods([Method::GET])
        .missing_key(tower_redlock::OnMissingKey::Pass));
    send(&app, "GET", "/pages/7").await;
    assert_eq!(nodes.sent(0, OpKind::Acquire), 1);
    // Neither is named. The handler has no lock.
    assert_eq!(
        send(&app, "POST", "/pages/7").await.status,
        StatusCode::INTERNAL_SERVER_ERROR
    );
    assert_eq!(nodes.sent(0, OpKind::Acquire), 1);
}

#[tokio::test(start_paused = true)]
async fn a_writer_that_waits_is_served_before_readers_that_come_later() {
    let nodes = ScriptedNodes::new(3);
    let app = app(layer(&redlock(&nodes))
        .shared_methods([Method::GET])
        .wait(secs(5)));
    let began = Instant::now();
    let reader = tokio::spawn({
        let app = app.clone();
        async move { send(&app, "GET", "/pages/7").await }
    });
    sleep(ms(100)).await;
    let writer = tokio::spawn({
        let app = app.clone();
        async move {
            send(&app, "PUT", "/pages/7").await;
            Instant::now()
        }
    });
    sleep(ms(100)).await;
    let late = tokio::spawn({
        let app = app.clone();
        async move {
            send(&app, "GET", "/pages/7").await;
            Instant::now()
        }
    });
    assert_eq!(reader.await.unwrap().status, StatusCode::OK);
    let (wrote, read) = (writer.await.unwrap(), late.await.unwrap());
    assert!(wrote - began < ms(2_200), "{:?}", wrote - began);
    assert!(read - began >= secs(3), "{:?}", read - began);
}

#[tokio::test(start_paused = true)]
async fn as_many_requests_as_allowed_run_at_a_time_and_one_more_is_answered_429() {
    let nodes = ScriptedNodes::new(3);
    let app = app(layer(&redlock(&nodes)).max_concurrent(3));
    let answers = send_all(&app, &["POST"; 5]).await;
    assert_eq!(statuses(&answers), [200, 200, 200, 429, 429]);
    let refused = answers.iter().find(|answer| answer.status == 429).unwrap();
    assert_eq!(refused.code(), "too-many-concurrent");
    assert_eq!(
        refused.headers["retry-after"],
        HeaderValue::from_static("1")
    );
    let body: serde_json::Value = serde_json::from_slice(&refused.body).unwrap();
    assert_eq!(body["code"], "too-many-concurrent");
    assert_eq!(body["status"], 429);
    assert_matches!(refused.rejection, Some(Rejection::TooManyConcurrent { .. }));
    let mut slots: Vec<_> = answers
        .iter()
        .filter(|answer| answer.status == 200)
        .collect();
    slots.sort_by_key(|answer| answer.body.clone());
    let slots: Vec<_> = slots.iter().map(|answer| answer.body.clone()).collect();
    assert_eq!(slots, ["Some(0) true", "Some(1) true", "Some(2) true"]);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_may_wait_gets_the_next_free_slot() {
    let nodes = ScriptedNodes::new(3);
    let app = app(layer(&redlock(&nodes)).max_concurrent(3).wait(secs(10)));
    let began = Instant::now();
    assert_eq!(statuses(&send_all(&app, &["POST"; 9]).await), [200; 9]);
    let took = began.elapsed();
    assert!(took >= secs(3) && took < ms(3_500), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn grpc_requests_beyond_the_limit_get_resource_exhausted() {
    let nodes = ScriptedNodes::new(3);
    let app = app(layer(&redlock(&nodes)).max_concurrent(1));
    let first = tokio::spawn({
        let app = app.clone();
        async move { send(&app, "POST", "/pages/7").await }
    });
    sleep(ms(10)).await;
    let mut call = request("POST", "/pages/7");
    let grpc = HeaderValue::from_static("application/grpc");
    call.headers_mut().insert("content-type", grpc);
    let refused = Answer::to(&app, call).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.headers["grpc-status"]),
        (200, &HeaderValue::from_static("8"))
    );
    assert_eq!(first.await.unwrap().status, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn impossible_numbers_of_slots_are_misconfigured() {
    let nodes = ScriptedNodes::new(3);
    for n in [0, 65] {
        let app = app(layer(&redlock(&nodes)).max_concurrent(n));
        let (log, _logging) = Log::subscribed();
        let refused = send(&app, "POST", "/pages/7").await;
        assert_eq!(refused.told(), (500, "misconfigured"));
        let log = log.text();
        assert!(log.contains("between 1 and 64"), "{log}");
    }
    assert_eq!(nodes.sent(0, OpKind::Acquire), 0);
}

#[tokio::test(start_paused = true)]
async fn no_quorum_is_503_for_readers_and_slots_too() {
    let nodes = ScriptedNodes::new(3);
    nodes.set(0, Gate::Failing);
    nodes.set(1, Gate::Failing);
    for layer in [
        layer(&redlock(&nodes)).max_concurrent(3),
        layer(&redlock(&nodes)).shared_methods([Method::POST]),
    ] {
        let refused = send(&app(layer), "POST", "/pages/7").await;
        assert_eq!(refused.told(), (503, "lock-unavailable"));
    }
}

#[derive(Debug, Deserialize)]
struct Page(String);

#[derive(Debug, Deserialize)]
struct ReadPage(String);

#[derive(Debug, Deserialize)]
struct ConvertedPage(String);

impl LockResource for Page {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from(("page", &self.0)).into()
    }
}

impl LockResource for ReadPage {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from(("page", &self.0)).into()
    }

    fn options(&self) -> LockOptions {
        LockOptions::default().shared()
    }
}

impl LockResource for ConvertedPage {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from(("page", &self.0)).into()
    }

    fn options(&self) -> LockOptions {
        LockOptions::default().slots(2)
    }
}

fn extractors(redlock: &Redlock) -> Router<()> {
    let write = async |_: Locked<Path<Page>>| sleep(secs(1)).await;
    let read = async |_: Locked<Path<ReadPage>>| sleep(secs(1)).await;
    let convert = async |Locked(guard, _): Locked<Path<ConvertedPage>>| {
        sleep(secs(1)).await;
        format!("{:?}", guard.slot())
    };
    Router::new()
        .route("/pages/{id}", get(read).put(write).post(convert))
        .with_state(redlock.clone())
}

#[tokio::test(start_paused = true)]
async fn extractors_share_a_resource_or_bound_its_requests() {
    let nodes = ScriptedNodes::new(3);
    let app = extractors(&redlock(&nodes));
    assert_eq!(
        statuses(&send_all(&app, &["GET", "GET", "PUT"]).await),
        [200, 200, 423]
    );
    until_free(&nodes).await;
    let answers = send_all(&app, &["POST"; 3]).await;
    assert_eq!(statuses(&answers), [200, 200, 429]);
    until_free(&nodes).await;
}

/// The lock of the layer, and an extractor for the same resource that wants another kind of lock.
#[tokio::test(start_paused = true)]
async fn an_extractor_shares_the_layers_lock_only_if_that_is_enough() {
    let (nodes, redlock) = three_nodes();
    let alone = extractors(&redlock).route_layer(layer(&redlock).methods([Method::GET]));
    // A reader inside of a lock that is held alone needs no other one.
    assert_eq!(send(&alone, "GET", "/pages/7").await.status, StatusCode::OK);
    assert_eq!(nodes.sent(0, OpKind::Acquire), 1);
    until_free(&nodes).await;

    let shared = extractors(&redlock)
        .route_layer(layer(&redlock).shared_methods([Method::PUT, Method::GET]));
    assert_eq!(
        send(&shared, "GET", "/pages/7").await.status,
        StatusCode::OK
    );
    let (log, _logging) = Log::subscribed();
    let refused = send(&shared, "PUT", "/pages/7").await;
    assert_eq!(refused.status, StatusCode::INTERNAL_SERVER_ERROR);
    let log = log.text();
    assert!(log.contains("lock it alone from the beginning"), "{log}");
    until_free(&nodes).await;

    // A slot is another resource than the page itself, and one slot is enough for a request.
    let slot = extractors(&redlock).route_layer(layer(&redlock));
    let before = nodes.sent(0, OpKind::Acquire);
    assert!(
        send(&slot, "POST", "/pages/7")
            .await
            .body
            .starts_with(b"Some")
    );
    assert_eq!(nodes.sent(0, OpKind::Acquire) - before, 2);
    let slots = extractors(&redlock).route_layer(layer(&redlock).max_concurrent(2));
    let before = nodes.sent(0, OpKind::Acquire);
    assert_eq!(
        statuses(&send_all(&slots, &["POST"; 3]).await),
        [200, 200, 429]
    );
    assert!(nodes.sent(0, OpKind::Acquire) - before <= 4);
    until_free(&nodes).await;
}

#[tokio::test(start_paused = true)]
async fn a_reader_has_no_token_and_the_log_says_why() {
    let nodes = ScriptedNodes::new(3);
    let layer = layer(&redlock(&nodes)).shared_methods([Method::GET]);
    let name = http::HeaderName::from_static("x-token");
    let layer = layer.expose_token(name.clone()).forward_token(name);
    let fenced = async |token: FencingToken| token.to_string();
    let app = Router::new().route("/pages/{id}", any(fenced).layer(layer));
    let written = send(&app, "PUT", "/pages/7").await;
    assert_eq!(written.headers["x-token"].as_bytes(), &written.body[..]);
    let (log, _logging) = Log::subscribed();
    let read = send(&app, "GET", "/pages/7").await;
    assert_eq!(read.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(read.headers.get("x-token"), None);
    let log = log.text();
    assert!(log.contains("reader"), "{log}");
}

#[tokio::test(start_paused = true)]
async fn slots_and_readers_in_one_layer_are_misconfigured() {
    let nodes = ScriptedNodes::new(3);
    let layer = layer(&redlock(&nodes)).max_concurrent(1);
    let app = app(layer.shared_methods([Method::GET]));
    for method in ["GET", "PUT"] {
        let refused = send(&app, method, "/pages/7").await;
        assert_eq!(refused.told(), (500, "misconfigured"));
    }
    assert_eq!(nodes.sent(0, OpKind::Acquire), 0);
}

/// For requests of a shared method too.
#[tokio::test(start_paused = true)]
async fn options_of_a_request_choose_its_kind_of_lock() {
    let nodes = ScriptedNodes::new(3);
    let layer = layer(&redlock(&nodes)).shared_methods([Method::GET]);
    let app = app(layer.options(|parts| match parts.uri.query() {
        Some("slots") => LockOptions::default().slots(2),
        _ => LockOptions::default(),
    }));
    let slot = || send(&app, "GET", "/pages/7?slots");
    let (one, other, third) = tokio::join!(slot(), slot(), slot());
    for slot in [one, other] {
        assert!(slot.body.starts_with(b"Some("), "{:?}", slot.body);
    }
    assert_eq!(third.told(), (429, "too-many-concurrent"));
    assert_eq!(send(&app, "GET", "/pages/7").await.body, "None false");
}
