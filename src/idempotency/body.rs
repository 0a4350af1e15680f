//! The response body of the layer.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{iter, unfold};
use http_body::{Body, Frame, SizeHint};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Either, Full, StreamBody};
use pin_project::pin_project;
use tokio::sync::mpsc;
use tower::BoxError;

/// Response body: the stream of the inner body, or a recorded response.
///
/// The execution reads the inner body and passes it on, and ends with it. If the execution is stopped, or its outcome
/// is not this response, the body ends with an error.
#[pin_project]
pub struct IdempotencyBody<B>(#[pin] Either<B, BoxBody<Bytes, BoxError>>);

/// A frame, `None` for the end of the body, or the error that ends it. Without these two, the execution was stopped.
pub(super) type PassedOn = Result<Option<Frame<Bytes>>, BoxError>;

impl<B> IdempotencyBody<B> {
    pub(super) fn streaming(body: B) -> Self {
        Self(Either::Left(body))
    }

    /// Creates the body of a response that was read or recorded, or of a refusal.
    pub(super) fn in_memory(
        body: impl Body<Data = Bytes, Error = Infallible> + Send + Sync + 'static,
    ) -> Self {
        let body = body.map_err(|never| match never {});
        Self(Either::Right(BoxBody::new(body)))
    }

    /// Creates a body that an execution passes on.
    pub(super) fn executing() -> (mpsc::Sender<PassedOn>, Self) {
        let (sender, frames) = mpsc::channel(1);
        let passed_on = unfold(Some(frames), async |frames: Option<mpsc::Receiver<_>>| {
            let mut frames = frames?;
            let stopped = || Err("the execution of the request was stopped".into());
            let passed_on: PassedOn = frames.recv().await.unwrap_or_else(stopped);
            let rest = passed_on.is_ok().then_some(frames);
            Some((passed_on.transpose()?, rest))
        });
        let body = StreamBody::new(passed_on.fuse());
        (sender, Self(Either::Right(BoxBody::new(body))))
    }

    /// Creates the body of a response whose inner body failed while it was read to be recorded.
    pub(super) fn broken(error: BoxError) -> Self {
        let body = StreamBody::new(iter([Err(error)]));
        Self(Either::Right(BoxBody::new(body)))
    }
}

/// An empty body, for outer layers that create responses.
impl<B> Default for IdempotencyBody<B> {
    fn default() -> Self {
        Self::in_memory(Full::default())
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

opaque_debug! { IdempotencyBody<B> }
