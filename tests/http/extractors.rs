//! `Locked`, `LockHandle` and `health_router`: locks by a handler's own signature.

use std::convert::Infallible;

use axum::body::Body;
use axum::extract::{FromRef, Path, Query, Request, State};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::{Extension, Form, Json, Router, debug_handler};
use futures_util::{StreamExt, stream};
use http::StatusCode;
use support::{Answer, ms, redlock, request_with, secs, send, three_nodes, three_nodes_with};
use tokio::time::{Instant, sleep};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    LockHandle, LockKey, LockKeys, LockResource, Locked, OnLost, OnMissingKey, OnUnavailable,
    Redlock, RedlockLayer, Rejection, admin_router, health_router, key,
};

use crate::shop::{AppState, OrderId, Transfer, shop, until_free};

#[tokio::test(start_paused = true)]
async fn locked_calls_the_handler_under_the_lock_of_its_path_only() {
    let (nodes, redlock) = three_nodes();
    let app = shop(&redlock);
    let served = send(&app, "POST", "/orders/7/ship").await;
    assert_eq!(served.status, StatusCode::OK);
    let expected = LockKey::from(("order", "7"));
    assert_eq!(served.text(), format!("7 {:?}", [expected]));
    let free = [0, 0, 0];
    assert_eq!(nodes.locks(), free, "the body waits for the release");
    // A held lock is refused as by the layer.
    let guard = redlock.try_lock(("order", "7")).await.unwrap();
    let refused = send(&app, "POST", "/orders/07/ship").await;
    assert_eq!(refused.told(), (423, "lock-contended"));
    drop(guard);
    // No lock is taken when the extractor fails.
    let asked = nodes.sent(0, OpKind::Acquire);
    assert_eq!(send(&app, "POST", "/orders/x/ship").await.status, 400);
    assert_eq!(nodes.sent(0, OpKind::Acquire), asked);
}

const FORM: &str = "application/x-www-form-urlencoded";
const JSON: &str = "application/json";

fn request(method: &str, content_type: &str, body: impl Into<Body>) -> Request {
    let request = request_with(method, "/", &[("content-type", content_type)]);
    request.map(|_| body.into())
}

/// A service that locks what a body names.
fn transfers(redlock: &Redlock) -> Router {
    let json = async |Locked(guard, Json(transfer)): Locked<Json<Transfer>>| {
        let response = format!("{} {}", transfer.from, guard.keys().len()).into_response();
        guard.hold_until_sent(response)
    };
    let form = async |Locked(guard, Form(transfer)): Locked<Form<Transfer>>| {
        let response = format!("{} {}", transfer.to, guard.keys().len()).into_response();
        guard.hold_until_sent(response)
    };
    let app = Router::new().route("/", post(json).put(form));
    app.with_state(redlock.clone())
}

