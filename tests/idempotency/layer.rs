//! One execution per idempotency key, and the recorded response for every duplicate.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Query, Request};
use axum::http::{self, Method, StatusCode};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, post};
use http_body_util::{BodyExt, Full};
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, ServiceExt, service_fn};
use tower_redlock::idempotency::RecordKeys;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    ExecutionHandle, IdempotencyKey, IdempotencyLayer, OnUnrecorded, Redlock, RedlockLayer,
    Rejection, RequestKind, RestartGuard, key, scope,
};

use crate::support::{Answer, redlock};

/// A handler that counts, and answers how many executions there were.
#[derive(Clone, Default)]
struct Payments(Arc<AtomicUsize>);

impl Payments {
    fn executed(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    fn app(&self, layer: IdempotencyLayer) -> Router {
        let payments = self.clone();
        let pay = async move |Query(form): Query<Form>, request: Request| {
            assert!(request.extensions().get::<ExecutionHandle>().is_some());
            assert!(request.extensions().get::<IdempotencyKey>().is_some());
            let body = request.into_body().collect().await.unwrap().to_bytes();
            sleep(Duration::from_millis(form.ms.unwrap_or(0))).await;
            let number = payments.0.fetch_add(1, Ordering::SeqCst) + 1;
            let status = StatusCode::from_u16(form.status.unwrap_or(200)).unwrap();
            assert!(status != StatusCode::IM_A_TEAPOT, "as the test wants it");
            let size = form.size.unwrap_or(0);
            let text = format!(
                "payment {number} of {} bytes {}",
                body.len(),
                "x".repeat(size)
            );
            let headers = [
                ("x-payment", "kept"),
                ("set-cookie", "session=1"),
                ("connection", "x-hop"),
                ("x-hop", "dropped"),
            ];
            (status, headers, text)
        };
        Router::new().route("/payments", any(pay)).layer(layer)
    }
}

#[derive(serde::Deserialize)]
struct Form {
    ms: Option<u64>,
    status: Option<u16>,
    size: Option<usize>,
}

fn layer(nodes: &ScriptedNodes) -> IdempotencyLayer {
    IdempotencyLayer::new(redlock(nodes), key::header("x-user"))
}

fn request(target: &str, key: &str, body: &'static str) -> Request {
    let request = Request::post(target)
        .header("x-user", "alice")
        .header("idempotency-key", key);
    request.body(Body::from(body)).unwrap()
}

async fn pay(app: &Router, target: &str, key: &str) -> Answer {
    Answer::to(app, request(target, key, "amount=5")).await
}

#[tokio::test(start_paused = true)]
async fn duplicate_gets_the_recorded_response_from_any_server() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let app = payments.app(layer(&nodes));
    let first = pay(&app, "/payments", "a").await;
    assert_eq!(
        (first.status, &first.body[..]),
        (StatusCode::OK, &b"payment 1 of 8 bytes "[..])
    );
    assert!(!first.is_replayed());
    for server in [app.clone(), payments.app(layer(&nodes))] {
        let again = pay(&server, "/payments", "a").await;
        assert!(again.is_replayed());
        assert_eq!((again.status, &again.body), (first.status, &first.body));
        assert_eq!(again.headers["x-payment"], "kept");
        for dropped in ["set-cookie", "connection", "x-hop", "date"] {
            assert!(!again.headers.contains_key(dropped), "{dropped}");
        }
    }
    assert_eq!(payments.executed(), 1);
    assert_eq!(nodes.locks(), [0, 0, 0]);
    let other = pay(&app, "/payments", "b").await;
    assert_eq!(other.body, "payment 2 of 8 bytes ");
}

#[tokio::test(start_paused = true)]
async fn replay_costs_one_command_per_node() {
    let nodes = ScriptedNodes::new(3);
    let app = Payments::default().app(layer(&nodes));
    let sent = |kind| [0, 1, 2].map(|node| nodes.sent(node, kind));
    pay(&app, "/payments", "a").await;
    assert_eq!(sent(OpKind::Acquire), [1, 1, 1]);
    assert_eq!(sent(OpKind::Record), [1, 1, 1], "in place of the release");
    assert_eq!(sent(OpKind::Release), [0, 0, 0]);
    for node in 0..3 {
        // The third answers after the replay is decided.
        nodes.set(node, Gate::Slow(Duration::from_millis(1 + node as u64)));
    }
    assert!(pay(&app, "/payments", "a").await.is_replayed());
    sleep(Duration::from_secs(1)).await;
    assert_eq!(sent(OpKind::Acquire), [2, 2, 2]);
    for other in [OpKind::Confirm, OpKind::Release, OpKind::Look] {
        assert_eq!(sent(other), [0, 0, 0], "{other:?}");
    }
    assert_eq!(sent(OpKind::Record), [1, 1, 1]);
}

