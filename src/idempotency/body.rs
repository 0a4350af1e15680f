//! The response body of the layer.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{Either, Full};
use pin_project::pin_project;
use tokio::sync::mpsc;
use tower::BoxError;

use crate::middleware::WholeBody;

/// Response body: the stream of the inner body, or a recorded response.
///
/// The execution reads the inner body and passes it on, and ends with it. If the execution is stopped, or its outcome
/// is not this response, the body ends with an error.
#[pin_project]
pub struct IdempotencyBody<B>(#[pin] Either<B, Either<InMemory, Executing>>);

/// Read, recorded, or a refusal.
type InMemory = Either<WholeBody, Full<Bytes>>;

/// Passed on by its execution; `None` behind its end.
struct Executing(Option<mpsc::Receiver<PassedOn>>);

/// A frame, `None` for the end of the body, or the error that ends it. Without these two, the execution was stopped.
pub(super) type PassedOn = Result<Option<Frame<Bytes>>, BoxError>;

impl<B> IdempotencyBody<B> {
    pub(super) fn streaming(body: B) -> Self {
        Self(Either::Left(body))
    }

    /// Creates a body that an execution passes on.
    pub(super) fn executing() -> (mpsc::Sender<PassedOn>, Self) {
        let (sender, frames) = mpsc::channel(1);
        let executing = Executing(Some(frames));
        (sender, Self(Either::Right(Either::Right(executing))))
    }

    pub(super) fn whole(body: WholeBody) -> Self {
        Self(Either::Right(Either::Left(Either::Left(body))))
    }

    pub(super) fn refusal(body: Full<Bytes>) -> Self {
        Self(Either::Right(Either::Left(Either::Right(body))))
    }

    /// Creates the body of a response whose inner body failed while it was read to be recorded.
    pub(super) fn broken(error: BoxError) -> Self {
        let (sender, body) = Self::executing();
        // Never full: it is the only item.
        drop(sender.try_send(Err(error)));
        body
    }
}

/// An empty body, for outer layers that create responses.
impl<B> Default for IdempotencyBody<B> {
    fn default() -> Self {
        Self::refusal(Full::default())
    }
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>>> Body for IdempotencyBody<B> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.project().0.poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

impl Body for Executing {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let Some(frames) = &mut self.0 else {
            return Poll::Ready(None);
        };
        let stopped = || Err("the execution of the request was stopped".into());
        let passed_on = ready!(frames.poll_recv(context)).unwrap_or_else(stopped);
        if !matches!(passed_on, Ok(Some(_))) {
            self.0 = None;
        }
        Poll::Ready(passed_on.transpose())
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }
}

opaque_debug! { IdempotencyBody<B> }
