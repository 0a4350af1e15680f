//! Bodies that are read before the lock is acquired: keys from them, limits, and unchanged bytes.

use std::collections::HashMap;
use std::convert::Infallible;

use axum::body::Body;
use axum::extract::Path;
use axum::middleware::{Next, from_fn};
use axum::routing::{self, post};
use axum::{Form, Router};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::iter;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, Empty, Full, Limited, StreamBody};
use proptest::prelude::*;
use support::{Answer, paused_runtime, redlock, request_with, secs};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tower::limit::GlobalConcurrencyLimitLayer;
use tower::{Layer, ServiceExt, service_fn};
use tower_redlock::middleware::ReadBody;
use tower_redlock::test_util::{OpKind, ScriptedNodes};
use tower_redlock::{BufferBodyLayer, BufferedBody, LockHandle, LockKey, RedlockLayer, key};

use crate::scripted_bodies::{Step, stream};

const LIMIT: usize = 64;

/// Answers with the keys that the request holds and the body that it came with.
async fn echo(handle: LockHandle, body: Bytes) -> String {
    format!("{:?} {}", handle.keys(), body.escape_ascii())
}

fn app(nodes: &ScriptedNodes) -> Router {
    let both = key::each(key::json_pointer("/from"), key::json_pointer("/to"));
    let transfers = RedlockLayer::new(redlock(nodes), ("account", both));
    let field = ("account", key::form_field("id"));
    let forms = RedlockLayer::new(redlock(nodes), field);
    let buffer = BufferBodyLayer::new(LIMIT);
    Router::new()
        .route("/transfer", post(echo).layer((buffer.clone(), transfers)))
        .route("/form", post(echo).layer((buffer, forms)))
}

async fn send(app: &Router, target: &str, content_type: &str, body: impl Into<Body>) -> Answer {
    let request = request_with("POST", target, &[("content-type", content_type)]);
    Answer::to(app, request.map(|_| body.into())).await
}

const FORM: &str = "application/x-www-form-urlencoded";
const JSON: &str = "application/json";

/// As axum's `Form` does.
#[tokio::test(start_paused = true)]
async fn key_form_field_of_get_and_head_is_that_of_the_query() {
    let read = async |handle: LockHandle, Form(form): Form<HashMap<String, String>>| {
        format!("{:?} {}", handle.keys(), form["id"])
    };
    let nodes = ScriptedNodes::new(3);
    let field = ("account", key::form_field("id"));
    let layer = RedlockLayer::new(redlock(&nodes), field);
    let layer = layer.methods([Method::GET, Method::POST]);
    let plain = Router::new().route("/", routing::any(read)).layer(layer);
    let buffered = plain.clone().layer(BufferBodyLayer::new(LIMIT));
    let of_query = "[LockKey(\"7:account,5:query,\")] query";
    for (app, method, expected) in [
        (&plain, "GET", of_query),
        (&plain, "HEAD", ""),
        (&buffered, "GET", of_query),
        (&buffered, "HEAD", ""),
        (&buffered, "POST", "[LockKey(\"7:account,4:body,\")] body"),
    ] {
        let request = request_with(method, "/?id=query", &[("content-type", FORM)]);
        let answer = Answer::to(app, request.map(|_| Body::from("id=body"))).await;
        assert_eq!(answer.status, StatusCode::OK, "{method}: {answer:?}");
        assert_eq!(answer.body, expected, "{method}");
    }
}

