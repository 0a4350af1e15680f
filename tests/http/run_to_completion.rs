//! Handlers whose client goes away: dropped, or run to their end under their lock.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]

use std::convert::Infallible;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tokio::time::{sleep, timeout};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{LockHandle, LockKeys, OnLost, Redlock, RedlockLayer, RunToCompletion};

const WORK: Duration = Duration::from_secs(30);
const TTL: Duration = Duration::from_secs(3);

fn layer(nodes: &ScriptedNodes) -> RedlockLayer<RunToCompletion> {
    let redlock = Redlock::builder().scripted(nodes).ttl(TTL).build();
    RedlockLayer::new(redlock.unwrap(), "resource").on_disconnect(RunToCompletion)
}

type Answer = Result<Response<Full<Bytes>>, Infallible>;

/// A handler that works for a while, and notes when it is done.
fn handler(
    done: &Arc<AtomicBool>,
) -> impl Service<
    Request<()>,
    Response = Response<Full<Bytes>>,
    Error = Infallible,
    Future: Send + 'static,
> + Clone
+ use<> {
    let done = Arc::clone(done);
    service_fn(move |request: Request<()>| {
        let done = Arc::clone(&done);
        async move {
            sleep(WORK).await;
            let handle = request.extensions().get::<LockHandle>();
            assert!(handle.is_none_or(LockHandle::is_valid));
            done.store(true, Ordering::Relaxed);
            Answer::Ok(Response::new("done".into()))
        }
    })
}

fn post() -> Request<()> {
    Request::post("/").body(()).unwrap()
}

/// Waits in small steps, so that the paused clock stops soon after it is so.
async fn until(is_so: impl Fn() -> bool) {
    while !is_so() {
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_whose_client_went_away_keeps_its_lock_until_it_is_done() {
    let (nodes, done) = (ScriptedNodes::new(3), Arc::default());
    let service = layer(&nodes).layer(handler(&done));
    let gone = timeout(Duration::from_secs(1), service.oneshot(post())).await;
    assert!(gone.is_err(), "the handler works for longer");
    let other = Redlock::builder()
        .scripted(&nodes)
        .ttl(TTL)
        .build()
        .unwrap();
    // Renewed several times meanwhile.
    sleep(WORK - Duration::from_secs(2)).await;
    assert!(other.try_lock("resource").await.is_err());
    until(|| done.load(Ordering::Relaxed)).await;
    until(|| nodes.locks() == [0, 0, 0]).await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_stays_finds_the_lock_free_with_the_last_piece() {
    let (nodes, done) = (ScriptedNodes::new(3), Arc::default());
    let service = layer(&nodes).layer(handler(&done));
    let response = service.oneshot(post()).await.unwrap();
    assert_eq!(nodes.locks(), [1, 1, 1]);
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "done");
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn the_end_of_the_lock_is_the_end_of_a_handler_that_is_told_to_abort() {
    for (on_lost, expected) in [(OnLost::Abort, false), (OnLost::Notify, true)] {
        let (nodes, done) = (ScriptedNodes::new(3), Arc::<AtomicBool>::default());
        let inner = {
            let done = Arc::clone(&done);
            service_fn(move |_: Request<()>| {
                let done = Arc::clone(&done);
                async move {
                    sleep(WORK).await;
                    done.store(true, Ordering::Relaxed);
                    Answer::Ok(Response::default())
                }
            })
        };
        let service = layer(&nodes).on_lost(on_lost).layer(inner);
        let gone = timeout(Duration::from_secs(1), service.oneshot(post())).await;
        assert!(gone.is_err());
        for node in 0..3 {
            nodes.set_for(node, OpKind::Confirm, Gate::Failing);
        }
        sleep(WORK).await;
        assert_eq!(done.load(Ordering::Relaxed), expected, "{on_lost:?}");
        assert_eq!(nodes.locks(), [0, 0, 0]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_lock_lost_under_a_client_that_stays_is_answered_with_503() {
    let (nodes, done) = (ScriptedNodes::new(3), Arc::default());
    let service = layer(&nodes).layer(handler(&done));
    for node in 0..3 {
        nodes.set_for(node, OpKind::Confirm, Gate::Failing);
    }
    let response = service.oneshot(post()).await.unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    sleep(2 * WORK).await;
    assert!(!done.load(Ordering::Relaxed), "the handler goes on");
}

/// The inner layer's second key is new, its first is shared with the outer layer, which cancels.
#[tokio::test(start_paused = true)]
async fn a_handler_that_runs_on_keeps_also_the_locks_that_its_layer_shares() {
    let (nodes, done) = (ScriptedNodes::new(3), Arc::default());
    let redlock = Redlock::builder()
        .scripted(&nodes)
        .ttl(TTL)
        .build()
        .unwrap();
    let both = |_: &Parts| ["a", "b"].into_iter().collect::<LockKeys>();
    let inner = RedlockLayer::new(redlock.clone(), both).on_disconnect(RunToCompletion);
    let service = (RedlockLayer::new(redlock, "a"), inner).layer(handler(&done));
    let gone = timeout(Duration::from_secs(1), service.oneshot(post())).await;
    assert!(gone.is_err());
    sleep(WORK - Duration::from_secs(2)).await;
    assert_eq!(nodes.locks(), [2, 2, 2]);
    until(|| done.load(Ordering::Relaxed)).await;
    until(|| nodes.locks() == [0, 0, 0]).await;
}

#[tokio::test(start_paused = true)]
async fn a_panic_reaches_the_client_s_connection_and_frees_the_lock() {
    let nodes = ScriptedNodes::new(3);
    let inner = service_fn(async |_: Request<()>| -> Answer { panic!("planted") });
    let service = layer(&nodes).layer(inner);
    let call = std::panic::AssertUnwindSafe(service.oneshot(post()));
    assert!(call.catch_unwind().await.is_err());
    until(|| nodes.locks() == [0, 0, 0]).await;
}

#[tokio::test(start_paused = true)]
async fn a_request_without_a_lock_is_dropped_as_ever() {
    let (nodes, done) = (ScriptedNodes::new(3), Arc::default());
    let service = layer(&nodes).layer(handler(&done));
    let mut get = post();
    *get.method_mut() = Method::GET;
    let gone = timeout(Duration::from_secs(1), service.oneshot(get)).await;
    assert!(gone.is_err());
    sleep(2 * WORK).await;
    assert!(!done.load(Ordering::Relaxed));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_for_handlers_whose_clients_went_away() {
    let (nodes, done) = (ScriptedNodes::new(3), Arc::default());
    let redlock = Redlock::builder()
        .scripted(&nodes)
        .ttl(TTL)
        .build()
        .unwrap();
    let layer = RedlockLayer::new(redlock.clone(), "resource").on_disconnect(RunToCompletion);
    let service = layer.layer(handler(&done));
    let gone = timeout(Duration::from_secs(1), service.oneshot(post())).await;
    assert!(gone.is_err());
    let drained = redlock.drain(2 * WORK).await;
    assert!(done.load(Ordering::Relaxed) && drained.held.is_empty());
}

/// By default nothing is asked of the inner service's future.
#[tokio::test(start_paused = true)]
async fn a_future_that_cannot_change_threads_is_served() {
    let inner = service_fn(async |_: Request<()>| {
        let text = Rc::new("local");
        tokio::task::yield_now().await;
        Answer::Ok(Response::new((*text).into()))
    });
    let service = RedlockLayer::new(Redlock::in_memory(1), "resource").layer(inner);
    let response = service.oneshot(post()).await.unwrap();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "local");
}
