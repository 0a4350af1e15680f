//! A body that was read, as the inner service and as key extractors get it.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};

/// Extension of a request whose body was read by a [`BufferBodyLayer`](crate::BufferBodyLayer): the bytes of
/// the body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BufferedBody(pub Bytes);

/// A request body that was read: the same bytes, in one frame, and the same trailers.
#[derive(Debug, Clone, Default)]
pub struct BufferedRequestBody {
    bytes: Bytes,
    trailers: Option<HeaderMap>,
}

impl BufferedRequestBody {
    pub(crate) fn new(bytes: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self { bytes, trailers }
    }

    #[cfg(feature = "idempotency")]
    pub(crate) fn bytes(&self) -> &Bytes {
        &self.bytes
    }
}

impl Body for BufferedRequestBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if !self.bytes.is_empty() {
            let bytes = std::mem::take(&mut self.bytes);
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        Poll::Ready(
            self.trailers
                .take()
                .map(|trailers| Ok(Frame::trailers(trailers))),
        )
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_empty() && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.len() as u64)
    }
}
