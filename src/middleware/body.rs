//! The response body: holds the lock until the response is done.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderMap, Response, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use pin_project::pin_project;
use tower::BoxError;

use crate::lock::{LockGuard, Lost, LostReason};

/// Response body of the layer's service: the inner body with a lock, or a refusal.
///
/// While it holds a lock, it holds back the last piece of the response until a majority of the
/// nodes has confirmed the release (at most the node timeout). Dropped early, it releases in the
/// background.
#[pin_project]
pub struct LockBody<B> {
    #[pin]
    kind: Kind<B>,
}

#[pin_project(project = KindProjection)]
enum Kind<B> {
    Inner {
        #[pin]
        body: B,
        hold: Option<Hold>,
    },
    Refusal(#[pin] Full<Bytes>),
    /// The lock was lost and the body ended with an error; nothing may follow.
    Aborted,
}

/// A lock that lives as long as a body.
pub(super) struct Hold {
    stage: Stage,
    /// Ends the body with an error when the lock is lost.
    lost: Option<Lost>,
    /// Whether the last piece waits for the release.
    await_release: bool,
    /// Bytes until the end, if their number is known.
    left: Option<u64>,
}

enum Stage {
    Holding(LockGuard),
    /// Released, with what is held back until a majority knows: a frame, or the end.
    Releasing(Releasing, Option<Frame<Bytes>>),
}

/// A release under way, whose outcome is in the log.
pub(super) struct Releasing(Pin<Box<dyn Future<Output = ()> + Send + Sync>>);

impl Releasing {
    pub(super) fn new(guard: LockGuard) -> Self {
        Self(Box::pin(async move {
            // Unconfirmed or lost, the response is what it is; the lock ends by its ttl.
            if let Err(error) = guard.release().await {
                tracing::debug!(%error, "redlock lock released without confirmation");
            }
        }))
    }
}

impl Future for Releasing {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(context)
    }
}

impl Hold {
    pub(super) fn new(guard: LockGuard, abort_if_lost: bool, await_release: bool) -> Self {
        Self {
            lost: abort_if_lost.then(|| guard.lost()),
            stage: Stage::Holding(guard),
            await_release,
            left: None,
        }
    }
}

impl<B> LockBody<B> {
    /// A body whose lock is released already, or that never had one.
    pub(super) fn unlocked(body: B) -> Self {
        Self {
            kind: Kind::Inner { body, hold: None },
        }
    }

    pub(super) fn refusal(body: Full<Bytes>) -> Self {
        Self {
            kind: Kind::Refusal(body),
        }
    }
}

/// An empty body without a lock: what layers further out put into the responses that they make themselves.
impl<B> Default for LockBody<B> {
    fn default() -> Self {
        Self::refusal(Full::default())
    }
}

impl<B: Body> LockBody<B> {
    /// A body that holds a lock to the end of the response with these headers.
    pub(super) fn locked(body: B, headers: &HeaderMap, mut hold: Hold) -> Self {
        // hyper ends a message at the length it declared, which is the header's if there is one.
        hold.left = declared_length(headers).or_else(|| body.size_hint().exact());
        Self {
            kind: Kind::Inner {
                body,
                hold: Some(hold),
            },
        }
    }
}

/// The length that a head declares for its body.
pub(super) fn declared_length(headers: &HeaderMap) -> Option<u64> {
    let value = headers.get(header::CONTENT_LENGTH)?;
    value.to_str().ok()?.parse().ok()
}

impl LockGuard {
    /// Makes the lock live as long as the body of a response, as the layer does: its last frame
    /// waits for the release, and it ends with an error if the lock is lost.
    ///
    /// A response without a body cannot wait for anything: [`release`](Self::release) the guard
    /// before returning one.
    pub fn hold_until_sent<B: Body>(self, response: Response<B>) -> Response<LockBody<B>> {
        let (parts, body) = response.into_parts();
        let hold = Hold::new(self, true, true);
        let body = LockBody::locked(body, &parts.headers, hold);
        Response::from_parts(parts, body)
    }
}

