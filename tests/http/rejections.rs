//! What a layer answers without a lock: status, headers, gRPC status, and requests that pass.

use std::convert::Infallible;
use std::fmt::Debug;
use std::future::pending;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::extract::State;
use axum::response::IntoResponse;
use bytes::Bytes;
use http::header::RETRY_AFTER;
use http::request::Parts;
use http::{HeaderMap, HeaderName, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use support::{Log, ms, request_with, send};
use tokio::time::sleep;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redlock::test_util::{Gate, ScriptedNodes};
use tower_redlock::{
    KeyExtractor, LockError, LockHandle, LockKeys, OnMissingKey, OnUnavailable, Redlock,
    RedlockLayer, Rejection, RequestKind, key,
};

use crate::scripted_bodies::{Flag, TTL, code, layer, lose, ok, post, redlock, working};

/// What the handler saw of the request.
type Seen = Arc<Mutex<Option<Parts>>>;

/// A handler that keeps the head of the last request.
fn keeping(
    seen: &Seen,
) -> impl Service<Request<()>, Response = Response<Full<Bytes>>, Error = Infallible, Future: Send> + Clone
{
    let seen = Arc::clone(seen);
    service_fn(move |request: Request<()>| {
        *seen.lock().unwrap() = Some(request.into_parts().0);
        async { Ok(ok(Full::from("done"))) }
    })
}

async fn call(layer: &RedlockLayer, request: Request<()>) -> (Response<Bytes>, Option<Parts>) {
    let seen = Seen::default();
    let response = layer.layer(keeping(&seen)).oneshot(request).await.unwrap();
    let (head, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let seen = seen.lock().unwrap().take();
    (Response::from_parts(head, body), seen)
}

fn request(method: &str, headers: &[(&str, &str)]) -> Request<()> {
    request_with(method, "/", headers).map(drop)
}

const TOKEN: HeaderName = HeaderName::from_static("x-fencing-token");

#[tokio::test(start_paused = true)]
async fn forward_token_replaces_a_token_sent_by_the_client() {
    let redlock = Redlock::in_memory(3);
    let layer = layer(&redlock)
        .forward_token(TOKEN)
        .skip(|parts| parts.headers.contains_key("x-skip"));
    let forged = ["1", "2"].map(|token| ("x-fencing-token", token));

    let (_, seen) = call(&layer, request("POST", &forged)).await;
    let seen = seen.unwrap();
    let handle = seen.extensions.get::<LockHandle>().unwrap();
    let token = handle.fencing_token().unwrap().to_string();
    let values: Vec<_> = seen.headers.get_all(TOKEN).iter().collect();
    assert_eq!(values, [token.as_str()]);

    // Requests without a lock must not arrive with a token of the client's either.
    for method in ["GET", "HEAD", "OPTIONS", "TRACE", "QUERY"] {
        let (_, seen) = call(&layer, request(method, &forged)).await;
        assert!(!seen.unwrap().headers.contains_key(TOKEN), "{method}");
    }
    let skipped = [forged[0], ("x-skip", "1")];
    let (_, seen) = call(&layer, request("POST", &skipped)).await;
    assert!(!seen.unwrap().headers.contains_key(TOKEN));
    // Without fencing there is no token, but still none of the client's.
    let unfenced = Redlock::builder().embedded(3).fencing(false).build();
    let layer = RedlockLayer::new(unfenced.unwrap(), "resource").forward_token(TOKEN);
    let (_, seen) = call(&layer, request("POST", &forged)).await;
    assert!(!seen.unwrap().headers.contains_key(TOKEN));
}

#[tokio::test(start_paused = true)]
async fn expose_token_sends_the_token_of_the_handler() {
    let redlock = Redlock::in_memory(3);
    let layer = layer(&redlock).expose_token(TOKEN);
    let mut last = 0;
    for _ in 0..3 {
        let (response, seen) = call(&layer, post()).await;
        let seen = seen.unwrap();
        let handle = seen.extensions.get::<LockHandle>().unwrap();
        let token = handle.fencing_token().unwrap().as_u64();
        assert_eq!(response.headers()[TOKEN], token.to_string());
        assert!(token > last);
        last = token;
    }
    let (passed, _) = call(&layer, request("GET", &[])).await;
    assert!(!passed.headers().contains_key(TOKEN));
}

// Rules: lock-unavailable
#[tokio::test(start_paused = true)]
async fn unavailable_lock_is_503_or_proceeds_without_a_handle() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    nodes.set(0, Gate::Failing);
    nodes.set(1, Gate::Never);
    let rejecting = layer(&redlock);
    let (refused, seen) = call(&rejecting, post()).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(code(&refused.map(Full::new)), "lock-unavailable");
    assert!(seen.is_none());

    let proceeding = layer(&redlock)
        .on_unavailable(OnUnavailable::Proceed)
        .forward_token(TOKEN);
    let (served, seen) = call(&proceeding, request("POST", &[("x-fencing-token", "1")])).await;
    assert_eq!(served.status(), StatusCode::OK);
    let seen = seen.unwrap();
    assert!(seen.extensions.get::<LockHandle>().is_none());
    assert!(!seen.headers.contains_key(TOKEN));

    // `Proceed` applies to unreachable nodes, never to a held lock.
    nodes.set(0, Gate::Ready);
    nodes.set(1, Gate::Ready);
    let guard = redlock.lock("resource").await.unwrap();
    let (refused, seen) = call(&proceeding, post()).await;
    assert_eq!(refused.status(), StatusCode::LOCKED);
    assert!(seen.is_none());
    drop(guard);
    redlock.drain(TTL).await;
    let (refused, seen) = call(&proceeding, post()).await;
    assert_eq!(code(&refused.map(Full::new)), "shutting-down");
    assert!(seen.is_none());
    // With the lock there, the handler has it.
    let healthy = RedlockLayer::new(Redlock::in_memory(3), "resource");
    let healthy = healthy.on_unavailable(OnUnavailable::Proceed);
    let seen = call(&healthy, post()).await.1.unwrap();
    assert!(seen.extensions.get::<LockHandle>().is_some());
}

// Rules: lock-contended
#[tokio::test(start_paused = true)]
async fn contended_lock_is_423_with_retry_after_and_without_the_key() {
    let nodes = ScriptedNodes::new(3);
    let (ours, theirs) = (redlock(&nodes), redlock(&nodes));
    // Held by another process, and then by this one.
    for holder in [&theirs, &ours] {
        let guard = holder.lock("se-cret").await.unwrap();
        let layer = RedlockLayer::new(ours.clone(), "se-cret");
        let (refused, seen) = call(&layer, post()).await;
        assert!(seen.is_none());
        assert_eq!(refused.status(), StatusCode::LOCKED);
        assert_eq!(
            refused.headers()["content-type"],
            "application/problem+json"
        );
        assert_eq!(refused.headers()[RETRY_AFTER], "1");
        let text = String::from_utf8(refused.body().to_vec()).unwrap();
        let problem: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(problem["code"], "lock-contended");
        assert_eq!(problem["status"], 423);
        let everything = format!("{text}{:?}", refused.headers());
        let token = guard.fencing_token().unwrap().to_string();
        for secret in ["se-cret", "embedded", &token] {
            assert!(!everything.contains(secret), "{everything}");
        }
        guard.release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn missing_key_names_the_part_of_the_request_that_lacks_it() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let layer = |key: Arc<dyn KeyExtractor>| RedlockLayer::new(redlock.clone(), key);
    for (key, expected) in [
        (
            Arc::new(("upload", key::header("x-upload-id"))) as Arc<dyn KeyExtractor>,
            "lacks a required key: header `x-upload-id`",
        ),
        (
            Arc::new(key::query("id").or(key::cookie("id"))),
            "key: query parameter `id` or cookie `id`",
        ),
        (
            Arc::new(key::from_fn(|_| None::<String>)),
            "lacks a required key",
        ),
        // What the service has named is not the client's.
        (
            Arc::new((key::header("x-a"), key::extension::<String>(String::as_str))),
            "lacks a required key",
        ),
    ] {
        let (refused, _) = call(&layer(key), post()).await;
        assert_eq!(rejection_of(&refused).code(), "key-missing");
        let problem: serde_json::Value = serde_json::from_slice(refused.body()).unwrap();
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.ends_with(expected), "{detail}");
    }
}

#[tokio::test(start_paused = true)]
async fn rejection_sets_the_response_and_keeps_the_extension() {
    let redlock = Redlock::in_memory(3);
    let guard = redlock.lock("resource").await.unwrap();
    let conflict = layer(&redlock).contended_status(StatusCode::CONFLICT);
    let (refused, _) = call(&conflict, post()).await;
    assert_eq!(refused.status(), StatusCode::CONFLICT);
    assert_eq!(code(&refused.map(Full::new)), "lock-contended");
    for (status, sent) in [(204, 423), (101, 423), (302, 423), (400, 400), (503, 503)] {
        let status = StatusCode::from_u16(status).unwrap();
        let (refused, _) = call(&layer(&redlock).contended_status(status), post()).await;
        assert_eq!(refused.status(), sent, "for {status}");
    }

    let kinds = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&kinds);
    let dressed = conflict.rejection(move |rejection: &Rejection, to: &RequestKind| {
        seen.lock().unwrap().push(*to);
        let text = format!("{} {}", rejection.status(), rejection.code());
        let mut response = Response::new(Full::from(text));
        *response.status_mut() = StatusCode::IM_A_TEAPOT;
        response
    });
    let (refused, _) = call(&dressed, post()).await;
    assert_eq!(refused.status(), StatusCode::IM_A_TEAPOT);
    assert_eq!(refused.body(), "409 Conflict lock-contended");
    assert_eq!(code(&refused.map(Full::new)), "lock-contended");
    let grpc = [("content-type", "application/grpc+proto")];
    call(&dressed, request("POST", &grpc)).await;
    let expected = [RequestKind::Http, RequestKind::Grpc];
    assert_eq!(*kinds.lock().unwrap(), expected);
    drop(guard);
}