#[tokio::test(start_paused = true)]
async fn duplicate_of_a_running_execution_is_refused_or_waits() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let slow = "/payments?ms=1000";
    for elsewhere in [false, true] {
        let app = payments.app(layer(&nodes));
        let other = if elsewhere {
            payments.app(layer(&nodes))
        } else {
            app.clone()
        };
        let patient = payments.app(layer(&nodes).wait(Duration::from_secs(5)));
        let before = payments.executed();
        let key = if elsewhere { "a" } else { "b" };
        let later = async |app: &Router, body| {
            sleep(Duration::from_millis(100)).await;
            Answer::to(app, request(slow, key, body)).await
        };
        let (first, refused, reused, waited) = tokio::join!(
            pay(&app, slow, key),
            later(&other, "amount=5"),
            later(&other, "amount=6"),
            later(&patient, "amount=5"),
        );
        assert_eq!(first.status, StatusCode::OK);
        assert_eq!(
            (refused.status, refused.code()),
            (StatusCode::CONFLICT, "lock-contended")
        );
        assert!(refused.headers.contains_key("retry-after"));
        assert_eq!(reused.status, StatusCode::UNPROCESSABLE_ENTITY);
        assert_eq!(reused.code(), "idempotency-key-reused");
        assert!(waited.is_replayed());
        assert_eq!(waited.body, first.body);
        assert_eq!(payments.executed(), before + 1);
        let later = Answer::to(&other, request(slow, key, "amount=6")).await;
        assert_eq!(later.code(), "idempotency-key-reused");
    }
}

#[tokio::test(start_paused = true)]
async fn idempotency_keys_are_scoped_by_caller_method_and_path() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let app = payments.app(layer(&nodes));
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
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let app = payments.app(layer(&nodes));
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
        (answer.status.as_u16(), answer.code())
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
    let nobody = Request::post("/payments").header("idempotency-key", "a");
    assert_eq!(
        code(&app, nobody.body(Body::empty()).unwrap()).await,
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
        sleep(Duration::from_millis(100)).await;
        let keyless = Request::post(slow).header("x-user", "alice");
        [
            (400, "key-missing", keyless.body(Body::empty()).unwrap()),
            (400, "key-invalid", request(slow, "a b", "amount=5")),
            (
                422,
                "idempotency-key-reused",
                request(slow, "a", "amount=6"),
            ),
            (409, "lock-contended", request(slow, "a", "amount=5")),
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
        assert_eq!((answer.status.as_u16(), answer.code()), (status, code));
        assert_eq!(answer.headers["content-type"], "application/problem+json");
        assert!(answer.headers.contains_key("link"), "{code}");
        let problem: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!(
            (&problem["status"], &problem["code"]),
            (&status.into(), &code.into())
        );
        let said = ["type", "title", "detail"].map(|member| problem[member].as_str());
        assert!(said.iter().all(Option::is_some), "{problem}");
    }
}

