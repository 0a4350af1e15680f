//! Settings of `IdempotencyLayer`: scopes, keys, fingerprints, headers, methods and rejections.

use std::sync::atomic::Ordering;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, post};
use axum::{Router, http};
use http_body_util::Full;
use support::{Answer, ms};
use tokio::time::sleep;
use tower_redlock::test_util::{OpKind, ScriptedNodes};
use tower_redlock::{IdempotencyLayer, Redlock, Rejection, RequestKind, RestartGuard, key, scope};

use crate::callers::{Payments, layer, pay, request, scene};

#[tokio::test(start_paused = true)]
async fn idempotency_keys_are_scoped_by_caller_method_and_path() {
    let (_nodes, payments, app) = scene();
    let nested = Router::new()
        .nest("/v1", app.clone())
        .nest("/v2", app.clone());
    pay(&app, "/payments", "a").await;
    let bob = Request::post("/payments")
        .header("x-user", "bob")
        .header("idempotency-key", "a");
    Answer::to(&app, bob.body(Body::from("amount=5")).unwrap()).await;
    let patch = Request::patch("/payments")
        .header("x-user", "alice")
        .header("idempotency-key", "a");
    Answer::to(&app, patch.body(Body::from("amount=5")).unwrap()).await;
    pay(&nested, "/v1/payments", "a").await;
    pay(&nested, "/v2/payments", "a").await;
    assert_eq!(payments.executed(), 5);
    let quoted = request("/payments", "\"a\"", "amount=5");
    assert!(
        Answer::to(&app, quoted).await.is_replayed(),
        "the same key as a string"
    );
}

#[tokio::test(start_paused = true)]
async fn refreshed_authorization_header_keeps_the_caller_scope() {
    let (_nodes, payments, app) = scene();
    let with = |credential| {
        let mut request = request("/payments", "a", "amount=5");
        let value = format!("Bearer {credential}").parse().unwrap();
        request.headers_mut().insert("authorization", value);
        request
    };
    let first = Answer::to(&app, with("before")).await;
    let again = Answer::to(&app, with("after it was refreshed")).await;
    assert!(again.is_replayed());
    assert_eq!((again.body, payments.executed()), (first.body, 1));
}

