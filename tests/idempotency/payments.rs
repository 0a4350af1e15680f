//! Payments that the tests share: layers, requests, handlers that count, bodies, and retries.

use std::future::{Future, ready};
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Query, Request};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, post};
use hyper::body::{Frame, SizeHint};
use support::{Answer, Executed, ms, once, redlock, request_with};
use tokio::time::sleep;
use tower::BoxError;
use tower::retry::Policy;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    IdempotencyLayer, LockKey, LockKeys, LockResource, Redlock, RedlockLayer, key,
};

/// Three nodes, and payments behind a layer over them.
pub(crate) fn scene() -> (ScriptedNodes, Executed, Router) {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let app = counts_ended(&executed).layer(layer(&nodes));
    (nodes, executed, app)
}

/// Returns a layer whose scope is shared by all callers, of a process of its own.
pub(crate) fn layer(nodes: &ScriptedNodes) -> IdempotencyLayer {
    once(&redlock(nodes))
}

/// Sets the gate of what some nodes are asked to record, and of whether they have it.
pub(crate) fn gate_records(nodes: &ScriptedNodes, of: Range<usize>, gate: Gate) {
    for node in of {
        nodes.set_for(node, OpKind::Record, gate);
        nodes.set_for(node, OpKind::Look, gate);
    }
}

/// Locks the account that the query names.
pub(crate) fn per_account(redlock: &Redlock) -> RedlockLayer {
    RedlockLayer::new(redlock.clone(), ("account", key::query("account")))
}

pub(crate) fn request(target: &str, key: &str) -> Request {
    request_with("POST", target, &[("idempotency-key", key)])
}

/// Returns a request with a body that a retry can clone.
pub(crate) fn cloneable(target: &str, key: &str) -> http::Request<String> {
    request(target, key).map(|_| String::new())
}

pub(crate) async fn pay(app: &Router, target: &str, key: &str) -> Answer {
    Answer::to(app, request(target, key)).await
}

/// Pays what a body says.
pub(crate) async fn pay_for(
    app: &Router,
    target: &str,
    key: &str,
    body: impl Into<Body>,
) -> Answer {
    Answer::to(app, request(target, key).map(|_| body.into())).await
}

/// Counts an execution when the handler begins, which then takes the time that the query names.
pub(crate) fn counts_begun(executed: &Executed) -> Router {
    let executed = executed.clone();
    let pay = async move |Query(form): Query<Form>| {
        let number = executed.one_more();
        sleep(ms(form.ms.unwrap_or(0))).await;
        format!("payment {number}")
    };
    Router::new().route("/payments", post(pay))
}

/// Counts an execution when the handler ends, after the time, with the status and with so many more bytes as the query
/// names.
pub(crate) fn counts_ended(executed: &Executed) -> Router {
    let executed = executed.clone();
    let pay = async move |Query(form): Query<Form>| {
        sleep(ms(form.ms.unwrap_or(0))).await;
        let number = executed.one_more();
        let status = StatusCode::from_u16(form.status.unwrap_or(200)).unwrap();
        let more = "x".repeat(form.size.unwrap_or(0));
        (status, format!("payment {number}{more}"))
    };
    Router::new().route("/payments", any(pay))
}

#[derive(serde::Deserialize)]
struct Form {
    ms: Option<u64>,
    status: Option<u16>,
    size: Option<usize>,
}

/// A service that answers each payment with the same function.
pub(crate) fn answering<R: IntoResponse>(
    executed: &Executed,
    answer: impl Fn() -> R + Clone + Send + Sync + 'static,
) -> Router {
    let executed = executed.clone();
    let pay = async move || {
        executed.one_more();
        answer().into_response()
    };
    Router::new().route("/payments", any(pay))
}

/// A body that says how large it is.
pub(crate) fn sized<B>(body: B, hint: SizeHint) -> Body
where
    B: hyper::body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let body = Box::pin(body);
    Body::new(Sized { body, hint })
}

struct Sized<B> {
    body: Pin<Box<B>>,
    hint: SizeHint,
}

impl<B: hyper::body::Body> hyper::body::Body for Sized<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        self.body.as_mut().poll_frame(context)
    }

    fn size_hint(&self) -> SizeHint {
        self.hint
    }
}

/// Retries a number of times after a 503 or an error.
#[derive(Clone)]
pub(crate) struct Again {
    times: usize,
    after: Option<Duration>,
}

impl Again {
    pub(crate) fn at_once(times: usize) -> Self {
        Self { times, after: None }
    }

    pub(crate) fn after(pause: Duration, times: usize) -> Self {
        let after = Some(pause);
        Self { times, after }
    }
}

impl<R: Clone, B, E> Policy<R, http::Response<B>, E> for Again {
    type Future = Pin<Box<dyn Future<Output = ()> + Send>>;

    fn retry(
        &mut self,
        _: &mut R,
        outcome: &mut Result<http::Response<B>, E>,
    ) -> Option<Self::Future> {
        let failed = !matches!(outcome, Ok(response) if response.status() != 503);
        (failed && self.times > 0).then(|| {
            self.times -= 1;
            match self.after {
                Some(pause) => Box::pin(sleep(pause)) as Self::Future,
                None => Box::pin(ready(())),
            }
        })
    }

    fn clone_request(&mut self, request: &R) -> Option<R> {
        Some(request.clone())
    }
}

/// Replaces status and headers, so that a rejection looks like a response of the handler.
pub(crate) async fn rebuilt(response: Response) -> Response {
    (StatusCode::BAD_REQUEST, response.into_body()).into_response()
}

/// The account of a request, for `Locked<Query<Account>>`.
#[derive(serde::Deserialize)]
pub(crate) struct Account {
    account: String,
}

impl LockResource for Account {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from(("account", self.account.as_str())).into()
    }
}