#[tokio::test(start_paused = true)]
async fn failed_response_is_executed_again_unless_at_most_once() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let app = payments.app(layer(&nodes));
    let careful = payments.app(layer(&nodes).at_most_once(true));
    for (number, app) in [&app, &careful].into_iter().enumerate() {
        let key = number.to_string();
        let failed = pay(app, "/payments?status=503", &key).await;
        assert_eq!(failed.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(failed.rejection, None, "it is the handler's");
        let again = pay(app, "/payments?status=503", &key).await;
        if number == 0 {
            assert_eq!((again.status, again.rejection), (failed.status, None));
        } else {
            assert_eq!(
                (again.status, again.code()),
                (StatusCode::CONFLICT, "outcome-unknown")
            );
        }
    }
    assert_eq!(payments.executed(), 3);
    let kept = pay(&app, "/payments?status=404", "c").await;
    let again = pay(&app, "/payments?status=404", "c").await;
    assert!(again.is_replayed());
    assert_eq!((again.status, again.body), (kept.status, kept.body));
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn panic_leaves_the_idempotency_key_locked_until_its_ttl() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    for at_most_once in [false, true] {
        let app = payments.app(layer(&nodes).at_most_once(at_most_once));
        let key = at_most_once.to_string();
        let panics = tokio::spawn({
            let (app, key) = (app.clone(), key.clone());
            async move { pay(&app, "/payments?status=418", &key).await }
        });
        assert!(panics.await.is_err());
        assert_eq!(
            pay(&app, "/payments", &key).await.status,
            StatusCode::UNPROCESSABLE_ENTITY
        );
        let again = pay(&app, "/payments?status=418", &key).await;
        assert_eq!(again.code(), "lock-contended");
        sleep(Duration::from_secs(11)).await;
        let again = pay(&app, "/payments", &key).await;
        let refused = if at_most_once { "outcome-unknown" } else { "" };
        assert_eq!(again.code(), refused);
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_request_does_not_stop_its_execution() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let app = payments.app(layer(&nodes));
    let slow = "/payments?ms=1000";
    let gone = timeout(Duration::from_millis(100), pay(&app, slow, "a")).await;
    assert!(gone.is_err());
    sleep(Duration::from_secs(2)).await;
    let retry = pay(&app, slow, "a").await;
    assert!(retry.is_replayed());
    assert_eq!(payments.executed(), 1);
    // One that leaves before it is its turn leaves nothing.
    for node in 0..3 {
        nodes.set(node, Gate::Slow(Duration::from_millis(20)));
    }
    let gone = timeout(Duration::from_millis(10), pay(&app, slow, "b")).await;
    assert!(gone.is_err());
    sleep(Duration::from_secs(1)).await;
    assert_eq!((payments.executed(), nodes.locks()), (1, vec![0, 0, 0]));
}

#[tokio::test(start_paused = true)]
async fn response_too_large_to_record_is_sent_once_and_never_executed_again() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let app = payments.app(layer(&nodes).max_response_body(100));
    let large = pay(&app, "/payments?size=200", "a").await;
    assert_eq!((large.status, large.body.len()), (StatusCode::OK, 221));
    let again = pay(&app, "/payments?size=200", "a").await;
    assert_eq!(
        (again.status, again.code()),
        (StatusCode::CONFLICT, "result-not-kept")
    );
    // At the limit, and one byte over.
    let full = pay(&app, "/payments?size=79", "b").await;
    assert_eq!(full.body.len(), 100);
    assert_eq!(pay(&app, "/payments?size=79", "b").await.body, full.body);
    assert_eq!(pay(&app, "/payments?size=80", "c").await.body.len(), 101);
    let again = pay(&app, "/payments?size=80", "c").await;
    assert_eq!(again.code(), "result-not-kept");
    assert_eq!(payments.executed(), 3);
    // What would keep the nodes from answering others is not kept, whatever is asked for.
    let app = payments.app(layer(&nodes).max_response_body(usize::MAX));
    let huge = "/payments?size=1100000";
    assert_eq!(pay(&app, huge, "d").await.status, StatusCode::OK);
    assert_eq!(pay(&app, huge, "d").await.code(), "result-not-kept");
}

#[tokio::test(start_paused = true)]
async fn big_record_is_fetched_once_for_a_replay() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let app = payments.app(layer(&nodes));
    let big = pay(&app, "/payments?size=60000", "a").await;
    let again = pay(&app, "/payments?size=60000", "a").await;
    assert!(again.is_replayed());
    assert_eq!(again.body, big.body);
    assert_eq!(payments.executed(), 1);
    let sent = |kind| (0..3).map(|node| nodes.sent(node, kind)).sum::<usize>();
    assert_eq!((sent(OpKind::Fetch), sent(OpKind::Look)), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn replays_repair_a_record_that_one_node_after_another_forgets() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let app = payments.app(layer(&nodes));
    let first = pay(&app, "/payments", "a").await;
    for round in 0..2 {
        for node in 0..3 {
            nodes.wipe(node);
            let again = pay(&app, "/payments", "a").await;
            assert!(again.is_replayed(), "round {round}, node {node}");
            assert_eq!(again.body, first.body);
            // Time for what is done in the background.
            sleep(Duration::from_secs(1)).await;
        }
    }
    assert_eq!((payments.executed(), nodes.locks()), (1, vec![0, 0, 0]));
    // Two without a replay in between are one too many: the documented limit.
    nodes.wipe(0);
    nodes.wipe(1);
    nodes.set(2, Gate::Down);
    assert!(!pay(&app, "/payments", "a").await.is_replayed());
    assert_eq!(payments.executed(), 2);
}

