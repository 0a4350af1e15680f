//! A body whose beginning was read: of requests to send them again, of responses to see their `code`.

use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};

use crate::middleware::BufferedRequestBody;
use crate::middleware::macros::opaque_debug;

/// Body of the requests and responses of a [`RetryLockedService`](crate::client::RetryLockedService): what the layer has
/// read of the original body, in one frame, and then the rest of it.
pub struct ClientBody<B: Body> {
    start: BufferedRequestBody,
    /// What was not read: the rest, or the error that ended the reading.
    rest: Option<Result<B, B::Error>>,
}

impl<B: Body<Data = Bytes> + Unpin> ClientBody<B> {
    pub(super) fn unread(body: B) -> Self {
        let (start, rest) = (BufferedRequestBody::default(), Some(Ok(body)));
        Self { start, rest }
    }

    /// Creates a body that has all its bytes.
    pub(super) fn whole(start: BufferedRequestBody) -> Self {
        Self { start, rest: None }
    }

    /// Returns a copy, if the body was read to its end.
    pub(super) fn copy(&self) -> Option<Self> {
        self.read().map(|start| Self::whole(start.clone()))
    }

    /// Returns what was read, if that is the whole body.
    pub(super) fn read(&self) -> Option<&BufferedRequestBody> {
        self.rest.is_none().then_some(&self.start)
    }

    /// Reads until the end, an error, or more than `limit` bytes. A body that says that it is longer is not begun.
    pub(super) fn poll_read(&mut self, limit: u64, context: &mut Context<'_>) -> Poll<()> {
        let read = &mut self.start.bytes;
        while let Some(Ok(rest)) = &mut self.rest
            && rest.size_hint().lower().saturating_add(read.len() as u64) <= limit
        {
            match ready!(Pin::new(rest).poll_frame(context)) {
                None => self.rest = None,
                Some(Err(error)) => self.rest = Some(Err(error)),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if read.is_empty() => *read = data,
                    Ok(data) => {
                        let mut joined = BytesMut::from(mem::take(read));
                        joined.extend_from_slice(&data);
                        *read = joined.freeze();
                    }
                    Err(frame) => self.start.trailers = frame.into_trailers().ok(),
                },
            }
        }
        Poll::Ready(())
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for ClientBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if !self.start.is_end_stream() {
            let frame = Pin::new(&mut self.start).poll_frame(context);
            return frame.map_err(|never| match never {});
        }
        match &mut self.rest {
            Some(Ok(rest)) => Pin::new(rest).poll_frame(context),
            // An error is told once.
            rest => Poll::Ready(rest.take().and_then(Result::err).map(Err)),
        }
    }

    fn is_end_stream(&self) -> bool {
        let has_ended = |rest: &Result<B, _>| rest.as_ref().is_ok_and(Body::is_end_stream);
        self.start.is_end_stream() && self.rest.as_ref().is_none_or(has_ended)
    }

    fn size_hint(&self) -> SizeHint {
        let start = self.start.size_hint();
        let rest = match &self.rest {
            None => return start,
            Some(rest) => rest.as_ref().map(Body::size_hint).unwrap_or_default(),
        };
        let mut hint = SizeHint::new();
        hint.set_lower(start.lower() + rest.lower());
        if let (Some(start), Some(rest)) = (start.upper(), rest.upper()) {
            hint.set_upper(start + rest);
        }
        hint
    }
}

/// Nothing in it is pinned.
impl<B: Body + Unpin> Unpin for ClientBody<B> {}

opaque_debug! { ClientBody<B> where B: Body }