/// Waits for the last frame, and returns what a client can compare.
async fn seen_by_client<B: http_body::Body<Error: Debug>>(
    response: Response<B>,
) -> (StatusCode, HeaderMap, Bytes) {
    let (head, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    (head.status, head.headers, body)
}

#[tokio::test(start_paused = true)]
async fn default_response_answers_the_cases_that_a_custom_rejection_leaves() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let custom = |rejection: &Rejection, to: &RequestKind| {
        if let Rejection::Contended { .. } = rejection {
            return Response::new(Full::from("taken"));
        }
        rejection.default_response(to)
    };
    let (default, changed) = (layer(&redlock), layer(&redlock).rejection(custom));
    let guard = redlock.lock("resource").await.unwrap();
    let (refused, _) = call(&changed, post()).await;
    assert_eq!(refused.body(), "taken");
    assert_eq!(code(&refused.map(Full::new)), "lock-contended");
    guard.release().await.unwrap();

    nodes.set(0, Gate::Down);
    nodes.set(1, Gate::Down);
    for content_type in ["application/json", "application/grpc"] {
        let sent = || request("POST", &[("content-type", content_type)]);
        let (expected, _) = call(&default, sent()).await;
        let (refused, _) = call(&changed, sent()).await;
        assert_eq!(refused.extensions().get(), Some(&rejection_of(&expected)));
        let (expected, refused) = (expected.map(Full::new), refused.map(Full::new));
        let expected = seen_by_client(expected).await;
        assert_eq!(seen_by_client(refused).await, expected);
        assert!(!expected.1.is_empty());
    }
}