#[tokio::test(start_paused = true)]
async fn execution_that_outlived_its_lock_is_recorded_without_a_rival() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let app = payments.app(layer(&nodes));
    (0..2).for_each(|node| nodes.set_for(node, OpKind::Confirm, Gate::Failing));
    let slow = "/payments?ms=60000";
    let first = pay(&app, slow, "a").await;
    assert_eq!(first.status, StatusCode::OK);
    assert!(!first.headers.contains_key("idempotency-recorded"));
    assert!(pay(&app, slow, "a").await.is_replayed());
    assert_eq!(payments.executed(), 1);
}

/// The lock of the execution is still there, and keeps a new owner from recording.
#[tokio::test(start_paused = true)]
async fn record_of_a_minority_is_completed_as_soon_as_a_majority_answers() {
    for mute in [Gate::Never, Gate::Failing] {
        let nodes = ScriptedNodes::new(3);
        let payments = Payments::default();
        let app = payments.app(layer(&nodes));
        for node in 0..2 {
            nodes.set_for(node, OpKind::Record, mute);
            nodes.set_for(node, OpKind::Look, Gate::Slow(Duration::from_millis(20)));
        }
        // After they were asked to record, and before their answers to the look.
        let back = async {
            while nodes.sent(0, OpKind::Look) == 0 {
                sleep(Duration::from_millis(1)).await;
            }
            (0..2).for_each(|node| nodes.set(node, Gate::Ready));
        };
        let (first, ()) = tokio::join!(pay(&app, "/payments", "a"), back);
        assert_eq!(first.status, StatusCode::OK);
        assert!(
            !first.headers.contains_key("idempotency-recorded"),
            "{mute:?}"
        );
        assert!(pay(&app, "/payments", "a").await.is_replayed());
        assert_eq!((payments.executed(), nodes.locks()), (1, vec![0, 0, 0]));
    }
}

#[tokio::test(start_paused = true)]
async fn response_without_a_majority_of_records_is_marked_unrecorded() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let redlock = redlock(&nodes);
    let layer = IdempotencyLayer::new(redlock.clone(), key::header("x-user"));
    let app = payments.app(layer);
    for node in 0..2 {
        nodes.set_for(node, OpKind::Record, Gate::Failing);
        nodes.set_for(node, OpKind::Look, Gate::Failing);
    }
    let first = pay(&app, "/payments", "a").await;
    assert_eq!(first.status, StatusCode::OK);
    assert_eq!(first.headers["idempotency-recorded"], "false");
    // The lock stays as long as it lives: somebody executed.
    let again = pay(&app, "/payments", "a").await;
    assert_eq!(again.status, StatusCode::CONFLICT);
    assert_eq!(payments.executed(), 1);
    // And whoever shuts down is told where it stays.
    let drained = redlock.drain(Duration::from_secs(1)).await;
    assert!(!drained.is_clean(), "{drained:?}");
}

#[tokio::test(start_paused = true)]
async fn unavailable_quorum_is_503_without_an_execution() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let app = payments.app(layer(&nodes));
    nodes.set(0, Gate::Down);
    nodes.set(1, Gate::Never);
    let refused = pay(&app, "/payments", "a").await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refused.code(), "lock-unavailable");
    assert_eq!(payments.executed(), 0);
}

#[tokio::test(start_paused = true)]
async fn records_expire_after_their_retention() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let app = payments.app(layer(&nodes).retention(Duration::from_secs(100)));
    pay(&app, "/payments", "a").await;
    sleep(Duration::from_secs(99)).await;
    assert!(pay(&app, "/payments", "a").await.is_replayed());
    sleep(Duration::from_secs(2)).await;
    assert!(!pay(&app, "/payments", "a").await.is_replayed());
    assert_eq!(payments.executed(), 2);
}