impl<B> Body for LockBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let mut kind = self.project().kind;
        let (mut body, hold) = match kind.as_mut().project() {
            KindProjection::Inner { body, hold } => (body, hold),
            KindProjection::Refusal(body) => {
                return body.poll_frame(context).map_err(|never| match never {});
            }
            KindProjection::Aborted => return Poll::Ready(None),
        };
        let Some(holding) = hold else {
            return body.poll_frame(context).map_err(Into::into);
        };
        if let Stage::Releasing(releasing, last) = &mut holding.stage {
            ready!(Pin::new(releasing).poll(context));
            let last = last.take();
            *hold = None;
            return Poll::Ready(last.map(Ok));
        }
        if let Some(reason) = holding.poll_lost(context) {
            // Never a clean end: the client must not take the part for the whole.
            kind.set(Kind::Aborted);
            return Poll::Ready(Some(Err(LockLostError(reason).into())));
        }
        let last = match ready!(body.as_mut().poll_frame(context)) {
            None => None,
            Some(Err(error)) => {
                *hold = None;
                return Poll::Ready(Some(Err(error.into())));
            }
            Some(Ok(frame)) => {
                if let (Some(left), Some(data)) = (&mut holding.left, frame.data_ref()) {
                    *left = left.saturating_sub(data.len() as u64);
                }
                let is_last =
                    frame.is_trailers() || body.is_end_stream() || holding.left == Some(0);
                if !is_last {
                    return Poll::Ready(Some(Ok(frame)));
                }
                Some(frame)
            }
        };
        let Some(Hold {
            stage: Stage::Holding(guard),
            await_release,
            ..
        }) = hold.take()
        else {
            return Poll::Ready(last.map(Ok));
        };
        if !await_release {
            drop(guard);
            return Poll::Ready(last.map(Ok));
        }
        let mut releasing = Releasing::new(guard);
        if Pin::new(&mut releasing).poll(context).is_ready() {
            return Poll::Ready(last.map(Ok));
        }
        *hold = Some(Hold {
            stage: Stage::Releasing(releasing, last),
            lost: None,
            await_release,
            left: None,
        });
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body, hold: None } => body.is_end_stream(),
            // The end is still to be held back.
            Kind::Inner { hold: Some(_), .. } => false,
            Kind::Refusal(body) => body.is_end_stream(),
            Kind::Aborted => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body, hold } => {
                let held = hold.as_ref().map_or(0, Hold::held_back);
                let inner = body.size_hint();
                let mut hint = SizeHint::new();
                if let Some(upper) = inner.upper() {
                    hint.set_upper(upper.saturating_add(held));
                }
                hint.set_lower(inner.lower().saturating_add(held));
                hint
            }
            Kind::Refusal(body) => body.size_hint(),
            Kind::Aborted => SizeHint::with_exact(0),
        }
    }
}

impl Hold {
    /// Looks whether the lock is lost and the body has to end; by the clock too, because the timer is late
    /// if this thread was busy or the process was stopped.
    fn poll_lost(&mut self, context: &mut Context<'_>) -> Option<LostReason> {
        let lost = self.lost.as_mut()?;
        match (Pin::new(lost).poll(context), &self.stage) {
            (Poll::Ready(reason), _) => Some(reason),
            (Poll::Pending, Stage::Holding(guard)) if !guard.is_valid() => {
                Some(LostReason::Expired)
            }
            (Poll::Pending, _) => None,
        }
    }

    /// Bytes that the inner body has handed out and the client has not got.
    fn held_back(&self) -> u64 {
        match &self.stage {
            Stage::Releasing(_, Some(frame)) => {
                frame.data_ref().map_or(0, |data| data.len() as u64)
            }
            Stage::Holding(_) | Stage::Releasing(_, None) => 0,
        }
    }
}

impl<B> fmt::Debug for LockBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockBody").finish_non_exhaustive()
    }
}

/// Error that ends a response body whose lock was lost while it was being sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LockLostError(LostReason);

impl LockLostError {
    /// Returns why the lock was lost.
    #[must_use]
    pub fn reason(&self) -> LostReason {
        self.0
    }
}

impl fmt::Display for LockLostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the lock was lost while the response was sent: {}",
            self.0
        )
    }
}

impl std::error::Error for LockLostError {}
