//! Bodies before and behind the layer.

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

/// Request body that the inner service gets: read already, or untouched if the request has no key.
#[pin_project]
#[derive(Clone)]
pub struct IdempotencyRequestBody<B> {
    #[pin]
    kind: RequestKind<B>,
}

#[pin_project(project = RequestKindProjection)]
#[derive(Clone)]
enum RequestKind<B> {
    Untouched(#[pin] B),
    Read(#[pin] BufferedRequestBody),
}

/// Response body: the inner one as it streams, or what was recorded.
#[pin_project]
pub struct IdempotencyBody<B> {
    #[pin]
    kind: Kind<B>,
}

#[pin_project(project = KindProjection)]
enum Kind<B> {
    Streaming(#[pin] B),
    Whole {
        #[pin]
        data: Full<Bytes>,
        trailers: Option<HeaderMap>,
    },
    /// What broke while it was read to be recorded.
    Broken(Option<BoxError>),
}

impl<B> IdempotencyRequestBody<B> {
    pub(super) fn untouched(body: B) -> Self {
        let kind = RequestKind::Untouched(body);
        Self { kind }
    }

    pub(super) fn read(body: BufferedRequestBody) -> Self {
        let kind = RequestKind::Read(body);
        Self { kind }
    }
}

impl<B> IdempotencyBody<B> {
    pub(super) fn streaming(body: B) -> Self {
        let kind = Kind::Streaming(body);
        Self { kind }
    }

    pub(super) fn whole(data: Bytes, trailers: Option<HeaderMap>) -> Self {
        let data = Full::new(data);
        let kind = Kind::Whole { data, trailers };
        Self { kind }
    }

    pub(super) fn refusal(data: Full<Bytes>) -> Self {
        let trailers = None;
        let kind = Kind::Whole { data, trailers };
        Self { kind }
    }

    pub(super) fn broken(error: BoxError) -> Self {
        let kind = Kind::Broken(Some(error));
        Self { kind }
    }
}

/// An empty body: what layers that send a request again, such as those that follow redirects, put into it.
impl<B> Default for IdempotencyRequestBody<B> {
    fn default() -> Self {
        Self::read(BufferedRequestBody::default())
    }
}

/// An empty body: what layers further out put into the responses that they make themselves.
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
        match self.project().kind.project() {
            RequestKindProjection::Untouched(body) => body.poll_frame(context),
            RequestKindProjection::Read(body) => {
                let frame = body.poll_frame(context);
                frame.map(|frame| frame.map(|frame| frame.map_err(|never| match never {})))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            RequestKind::Untouched(body) => body.is_end_stream(),
            RequestKind::Read(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            RequestKind::Untouched(body) => body.size_hint(),
            RequestKind::Read(body) => body.size_hint(),
        }
    }
}

impl<B> Body for IdempotencyBody<B>
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
        match self.project().kind.project() {
            KindProjection::Streaming(body) => {
                let frame = body.poll_frame(context);
                frame.map(|frame| frame.map(|frame| frame.map_err(Into::into)))
            }
            KindProjection::Whole { data, trailers } => match data.poll_frame(context) {
                Poll::Ready(None) => {
                    Poll::Ready(trailers.take().map(|last| Ok(Frame::trailers(last))))
                }
                frame => {
                    frame.map(|frame| frame.map(|frame| frame.map_err(|never| match never {})))
                }
            },
            KindProjection::Broken(error) => Poll::Ready(error.take().map(Err)),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Streaming(body) => body.is_end_stream(),
            Kind::Whole { data, trailers } => data.is_end_stream() && trailers.is_none(),
            Kind::Broken(error) => error.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Streaming(body) => body.size_hint(),
            Kind::Whole { data, .. } => data.size_hint(),
            Kind::Broken(_) => SizeHint::default(),
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