fn rejection_of<B>(response: &Response<B>) -> Rejection {
    response.extensions().get::<Rejection>().unwrap().clone()
}

// Rules: lock-expired
#[tokio::test(start_paused = true)]
async fn lock_error_and_rejection_are_the_responses_of_the_layer() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let compare = async |expected: &str| {
        let error = redlock.try_lock("resource").await.unwrap_err();
        let rejection = Rejection::from(error.clone());
        for response in [error.into_response(), rejection.clone().into_response()] {
            assert_eq!(rejection_of(&response), rejection);
            let (of_layer, _) = call(&layer(&redlock), post()).await;
            assert_eq!(rejection_of(&of_layer).code(), expected);
            let response = seen_by_client(response).await;
            assert_eq!(response, seen_by_client(of_layer.map(Full::new)).await);
        }
    };
    let guard = redlock.lock("resource").await.unwrap();
    compare("lock-contended").await;
    guard.release().await.unwrap();
    nodes.set(0, Gate::Down);
    nodes.set(1, Gate::Down);
    compare("lock-unavailable").await;
    redlock.drain(TTL).await;
    compare("shutting-down").await;
}

#[tokio::test(start_paused = true)]
async fn lock_error_of_a_handler_that_only_the_operator_can_correct_is_logged() {
    async fn handler(State(redlock): State<Redlock>) -> Result<&'static str, LockError> {
        let _guard = redlock.try_lock("report").ttl(10 * TTL).await?;
        Ok("done")
    }
    let app = axum::Router::new()
        .route("/", axum::routing::post(handler))
        .with_state(redlock(&ScriptedNodes::new(3)));
    let (log, _guard) = Log::subscribed();
    let refused = send(&app, "POST", "/").await;
    assert_eq!(refused.told(), (500, "misconfigured"));
    assert!(log.text().contains("raise max_ttl"), "{}", log.text());
}