/// A handler that sends requests on with its own extensions.
#[tokio::test(start_paused = true)]
async fn body_of_a_request_is_not_that_of_another_with_its_extensions() {
    let nodes = ScriptedNodes::new(3);
    let field = ("account", key::form_field("id"));
    let locked = RedlockLayer::new(redlock(&nodes), field);
    let buffer = BufferBodyLayer::new(LIMIT);
    let pay = Router::new().route("/pay", post(echo).layer(locked));
    let buffered = Router::new().nest("/buffered", pay.clone().layer(buffer.clone()));
    let within = pay.clone().merge(buffered);
    let batch = async move |Path(target): Path<String>, request: axum::extract::Request| {
        let form = [("content-type", FORM)];
        let mut call = request_with("POST", &format!("/{target}"), &form);
        *call.extensions_mut() = request.extensions().clone();
        let call = call.map(|_| Body::from("id=child"));
        within.clone().oneshot(call).await
    };
    let app = Router::new()
        .route("/batch/{*target}", post(batch))
        .layer(buffer.clone());
    let refused = send(&app, "/batch/pay", FORM, "id=parent").await;
    assert_eq!(refused.told(), (500, "misconfigured"));
    let seen = send(&app, "/batch/buffered/pay", FORM, "id=parent").await;
    assert_eq!(seen.text(), "[LockKey(\"7:account,5:child,\")] id=child");
    // The same request: in a nested router, cloned for a retry, or rewritten.
    let nested = Router::new().nest("/v1", pay);
    let cloning = async |request: axum::extract::Request, next: Next| {
        let (parts, body) = request.into_parts();
        next.run(Request::from_parts(parts.clone(), body)).await
    };
    let cloned = nested.clone().layer(from_fn(cloning));
    let rewritten = nested.clone();
    let rewrite = async move |mut request: axum::extract::Request| {
        *request.uri_mut() = "/v1/pay".parse().unwrap();
        rewritten.clone().oneshot(request).await
    };
    let rewritten = Router::new().route("/pay", post(rewrite));
    for (app, target) in [
        (nested, "/v1/pay"),
        (cloned, "/v1/pay"),
        (rewritten, "/pay"),
    ] {
        let seen = send(&app.layer(buffer.clone()), target, FORM, "id=7").await;
        assert_eq!(seen.text(), "[LockKey(\"7:account,1:7,\")] id=7");
    }
}

