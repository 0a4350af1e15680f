//! Payments with a body, and handlers that answer them.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::request::Builder;
use axum::response::IntoResponse;
use axum::routing::{any, post};
use hyper::body::{Frame, SizeHint};
use support::{Answer, Executed, redlock, secs};
use tokio::time::sleep;
use tower::BoxError;
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{IdempotencyLayer, scope};

pub(crate) fn layer(nodes: &ScriptedNodes) -> IdempotencyLayer {
    IdempotencyLayer::new(redlock(nodes), scope::public())
}

pub(crate) fn payment(target: &str, key: &str) -> Builder {
    Request::post(target).header(KEY, key)
}

pub(crate) async fn pay(app: &Router, key: &str) -> Answer {
    let request = payment("/payments", key).body(Body::from("amount=5"));
    Answer::to(app, request.expect("it is a request")).await
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

/// A service that takes its time.
pub(crate) fn slow(executed: &Executed) -> Router {
    let executed = executed.clone();
    let pay = async move || {
        sleep(secs(2)).await;
        format!("payment {}", executed.one_more())
    };
    Router::new().route("/payments", post(pay))
}

pub(crate) const KEY: &str = "idempotency-key";

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