// Rules: grpc
#[tokio::test(start_paused = true)]
async fn grpc_rejections_are_200_with_grpc_status_in_the_head() {
    let grpc = || request("POST", &[("content-type", "application/grpc")]);
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let check = |(response, seen): (Response<Bytes>, Option<Parts>), status: &str, code: &str| {
        assert!(seen.is_none());
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "application/grpc");
        assert_eq!(response.headers()["grpc-status"], status);
        assert_eq!(response.headers()["grpc-message"], code);
        assert!(response.body().is_empty());
    };
    let guard = redlock.lock("resource").await.unwrap();
    check(call(&layer(&redlock), grpc()).await, "10", "lock-contended");
    guard.release().await.unwrap();
    let no_key = RedlockLayer::new(redlock.clone(), key::header("x-key"));
    check(call(&no_key, grpc()).await, "3", "key-missing");
    let no_router = RedlockLayer::new(redlock.clone(), key::path("id"));
    check(call(&no_router, grpc()).await, "13", "misconfigured");
    nodes.set(0, Gate::Down);
    nodes.set(1, Gate::Down);
    let unavailable = call(&layer(&redlock), grpc()).await;
    check(unavailable, "14", "lock-unavailable");

    (0..2).for_each(|node| nodes.set(node, Gate::Ready));
    let dropped = Flag::default();
    let service = working(&dropped, |_| pending::<Response<Full<Bytes>>>());
    let mut calling = pin!(layer(&redlock).layer(service).oneshot(grpc()));
    assert!(futures_util::poll!(&mut calling).is_pending());
    sleep(ms(5)).await;
    lose(&nodes);
    let (head, body) = calling.await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    check((Response::from_parts(head, body), None), "10", "lock-lost");
}

#[tokio::test(start_paused = true)]
async fn safe_methods_and_skipped_requests_pass_while_the_lock_is_held() {
    let redlock = Redlock::in_memory(3);
    let guard = redlock.lock("resource").await.unwrap();
    let layer = layer(&redlock).skip(|parts| parts.headers.contains_key("x-skip"));
    for method in ["GET", "HEAD", "OPTIONS", "TRACE", "QUERY"] {
        let (served, seen) = call(&layer, request(method, &[])).await;
        assert_eq!(served.status(), StatusCode::OK, "{method}");
        assert!(seen.unwrap().extensions.get::<LockHandle>().is_none());
    }
    for method in [
        "POST", "PUT", "PATCH", "DELETE", "CONNECT", "PROPFIND", "get",
    ] {
        let (refused, seen) = call(&layer, request(method, &[])).await;
        assert_eq!(refused.status(), StatusCode::LOCKED, "{method}");
        assert!(seen.is_none());
    }
    let (skipped, _) = call(&layer, request("POST", &[("x-skip", "1")])).await;
    assert_eq!(skipped.status(), StatusCode::OK);
    // Chosen methods replace the default, they do not add to it; GET includes HEAD, but not the reverse.
    for (chosen, locked, passing) in [
        (Method::GET, &["GET", "HEAD"][..], &["POST"][..]),
        (Method::HEAD, &["HEAD"], &["GET", "POST"]),
        (Method::POST, &["POST"], &["GET", "HEAD"]),
    ] {
        let layer = layer.clone().methods([chosen.clone()]);
        for (methods, status) in [(locked, StatusCode::LOCKED), (passing, StatusCode::OK)] {
            for method in methods {
                let (answer, _) = call(&layer, request(method, &[])).await;
                assert_eq!(answer.status(), status, "{chosen}: {method}");
            }
        }
    }
    drop(guard);
}

// Rules: key-missing
#[tokio::test(start_paused = true)]
async fn missing_key_is_refused_unless_on_missing_key_is_pass() {
    // The second is what a function may return.
    for layer in [
        RedlockLayer::new(Redlock::in_memory(3), key::header("x-key")),
        RedlockLayer::new(Redlock::in_memory(3), |_: &Parts| String::new()),
    ] {
        let (refused, seen) = call(&layer, post()).await;
        assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
        assert_eq!(code(&refused.map(Full::new)), "key-missing");
        assert!(seen.is_none());
        let (served, seen) = call(&layer.missing_key(OnMissingKey::Pass), post()).await;
        assert_eq!(served.status(), StatusCode::OK);
        assert!(seen.unwrap().extensions.get::<LockHandle>().is_none());
    }
}

