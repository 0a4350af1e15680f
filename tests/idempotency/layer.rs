//! Settings of `IdempotencyLayer`: scopes, keys, fingerprints, headers, methods and rejections.

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::middleware::map_response;
use axum::response::Response;
use axum::routing::any;
use axum::{Router, http};
use http_body_util::Full;
use support::{Answer, Executed, ms, redlock, request_with};
use tokio::time::sleep;
use tower_redlock::test_util::{OpKind, ScriptedNodes};
use tower_redlock::{IdempotencyLayer, Rejection, RequestKind, key};

use crate::payments::counts_ended;

/// Returns a layer whose scope is the user.
fn layer(nodes: &ScriptedNodes) -> IdempotencyLayer {
    IdempotencyLayer::new(redlock(nodes), key::header("x-user"))
}

fn request(target: &str, key: &str, body: &str) -> Request {
    let headers = [("x-user", "alice"), ("idempotency-key", key)];
    request_with("POST", target, &headers).map(|_| Body::from(body.to_owned()))
}

async fn pay(app: &Router, target: &str, key: &str) -> Answer {
    Answer::to(app, request(target, key, "amount=5")).await
}

// Rules: http.scope
#[tokio::test(start_paused = true)]
async fn idempotency_keys_are_scoped_by_caller_method_and_path() {
    let executed = Executed::default();
    let app = counts_ended(&executed).layer(layer(&ScriptedNodes::new(3)));
    let nested = Router::new().nest("/v1", app.clone());
    let nested = nested.nest("/v2", app.clone());
    for (method, user) in [("POST", "alice"), ("POST", "bob"), ("PATCH", "alice")] {
        let headers = [("x-user", user), ("idempotency-key", "a")];
        let request = request_with(method, "/payments", &headers);
        Answer::to(&app, request.map(|_| Body::from("amount=5"))).await;
    }
    pay(&nested, "/v1/payments", "a").await;
    pay(&nested, "/v2/payments", "a").await;
    assert_eq!(executed.count(), 5);
    let quoted = request("/payments", "\"a\"", "amount=5");
    // The same key as a string.
    assert!(Answer::to(&app, quoted).await.is_replayed());
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
    let keyless = || support::request("POST", "/payments").map(|_| Body::from("12345"));
    let unscoped = |method| request_with(method, "/payments", &[("idempotency-key", "a")]);
    assert_eq!(Answer::to(&app, keyless()).await.body, "5");
    let required = plain.clone().layer(layer(&nodes).required(true));
    assert_eq!(code(&required, keyless()).await, (400, "key-missing"));
    let unknown = support::request("POST", "/nowhere");
    assert_eq!(code(&required, unknown).await, (404, ""));
    for method in ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"] {
        assert_eq!(code(&required, unscoped(method)).await, (200, ""));
    }
    assert_eq!(code(&app, unscoped("POST")).await, (500, "scope-missing"));
    let long = "x".repeat(256);
    let none = ["", "a b", "a\tb", "\"a", "é", long.as_str()];
    // As a proxy merges several headers.
    let bare = ["a1,a1", "a1,", ",a1", ",", "a1, a1"];
    let quoted = [r#""a1","a1""#, r#""a1", a1"#, r#"a1,"a1""#];
    for bad in none.into_iter().chain(bare).chain(quoted) {
        let refused = code(&app, request("/payments", bad, "")).await;
        assert_eq!(refused, (400, "key-invalid"), "{bad}");
    }
    assert_eq!(nodes.sent(0, OpKind::Acquire), 0);
    assert_eq!(
        code(&app, request("/payments", "\"a,b\"", "")).await,
        (200, "")
    );
    let mut twice = request("/payments", "a", "");
    let another = "b".parse().unwrap();
    twice.headers_mut().append("idempotency-key", another);
    assert_eq!(code(&app, twice).await, (400, "key-invalid"));
    let small = plain.layer(layer(&nodes).max_request_body(8));
    for (body, told) in [
        ("8 bytes.", (200, "")),
        ("9 bytes..", (413, "body-too-large")),
    ] {
        let sized = request("/payments", &body.len().to_string(), body);
        assert_eq!(code(&small, sized).await, told);
    }
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn rejections_are_problem_json_with_a_documentation_link() {
    let nodes = ScriptedNodes::new(3);
    let app = counts_ended(&Executed::default()).layer(layer(&nodes).required(true));
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
        let keyless = request_with("POST", slow, &[("x-user", "alice")]);
        let reused = request(slow, "a", "amount=6");
        [
            (400, "key-missing", keyless),
            (400, "key-invalid", request(slow, "a b", "amount=5")),
            (422, "idempotency-key-reused", reused),
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
        let problem = answer.json();
        assert_eq!(problem["status"], status);
        assert_eq!(problem["code"], code);
        let said = ["type", "title", "detail"].map(|member| problem[member].as_str());
        assert!(said.iter().all(Option::is_some), "{problem}");
        let expected = match code {
            "key-missing" => "the request lacks a required key: header `idempotency-key`",
            "request-in-progress" => "still runs",
            _ => continue,
        };
        let text = problem.to_string();
        assert!(text.contains(expected), "{text}");
        assert!(!text.contains("locked"), "{text}");
    }
}

/// By default it is the query, too.
#[tokio::test(start_paused = true)]
async fn fingerprint_decides_which_requests_are_equal() {
    let nodes = ScriptedNodes::new(3);
    let reused = "idempotency-key-reused";
    let by_body = layer(&nodes).fingerprint(|_, body| body.to_vec());
    for (key, layer, other_query) in [("a", by_body, ""), ("b", layer(&nodes), reused)] {
        let executed = Executed::default();
        let app = counts_ended(&executed).layer(layer);
        for (target, body, code) in [
            ("/payments?size=1", "amount=5", ""),
            ("/payments?size=1", "amount=5", ""),
            ("/payments?size=2", "amount=5", other_query),
            ("/payments", "amount=5", other_query),
            ("/payments?size=1", "amount=6", reused),
        ] {
            let answer = Answer::to(&app, request(target, key, body)).await;
            assert_eq!(answer.code(), code, "{key}: {target} {body}");
        }
        assert_eq!(executed.count(), 1, "{key}");
    }
}

#[tokio::test(start_paused = true)]
async fn header_methods_and_rejection_are_configurable() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let named = layer(&nodes)
        .header("x-once".parse().unwrap())
        .methods([Method::PUT])
        .rejection(|rejection: &Rejection, _: &RequestKind| {
            let code = Full::from(rejection.code());
            let mut response = http::Response::new(code);
            *response.status_mut() = StatusCode::IM_A_TEAPOT;
            response
        });
    let app = counts_ended(&executed).layer(named);
    let with = async |method: &str, body| {
        let headers = [("x-user", "alice"), ("x-once", "a")];
        let request = request_with(method, "/payments", &headers);
        Answer::to(&app, request.map(|_| Body::from(body))).await
    };
    let first = with("PUT", "amount=5").await;
    let again = with("PUT", "amount=5").await;
    assert_eq!((again.status, &again.body), (first.status, &first.body));
    assert!(again.is_replayed() && !first.is_replayed());
    let reused = with("PUT", "amount=6").await;
    assert_eq!(reused.status, StatusCode::IM_A_TEAPOT);
    assert_eq!(reused.body, "idempotency-key-reused");
    assert_eq!(executed.count(), 1);
}
