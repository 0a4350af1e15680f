//! What clients read of bodies: of requests to send them again, of responses to see their `code`.

use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http_body::Body;

use crate::middleware::ReadBody;

impl<B: Body<Data = Bytes> + Unpin> ReadBody<B> {
    /// Returns a copy, if the body was read to its end.
    pub(super) fn copy(&self) -> Option<Self> {
        let is_whole = self.rest.is_none() && self.error.is_none();
        is_whole.then(|| Self::whole(self.bytes.clone(), self.trailers.clone()))
    }

    /// Reads until the end, an error, or more than `limit` bytes. A body that says that it is longer is not begun.
    pub(super) fn poll_read(&mut self, limit: u64, context: &mut Context<'_>) -> Poll<()> {
        let read = &mut self.bytes;
        while let Some(rest) = &mut self.rest
            && rest.size_hint().lower().saturating_add(read.len() as u64) <= limit
        {
            match ready!(Pin::new(rest).poll_frame(context)) {
                None => self.rest = None,
                Some(Err(error)) => {
                    (self.rest, self.error) = (None, Some(error));
                }
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if read.is_empty() => *read = data,
                    Ok(data) => {
                        let mut joined = BytesMut::from(mem::take(read));
                        joined.extend_from_slice(&data);
                        *read = joined.freeze();
                    }
                    Err(frame) => self.trailers = frame.into_trailers().ok(),
                },
            }
        }
        Poll::Ready(())
    }
}