#[tokio::test(start_paused = true)]
async fn scope_public_is_shared_by_all_callers() {
    let redlock = Redlock::builder()
        .embedded(3)
        .restart_guard(RestartGuard::Off);
    let layer = IdempotencyLayer::new(redlock.build().unwrap(), scope::public());
    let hello = post(async || "hello".into_response());
    let app = Router::new().route("/", hello).layer(layer);
    let anybody = || {
        Request::post("/")
            .header("idempotency-key", "a")
            .body(Body::empty())
            .unwrap()
    };
    assert!(!Answer::to(&app, anybody()).await.is_replayed());
    assert!(Answer::to(&app, anybody()).await.is_replayed());
}

#[tokio::test(start_paused = true)]
async fn concurrent_request_with_another_payload_is_refused_as_reused() {
    let nodes = ScriptedNodes::new(3);
    for node in 0..3 {
        nodes.set(node, Gate::Slow(Duration::from_millis(2)));
    }
    let payments = Payments::default();
    for (round, layer) in [layer(&nodes), layer(&nodes).max_waiters(1)]
        .into_iter()
        .enumerate()
    {
        let app = payments.app(layer);
        let (slow, key) = ("/payments?ms=1000", round.to_string());
        // All of them come while the first is only asking.
        let (first, reused, refused) = tokio::join!(
            Answer::to(&app, request(slow, &key, "amount=5")),
            Answer::to(&app, request(slow, &key, "amount=6")),
            Answer::to(&app, request(slow, &key, "amount=5")),
        );
        assert_eq!(first.status, StatusCode::OK);
        assert_eq!(refused.code(), "lock-contended");
        if round == 0 {
            assert_eq!(reused.code(), "idempotency-key-reused");
        }
    }
    assert_eq!(payments.executed(), 2);
}

#[tokio::test(start_paused = true)]
async fn inner_refusal_is_not_recorded() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let redlock = redlock(&nodes);
    // Layers that come later stand outside: the lock is within.
    let pay_within = post({
        let payments = payments.clone();
        async move || payments.0.fetch_add(1, Ordering::SeqCst).to_string()
    });
    let pay_within = pay_within.layer(RedlockLayer::new(redlock.clone(), "account"));
    let app = Router::new()
        .route("/payments", pay_within)
        .layer(layer(&nodes));
    let other = redlock.lock("account").await.unwrap();
    let refused = pay(&app, "/payments", "a").await;
    assert_eq!(refused.status, StatusCode::LOCKED);
    other.release().await.unwrap();
    let paid = pay(&app, "/payments", "a").await;
    assert_eq!(paid.status, StatusCode::OK);
    assert!(!paid.is_replayed());
    assert!(pay(&app, "/payments", "a").await.is_replayed());
    assert_eq!((payments.executed(), nodes.locks()), (1, vec![0, 0, 0]));
}

#[tokio::test(start_paused = true)]
async fn idempotency_layer_applied_twice_acts_once() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
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
async fn inner_service_error_leaves_the_idempotency_key_locked_until_its_ttl() {
    let nodes = ScriptedNodes::new(3);
    let failing = service_fn(async |_| Err::<Response, _>("perhaps an effect"));
    let failing = layer(&nodes).layer(failing);
    let failed = failing.oneshot(request("/payments", "a", "")).await;
    assert_eq!(failed.err(), Some("perhaps an effect"));
    assert_eq!(nodes.locks(), [1, 1, 1]);
    sleep(Duration::from_secs(11)).await;
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn execution_that_lost_its_lease_gets_conflicting_outcomes_and_no_replay() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let (slow, other) = (payments.app(layer(&nodes)), payments.app(layer(&nodes)));
    let (first, second) = tokio::join!(pay(&slow, "/payments?ms=60000", "a"), async {
        sleep(Duration::from_secs(10)).await;
        // The lock of the first is over by then, and nobody else can know of it.
        (0..3).for_each(|node| nodes.wipe(node));
        sleep(Duration::from_secs(20)).await;
        pay(&other, "/payments", "a").await
    });
    assert_eq!(second.body, "payment 1 of 8 bytes ");
    assert_eq!(first.code(), "conflicting-outcomes");
    assert_eq!(payments.executed(), 2);
}

