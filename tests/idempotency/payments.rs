//! Payments that the tests of executions share: requests, handlers that count, and retries.

use std::future::{Future, ready};
use std::pin::Pin;
use std::time::Duration;

use axum::Router;
use axum::extract::{Query, Request};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use support::{Answer, Executed, ms, request_with};
use tokio::time::sleep;
use tower::retry::Policy;
use tower_redlock::{LockKey, LockKeys, LockResource, Redlock, RedlockLayer, key};

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

/// Counts an execution when the handler ends, after the time and with the status that the query names.
///
/// Status 418 panics instead.
pub(crate) fn counts_ended(executed: &Executed) -> Router {
    let executed = executed.clone();
    let pay = async move |Query(form): Query<Form>| {
        sleep(ms(form.ms.unwrap_or(0))).await;
        let number = executed.one_more();
        assert!(form.status != Some(418), "as the test wants it");
        let status = StatusCode::from_u16(form.status.unwrap_or(200)).unwrap();
        (status, format!("payment {number}"))
    };
    Router::new().route("/payments", post(pay))
}

#[derive(serde::Deserialize)]
struct Form {
    ms: Option<u64>,
    status: Option<u16>,
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

/// The account of a request, for `Locked<Query<Account>>`; one named `broken` panics.
#[derive(serde::Deserialize)]
pub(crate) struct Account {
    account: String,
}

impl LockResource for Account {
    fn lock_keys(&self) -> LockKeys {
        assert_ne!(self.account, "broken", "as the test wants it");
        LockKey::from(("account", self.account.as_str())).into()
    }
}
