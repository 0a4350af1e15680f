//! The request body that the inner service gets, and the response body of the layer.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use pin_project::pin_project;
use tower::BoxError;

use crate::middleware::BufferedRequestBody;

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
#[pin_project]
pub struct IdempotencyBody<B> {
    #[pin]
    content: ResponseContent<B>,
}

#[pin_project(project = ResponseContentProjection)]
enum ResponseContent<B> {
    Streaming(#[pin] B),
    /// In memory, because it was read or recorded.
    Whole(#[pin] BufferedRequestBody),
    Refusal(#[pin] Full<Bytes>),
    /// The error of an inner body that failed while it was read to be recorded.
    Broken(Option<BoxError>),
}

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

    pub(super) fn whole(data: Bytes, trailers: Option<HeaderMap>) -> Self {
        let body = BufferedRequestBody::new(data, trailers);
        let content = ResponseContent::Whole(body);
        Self { content }
    }

    pub(super) fn refusal(body: Full<Bytes>) -> Self {
        let content = ResponseContent::Refusal(body);
        Self { content }
    }

    pub(super) fn broken(error: BoxError) -> Self {
        let content = ResponseContent::Broken(Some(error));
        Self { content }
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
            ResponseContentProjection::Whole(body) => {
                body.poll_frame(context).map_err(|never| match never {})
            }
            ResponseContentProjection::Refusal(body) => {
                body.poll_frame(context).map_err(|never| match never {})
            }
            ResponseContentProjection::Broken(error) => Poll::Ready(error.take().map(Err)),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            ResponseContent::Streaming(body) => body.is_end_stream(),
            ResponseContent::Whole(body) => body.is_end_stream(),
            ResponseContent::Refusal(body) => body.is_end_stream(),
            ResponseContent::Broken(error) => error.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            ResponseContent::Streaming(body) => body.size_hint(),
            ResponseContent::Whole(body) => body.size_hint(),
            ResponseContent::Refusal(body) => body.size_hint(),
            ResponseContent::Broken(_) => SizeHint::default(),
        }
    }
}

impl<B> fmt::Debug for IdempotencyRequestBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyRequestBody")
            .finish_non_exhaustive()
    }
}

impl<B> fmt::Debug for IdempotencyBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyBody").finish_non_exhaustive()
    }
}