/// What decodes it further in hands the handler another body than the one that was locked for.
#[tokio::test(start_paused = true)]
async fn body_keys_lock_what_the_body_names_unless_it_has_a_content_encoding() {
    let nodes = ScriptedNodes::new(3);
    let app = app(&nodes);
    let both = format!(
        "{:?}",
        [("account", "a"), ("account", "b")].map(LockKey::from)
    );
    let one = format!("{:?}", [LockKey::from(("account", "1"))]);
    for (target, content_type, body, keys) in [
        ("/transfer", JSON, r#"{"from":"b","to":"a"}"#, both),
        ("/form", FORM, "id=1", one),
    ] {
        for (encodings, told) in [
            (&["deflate"][..], (400, "key-invalid")),
            (&["identity", "br"], (400, "key-invalid")),
            (&["identity, br"], (400, "key-invalid")),
            (&["Identity"], (200, "")),
        ] {
            let mut headers = vec![("content-type", content_type)];
            headers.extend(encodings.iter().map(|one| ("content-encoding", *one)));
            let request = request_with("POST", target, &headers);
            let answer = Answer::to(&app, request.map(|_| Body::from(body))).await;
            assert_eq!(answer.told(), told, "{encodings:?}");
            let seen = format!("{keys} {}", body.escape_default());
            assert_eq!(answer.text() == seen, told.0 == 200, "{answer:?}");
        }
    }
    assert_eq!(nodes.sent(0, OpKind::Acquire), 2);
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

// Rules: body-too-large
#[tokio::test(start_paused = true)]
async fn body_over_the_limit_is_refused_with_or_without_a_declared_length() {
    let nodes = ScriptedNodes::new(3);
    let app = app(&nodes);
    let of = |length| format!("id={}", "x".repeat(length - 3));
    let chunked = |length| {
        let frame = Ok::<_, Infallible>(Bytes::from(of(length)));
        Body::from_stream(iter([frame]))
    };
    // It panics if it is read.
    let unread = stream(&[Step::Panic]).sized(LIMIT as u64 + 1);
    // By the limit of an outer layer.
    let limited = Body::new(Limited::new(chunked(10), 5));
    for (body, expected) in [
        (Body::from(of(LIMIT)), (200, "")),
        (Body::from(of(LIMIT + 1)), (413, "body-too-large")),
        (chunked(LIMIT), (200, "")),
        (chunked(LIMIT + 1), (413, "body-too-large")),
        (Body::new(unread), (413, "body-too-large")),
        (limited, (413, "body-too-large")),
    ] {
        assert_eq!(send(&app, "/form", FORM, body).await.told(), expected);
    }
}

/// With `BufferBodyLayer` outside, it holds no permit of a limit inside either.
// Rules: http.upload
#[tokio::test(start_paused = true)]
async fn slow_upload_holds_the_lock_unless_buffer_body_layer_is_outside() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let locked = || RedlockLayer::new(redlock.clone(), "resource");
    let limit = GlobalConcurrencyLimitLayer::new(1);
    let echo = || post(async |body: Bytes| body);
    let buffer = BufferBodyLayer::new(LIMIT);
    let buffered = echo().layer((buffer, locked(), limit));
    let plain = echo().layer(locked());
    for (route, is_held, status) in [(buffered, false, 200), (plain, true, 423)] {
        let app = Router::new().route("/", route);
        let pieces = iter(["sl", "ow"]).then(async |piece| {
            sleep(secs(10)).await;
            Ok::<_, Infallible>(piece)
        });
        let slow = support::request("POST", "/").map(|_| Body::from_stream(pieces));
        let (began, uploading) = (Instant::now(), app.clone());
        let slow = tokio::spawn(async move { Answer::to(&uploading, slow).await });
        sleep(secs(15)).await;
        assert_eq!(nodes.locks(), [usize::from(is_held); 3]);
        let other = support::send(&app, "POST", "/").await;
        assert_eq!(other.status, status);
        assert!(began.elapsed() < secs(16), "it waits for nothing");
        assert_eq!(slow.await.unwrap().text(), "slow");
        assert_eq!(nodes.locks(), [0, 0, 0]);
    }
}

/// What the inner service got: the bytes and trailers of the body, and what the extension says.
type Got = (Bytes, Option<HeaderMap>, Bytes);

/// Sends frames through the layer.
async fn through(frames: Vec<Bytes>, trailers: Option<HeaderMap>) -> Got {
    let (got, mut received) = mpsc::unbounded_channel::<Got>();
    let inner = service_fn(move |request: Request<ReadBody<Empty<Bytes>>>| {
        let got = got.clone();
        async move {
            assert_eq!(request.extensions().get(), Some(&"kept"));
            assert_eq!(request.headers()["x-kept"], "too");
            let BufferedBody(whole) = request.extensions().get().cloned().unwrap();
            let body = request.into_body().collect().await.unwrap();
            let trailers = body.trailers().cloned();
            got.send((body.to_bytes(), trailers, whole)).unwrap();
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        }
    });
    let frames = frames.into_iter().map(Frame::data);
    let frames = frames.chain(trailers.map(Frame::trailers));
    let body = StreamBody::new(iter(frames.map(Ok::<_, Infallible>)));
    let mut request = Request::post("/")
        .header("x-kept", "too")
        .body(body)
        .unwrap();
    request.extensions_mut().insert("kept");
    let layered = BufferBodyLayer::new(1 << 20).layer(inner);
    let response = layered.oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    received.recv().await.unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn buffer_body_layer_passes_bytes_and_trailers_on_unchanged(
        frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..64), 0..6),
        with_trailers: bool,
    ) {
        let trailers = with_trailers.then(|| {
            let value = HeaderValue::from_static("0");
            HeaderMap::from_iter([("grpc-status".parse().unwrap(), value)])
        });
        let sent: Vec<u8> = frames.concat();
        let frames = frames.into_iter().map(Bytes::from).collect();
        let passing = through(frames, trailers.clone());
        let (read, read_trailers, whole) = paused_runtime().block_on(passing);
        prop_assert_eq!(&read, &sent);
        prop_assert_eq!(&whole, &sent);
        prop_assert_eq!(read_trailers, trailers);
    }
}
