//! Layers whose locks several requests hold: readers, and up to n requests at a time.

use axum::Router;
use axum::extract::Path;
use axum::routing::{any, get};
use futures_util::future::join_all;
use http::{Method, StatusCode};
use serde::Deserialize;
use support::{Answer, Log, ms, redlock, secs, send, three_nodes};
use tokio::time::{Instant, sleep};
use tower_redlock::test_util::{OpKind, ScriptedNodes};
use tower_redlock::{
    FencingToken, LockHandle, LockKey, LockKeys, LockOptions, LockResource, Locked, Redlock,
    RedlockLayer, key,
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

/// Sends requests at the same time, and returns their answers.
async fn send_all(app: &Router, methods: &[&'static str]) -> Vec<Answer> {
    let requests = methods.iter().map(|method| send(app, method, "/pages/7"));
    join_all(requests).await
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
    for (methods, expected) in [
        (["GET", "GET", "PUT"], [200, 200, 423]),
        (["PUT", "GET", "GET"], [200, 423, 423]),
    ] {
        assert_eq!(statuses(&send_all(&app, &methods).await), expected);
    }
    let writer = send(&app, "PUT", "/pages/7").await;
    assert_eq!(writer.body, "None true");
    // Another page is another resource.
    let (one, other) = tokio::join!(send(&app, "PUT", "/pages/7"), send(&app, "GET", "/pages/8"));
    assert_eq!(statuses(&[one, other]), [200, 200]);
    until_free(&nodes).await;
}

#[tokio::test(start_paused = true)]
async fn shared_methods_are_locked_although_the_list_of_methods_lacks_them() {
    let nodes = ScriptedNodes::new(3);
    let layer = layer(&redlock(&nodes)).methods([Method::PUT]);
    let app = app(layer.shared_methods([Method::GET]));
    send(&app, "GET", "/pages/7").await;
    assert_eq!(nodes.sent(0, OpKind::Acquire), 1);
    // Neither is named. The handler has no lock.
    assert_eq!(send(&app, "POST", "/pages/7").await.status, 500);
    assert_eq!(nodes.sent(0, OpKind::Acquire), 1);
}

// Rules: too-many-concurrent
#[tokio::test(start_paused = true)]
async fn as_many_requests_as_allowed_run_at_a_time_and_one_more_is_answered_429() {
    let nodes = ScriptedNodes::new(3);
    let app = app(layer(&redlock(&nodes)).max_concurrent(3));
    let answers = send_all(&app, &["POST"; 5]).await;
    let (served, refused): (Vec<_>, Vec<_>) =
        answers.iter().partition(|answer| answer.status == 200);
    assert_eq!(refused.len(), 2);
    for refused in refused {
        assert_eq!(refused.told(), (429, "too-many-concurrent"));
        assert_eq!(refused.headers["retry-after"], "1");
    }
    let mut slots: Vec<_> = served.into_iter().map(Answer::text).collect();
    slots.sort_unstable();
    assert_eq!(slots, ["Some(0) true", "Some(1) true", "Some(2) true"]);
}

#[tokio::test(start_paused = true)]
async fn impossible_slots_are_misconfigured() {
    let nodes = ScriptedNodes::new(3);
    let slots = |n| layer(&redlock(&nodes)).max_concurrent(n);
    for (layer, remedy) in [
        (slots(0), "between 1 and 64"),
        (slots(65), "between 1 and 64"),
        (slots(1).shared_methods([Method::GET]), "shared_methods"),
    ] {
        let app = app(layer);
        let (log, _logging) = Log::subscribed();
        for method in ["PUT", "GET"] {
            let refused = send(&app, method, "/pages/7").await;
            assert_eq!(refused.told(), (500, "misconfigured"));
        }
        let log = log.text();
        assert!(log.contains(remedy), "{log}");
    }
    assert_eq!(nodes.sent(0, OpKind::Acquire), 0);
}

/// A page that requests write, read or convert.
#[derive(Debug, Deserialize)]
struct Page<const KIND: char>(String);

impl<const KIND: char> LockResource for Page<KIND> {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from(("page", &self.0)).into()
    }

    fn options(&self) -> LockOptions {
        match KIND {
            'r' => LockOptions::default().shared(),
            'c' => LockOptions::default().slots(2),
            _ => LockOptions::default(),
        }
    }
}

fn extractors(redlock: &Redlock) -> Router<()> {
    let write = async |_: Locked<Path<Page<'w'>>>| sleep(secs(1)).await;
    let read = async |_: Locked<Path<Page<'r'>>>| sleep(secs(1)).await;
    let convert = async |Locked(guard, _): Locked<Path<Page<'c'>>>| {
        sleep(secs(1)).await;
        format!("{:?}", guard.slot())
    };
    Router::new()
        .route("/pages/{id}", get(read).put(write).post(convert))
        .with_state(redlock.clone())
}

/// The lock of the layer, and an extractor for the same resource that wants another kind of lock.
#[tokio::test(start_paused = true)]
async fn an_extractor_shares_the_layers_lock_only_if_that_is_enough() {
    let (nodes, redlock) = three_nodes();
    let alone = extractors(&redlock).route_layer(layer(&redlock).methods([Method::GET]));
    // A reader inside of a lock that is held alone needs no other one.
    assert_eq!(send(&alone, "GET", "/pages/7").await.status, 200);
    assert_eq!(nodes.sent(0, OpKind::Acquire), 1);
    until_free(&nodes).await;

    let sharing = layer(&redlock).shared_methods([Method::PUT, Method::GET]);
    let shared = extractors(&redlock).route_layer(sharing);
    assert_eq!(send(&shared, "GET", "/pages/7").await.status, 200);
    let (log, _logging) = Log::subscribed();
    let refused = send(&shared, "PUT", "/pages/7").await;
    assert_eq!(refused.status, StatusCode::INTERNAL_SERVER_ERROR);
    let log = log.text();
    assert!(log.contains("lock it alone from the beginning"), "{log}");
    until_free(&nodes).await;

    // A slot is another resource than the page itself, and one slot is enough for a request.
    let slot = extractors(&redlock).route_layer(layer(&redlock));
    let before = nodes.sent(0, OpKind::Acquire);
    let answer = send(&slot, "POST", "/pages/7").await;
    assert!(answer.body.starts_with(b"Some"), "{answer:?}");
    assert_eq!(nodes.sent(0, OpKind::Acquire) - before, 2);
    let slots = extractors(&redlock).route_layer(layer(&redlock).max_concurrent(2));
    let before = nodes.sent(0, OpKind::Acquire);
    let answers = send_all(&slots, &["POST"; 3]).await;
    assert_eq!(statuses(&answers), [200, 200, 429]);
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