/// The others may hold it, or the request cannot be locked at all.
#[tokio::test(start_paused = true)]
async fn no_request_proceeds_without_its_lock_but_for_want_of_a_quorum() {
    let redlock = Redlock::in_memory(3);
    let many = |_: &Parts| (0..33).map(|key| key.to_string()).collect::<LockKeys>();
    let many = RedlockLayer::new(redlock.clone(), many);
    let many = many.on_unavailable(OnUnavailable::Proceed);
    let (refused, seen) = call(&many, post()).await;
    assert_eq!((refused.status().as_u16(), seen.is_none()), (400, true));

    let _guard = redlock.lock("resource").await.unwrap();
    let busy = layer(&redlock).on_unavailable(OnUnavailable::Proceed);
    let (refused, seen) = call(&busy, post()).await;
    assert_eq!((refused.status().as_u16(), seen.is_none()), (423, true));
    let busy = busy.wait(TTL).max_waiters(1);
    let mut first = pin!(call(&busy, post()));
    assert!(futures_util::poll!(&mut first).is_pending());
    let (refused, seen) = call(&busy, post()).await;
    assert_eq!((refused.status().as_u16(), seen.is_none()), (503, true));
    assert!(refused.headers().contains_key(RETRY_AFTER));
    assert_eq!(code(&refused.map(Full::new)), "lock-overloaded");
}

#[tokio::test(start_paused = true)]
async fn request_without_a_route_passes_unlocked_to_its_404() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let handler = move || {
        counted.fetch_add(1, Ordering::Relaxed);
        async { "done" }
    };
    let redlock = Redlock::in_memory(3);
    for layer in [
        RedlockLayer::new(redlock.clone(), key::header("x-key")),
        RedlockLayer::new(redlock.clone(), ("thing", key::path("id"))),
    ] {
        let app = axum::Router::new()
            .route("/things/{id}", axum::routing::post(handler.clone()))
            .layer(layer);
        assert_eq!(send(&app, "POST", "/nowhere").await.status, 404);
    }
    assert_eq!(calls.load(Ordering::Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn missing_key_reject_always_refuses_a_fallback_too() {
    let status = async |missing_key: OnMissingKey| {
        let layer = RedlockLayer::new(Redlock::in_memory(3), key::header("x-key"));
        let layer = layer.missing_key(missing_key);
        let fallback = axum::routing::post(|| async { "done" }).layer(layer);
        let app: axum::Router = axum::Router::new().fallback_service(fallback);
        send(&app, "POST", "/anywhere").await.status
    };
    assert_eq!(status(OnMissingKey::Reject).await, 200);
    assert_eq!(status(OnMissingKey::RejectAlways).await, 400);
}

/// The body of a refusal by this layer while a process with a label holds the key.
async fn refusal_body(nodes: &ScriptedNodes, layer: RedlockLayer, request: Request<()>) -> String {
    let process = Redlock::builder().scripted(nodes).holder("server-a");
    let process = process.build();
    let held = process.unwrap().lock(("order", "secret-7")).note("POST /x");
    let _held = held.await.unwrap();
    let (response, seen) = call(&layer, request).await;
    assert!(seen.is_none() && response.status() == StatusCode::LOCKED);
    let headers = format!("{:?}", response.headers());
    headers + std::str::from_utf8(response.body()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn refusal_names_the_holder_only_if_the_layer_exposes_it() {
    let nodes = ScriptedNodes::new(3);
    let redlock = || Redlock::builder().scripted(&nodes).build().unwrap();
    // In another process, and in that of the holder.
    for redlock in [redlock(), redlock()] {
        let layer = || RedlockLayer::new(redlock.clone(), ("order", "secret-7"));
        let said = refusal_body(&nodes, layer(), request("POST", &[])).await;
        for secret in ["holder", "server-a", "POST /x", "secret-7"] {
            assert!(!said.contains(secret), "{said}");
        }
        let exposing = layer().expose_holder(true);
        let said = refusal_body(&nodes, exposing, request("POST", &[])).await;
        let member = r#""holder":{"label":"server-a","note":"POST /x"}}"#;
        assert!(said.ends_with(member), "{said}");
        let grpc = request("POST", &[("content-type", "application/grpc")]);
        let _held = redlock.lock(("order", "secret-7")).note("n").await.unwrap();
        let (response, _) = call(&layer().expose_holder(true), grpc).await;
        assert!(!format!("{:?}", response.headers()).contains("note"));
    }
}
