//! Requests whose lock is lost: no handler begins without its lock, and an aborted one is not polled
//! again. The tests poll each response future by hand, so that a poll comes after the loss.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::poll;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use support::{Executed, ms, redlock, secs};
use tokio::time::sleep;
use tower::{Layer, Service, ServiceExt};
use tower_redlock::middleware::RedlockService;
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{LockBody, LockHandle, OnLost, Redlock, RedlockLayer, Rejection};

const TTL: Duration = secs(1);
const WAIT: Duration = secs(10);

type Plain = Full<Bytes>;

/// A service whose readiness and whose answer the test decides, and which counts what it is asked.
#[derive(Debug, Clone, Default)]
struct Inner(Arc<Seen>);

#[derive(Debug, Default)]
struct Seen {
    is_ready: AtomicBool,
    answers: AtomicBool,
    calls: Executed,
    /// How often its handlers were polled.
    polls: Executed,
    lock: Mutex<Option<LockHandle>>,
}

impl Service<Request<Plain>> for Inner {
    type Response = Response<Plain>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Plain>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        if self.0.is_ready.load(Ordering::Relaxed) {
            Poll::Ready(Ok(()))
        } else {
            Poll::Pending
        }
    }

    fn call(&mut self, request: Request<Plain>) -> Self::Future {
        let seen = Arc::clone(&self.0);
        seen.calls.one_more();
        *seen.lock.lock().unwrap() = request.extensions().get().cloned();
        Box::pin(poll_fn(move |_| {
            seen.polls.one_more();
            if seen.answers.load(Ordering::Relaxed) {
                Poll::Ready(Ok(Response::new(Full::from("done"))))
            } else {
                Poll::Pending
            }
        }))
    }
}

/// A layer over nodes whose locks are not renewed, around a service, and what that sees.
fn stack(
    wait: Duration,
    on_lost: OnLost,
    is_ready: bool,
) -> (ScriptedNodes, RedlockService<Inner>, Arc<Seen>) {
    let nodes = ScriptedNodes::new(3);
    let builder = Redlock::builder().scripted(&nodes).ttl(TTL).renew(false);
    let (inner, redlock) = (Inner::default(), builder.build().unwrap());
    let seen = Arc::clone(&inner.0);
    seen.is_ready.store(is_ready, Ordering::Relaxed);
    let layer = RedlockLayer::new(redlock, "k").wait(wait).on_lost(on_lost);
    (nodes, layer.layer(inner), seen)
}

fn request() -> Request<Plain> {
    Request::post("/").body(Full::default()).unwrap()
}

#[track_caller]
fn assert_lost(polled: Poll<Result<Response<LockBody<Plain>>, Infallible>>, what: &str) {
    let Poll::Ready(Ok(response)) = polled else {
        panic!("{what}: still under way");
    };
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE, "{what}");
    let rejection = response.extensions().get::<Rejection>();
    assert_eq!(rejection.map(Rejection::code), Some("lock-lost"), "{what}");
}

#[tokio::test(start_paused = true)]
async fn on_lost_abort_answers_503_without_polling_the_handler_again() {
    for wait in [Duration::ZERO, WAIT] {
        for answers in [false, true] {
            let what = format!("waiting {wait:?}, the handler has an answer: {answers}");
            let (_nodes, mut service, seen) = stack(wait, OnLost::Abort, true);
            let service = service.ready().await.unwrap();
            let mut serving = pin!(service.call(request()));
            while seen.polls.count() == 0 {
                assert!(poll!(&mut serving).is_pending(), "{what}");
                sleep(ms(1)).await;
            }

            let lock = seen.lock.lock().unwrap().take().unwrap();
            lock.lost().await;
            let polled = seen.polls.count();
            seen.answers.store(answers, Ordering::Relaxed);
            assert_lost(poll!(&mut serving), &what);
            assert_eq!(seen.polls.count(), polled, "{what}: the handler went on");
        }
    }
}

/// In wait mode a request asks for readiness itself, once it has its lock.
#[tokio::test(start_paused = true)]
async fn layer_begins_no_handler_if_its_lock_is_lost_while_the_service_is_not_ready() {
    for on_lost in [OnLost::Abort, OnLost::Notify] {
        for becomes_ready in [false, true] {
            let what = format!("{on_lost:?}, ready at last: {becomes_ready}");
            let (nodes, mut service, seen) = stack(WAIT, on_lost, false);
            let mut serving = pin!(service.call(request()));
            while nodes.locks() != [1, 1, 1] {
                assert!(poll!(&mut serving).is_pending(), "{what}");
                sleep(ms(1)).await;
            }
            assert!(poll!(&mut serving).is_pending(), "{what}");

            sleep(TTL).await;
            seen.is_ready.store(becomes_ready, Ordering::Relaxed);
            assert_lost(poll!(&mut serving), &what);
            assert_eq!(
                seen.calls.count(),
                0,
                "{what}: a handler began without its lock"
            );
        }
    }
}

/// The lease task gets the lock from another process while the response future is not polled.
// Rules: http.clock
#[tokio::test(start_paused = true)]
async fn layer_begins_no_handler_if_its_lock_is_lost_before_the_future_is_polled() {
    for on_lost in [OnLost::Abort, OnLost::Notify] {
        let what = format!("{on_lost:?}");
        let (nodes, mut service, seen) = stack(WAIT, on_lost, true);
        let elsewhere = redlock(&nodes).lock("k").await.unwrap();
        let mut serving = pin!(service.call(request()));
        for _ in 0..3 {
            assert!(poll!(&mut serving).is_pending(), "{what}");
            sleep(ms(1)).await;
        }
        elsewhere.release().await.unwrap();
        sleep(TTL / 2).await;
        assert_eq!(nodes.locks(), [1, 1, 1], "{what}: its task has the lock");
        sleep(TTL).await;
        assert_lost(poll!(&mut serving), &what);
        assert_eq!(
            seen.calls.count(),
            0,
            "{what}: a handler began without its lock"
        );
    }
}
