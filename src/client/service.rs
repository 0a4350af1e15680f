//! The layer, with its settings, and its service: sends a request, and again while that is safe and can succeed.

use std::fmt::Debug;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response, StatusCode};
use http_body::Body;
use tokio::time::{Instant, sleep, timeout_at};
use tower::{Layer, Service, ServiceExt};

use crate::client::answer::{Verdict, deadline_exceeded, judge, retry_after};
use crate::client::idempotent::has_key;
use crate::middleware::{ReadBody, RequestKind};
use crate::node::{after, random_u64};
use crate::protocol::retry::{self, Retry};

/// Layer that applies the [`RetryLockedService`] middleware: sends a request again when the server says that it can
/// succeed later, and after a lost connection if that is safe.
///
/// | answer | what follows |
/// |---|---|
/// | 423 or 429; 503 with `Retry-After` | the request was not executed, and is sent again |
/// | 409 with `Retry-After` or the code `request-in-progress` | the request is sent again, and gets the response of the first one |
/// | gRPC status 8, 10 or 14 with `Retry-After`, and no message | as 429, 409 or 503 |
/// | error of the inner service | the request is sent again if it has an `Idempotency-Key` or its method is idempotent (RFC 9110, section 9.2.2) |
/// | all others, such as 409 `outcome-unknown` or 422 `idempotency-key-reused` | it is returned at once |
///
/// The delay is `Retry-After`, in seconds or as a date, and a random time on top of it, so that clients that were refused
/// together do not come back together; see [`backoff`](Self::backoff).
///
/// # What a call returns
///
/// * A response, of the last attempt. If that was refused, the call was not executed.
/// * If the call is given up after a refusal, but an earlier attempt left it open whether the call was executed, the
///   result of that attempt: the error of the lost connection, or 409.
/// * 504 with the code `deadline-exceeded`, or gRPC status 4, if the deadline passed while an attempt was under way:
///   whether the call was executed is unknown.
///
/// A caller that must know sends the call again later, with the same key.
///
/// # Bodies
///
/// A request is sent again if its body can be: if, when it is first sent, all its frames are there without waiting, and
/// have at most [`max_body`](Self::max_body) bytes. So can texts, bytes and the message of a unary gRPC call. A stream that waits
/// for its next frame is sent once, and a warning in the log says so if it would have to be sent again.
///
/// A response is passed on when its head arrives. If its body breaks off later, the call is not repeated.
#[derive(Clone)]
#[must_use = "a layer does nothing until it is applied"]
pub struct RetryLockedLayer {
    attempts: u32,
    deadline: Duration,
    backoff: Retry,
    max_body: u64,
    on_attempt: Arc<dyn Fn(&Attempt) + Send + Sync>,
}

impl Default for RetryLockedLayer {
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

impl RetryLockedLayer {
    /// Creates a layer with the default settings.
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Sets how often a request is sent at most. Default: 10. Zero counts as one.
        attempts(attempts: u32) => attempts = attempts;

        /// Sets the time for all attempts of a call and the delays between them. Default: 30 s.
        ///
        /// A delay that would end later is not begun: the call ends with the response that it has. An attempt that is under
        /// way then is dropped.
        deadline(deadline: Duration) => deadline = deadline;

        /// Sets the random part of the delays ("full jitter"). Default: from zero to 100 ms after the first attempt, doubling
        /// up to 5 s. It is the whole delay if there is no `Retry-After`.
        backoff(backoff: Retry) => backoff = backoff;

        /// Sets how many bytes of a request body are kept to send it again. Default: 2 MiB. A longer body is sent once.
        max_body(bytes: u64) => max_body = bytes;

        /// Sets a function that is told of each attempt when it has ended, such as for a log or a metric. Default: none.
        ///
        /// ```
        /// use tower_redlock::client::{Attempt, Decision, RetryLockedLayer};
        ///
        /// let layer = RetryLockedLayer::new().on_attempt(|attempt: &Attempt| {
        ///     if let Decision::SendAgain(delay) = attempt.decision {
        ///         eprintln!("attempt {}: {:?}, again in {delay:?}", attempt.number, attempt.status);
        ///     }
        /// });
        /// # let _: RetryLockedLayer = layer;
        /// ```
        on_attempt(on_attempt: impl Fn(&Attempt) + Send + Sync + 'static) => on_attempt = Arc::new(on_attempt);
    }
}

impl<S> Layer<S> for RetryLockedLayer {
    type Service = RetryLockedService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        let settings = Arc::new(self.clone());
        RetryLockedService { inner, settings }
    }
}

opaque_debug! { RetryLockedLayer }

/// One attempt to send a request, for [`on_attempt`](RetryLockedLayer::on_attempt).
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
    /// The body cannot be sent again; see [`max_body`](RetryLockedLayer::max_body).
    BodyConsumed,
    /// This was the last attempt; see [`attempts`](RetryLockedLayer::attempts).
    NoAttemptLeft,
    /// The deadline has passed, or would pass before the next attempt; see
    /// [`deadline`](RetryLockedLayer::deadline).
    NoTimeLeft,
}

/// Middleware that sends a request again when that is safe and can succeed.
///
/// Created by [`RetryLockedLayer`](crate::client::RetryLockedLayer), which tells when.
///
/// A call that is dropped sends nothing more, and drops the attempt that is under way.
#[derive(Clone)]
pub struct RetryLockedService<S> {
    inner: S,
    settings: Arc<RetryLockedLayer>,
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
        let mut inner = mem::replace(&mut self.inner, clone);
        let settings = Arc::clone(&self.settings);
        Box::pin(async move {
            let deadline = after(Instant::now(), settings.deadline);
            let (parts, body) = request.into_parts();
            let mut body = ReadBody::unread(body);
            // Without waiting: the next frame of a stream may depend on the response, as in a call of gRPC with streams.
            body.read(settings.max_body).now_or_never();
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
                    (settings.on_attempt)(&Attempt {
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
                let jitter = retry::delay(&settings.backoff, number - 1, None, random_u64());
                let delay = delay.saturating_add(jitter);
                let is_safe = result.is_ok() || has_key(&parts) || parts.method.is_idempotent();
                let decision = match verdict {
                    Verdict::Final => Decision::Return,
                    _ if !is_safe => Decision::NoKey,
                    _ if original.is_none() => Decision::BodyConsumed,
                    _ if number >= settings.attempts => Decision::NoAttemptLeft,
                    _ if after(Instant::now(), delay) >= deadline => Decision::NoTimeLeft,
                    _ => Decision::SendAgain(delay),
                };
                report(result.as_ref().ok().map(Response::status), decision);
                if decision == Decision::BodyConsumed {
                    tracing::warn!(
                        max_body = settings.max_body,
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
        })
    }
}

opaque_debug! { RetryLockedService<S> [inner = inner] where S: Debug }
