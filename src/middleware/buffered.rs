//! A body that was read, as the inner service and as key extractors get it.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Method};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Collected;

use crate::middleware::routed::nested_segments;

/// Extension of a request whose body was read by a [`BufferBodyLayer`](crate::BufferBodyLayer): the bytes of
/// the body. Body keys ignore a copy of it in another request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BufferedBody(pub Bytes);

impl BufferedBody {
    /// Returns the body of a request. That of another request, whose extensions this one has, does not count.
    pub(crate) fn of(parts: &Parts) -> Option<&Self> {
        let body = parts.extensions.get()?;
        let of = parts.extensions.get::<BufferedFor>();
        of.is_none_or(|of| of.is(parts)).then_some(body)
    }
}

/// The method and the path of the request that a body was read of, in its extensions, and whether this is a copy.
///
/// # Design
///
/// A handler that sends other requests on with its extensions copies them. The copy of a request for a retry counts as
/// the same request: it has the same method and path, but for what nested routers have taken off. What is no copy may
/// also have been rewritten.
pub(super) struct BufferedFor(Arc<(Method, String, usize)>, bool);

impl BufferedFor {
    pub(super) fn new(parts: &Parts) -> Self {
        let path = path(parts).to_owned();
        Self(Arc::new((parts.method.clone(), path, depth(parts))), false)
    }

    fn is(&self, parts: &Parts) -> bool {
        let (method, full, total) = &*self.0;
        let is_same = *method == parts.method && full.ends_with(path(parts));
        !self.1 || (is_same && *total == depth(parts))
    }
}

fn path(parts: &Parts) -> &str {
    parts.uri.path().trim_end_matches('/')
}

/// Returns the number of segments of the path, with those that nested routers have taken off.
fn depth(parts: &Parts) -> usize {
    path(parts).matches('/').count() + nested_segments(parts)
}

/// By hand: a copy says that it is one.
impl Clone for BufferedFor {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0), true)
    }
}

/// A request body that was read: the same bytes, in one frame, and the same trailers.
#[derive(Debug, Clone, Default)]
pub struct BufferedRequestBody {
    pub(crate) bytes: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
}

impl BufferedRequestBody {
    pub(crate) fn collected(body: Collected<Bytes>) -> Self {
        let trailers = body.trailers().cloned();
        let bytes = body.to_bytes();
        Self { bytes, trailers }
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
        let trailers = self.trailers.take();
        Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_empty() && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        let len = self.bytes.len() as u64;
        let mut hint = SizeHint::with_exact(len);
        if self.trailers.is_some() {
            // For an exact size, HTTP/1.1 declares the length, and has no place for trailers then.
            hint.set_upper(len + 1);
        }
        hint
    }
}
