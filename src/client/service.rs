//! The service: sends a request, and again while that is safe and can succeed.

use std::fmt::Debug;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response, StatusCode};
use http_body::Body;
use tokio::time::{Instant, sleep, timeout_at};
use tower::{Service, ServiceExt};

use crate::client::answer::{Verdict, deadline_exceeded, judge, retry_after};
use crate::client::idempotent::has_key;
use crate::middleware::{ReadBody, RequestKind};
use crate::node::{after, random_u64};
use crate::protocol::retry::{self, Retry};

/// One attempt to send a request, for [`on_attempt`](crate::client::RetryLockedLayer::on_attempt).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Attempt {
    /// Its number within the call, from 1 on.
    pub number: u32,
    /// The status of its response; `None` if the inner service returned an error, or the deadline passed before.
    pub status: Option<StatusCode>,
    /// What follows it.
    pub decision: Decision,
}

/// What follows an attempt. All but [`SendAgain`](Self::SendAgain) end the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Decision {
    /// The response is final.
    Return,
    /// The request is sent again after this delay.
    SendAgain(Duration),
    /// The connection was lost, and the request has neither an `Idempotency-Key` nor an idempotent method: to send it
    /// again might execute it twice.
    NoKey,
    /// The body cannot be sent again; see [`max_body`](crate::client::RetryLockedLayer::max_body).
    BodyConsumed,
    /// This was the last attempt; see [`attempts`](crate::client::RetryLockedLayer::attempts).
    NoAttemptLeft,
    /// The deadline has passed, or would pass before the next attempt; see
    /// [`deadline`](crate::client::RetryLockedLayer::deadline).
    NoTimeLeft,
}

/// The settings of a layer and its services.
#[derive(Clone)]
pub(super) struct Config {
    pub(super) attempts: u32,
    pub(super) deadline: Duration,
    pub(super) backoff: Retry,
    pub(super) max_body: u64,
    pub(super) on_attempt: Arc<dyn Fn(&Attempt) + Send + Sync>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            attempts: 10,
            deadline: Duration::from_secs(30),
            backoff: Retry::new(Duration::from_millis(100), Duration::from_secs(5)),
            max_body: 2 * 1024 * 1024,
            on_attempt: Arc::new(|_| ()),
        }
    }
}

/// Middleware that sends a request again when that is safe and can succeed.
///
/// Created by [`RetryLockedLayer`](crate::client::RetryLockedLayer), which tells when.
#[derive(Clone)]
pub struct RetryLockedService<S> {
    pub(super) inner: S,
    pub(super) config: Arc<Config>,
}

impl<S, B, R> Service<Request<B>> for RetryLockedService<S>
where
    S: Service<Request<ReadBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    B: Body<Data = Bytes, Error: Send> + Unpin + Send + 'static,
    R: Body<Data = Bytes, Error: Send> + Unpin + Send + 'static,
{
    boxed_service!(Response<ReadBody<R>>);

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let clone = self.inner.clone();
        let ready = mem::replace(&mut self.inner, clone);
        Box::pin(send(ready, request, Arc::clone(&self.config)))
    }
}

opaque_debug! { RetryLockedService<S> [inner = inner] where S: Debug }

/// Sends a request until its answer is final, or it cannot be sent again.
///
/// # Cancel safety
///
/// If dropped, it sends nothing more, and drops the attempt that is under way.
async fn send<S, B, R>(
    mut inner: S,
    request: Request<B>,
    config: Arc<Config>,
) -> Result<Response<ReadBody<R>>, S::Error>
where
    S: Service<Request<ReadBody<B>>, Response = Response<R>>,
    B: Body<Data = Bytes> + Unpin,
    R: Body<Data = Bytes> + Unpin,
{
    let deadline = after(Instant::now(), config.deadline);
    let (parts, body) = request.into_parts();
    let mut body = ReadBody::unread(body);
    // Without waiting: the next frame of a stream may depend on the response, as in a call of gRPC with streams.
    body.read(config.max_body).now_or_never();
    let original = body.copy();
    let mut request = Request::from_parts(parts.clone(), body);
    // The latest result that leaves it open whether the call was executed.
    let mut open = None;
    let mut number = 0;
    loop {
        number += 1;
        let sending = async {
            let response = inner.ready().await?.call(request).await?;
            Ok(judge(response).await)
        };
        let report = |status, decision| {
            (config.on_attempt)(&Attempt {
                number,
                status,
                decision,
            });
        };
        let Ok(sent) = timeout_at(deadline, sending).await else {
            report(None, Decision::NoTimeLeft);
            return Ok(deadline_exceeded(RequestKind::of(&parts)));
        };
        let (verdict, result) = match sent {
            Ok((verdict, response)) => (verdict, Ok(response)),
            Err(error) => (Verdict::Open, Err(error)),
        };
        let invited = result.as_ref().ok().map(Response::headers);
        let delay = invited.and_then(retry_after).unwrap_or_default();
        let delay = delay.saturating_add(retry::delay(
            &config.backoff,
            number - 1,
            None,
            random_u64(),
        ));
        let is_safe = result.is_ok() || has_key(&parts) || parts.method.is_idempotent();
        let decision = match verdict {
            Verdict::Final => Decision::Return,
            _ if !is_safe => Decision::NoKey,
            _ if original.is_none() => Decision::BodyConsumed,
            _ if number >= config.attempts => Decision::NoAttemptLeft,
            _ if after(Instant::now(), delay) >= deadline => Decision::NoTimeLeft,
            _ => Decision::SendAgain(delay),
        };
        report(result.as_ref().ok().map(Response::status), decision);
        if decision == Decision::BodyConsumed {
            tracing::warn!(
                max_body = config.max_body,
                "a request is not sent again, because its body was a stream or exceeds `max_body`; collect it first"
            );
        }
        let copy = original.as_ref().and_then(ReadBody::copy);
        match (decision, copy) {
            (Decision::SendAgain(_), Some(copy)) => {
                request = Request::from_parts(parts.clone(), copy);
            }
            // A refusal of this attempt does not tell what became of an earlier one.
            _ if verdict == Verdict::Refused => return open.unwrap_or(result),
            _ => return result,
        }
        match verdict {
            Verdict::Open => open = Some(result),
            // An unread body would keep its connection, and what the server holds until the end of it.
            Verdict::Refused | Verdict::Final => drop(result),
        }
        sleep(delay).await;
    }
}
