//! Responses that keep their connection until they are read or dropped.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::header::RETRY_AFTER;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{Full, StreamBody};
use tokio::sync::Semaphore;
use tower::{Layer, ServiceExt, service_fn};

use crate::client::RetryLockedLayer;
use crate::middleware::ReadBody;
use crate::node::Mutex;

#[tokio::test(start_paused = true)]
async fn responses_that_are_not_returned_keep_no_connection_while_the_request_waits() {
    for status in [StatusCode::CONFLICT, StatusCode::SERVICE_UNAVAILABLE] {
        let connections = Arc::new(Semaphore::new(1));
        let answered = Arc::new(Mutex::new(0));
        let (free, count) = (Arc::clone(&connections), Arc::clone(&answered));
        let service = service_fn(move |_: Request<ReadBody<Full<Bytes>>>| {
            let (free, count) = (Arc::clone(&free), Arc::clone(&count));
            async move {
                let connection = free.acquire_owned().await.unwrap();
                let mut count = count.lock();
                *count += 1;
                let frames = stream::iter([Ok::<_, Infallible>(Frame::data(Bytes::from("x")))]);
                let frames = frames.chain(stream::poll_fn(move |_| {
                    let _connection = &connection;
                    Poll::Ready(None)
                }));
                let mut response = Response::new(StreamBody::new(frames));
                if *count == 1 {
                    *response.status_mut() = status;
                    let soon = HeaderValue::from_static("1");
                    response.headers_mut().insert(RETRY_AFTER, soon);
                }
                Ok::<_, Infallible>(response)
            }
        });
        let layer = RetryLockedLayer::new();
        let request = Request::put("http://bank.example/").body(Full::from("amount=5"));
        let response = layer
            .layer(service)
            .oneshot(request.unwrap())
            .await
            .unwrap();
        assert_eq!((response.status(), *answered.lock()), (StatusCode::OK, 2));
    }
}
