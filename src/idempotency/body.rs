//! The request body that the inner service gets, and the response body of the layer.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{Either, Full};
use pin_project::pin_project;
use tokio::sync::mpsc;
use tower::BoxError;

use crate::middleware::BufferedRequestBody;
use crate::middleware::macros::opaque_debug;

/// Request body for the inner service: read already, or untouched if the request has no key.
#[pin_project]
#[derive(Clone)]
pub struct IdempotencyRequestBody<B> {
    #[pin]
    content: RequestContent<B>,
}

#[pin_project(project = RequestContentProjection)]
#[derive(Clone)]
enum RequestContent<B> {
    Untouched(#[pin] B),
    Buffered(#[pin] BufferedRequestBody),
}

/// Response body: the stream of the inner body, or a recorded response.
///
/// The execution reads the inner body and passes it on, and ends with it. If the execution is stopped, or its outcome
/// is not this response, the body ends with an error.
#[pin_project]
pub struct IdempotencyBody<B> {
    #[pin]
    content: ResponseContent<B>,
}

#[pin_project(project = ResponseContentProjection)]
enum ResponseContent<B> {
    Streaming(#[pin] B),
    /// Passed on by its execution; `None` behind its end.
    Executing(Option<mpsc::Receiver<PassedOn>>),
    /// In memory: read, recorded, or a refusal.
    Whole(#[pin] Either<BufferedRequestBody, Full<Bytes>>),
}

/// A frame, `None` for the end of the body, or the error that ends it. Without these two, the execution was stopped.
pub(super) type PassedOn = Result<Option<Frame<Bytes>>, BoxError>;

impl<B> IdempotencyRequestBody<B> {
    pub(super) fn untouched(body: B) -> Self {
        let content = RequestContent::Untouched(body);
        Self { content }
    }

    pub(super) fn buffered(body: BufferedRequestBody) -> Self {
        let content = RequestContent::Buffered(body);
        Self { content }
    }
}

impl<B> IdempotencyBody<B> {
    pub(super) fn streaming(body: B) -> Self {
        let content = ResponseContent::Streaming(body);
        Self { content }
    }

    /// Creates a body that an execution passes on.
    pub(super) fn executing() -> (mpsc::Sender<PassedOn>, Self) {
        let (sender, frames) = mpsc::channel(1);
        let content = ResponseContent::Executing(Some(frames));
        (sender, Self { content })
    }

    pub(super) fn whole(data: Bytes, trailers: Option<HeaderMap>) -> Self {
        let body = BufferedRequestBody::new(data, trailers);
        let content = ResponseContent::Whole(Either::Left(body));
        Self { content }
    }

    pub(super) fn refusal(body: Full<Bytes>) -> Self {
        let content = ResponseContent::Whole(Either::Right(body));
        Self { content }
    }

    /// Creates the body of a response whose inner body failed while it was read to be recorded.
    pub(super) fn broken(error: BoxError) -> Self {
        let (sender, body) = Self::executing();
        // Never full: it is the only item.
        drop(sender.try_send(Err(error)));
        body
    }
}

/// An empty body, for layers that send a request again, such as `FollowRedirect`.
impl<B> Default for IdempotencyRequestBody<B> {
    fn default() -> Self {
        Self::buffered(BufferedRequestBody::default())
    }
}

/// An empty body, for outer layers that create responses.
impl<B> Default for IdempotencyBody<B> {
    fn default() -> Self {
        Self::refusal(Full::default())
    }
}

impl<B> Body for IdempotencyRequestBody<B>
where
    B: Body<Data = Bytes>,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().content.project() {
            RequestContentProjection::Untouched(body) => body.poll_frame(context),
            RequestContentProjection::Buffered(body) => {
                body.poll_frame(context).map_err(|never| match never {})
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            RequestContent::Untouched(body) => body.is_end_stream(),
            RequestContent::Buffered(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            RequestContent::Untouched(body) => body.size_hint(),
            RequestContent::Buffered(body) => body.size_hint(),
        }
    }
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>>> Body for IdempotencyBody<B> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match self.project().content.project() {
            ResponseContentProjection::Streaming(body) => {
                body.poll_frame(context).map_err(Into::into)
            }
            ResponseContentProjection::Executing(frames) => {
                let Some(receiver) = frames else {
                    return Poll::Ready(None);
                };
                let stopped = || Err("the execution of the request was stopped".into());
                let passed_on = ready!(receiver.poll_recv(context)).unwrap_or_else(stopped);
                if !matches!(passed_on, Ok(Some(_))) {
                    *frames = None;
                }
                Poll::Ready(passed_on.transpose())
            }
            ResponseContentProjection::Whole(body) => body.poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            ResponseContent::Streaming(body) => body.is_end_stream(),
            ResponseContent::Executing(frames) => frames.is_none(),
            ResponseContent::Whole(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            ResponseContent::Streaming(body) => body.size_hint(),
            ResponseContent::Whole(body) => body.size_hint(),
            ResponseContent::Executing(_) => SizeHint::default(),
        }
    }
}

opaque_debug! { IdempotencyRequestBody<B> }
opaque_debug! { IdempotencyBody<B> }