#[tokio::test(start_paused = true)]
async fn missing_or_invalid_idempotency_key_is_refused_or_passes() {
    let nodes = ScriptedNodes::new(3);
    let plain = Router::new().route("/payments", any(async |body: Bytes| body.len().to_string()));
    let app = plain.clone().layer(layer(&nodes));
    let code = async |app: &Router, request| {
        let answer = Answer::to(app, request).await;
        answer.told()
    };
    let keyless = || {
        Request::post("/payments")
            .body(Body::from("12345"))
            .unwrap()
    };
    assert_eq!(Answer::to(&app, keyless()).await.body, "5");
    let required = plain.clone().layer(layer(&nodes).required(true));
    assert_eq!(code(&required, keyless()).await, (400, "key-missing"));
    let unknown = Request::post("/nowhere").body(Body::empty()).unwrap();
    assert_eq!(code(&required, unknown).await, (404, ""));
    let put = Request::put("/payments").header("idempotency-key", "a");
    assert_eq!(
        code(&app, put.body(Body::empty()).unwrap()).await,
        (200, "")
    );
    let unscoped = Request::post("/payments").header("idempotency-key", "a");
    assert_eq!(
        code(&app, unscoped.body(Body::empty()).unwrap()).await,
        (500, "scope-missing")
    );
    let long = "x".repeat(256);
    for bad in ["", "a b", "a\tb", "\"a", "é", long.as_str()] {
        assert_eq!(
            code(&app, request("/payments", bad, "")).await,
            (400, "key-invalid"),
            "{bad}"
        );
    }
    let mut twice = request("/payments", "a", "");
    twice
        .headers_mut()
        .append("idempotency-key", "b".parse().unwrap());
    assert_eq!(code(&app, twice).await, (400, "key-invalid"));
    let small = plain.layer(layer(&nodes).max_request_body(8));
    assert_eq!(
        code(&small, request("/payments", "a", "12345678")).await,
        (200, "")
    );
    assert_eq!(
        code(&small, request("/payments", "b", "123456789")).await,
        (413, "body-too-large")
    );
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn rejections_are_problem_json_with_a_documentation_link() {
    let nodes = ScriptedNodes::new(3);
    let app = Payments::default().app(layer(&nodes).required(true));
    let app = app.layer(map_response(async |mut response: Response| {
        if response.extensions().get::<Rejection>().is_some() {
            let link = "<https://example.com/payments>; rel=\"describedby\"";
            response.headers_mut().insert("link", link.parse().unwrap());
        }
        response
    }));
    let slow = "/payments?ms=1000";
    let refused = async {
        sleep(ms(100)).await;
        let keyless = Request::post(slow).header("x-user", "alice");
        [
            (400, "key-missing", keyless.body(Body::empty()).unwrap()),
            (400, "key-invalid", request(slow, "a b", "amount=5")),
            (
                422,
                "idempotency-key-reused",
                request(slow, "a", "amount=6"),
            ),
            (409, "request-in-progress", request(slow, "a", "amount=5")),
        ]
    };
    let (first, refused) = tokio::join!(pay(&app, slow, "a"), async {
        let mut answers = Vec::new();
        for (status, code, request) in refused.await {
            answers.push((status, code, Answer::to(&app, request).await));
        }
        answers
    });
    assert!(!first.headers.contains_key("link"));
    for (status, code, answer) in refused {
        assert_eq!(answer.told(), (status, code));
        assert_eq!(answer.headers["content-type"], "application/problem+json");
        assert!(answer.headers.contains_key("link"), "{code}");
        let problem: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!(
            (&problem["status"], &problem["code"]),
            (&status.into(), &code.into())
        );
        let said = ["type", "title", "detail"].map(|member| problem[member].as_str());
        assert!(said.iter().all(Option::is_some), "{problem}");
        let expected = match code {
            "key-missing" => "the request lacks a required key: header `idempotency-key`",
            "request-in-progress" => "still runs",
            _ => continue,
        };
        let text = problem.to_string();
        assert!(
            text.contains(expected) && !text.contains("locked"),
            "{text}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn scope_public_is_shared_by_all_callers() {
    let redlock = Redlock::builder()
        .embedded(3)
        .restart_guard(RestartGuard::Off);
    let layer = IdempotencyLayer::new(redlock.build().unwrap(), scope::public());
    let hello = post(async || "hello".into_response());
    let app = Router::new().route("/", hello).layer(layer);
    let call = || {
        Request::post("/")
            .header("idempotency-key", "a")
            .body(Body::empty())
            .unwrap()
    };
    assert!(!Answer::to(&app, call()).await.is_replayed());
    assert!(Answer::to(&app, call()).await.is_replayed());
}

#[tokio::test(start_paused = true)]
async fn idempotency_layer_applied_twice_acts_once() {
    let (nodes, payments) = (ScriptedNodes::new(3), Payments::default());
    let layer = layer(&nodes);
    let app = payments.app(layer.clone()).layer(layer);
    let first = pay(&app, "/payments", "a").await;
    assert_eq!(first.status, StatusCode::OK);
    let again = pay(&app, "/payments", "a").await;
    assert!(again.is_replayed());
    assert_eq!((again.body, payments.executed()), (first.body, 1));
    let sent = [OpKind::Acquire, OpKind::Record].map(|kind| nodes.sent(0, kind));
    assert_eq!(sent, [2, 1]);
}

#[tokio::test(start_paused = true)]
async fn long_idempotency_keys_and_paths_fit_the_empty_namespace() {
    let nodes = ScriptedNodes::new(3);
    let builder = Redlock::builder().scripted(&nodes).namespace("");
    let layer = IdempotencyLayer::new(builder.build().unwrap(), key::header("x-user"));
    let executed = Payments::default();
    let count = executed.clone();
    let pay_there = post(async move || count.0.fetch_add(1, Ordering::SeqCst).to_string());
    let app = Router::new().route("/{account}", pay_there).layer(layer);
    for (number, account) in ["x".repeat(600), "y".repeat(600)].into_iter().enumerate() {
        let (target, key) = (format!("/{account}"), "k".repeat(255));
        let first = pay(&app, &target, &key).await;
        assert_eq!(
            (first.status, first.body),
            (StatusCode::OK, number.to_string().into())
        );
        assert!(pay(&app, &target, &key).await.is_replayed());
    }
}

#[tokio::test(start_paused = true)]
async fn fingerprint_decides_which_requests_are_equal() {
    let (nodes, payments) = (ScriptedNodes::new(3), Payments::default());
    let app = payments.app(layer(&nodes).fingerprint(|_, body| body.to_vec()));
    let first = pay(&app, "/payments?size=1", "a").await;
    let again = pay(&app, "/payments?size=2", "a").await;
    assert!(again.is_replayed());
    assert_eq!(again.body, first.body);
    let other = Answer::to(&app, request("/payments?size=1", "a", "amount=6")).await;
    assert_eq!(other.code(), "idempotency-key-reused");
    // By default it is all of these.
    let app = payments.app(layer(&nodes));
    let with = async |target: &str, kind: &str, body| {
        let mut request = request(target, "b", body);
        let kind = kind.parse().unwrap();
        request.headers_mut().insert("content-type", kind);
        Answer::to(&app, request).await
    };
    let (target, kind, body) = ("/payments?size=1", "text/plain", "amount=5");
    assert_eq!(with(target, kind, body).await.status, StatusCode::OK);
    assert!(with(target, kind, body).await.is_replayed());
    for other in [
        with("/payments?size=2", kind, body).await,
        with("/payments", kind, body).await,
        with(target, "text/html", body).await,
        with(target, kind, "amount=6").await,
        with(target, kind, "").await,
    ] {
        assert_eq!(other.code(), "idempotency-key-reused");
    }
    assert_eq!(payments.executed(), 2);
}

#[tokio::test(start_paused = true)]
async fn header_methods_and_rejection_are_configurable() {
    let (nodes, payments) = (ScriptedNodes::new(3), Payments::default());
    let named = layer(&nodes)
        .header("x-once".parse().unwrap())
        .methods([Method::PUT])
        .rejection(|rejection: &Rejection, _: &RequestKind| {
            let code = Full::from(rejection.code());
            let mut response = http::Response::new(code);
            *response.status_mut() = StatusCode::IM_A_TEAPOT;
            response
        });
    let app = payments.app(named);
    let with = async |method: &str, body| {
        let request = Request::builder().method(method).uri("/payments");
        let request = request.header("x-user", "alice").header("x-once", "a");
        Answer::to(&app, request.body(Body::from(body)).unwrap()).await
    };
    let first = with("PUT", "amount=5").await;
    let again = with("PUT", "amount=5").await;
    assert_eq!((again.status, &again.body), (first.status, &first.body));
    assert!(again.is_replayed() && !first.is_replayed());
    let reused = with("PUT", "amount=6").await;
    assert_eq!(reused.status, StatusCode::IM_A_TEAPOT);
    assert_eq!(reused.body, "idempotency-key-reused");
    assert_eq!(payments.executed(), 1);
}
