//! Refusals of extractors and of `BufferBodyLayer` in the form that the program chooses.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequest, OptionalFromRequest, Path};
use axum::routing::post;
use axum::{Extension, Router};
use bytes::Bytes;
use futures_util::stream::iter;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use support::{Answer, request_with, three_nodes};
use tower_redlock::{
    BufferBodyLayer, FencingToken, IdempotencyKey, LockHandle, LockKey, LockKeys, LockResource,
    Locked, LockedRejection, Redlock, Rejection, RejectionResponse, RequestKind,
};

use crate::shop::{OrderId, until_free};

const TEAPOT: StatusCode = StatusCode::IM_A_TEAPOT;

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "the layer passes references"
)]
fn teapot(rejection: &Rejection, to: &RequestKind) -> Response<Full<Bytes>> {
    let mut response = Response::new(format!("{to:?} {}", rejection.code()).into());
    *response.status_mut() = TEAPOT;
    response
}

async fn send(app: &Router, target: &str, content_type: &str) -> Answer {
    let request = request_with("POST", target, &[("content-type", content_type)]);
    Answer::to(app, request).await
}

/// Consumes the request, whatever its content type is.
struct Consumed;

impl<S: Send + Sync> FromRequest<S> for Consumed {
    type Rejection = Infallible;

    async fn from_request(request: Request<Body>, _: &S) -> Result<Self, Infallible> {
        drop(request);
        Ok(Self)
    }
}

impl<S: Send + Sync> OptionalFromRequest<S> for Consumed {
    type Rejection = Infallible;

    async fn from_request(request: Request<Body>, _: &S) -> Result<Option<Self>, Infallible> {
        drop(request);
        Ok(Some(Self))
    }
}

impl LockResource for Consumed {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from(("order", 7)).into()
    }
}

fn app(redlock: &Redlock) -> Router {
    let as_result = async |locked: Result<Locked<Path<OrderId>>, LockedRejection<_>>| match locked {
        Ok(_) => "locked".to_owned(),
        Err(LockedRejection::Lock(refused)) => refused.rejection().code().to_owned(),
        Err(_) => "no order".to_owned(),
    };
    let locked = async |_: Locked<Path<OrderId>>| "locked";
    let optional = async |_: Option<Locked<Path<OrderId>>>| "locked";
    let optional_body = async |_: Option<Locked<Consumed>>| "locked";
    Router::new()
        .route("/locked/{id}", post(locked))
        .route("/optional/{id}", post(optional))
        .route("/body", post(async |_: Locked<Consumed>| "locked"))
        .route("/optional_body", post(optional_body))
        .route("/result/{id}", post(as_result))
        .route("/handle", post(async |_: LockHandle| "held"))
        .route("/token", post(async |_: FencingToken| "fenced"))
        .route("/key", post(async |_: IdempotencyKey| "keyed"))
        .with_state(redlock.clone())
}

fn for_extractors(rejection: impl RejectionResponse) -> Extension<Arc<dyn RejectionResponse>> {
    Extension(Arc::new(rejection))
}

#[tokio::test(start_paused = true)]
async fn rejection_in_the_extensions_answers_refusals_of_all_extractors() {
    let (nodes, redlock) = three_nodes();
    let plain = app(&redlock);
    let dressed = plain.clone().layer(for_extractors(teapot));
    assert_eq!(send(&dressed, "/locked/7", "").await.body, "locked");
    until_free(&nodes).await;
    let guard = redlock.try_lock(("order", 7)).await.unwrap();
    for (target, code) in [
        ("/locked/7", "lock-contended"),
        ("/optional/7", "lock-contended"),
        ("/body", "lock-contended"),
        ("/optional_body", "lock-contended"),
        ("/handle", "misconfigured"),
        ("/token", "misconfigured"),
        ("/key", "misconfigured"),
    ] {
        for (content_type, kind) in [("text/plain", "Http"), ("application/grpc", "Grpc")] {
            let answer = send(&dressed, target, content_type).await;
            assert_eq!(answer.status, TEAPOT, "{target}");
            assert_eq!(answer.body, format!("{kind} {code}"), "{target}");
            // For outer layers, as without it.
            assert_eq!(answer.code(), code, "{target}");
        }
        let answer = send(&plain, target, "text/plain").await;
        assert_ne!(answer.status, TEAPOT, "{target}");
        assert_eq!(answer.code(), code, "{target}");
    }
    // The rejection of the extractor within is not one of this crate.
    let answer = send(&dressed, "/locked/x", "").await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    // A handler that takes the rejection answers by itself.
    for (target, told) in [("/result/7", "lock-contended"), ("/result/x", "no order")] {
        assert_eq!(send(&dressed, target, "").await.body, told);
    }
    guard.release().await.unwrap();
    assert_eq!(send(&dressed, "/result/7", "").await.body, "locked");
}

#[tokio::test(start_paused = true)]
async fn buffer_body_layer_rejection_answers_every_body_that_it_refuses() {
    let app = |layer: BufferBodyLayer| -> Router {
        Router::new().route("/", post(async || "read")).layer(layer)
    };
    let plain = app(BufferBodyLayer::new(4));
    let dressed = app(BufferBodyLayer::new(4).rejection(teapot));
    let broken = || {
        let frames = [Ok("1"), Err(io::Error::other("reset"))];
        Body::from_stream(iter(frames))
    };
    let bodies: [(&dyn Fn() -> Body, _); 3] = [
        (&|| "12345".into(), (413, "body-too-large")),
        (&broken, (400, "body-unreadable")),
        (&|| "1234".into(), (200, "")),
    ];
    for (body, (status, code)) in bodies {
        let request = || request_with("POST", "/", &[]).map(|_| body());
        let answer = Answer::to(&plain, request()).await;
        assert_eq!(answer.told(), (status, code));
        let answer = Answer::to(&dressed, request()).await;
        let expected = if code.is_empty() { status } else { 418 };
        assert_eq!(answer.told(), (expected, code));
    }
}
