//! Payments of named callers, with a handler that answers as the query asks.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::body::Body;
use axum::extract::{Query, Request};
use axum::http::StatusCode;
use axum::routing::any;
use http_body_util::BodyExt;
use support::{Answer, ms, redlock, request_with};
use tokio::time::sleep;
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{ExecutionHandle, IdempotencyKey, IdempotencyLayer, key};

/// A handler that counts, and answers how many executions there were.
#[derive(Clone, Default)]
pub(crate) struct Payments(pub(crate) Arc<AtomicUsize>);

impl Payments {
    pub(crate) fn executed(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    pub(crate) fn app(&self, layer: IdempotencyLayer) -> Router {
        let payments = self.clone();
        let pay = async move |Query(form): Query<Form>, request: Request| {
            assert!(request.extensions().get::<ExecutionHandle>().is_some());
            assert!(request.extensions().get::<IdempotencyKey>().is_some());
            let body = request.into_body().collect().await.unwrap().to_bytes();
            sleep(ms(form.ms.unwrap_or(0))).await;
            let number = payments.0.fetch_add(1, Ordering::SeqCst) + 1;
            let status = StatusCode::from_u16(form.status.unwrap_or(200)).unwrap();
            assert!(status != StatusCode::IM_A_TEAPOT, "as the test wants it");
            let size = form.size.unwrap_or(0);
            let (len, more) = (body.len(), "x".repeat(size));
            let text = format!("payment {number} of {len} bytes {more}");
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
pub(crate) struct Form {
    pub(crate) ms: Option<u64>,
    pub(crate) status: Option<u16>,
    pub(crate) size: Option<usize>,
}

/// Three nodes, and payments behind a layer over them.
pub(crate) fn scene() -> (ScriptedNodes, Payments, Router) {
    let (nodes, payments) = (ScriptedNodes::new(3), Payments::default());
    let app = payments.app(layer(&nodes));
    (nodes, payments, app)
}

pub(crate) fn layer(nodes: &ScriptedNodes) -> IdempotencyLayer {
    IdempotencyLayer::new(redlock(nodes), key::header("x-user"))
}

pub(crate) fn request(target: &str, key: &str, body: &'static str) -> Request {
    let headers = [("x-user", "alice"), ("idempotency-key", key)];
    request_with("POST", target, &headers).map(|_| Body::from(body))
}

pub(crate) async fn pay(app: &Router, target: &str, key: &str) -> Answer {
    Answer::to(app, request(target, key, "amount=5")).await
}