#[tokio::test(start_paused = true)]
async fn protocol_upgrade_is_not_replayed() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let app = payments.app(layer(&nodes));
    let first = pay(&app, "/payments?status=101", "a").await;
    assert_eq!(first.status, StatusCode::SWITCHING_PROTOCOLS);
    let again = pay(&app, "/payments?status=101", "a").await;
    assert_eq!((again.code(), payments.executed()), ("result-not-kept", 1));
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
async fn concurrent_duplicates_of_a_record_are_all_replayed() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let app = payments.app(layer(&nodes));
    for node in 0..3 {
        nodes.set(node, Gate::Slow(Duration::from_millis(5)));
    }
    let first = pay(&app, "/payments", "a").await;
    let duplicates = (0..200).map(|_| pay(&app, "/payments", "a"));
    let (duplicates, reused) = tokio::join!(
        futures_util::future::join_all(duplicates),
        Answer::to(&app, request("/payments", "a", "amount=6"))
    );
    for duplicate in duplicates {
        assert!(duplicate.is_replayed(), "{}", duplicate.code());
        assert_eq!(duplicate.body, first.body);
    }
    assert_eq!(reused.code(), "idempotency-key-reused");
    assert_eq!(payments.executed(), 1);
    assert_eq!(
        nodes.sent(0, OpKind::Acquire),
        2,
        "the first of them asks for all"
    );
}

#[tokio::test(start_paused = true)]
async fn requests_dropped_at_any_time_leave_no_lock_and_no_task() {
    const GATES: [Gate; 5] = [
        Gate::Ready,
        Gate::Slow(Duration::from_millis(3)),
        Gate::Never,
        Gate::Failing,
        Gate::Down,
    ];
    let ms = Duration::from_millis;
    for round in 0..2_000 {
        let mut random = fastrand::Rng::with_seed(round);
        let nodes = ScriptedNodes::new(3);
        let gates = [Gate::Ready, Gate::Ready, GATES[random.usize(..5)]];
        for (node, gate) in gates.into_iter().enumerate() {
            nodes.set(node, gate);
        }
        let (begun, ended) = (Payments::default(), Payments::default());
        let status = [StatusCode::OK, StatusCode::BAD_GATEWAY][random.usize(..2)];
        let pay_there = post({
            let (begun, ended) = (begun.clone(), ended.clone());
            async move || {
                begun.0.fetch_add(1, Ordering::SeqCst);
                sleep(ms(5)).await;
                ended.0.fetch_add(1, Ordering::SeqCst);
                status
            }
        });
        let redlock = redlock(&nodes);
        let layer = IdempotencyLayer::new(redlock.clone(), scope::public());
        let layer = layer.wait(ms(100)).at_most_once(random.bool());
        let app = Router::new().route("/payments", pay_there).layer(layer);
        let what = format!("round {round}: {gates:?}, {status}");
        let mut both = Box::pin(async {
            let [one, other] = [(); 2].map(|()| pay(&app, "/payments", "a"));
            tokio::join!(one, other)
        });
        for _ in 0..random.usize(..24) {
            if futures_util::poll!(&mut both).is_ready() {
                break;
            }
            tokio::task::yield_now().await;
            if random.bool() {
                sleep(ms(1)).await;
            }
        }
        drop(both);
        let drained = timeout(ms(10_000), redlock.drain(ms(5_000))).await;
        assert_eq!(drained.expect(&what).held, [], "{what}");
        assert_eq!(begun.executed(), ended.executed(), "{what}");
        assert!(status != StatusCode::OK || ended.executed() <= 1, "{what}");
        // What is on a slow wire arrives.
        sleep(ms(10)).await;
        assert_eq!(nodes.locks()[..2], [0, 0], "{what}");
        drop((app, redlock));
        sleep(ms(200)).await;
        let tasks = tokio::runtime::Handle::current()
            .metrics()
            .num_alive_tasks();
        assert_eq!(tasks, 0, "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn inner_lock_waits_whatever_its_key_and_redlock() {
    let (nodes, others) = (ScriptedNodes::new(3), ScriptedNodes::new(3));
    let same = redlock(&nodes);
    // Sorts before all keys of idempotent requests.
    for (key, locks) in [("a", same.clone()), ("b", redlock(&others))] {
        let within = RedlockLayer::new(locks.clone(), "0").wait(Duration::from_secs(5));
        let app = Router::new()
            .route("/payments", post(async || "paid").layer(within))
            .layer(IdempotencyLayer::new(same.clone(), scope::public()));
        let other = locks.lock("0").await.unwrap();
        let (paid, _) = tokio::join!(pay(&app, "/payments", key), async {
            sleep(Duration::from_secs(1)).await;
            other.release().await.unwrap();
        });
        assert_eq!(paid.status, StatusCode::OK, "{key}");
    }
}

#[tokio::test(start_paused = true)]
async fn duplicate_is_refused_as_soon_as_the_first_executes() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let app = payments.app(layer(&nodes));
    for node in 0..3 {
        nodes.set_for(node, OpKind::Acquire, Gate::Slow(Duration::from_millis(20)));
    }
    let slow = "/payments?ms=1000";
    let began = Instant::now();
    let duplicate = async {
        sleep(Duration::from_millis(5)).await;
        let answer = pay(&app, slow, "a").await;
        (answer.code(), began.elapsed())
    };
    let (first, (code, after)) = tokio::join!(pay(&app, slow, "a"), duplicate);
    assert_eq!((first.status, code), (StatusCode::OK, "lock-contended"));
    // The nodes' round trip, and not twice what they may take at most.
    assert!(after < Duration::from_millis(25), "{after:?}");
    assert_eq!(payments.executed(), 1);
}

#[tokio::test(start_paused = true)]
async fn encrypt_and_compress_above_replay_the_response_unchanged() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let with = |keys: RecordKeys| payments.app(layer(&nodes).compress_above(1024).encrypt(keys));
    let first = with(RecordKeys::new(1, &[1; 32]));
    let large = "/payments?size=60000";
    let answer = pay(&first, large, "a").await;
    assert_eq!(answer.status, StatusCode::OK);
    // So much smaller that it travels with the answers of the nodes.
    let again = pay(&first, large, "a").await;
    assert!(again.is_replayed());
    assert_eq!(again.body, answer.body);
    assert_eq!(nodes.sent(0, OpKind::Look), 0);

    let rotated = with(RecordKeys::new(2, &[2; 32]).reading(1, &[1; 32]));
    assert_eq!(pay(&rotated, large, "a").await.body, answer.body);
    let without = payments.app(layer(&nodes));
    for other in [with(RecordKeys::new(2, &[2; 32])), without] {
        let refused = pay(&other, large, "a").await;
        assert_eq!(
            (refused.status.as_u16(), refused.code()),
            (500, "misconfigured")
        );
    }
    assert_eq!(
        payments.executed(),
        1,
        "an unknown key is an error, and no execution"
    );
}