#[tokio::test(start_paused = true)]
async fn locked_json_and_form_lock_what_the_body_names_and_nothing_for_a_bad_body() {
    let (nodes, redlock) = three_nodes();
    let app = transfers(&redlock);
    let both = r#"{"from":"a","to":"b"}"#;
    for (method, content_type, body, status, text) in [
        ("POST", JSON, both, 200, "a 2"),
        ("PUT", FORM, "from=a&to=b", 200, "b 2"),
        ("POST", JSON, "{", 400, "Failed to parse"),
        (
            "POST",
            JSON,
            r#"{"from":"a"}"#,
            422,
            "Failed to deserialize",
        ),
        ("POST", "text/plain", "{}", 415, "Expected request"),
    ] {
        let answer = Answer::to(&app, request(method, content_type, body)).await;
        assert_eq!(answer.told(), (status, ""), "{body}");
        assert!(answer.text().starts_with(text), "{answer:?}");
        assert_eq!(nodes.locks(), [0, 0, 0]);
    }
    assert_eq!(nodes.sent(0, OpKind::Acquire), 2);
    let guard = redlock.lock(("account", "b")).await.unwrap();
    let refused = Answer::to(&app, request("POST", JSON, both)).await;
    assert_eq!(refused.code(), "lock-contended");
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn locked_json_takes_the_lock_after_its_body_has_arrived() {
    let (_nodes, redlock) = three_nodes();
    let app = transfers(&redlock);
    let pieces = stream::iter([r#"{"from":"a","#, r#""to":"b"}"#]).then(async |piece| {
        sleep(secs(1)).await;
        Ok::<_, Infallible>(piece)
    });
    let slow = request("POST", JSON, Body::from_stream(pieces));
    let serving = tokio::spawn(async move { Answer::to(&app, slow).await });
    sleep(ms(1_500)).await;
    let guard = redlock.try_lock(("account", "b")).await.unwrap();
    guard.release().await.unwrap();
    assert_eq!(serving.await.unwrap().body, "a 2");
}

#[tokio::test(start_paused = true)]
async fn optional_locked_is_none_only_without_its_resource() {
    #[debug_handler(state = AppState)]
    async fn handler(locked: Option<Locked<Extension<Transfer>>>) -> String {
        format!("{:?}", locked.map(|Locked(guard, _)| guard.keys().len()))
    }
    let (nodes, redlock) = three_nodes();
    let app = Router::new()
        .route("/", post(handler))
        .with_state(redlock.clone());
    assert_eq!(send(&app, "POST", "/").await.text(), "None");
    let [from, to] = ["a", "b"].map(String::from);
    let app = app.layer(Extension(Transfer { from, to }));
    assert_eq!(send(&app, "POST", "/").await.text(), "Some(2)");
    until_free(&nodes).await;
    let guard = redlock.try_lock(("account", "b")).await.unwrap();
    assert_eq!(send(&app, "POST", "/").await.status, StatusCode::LOCKED);
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn lock_resource_sets_wait_and_ttl() {
    let transfer = async |Locked(guard, _): Locked<Query<Transfer>>| {
        format!("{:?}", guard.valid_for() < secs(5))
    };
    let (_nodes, redlock) = three_nodes();
    let app = Router::new().route("/transfer", post(transfer));
    let app = app.with_state(redlock.clone());
    let guard = redlock.try_lock(("account", "a")).await.unwrap();
    let release = async {
        sleep(secs(1)).await;
        drop(guard);
    };
    let answer = send(&app, "POST", "/transfer?from=b&to=a");
    assert_eq!(tokio::join!(answer, release).0.text(), "true");
}

#[tokio::test(start_paused = true)]
async fn lock_handle_without_a_lock_names_the_missing_layer() {
    async fn handler(handle: LockHandle) -> String {
        format!("{:?}", handle.keys())
    }
    let nodes = ScriptedNodes::new(3);
    let layer = RedlockLayer::new(redlock(&nodes), key::query("id"))
        .missing_key(OnMissingKey::Pass)
        .on_unavailable(OnUnavailable::Proceed)
        .skip(|parts| parts.headers.contains_key("x-skip"));
    let bare: Router = Router::new().route("/", get(handler).post(handler));
    let layered = bare.clone().layer(layer);
    assert_eq!(send(&layered, "POST", "/?id=7").await.status, 200);
    for (app, method, target, expected) in [
        (&bare, "POST", "/?id=7", "no RedlockLayer"),
        (&layered, "GET", "/?id=7", "does not lock"),
        (&layered, "POST", "/", "names no resource"),
        (&layered, "POST", "/?id=8", "without a quorum"),
    ] {
        if expected == "without a quorum" {
            (0..2).for_each(|node| nodes.set(node, Gate::Down));
        }
        let refused = send(app, method, target).await;
        assert_eq!(refused.status, StatusCode::INTERNAL_SERVER_ERROR);
        let Some(Rejection::Misconfigured(error)) = refused.rejection else {
            panic!("{method} {target} is not misconfigured");
        };
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// A part of the state can be the resource.
#[derive(Clone)]
struct Report(&'static str);

impl LockResource for Report {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from(self.0).into()
    }
}

#[derive(Clone, FromRef)]
struct ReportState {
    redlock: Redlock,
    report: Report,
}

#[tokio::test(start_paused = true)]
async fn locked_takes_its_resource_from_the_state_and_refuses_an_empty_key() {
    let handler = async |Locked(guard, _): Locked<State<Report>>| format!("{:?}", guard.key());
    for (report, told, text) in [
        ("nightly", (200, ""), "LockKey(\"nightly\")"),
        ("", (400, "key-missing"), "required key"),
    ] {
        let (redlock, report) = (Redlock::in_memory(1), Report(report));
        let app = Router::new().route("/", post(handler));
        let app = app.with_state(ReportState { redlock, report });
        let answer = send(&app, "POST", "/").await;
        assert_eq!(answer.told(), told);
        assert!(answer.text().contains(text), "{answer:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn health_router_reports_the_quorum_names_the_nodes_and_is_503_while_the_service_drains() {
    let (nodes, redlock) = three_nodes();
    let app = Router::new()
        .nest("/healthz", health_router(redlock.clone()))
        .nest("/admin", admin_router(redlock.clone()))
        // The application has a state of its own.
        .route("/", get(async |_: State<u8>| "ok"))
        .with_state(7);
    for (failing, status, told) in [
        (0, 200, "ready"),
        (1, 200, "degraded"),
        (2, 503, "down"),
        (0, 503, "draining"),
    ] {
        (0..3).for_each(|node| nodes.set(node, Gate::Ready));
        (0..failing).for_each(|node| nodes.set(node, Gate::Failing));
        if told == "draining" {
            redlock.drain(secs(0)).await;
        }
        for target in ["/healthz", "/admin"] {
            let answer = send(&app, "GET", target).await;
            let body = answer.json();
            assert_eq!(answer.status, status, "{body}");
            assert_eq!(
                (&body["status"], &body["needed"]),
                (&told.into(), &2.into())
            );
            assert_eq!(body["quorum"], failing < 2, "{body}");
            let states = (0..3).map(|node| body["nodes"][node]["state"] == "up");
            assert_eq!(states.filter(|up| *up).count(), 3 - failing);
            assert_eq!(body["nodes"][2]["node"], "embedded-2");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn max_hold_of_the_builder_is_the_default_of_layers_and_locked() {
    let layered = async |handle: LockHandle| handle.lost().await.to_string();
    let locked = async |Locked(guard, _): Locked<Path<OrderId>>| guard.lost().await.to_string();
    for (of_builder, of_all) in [(None, 60), (Some(2), 2), (Some(100), 100)] {
        let (nodes, redlock) = three_nodes_with(|builder| {
            let builder = builder.ttl(secs(1));
            match of_builder {
                Some(max_hold) => builder.max_hold(secs(max_hold)),
                None => builder,
            }
        });
        let layer = RedlockLayer::new(redlock.clone(), ("order", key::path("id")));
        let layer = layer.on_lost(OnLost::Notify);
        let brief = layer.clone().max_hold(secs(4));
        let app = Router::new()
            .route("/layer/{id}", post(layered).layer(layer))
            .route("/brief/{id}", post(layered).layer(brief))
            .route("/locked/{id}", post(locked))
            .with_state(redlock);
        for (target, expected) in [("/layer/7", of_all), ("/brief/7", 4), ("/locked/7", of_all)] {
            let began = Instant::now();
            let answer = send(&app, "POST", target).await;
            assert_eq!(answer.status, StatusCode::OK, "{target}: {answer:?}");
            assert_eq!(began.elapsed().as_secs(), expected, "{target}: {answer:?}");
            assert!(answer.text().contains("max_hold"), "{target}: {answer:?}");
            until_free(&nodes).await;
        }
    }
}
