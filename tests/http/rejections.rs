//! What a layer answers without a lock: status, headers, gRPC status, and requests that pass.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::{Arc, Mutex};

use axum::response::IntoResponse;
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use support::{ms, request_with, send, spawn_send};
use tokio::time::{Instant, sleep};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redlock::test_util::{Gate, ScriptedNodes};
use tower_redlock::{
    LockHandle, LockKeys, LockOptions, OnMissingKey, OnUnavailable, Redlock, RedlockLayer,
    Rejection, RequestKind, key,
};

use crate::scripted_bodies::{TTL, layer, ok, post, redlock};

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

#[tokio::test(start_paused = true)]
async fn contended_status_is_sent_if_it_is_one_of_an_error() {
    let redlock = Redlock::in_memory(3);
    let _guard = redlock.lock("resource").await.unwrap();
    for (status, sent) in [(204, 423), (101, 423), (302, 423), (400, 400), (503, 503)] {
        let status = StatusCode::from_u16(status).unwrap();
        let (refused, _) = call(&layer(&redlock).contended_status(status), post()).await;
        assert_eq!(refused.status(), sent, "for {status}");
    }
}

#[tokio::test(start_paused = true)]
async fn rejection_sets_the_response_or_leaves_it_to_default_response() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let custom = |rejection: &Rejection, to: &RequestKind| {
        let Rejection::Contended { status, .. } = rejection else {
            return rejection.default_response(to);
        };
        let text = format!("{status} {} {to:?}", rejection.code());
        let mut response = Response::new(Full::from(text));
        *response.status_mut() = StatusCode::IM_A_TEAPOT;
        response
    };
    let default = layer(&redlock).contended_status(StatusCode::CONFLICT);
    let changed = default.clone().rejection(custom);
    let kinds = [("application/json", "Http"), ("application/grpc", "Grpc")];
    let sent = |content_type| request("POST", &[("content-type", content_type)]);
    let guard = redlock.lock("resource").await.unwrap();
    for (content_type, kind) in kinds {
        let (refused, _) = call(&changed, sent(content_type)).await;
        assert_eq!(refused.status(), StatusCode::IM_A_TEAPOT);
        let text = format!("409 Conflict lock-contended {kind}");
        assert_eq!(*refused.body(), text);
        assert_eq!(rejection_of(&refused).code(), "lock-contended");
    }
    guard.release().await.unwrap();
    (0..2).for_each(|node| nodes.set(node, Gate::Down));
    for (content_type, _) in kinds {
        let (expected, _) = call(&default, sent(content_type)).await;
        let (refused, _) = call(&changed, sent(content_type)).await;
        assert_eq!(rejection_of(&refused), rejection_of(&expected));
        assert_eq!(seen_by_client(&refused), seen_by_client(&expected));
        assert!(!expected.headers().is_empty());
    }
}

fn seen_by_client<B>(response: &Response<B>) -> (StatusCode, &HeaderMap, &B) {
    (response.status(), response.headers(), response.body())
}

fn rejection_of<B>(response: &Response<B>) -> Rejection {
    response.extensions().get::<Rejection>().unwrap().clone()
}

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
            let (head, body) = response.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let response = Response::from_parts(head, body);
            assert_eq!(seen_by_client(&response), seen_by_client(&of_layer));
        }
    };
    let guard = redlock.lock("resource").await.unwrap();
    compare("lock-contended").await;
    guard.release().await.unwrap();
    (0..2).for_each(|node| nodes.set(node, Gate::Down));
    compare("lock-unavailable").await;
    redlock.drain(TTL).await;
    compare("shutting-down").await;
}