#[tokio::test(start_paused = true)]
async fn record_survives_two_of_five_forgetful_nodes_and_not_three() {
    for (one, other) in (0..5).flat_map(|one| (0..one).map(move |other| (one, other))) {
        let nodes = ScriptedNodes::new(5);
        let payments = Payments::default();
        let app = payments.app(layer(&nodes));
        pay(&app, "/payments", "a").await;
        // All five have it a moment later.
        sleep(Duration::from_secs(1)).await;
        nodes.wipe(one);
        nodes.wipe(other);
        assert!(
            pay(&app, "/payments", "a").await.is_replayed(),
            "{one}, {other}"
        );
        assert_eq!(payments.executed(), 1);
    }
    let nodes = ScriptedNodes::new(5);
    let payments = Payments::default();
    let app = payments.app(layer(&nodes));
    pay(&app, "/payments", "a").await;
    sleep(Duration::from_secs(1)).await;
    (0..3).for_each(|node| nodes.wipe(node));
    // Those that have it are too late to be heard.
    (3..5).for_each(|node| nodes.set(node, Gate::Down));
    assert!(!pay(&app, "/payments", "a").await.is_replayed());
    assert_eq!(payments.executed(), 2);
}

#[tokio::test(start_paused = true)]
async fn on_unrecorded_fail_answers_outcome_unknown_without_a_majority_of_records() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let once = layer(&nodes).on_unrecorded(OnUnrecorded::Fail);
    let app = payments.app(once.ttl(Duration::from_secs(2)).unwrap());
    for node in 0..2 {
        nodes.set_for(node, OpKind::Record, Gate::Failing);
        nodes.set_for(node, OpKind::Look, Gate::Failing);
    }
    nodes.set(2, Gate::Down);
    let failed = pay(&app, "/payments", "a").await;
    assert_eq!(
        (failed.status, failed.code()),
        (StatusCode::CONFLICT, "outcome-unknown")
    );
    assert!(!failed.body.starts_with(b"payment"), "{:?}", failed.body);
    assert_eq!(pay(&app, "/payments", "a").await.code(), "lock-contended");
    // The lock has ended by the ttl, and nobody knows of anything.
    sleep(Duration::from_secs(3)).await;
    (0..3).for_each(|node| nodes.set(node, Gate::Ready));
    for node in 0..2 {
        nodes.set_for(node, OpKind::Record, Gate::Ready);
        nodes.set_for(node, OpKind::Look, Gate::Ready);
    }
    let second = pay(&app, "/payments", "a").await;
    assert_eq!(second.body, "payment 2 of 8 bytes ");
    assert!(pay(&app, "/payments", "a").await.is_replayed());
}

