//! The layer, with its settings.

use std::sync::Arc;
use std::time::Duration;

use tower::Layer;

use crate::client::service::{Attempt, Config, RetryLockedService};
use crate::protocol::Retry;

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
#[derive(Clone, Default)]
#[must_use = "a layer does nothing until it is applied"]
pub struct RetryLockedLayer {
    config: Arc<Config>,
}

impl RetryLockedLayer {
    /// Creates a layer with the default settings.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how often a request is sent at most. Default: 10. Zero counts as one.
    pub fn attempts(self, attempts: u32) -> Self {
        self.with(|config| config.attempts = attempts)
    }

    /// Sets the time for all attempts of a call and the delays between them. Default: 30 s.
    ///
    /// A delay that would end later is not begun: the call ends with the response that it has. An attempt that is under
    /// way then is dropped.
    pub fn deadline(self, deadline: Duration) -> Self {
        self.with(|config| config.deadline = deadline)
    }

    /// Sets the random part of the delays ("full jitter"). Default: from zero to 100 ms after the first attempt, doubling
    /// up to 5 s. It is the whole delay if there is no `Retry-After`.
    pub fn backoff(self, backoff: Retry) -> Self {
        self.with(|config| config.backoff = backoff)
    }

    /// Sets how many bytes of a request body are kept to send it again. Default: 2 MiB. A longer body is sent once.
    pub fn max_body(self, bytes: u64) -> Self {
        self.with(|config| config.max_body = bytes)
    }

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
    pub fn on_attempt(self, on_attempt: impl Fn(&Attempt) + Send + Sync + 'static) -> Self {
        self.with(|config| config.on_attempt = Arc::new(on_attempt))
    }

    fn with(mut self, set: impl FnOnce(&mut Config)) -> Self {
        set(Arc::make_mut(&mut self.config));
        self
    }
}

impl<S> Layer<S> for RetryLockedLayer {
    type Service = RetryLockedService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        let config = Arc::clone(&self.config);
        RetryLockedService { inner, config }
    }
}

opaque_debug! { RetryLockedLayer }
