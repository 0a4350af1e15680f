//! Threads that block beyond the validity of a lock, as those of a process do that is stopped.
//!
//! The crate compares the validity with the clock and does not rely on a timer alone: no handler begins or goes on
//! without its lock, and no response is passed on that came too late.

use std::convert::Infallible;
use std::future::ready;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::{Request, Response, StatusCode};
use bytes::Bytes;
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use support::{Executed, ms, secs};
use tokio::time::{Instant, sleep};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redlock::{OnLost, Redlock, RedlockLayer};

use crate::scripted_bodies::{code, layer, post};

const TTL: Duration = ms(200);

/// Keeps the thread busy until every lock that was held before is over.
fn block() {
    let end = Instant::now() + 2 * TTL;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

fn redlock() -> Redlock {
    Redlock::builder().embedded(3).ttl(TTL).build().unwrap()
}

/// A handler that counts when it has ended, and takes as long as `work`.
fn handler<F: Future<Output = ()>, W: Fn() -> F + Clone>(
    ended: &Executed,
    work: W,
) -> impl Service<Request<()>, Response = Response<Full<Bytes>>, Error = Infallible> + Clone + use<F, W>
{
    let ended = ended.clone();
    service_fn(move |_: Request<()>| {
        let (ended, working) = (ended.clone(), work());
        async move {
            working.await;
            ended.one_more();
            Ok(Response::default())
        }
    })
}

// Rules: http.clock
#[tokio::test]
async fn handler_that_blocks_its_thread_beyond_the_lock_is_answered_lock_lost() {
    for (on_lost, expected) in [(OnLost::Abort, "lock-lost"), (OnLost::Notify, "none")] {
        let layer = layer(&redlock()).on_lost(on_lost);
        let ended = Executed::default();
        let inner = handler(&ended, async || block());
        let Ok(response) = layer.layer(inner).oneshot(post()).await;
        assert_eq!(code(&response), expected, "{on_lost:?}");
    }
}

/// Its timer and that of the lock are due at the same time when the thread goes on.
#[tokio::test]
async fn handler_whose_thread_was_blocked_beyond_the_lock_does_not_go_on() {
    for (on_lost, expected, count) in [(OnLost::Abort, "lock-lost", 0), (OnLost::Notify, "none", 1)]
    {
        let (layer, ended) = (layer(&redlock()).on_lost(on_lost), Executed::default());
        let inner = handler(&ended, async || {
            tokio::spawn(async { block() });
            sleep(TTL / 2).await;
        });
        let Ok(response) = layer.layer(inner).oneshot(post()).await;
        assert_eq!(code(&response), expected, "{on_lost:?}");
        assert_eq!(ended.count(), count, "{on_lost:?}");
    }
}

/// Keeps the thread busy while it becomes ready, but for the first time.
#[derive(Clone)]
struct SlowReadiness<S>(S, Executed);

impl<S: Service<Request<()>>> Service<Request<()>> for SlowReadiness<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        if self.1.one_more() > 1 {
            block();
        }
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<()>) -> S::Future {
        self.0.call(request)
    }
}

#[tokio::test]
async fn on_lost_notify_begins_no_handler_after_the_validity_of_its_lock() {
    for on_lost in [OnLost::Abort, OnLost::Notify] {
        let called = Executed::default();
        let inner = SlowReadiness(handler(&called, || ready(())), Executed::default());
        let layer: RedlockLayer = layer(&redlock()).on_lost(on_lost).wait(secs(1));
        let Ok(response) = layer.layer(inner).oneshot(post()).await;
        assert_eq!(code(&response), "lock-lost", "{on_lost:?}");
        assert_eq!(called.count(), 0, "{on_lost:?}");
    }
}

#[tokio::test]
async fn body_that_blocks_its_thread_beyond_the_lock_ends_with_an_error() {
    let handler = service_fn(|_: Request<()>| {
        let frames = (0..3).map(|number| {
            if number == 1 {
                block();
            }
            Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"part")))
        });
        let body = StreamBody::new(futures_util::stream::iter(frames));
        ready(Ok::<_, Infallible>(Response::new(body)))
    });
    let Ok(response) = layer(&redlock()).layer(handler).oneshot(post()).await;
    assert_eq!(response.status(), StatusCode::OK);
    let error = response.into_body().collect().await.err().unwrap();
    assert!(error.to_string().contains("lost"), "{error}");
}