#[tokio::test(start_paused = true)]
async fn fingerprint_decides_which_requests_are_equal() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
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
async fn header_replay_header_methods_and_rejection_are_configurable() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let named = layer(&nodes)
        .header("x-once".parse().unwrap())
        .replay_header("x-again".parse().unwrap())
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
    assert_eq!(again.headers["x-again"], "true");
    assert!(!first.headers.contains_key("x-again") && !again.is_replayed());
    let reused = with("PUT", "amount=6").await;
    assert_eq!(reused.status, StatusCode::IM_A_TEAPOT);
    assert_eq!(reused.body, "idempotency-key-reused");
    assert_eq!(payments.executed(), 1);
}

#[tokio::test(start_paused = true)]
async fn max_waiters_limits_waiting_duplicates() {
    let nodes = ScriptedNodes::new(3);
    let payments = Payments::default();
    let patient = layer(&nodes).wait(Duration::from_secs(5)).max_waiters(1);
    let app = payments.app(patient);
    let slow = "/payments?ms=1000";
    let later = async |ms| {
        sleep(Duration::from_millis(ms)).await;
        pay(&app, slow, "a").await
    };
    let (first, waited, refused) = tokio::join!(pay(&app, slow, "a"), later(100), later(200));
    assert_eq!(
        (refused.status, refused.code()),
        (StatusCode::SERVICE_UNAVAILABLE, "lock-overloaded")
    );
    assert!(waited.is_replayed());
    assert_eq!((waited.body, payments.executed()), (first.body, 1));
}

#[tokio::test(start_paused = true)]
async fn at_most_once_is_outcome_unknown_while_a_majority_keeps_the_intent() {
    let failing = "/payments?status=503";
    for (is_down, wiped, then) in [
        (false, &[1][..], "outcome-unknown"),
        (false, &[1, 2], ""),
        (true, &[2], "outcome-unknown"),
        (true, &[1], ""),
    ] {
        let nodes = ScriptedNodes::new(3);
        let payments = Payments::default();
        let app = payments.app(layer(&nodes).at_most_once(true));
        if is_down {
            // It never hears that anything has begun.
            nodes.set(2, Gate::Down);
        }
        let failed = pay(&app, failing, "a").await;
        assert_eq!(failed.status, StatusCode::SERVICE_UNAVAILABLE);
        nodes.set(2, Gate::Ready);
        assert_eq!(pay(&app, failing, "a").await.code(), "outcome-unknown");
        wiped.iter().for_each(|node| nodes.wipe(*node));
        let again = pay(&app, failing, "a").await;
        assert_eq!(again.code(), then, "{is_down}, {wiped:?}");
        let executed = if then.is_empty() { 2 } else { 1 };
        assert_eq!(payments.executed(), executed, "{is_down}, {wiped:?}");
    }
}

#[test]
fn idempotency_chapter_names_existing_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders = vec![root.join("tests"), root.join("src/idempotency")];
    let mut sources = String::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                sources.push_str(&fs::read_to_string(path).unwrap());
            }
        }
    }
    let names = include_str!("../../docs/idempotency.md").split('`');
    // No setting has such a long name.
    let tests: Vec<_> = names.filter(|name| name.matches('_').count() > 3).collect();
    assert!(tests.len() > 10, "{tests:?}");
    for test in tests {
        assert!(sources.contains(&format!("fn {test}(")), "{test}");
    }
}
