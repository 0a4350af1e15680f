//! A body that was read, as the inner service and as key extractors get it.

use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Method};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{Collected, Empty};
use pin_project::pin_project;

use crate::middleware::routed::nested_segments;

/// Extension of a request whose body was read by a [`BufferBodyLayer`](crate::BufferBodyLayer): the bytes of
/// the body. Body keys ignore a copy of it in another request.
#[derive(Debug, Clone)]
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

/// A body of which a layer has read the whole or the beginning: what was read, in one frame, and then the rest, or the
/// trailers. The layers that read bodies pass it on in place of the original.
#[pin_project]
#[derive(Clone)]
pub struct ReadBody<B: Body> {
    pub(crate) bytes: Bytes,
    /// What was not read.
    #[pin]
    pub(crate) rest: Option<B>,
    /// The error that ended the reading.
    pub(crate) error: Option<B::Error>,
    pub(crate) trailers: Option<HeaderMap>,
}

/// A body that was read to its end.
pub(crate) type WholeBody = ReadBody<Empty<Bytes>>;

impl<B: Body<Data = Bytes>> ReadBody<B> {
    pub(crate) fn whole(bytes: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self {
            bytes,
            rest: None,
            error: None,
            trailers,
        }
    }

    pub(crate) fn collected(body: Collected<Bytes>) -> Self {
        let trailers = body.trailers().cloned();
        Self::whole(body.to_bytes(), trailers)
    }

    pub(crate) fn unread(body: B) -> Self {
        Self {
            rest: Some(body),
            ..Self::default()
        }
    }
}

/// An empty body, for layers that send a request again, such as `FollowRedirect`.
impl<B: Body<Data = Bytes>> Default for ReadBody<B> {
    fn default() -> Self {
        Self::whole(Bytes::new(), None)
    }
}

impl<B: Body<Data = Bytes>> Body for ReadBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.project();
        if !this.bytes.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(mem::take(this.bytes)))));
        }
        if let Some(rest) = this.rest.as_pin_mut() {
            return rest.poll_frame(context);
        }
        let error = this.error.take().map(Err);
        Poll::Ready(error.or_else(|| Some(Ok(Frame::trailers(this.trailers.take()?)))))
    }

    fn is_end_stream(&self) -> bool {
        let is_read = self.bytes.is_empty() && self.error.is_none() && self.trailers.is_none();
        is_read && self.rest.as_ref().is_none_or(B::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let rest = match &self.rest {
            Some(rest) => rest.size_hint(),
            None if self.error.is_some() => SizeHint::default(),
            None => SizeHint::with_exact(0),
        };
        let read = self.bytes.len() as u64;
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + read);
        if let Some(upper) = rest.upper() {
            // For an exact size, HTTP/1.1 declares the length, and has no place for trailers then.
            hint.set_upper(upper + read + u64::from(self.trailers.is_some()));
        }
        hint
    }
}

opaque_debug! { ReadBody<B> where B: Body }
