//! The body of a response whose execution goes on.

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{iter, poll_fn};
use http_body::Frame;
use http_body_util::StreamBody;
use tokio::sync::mpsc;
use tower::BoxError;

use crate::middleware::LockBody;

/// A frame, `None` for the end of the body, or the error that ends it. Without these two, the execution was stopped.
pub(super) type PassedOn = Result<Option<Frame<Bytes>>, BoxError>;

/// Creates a body that an execution passes on. If the execution is stopped, or its outcome is not this response, the body
/// ends with an error.
pub(super) fn executing<B>() -> (mpsc::Sender<PassedOn>, LockBody<B>) {
    let (sender, mut frames) = mpsc::channel::<PassedOn>(1);
    let passed_on = poll_fn(move |context| {
        let stopped = || Err("the execution of the request was stopped".into());
        let next = frames.poll_recv(context);
        next.map(|next| next.unwrap_or_else(stopped).transpose())
    });
    (sender, LockBody::boxed(StreamBody::new(passed_on.fuse())))
}

/// Creates the body of a response whose inner body failed while it was read to be recorded.
pub(super) fn broken<B>(error: BoxError) -> LockBody<B> {
    LockBody::boxed(StreamBody::new(iter([Err(error)])))
}
