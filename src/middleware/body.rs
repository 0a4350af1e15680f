//! The response body, which holds the lock until the response is complete.
//!
//! # Implementation details
//!
//! * Every frame is passed on at once, but for the last one. A frame is the last if it has trailers,
//!   if the inner body reports its end after it, or if it completes the declared length: hyper ends a message
//!   there without polling again, and drops the body. Without such a frame, the end of the stream is the last.
//! * The last frame waits for the confirmation of the release, so the client's next request cannot
//!   meet the lock. Until the frame is passed on, `is_end_stream` is false and `size_hint` counts the frame.
//! * When the lock is lost, the body ends with an error, so the client cannot take the part for the whole. The inner
//!   body is dropped first.
//!
//! The loss of the lock is checked before the inner body is polled.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderMap, Response, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Either, Empty};
use pin_project::pin_project;
use tower::BoxError;

use crate::lock::LockGuard;
use crate::middleware::config::OnLost;
use crate::middleware::held::HeldShare;
use crate::middleware::rejection::Rejection;

/// Response body of the services of this crate: the inner body, with or without a lock, a recorded response, or a refusal.
///
/// While it holds a lock, it delays the last frame of the response until a majority of the
/// nodes has confirmed the release (at most the node timeout). If it is dropped before, the lock is released
/// in the background.
#[pin_project]
pub struct LockBody<B> {
    /// The inner body, or another in its place, which is empty once aborted.
    #[pin]
    body: Either<B, BoxBody<Bytes, BoxError>>,
    /// Until the lock is released or lost.
    held: Option<HeldShare>,
    /// Bytes until the end, if their number is known.
    remaining: Option<u64>,
    /// The last frame, while it waits for the release.
    last: Option<Frame<Bytes>>,
}

impl<B> LockBody<B> {
    /// Creates a body without a lock.
    pub(crate) fn unlocked(body: B) -> Self {
        Self::new(Either::Left(body))
    }

    /// Creates a body in the place of the inner one: of a refusal, or of a response that was read, recorded, or is passed on
    /// by a task.
    pub(crate) fn boxed(
        body: impl Body<Data = Bytes, Error: Into<BoxError>> + Send + Sync + 'static,
    ) -> Self {
        Self::new(Either::Right(BoxBody::new(body.map_err(Into::into))))
    }

    fn new(body: Either<B, BoxBody<Bytes, BoxError>>) -> Self {
        Self {
            body,
            held: None,
            remaining: None,
            last: None,
        }
    }
}

/// An empty body without a lock, which outer layers put into the responses that they create.
impl<B> Default for LockBody<B> {
    fn default() -> Self {
        Self::boxed(Empty::new())
    }
}

impl<B: Body> LockBody<B> {
    /// Makes the body of a response hold a lock to the end of the response.
    pub(super) fn hold(
        response: Response<B>,
        declared: Option<u64>,
        held: HeldShare,
    ) -> Response<Self> {
        // hyper ends a message at its declared length, and prefers that of the header.
        response.map(|body| Self {
            held: Some(held),
            remaining: declared.or_else(|| body.size_hint().exact()),
            ..Self::unlocked(body)
        })
    }
}

/// Returns the length that a head declares for its body.
#[must_use]
#[allow(unreachable_pub, reason = "a fuzz target calls it")]
pub fn declared_length(headers: &HeaderMap) -> Option<u64> {
    let value = headers.get(header::CONTENT_LENGTH)?;
    let digits = value.to_str().ok()?;
    // The standard library also reads a sign, and hyper does not.
    let is_length = digits.bytes().all(|digit| digit.is_ascii_digit());
    digits.parse().ok().filter(|_| is_length)
}

impl LockGuard {
    /// Makes the lock live as long as the body of a response, as the layer does: its last frame
    /// waits for the release, and it ends with a [`Rejection`] as its error if the lock is lost. `IntoResponse::into_response`
    /// makes a response of what a handler has, and a `Response<Body>` of what this returns. Take the token before, if the body needs it.
    ///
    /// A response without a body cannot wait for the release: [`release`](Self::release) the guard
    /// before you return one.
    pub fn hold_until_sent<B: Body>(self, response: Response<B>) -> Response<LockBody<B>> {
        let declared = declared_length(response.headers());
        let held = HeldShare::new(self, OnLost::Abort, true);
        LockBody::hold(response, declared, held)
    }
}

impl<B> Body for LockBody<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let mut this = self.project();
        let Some(held) = this.held else {
            return this.body.poll_frame(context);
        };
        // From then on, only the last frame remains, or the end of the stream.
        if !held.is_releasing() {
            let aborts = held.on_lost == OnLost::Abort;
            let mut lost = held.lost_reason().filter(|_| aborts);
            let mut polled = Poll::Pending;
            if lost.is_none() {
                polled = this.body.as_mut().poll_frame(context);
                if aborts && polled.is_pending() {
                    lost = held.check_lost(context);
                }
            }
            if let Some(reason) = lost {
                this.body.set(Self::default().body);
                *this.held = None;
                return Poll::Ready(Some(Err(Rejection::Lost(reason).into())));
            }
            match ready!(polled) {
                None => {}
                Some(Err(error)) => {
                    *this.held = None;
                    return Poll::Ready(Some(Err(error)));
                }
                Some(Ok(frame)) => {
                    let sent = frame.data_ref().map_or(0, |data| data.len() as u64);
                    *this.remaining = this.remaining.map(|left| left.saturating_sub(sent));
                    let is_at_end = this.body.is_end_stream() || *this.remaining == Some(0);
                    if !frame.is_trailers() && !is_at_end {
                        return Poll::Ready(Some(Ok(frame)));
                    }
                    *this.last = Some(frame);
                }
            }
        }
        ready!(held.poll_release(context));
        // Without a wait, the lock is released in the background.
        *this.held = None;
        Poll::Ready(this.last.take().map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        // While it holds the lock, the end is still to be delayed.
        self.held.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let mut hint = self.body.size_hint();
        if let Some(data) = self.last.as_ref().and_then(Frame::data_ref) {
            let delayed = data.len() as u64;
            if let Some(upper) = hint.upper() {
                hint.set_upper(upper.saturating_add(delayed));
            }
            hint.set_lower(hint.lower().saturating_add(delayed));
        }
        hint
    }
}

opaque_debug! { LockBody<B> }

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn declared_length_is_a_number_without_a_sign() {
        let declared = |length: &'static str| {
            let mut headers = HeaderMap::new();
            let length = HeaderValue::from_static(length);
            headers.insert(header::CONTENT_LENGTH, length);
            declared_length(&headers)
        };
        assert_eq!(declared("17"), Some(17));
        for other in ["+17", "-17", "17, 17", "0x11", ""] {
            assert_eq!(declared(other), None, "{other}");
        }
        assert_eq!(declared_length(&HeaderMap::new()), None);
    }
}