/// tests/grpc has the others.
// Rules: grpc
#[tokio::test(start_paused = true)]
async fn grpc_rejections_are_200_with_grpc_status_in_the_head() {
    let redlock = Redlock::in_memory(3);
    let _guard = redlock.lock("resource").await.unwrap();
    let _slot = redlock.lock("slot").slots(1).await.unwrap();
    let slots = RedlockLayer::new(redlock.clone(), "slot").max_concurrent(1);
    for (layer, status, code) in [
        (layer(&redlock), "10", "lock-contended"),
        (slots, "8", "too-many-concurrent"),
    ] {
        let grpc = request("POST", &[("content-type", "application/grpc")]);
        let (response, seen) = call(&layer, grpc).await;
        assert!(seen.is_none());
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "application/grpc");
        assert_eq!(response.headers()["grpc-status"], status);
        assert_eq!(response.headers()["grpc-message"], code);
        assert!(response.body().is_empty());
    }
}

// Rules: shutting-down
#[tokio::test(start_paused = true)]
async fn drain_serves_the_holder_and_refuses_waiters_and_new_requests() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let slow = axum::routing::post(async || sleep(TTL).await);
    let waiting = layer(&redlock).wait(2 * TTL);
    let app = axum::Router::new().route("/", slow.layer(waiting));
    let [holder, waiter] = [(); 2].map(|()| spawn_send(&app, "POST", "/"));
    sleep(ms(100)).await;
    let draining = tokio::spawn(async move { redlock.drain(2 * TTL).await });
    let began = Instant::now();
    let waiter = waiter.await.unwrap();
    for refused in [waiter, send(&app, "POST", "/").await] {
        assert_eq!(refused.told(), (503, "shutting-down"));
        assert_eq!(refused.header("retry-after"), Some("1"));
    }
    assert!(began.elapsed() < ms(10), "the waiter is woken");
    assert_eq!(nodes.locks(), [1, 1, 1], "not released under its holder");
    assert!(!draining.is_finished());
    assert_eq!(holder.await.unwrap().status, StatusCode::OK);
    // Free with the last byte of the response.
    assert_eq!(nodes.locks(), [0, 0, 0]);
    let drained = draining.await.unwrap();
    assert!(drained.is_clean() && drained.released == 1, "{drained:?}");
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
    for method in ["POST", "PUT", "PATCH", "DELETE", "CONNECT", "get"] {
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

/// Other requests may hold it, or this one cannot be locked at all.
#[tokio::test(start_paused = true)]
async fn on_unavailable_proceed_lets_requests_proceed_without_a_lock_for_want_of_a_quorum_only() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let token = HeaderName::from_static("x-fencing-token");
    let proceeding = |layer: RedlockLayer| {
        let layer = layer.on_unavailable(OnUnavailable::Proceed);
        layer.forward_token(token.clone())
    };
    nodes.set(0, Gate::Failing);
    nodes.set(1, Gate::Never);
    let forged = request("POST", &[("x-fencing-token", "1")]);
    let (served, seen) = call(&proceeding(layer(&redlock)), forged).await;
    assert_eq!(served.status(), StatusCode::OK);
    let seen = seen.unwrap();
    assert!(seen.extensions.get::<LockHandle>().is_none());
    assert!(!seen.headers.contains_key(&token));

    (0..2).for_each(|node| nodes.set(node, Gate::Ready));
    let check = async |layer: RedlockLayer, status: u16, code: &str| {
        let (refused, seen) = call(&proceeding(layer), post()).await;
        assert_eq!((refused.status().as_u16(), seen.is_none()), (status, true));
        assert_eq!(rejection_of(&refused).code(), code);
    };
    let many = |_: &Parts| (0..33).map(|key| key.to_string()).collect::<LockKeys>();
    check(RedlockLayer::new(redlock.clone(), many), 400, "key-invalid").await;
    let guard = redlock.lock("resource").await.unwrap();
    check(layer(&redlock), 423, "lock-contended").await;
    // Also if another function chooses the options.
    let busy = layer(&redlock).wait(TTL).max_waiters(1);
    let busy = busy.options(|_| LockOptions::default());
    let waiting = proceeding(busy.clone());
    let mut first = pin!(call(&waiting, post()));
    assert!(futures_util::poll!(&mut first).is_pending());
    check(busy, 503, "lock-overloaded").await;
    drop(guard);
    first.await;
    redlock.drain(TTL).await;
    check(layer(&redlock), 503, "shutting-down").await;
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
