//! Handlers whose client disconnects: dropped, or run to completion under their lock.

use std::convert::Infallible;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use support::{ms, secs, set_all, subscribe, three_nodes_with};
use tokio::time::{sleep, timeout};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{LockHandle, LockKeys, OnLost, Redlock, RedlockLayer, RunToCompletion};
use tracing::{Instrument, Metadata, Span};

use crate::scripted_bodies::post;
use crate::shop::until_free;

const WORK: Duration = secs(30);
const TTL: Duration = secs(3);

fn layer(nodes: &ScriptedNodes) -> RedlockLayer<RunToCompletion> {
    let redlock = Redlock::builder().scripted(nodes).ttl(TTL).build();
    RedlockLayer::new(redlock.unwrap(), "resource").on_disconnect(RunToCompletion)
}

type Answer = Result<Response<Full<Bytes>>, Infallible>;

/// Of each handler that came to its end: whether it still had its lock, if it had one.
type Done = Arc<Mutex<Vec<bool>>>;

/// A handler that works for a while.
fn handler(
    done: &Done,
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
            let is_valid = handle.is_none_or(LockHandle::is_valid);
            done.lock().unwrap().push(is_valid);
            Answer::Ok(Response::new("done".into()))
        }
    })
}

#[tokio::test(start_paused = true)]
async fn run_to_completion_aborts_the_handler_of_a_lost_lock_unless_on_lost_is_notify() {
    for (on_lost, status, expected) in [
        (OnLost::Abort, StatusCode::SERVICE_UNAVAILABLE, &[][..]),
        (OnLost::Notify, StatusCode::OK, &[false]),
    ] {
        for client_stays in [false, true] {
            let (nodes, done) = (ScriptedNodes::new(3), Done::default());
            let service = layer(&nodes).on_lost(on_lost).layer(handler(&done));
            let patience = if client_stays { 2 * WORK } else { secs(1) };
            let serving = timeout(patience, service.oneshot(post()));
            let fail = async {
                sleep(ms(10)).await;
                set_all(&nodes, OpKind::Confirm, Gate::Failing);
            };
            let (response, ()) = tokio::join!(serving, fail);
            assert_eq!(response.is_ok(), client_stays);
            if let Ok(response) = response {
                assert_eq!(response.unwrap().status(), status);
            }
            sleep(2 * WORK).await;
            assert_eq!(*done.lock().unwrap(), expected, "{on_lost:?}");
            assert_eq!(nodes.locks(), [0, 0, 0]);
        }
    }
}

/// A task-local of the caller shows where the handler runs.
#[tokio::test(start_paused = true)]
async fn run_to_completion_moves_a_handler_to_a_task_in_the_span_of_its_request_when_it_is_dropped()
{
    tokio::task_local! {
        static CALLER: ();
    }
    let _subscriber = subscribe(tracing_subscriber::registry());
    let (seen, nodes) = (Arc::new(Mutex::new(Vec::new())), ScriptedNodes::new(3));
    let inner_seen = Arc::clone(&seen);
    let inner = service_fn(move |_: Request<()>| {
        let seen = Arc::clone(&inner_seen);
        let see = move || {
            let name = Span::current().metadata().map(Metadata::name);
            let is_with_caller = CALLER.try_with(|()| ()).is_ok();
            seen.lock().unwrap().push((name, is_with_caller));
        };
        async move {
            see();
            sleep(WORK).await;
            see();
            Answer::Ok(Response::default())
        }
    });
    let service = layer(&nodes).layer(inner);
    for patience in [2 * WORK, secs(1)] {
        let serving = timeout(patience, service.clone().oneshot(post()));
        let serving = serving.instrument(tracing::info_span!("request"));
        assert_eq!(CALLER.scope((), serving).await.is_ok(), patience > WORK);
        sleep(WORK).await;
    }
    let within = |is_with_caller| (Some("request"), is_with_caller);
    let expected = [true, true, true, false].map(within);
    assert_eq!(*seen.lock().unwrap(), expected);
}

/// The inner layer's second key is new, its first is shared with the outer layer, which cancels.
#[tokio::test(start_paused = true)]
async fn run_to_completion_keeps_locks_shared_with_an_outer_layer_and_drain_waits_for_it() {
    let done = Done::default();
    let (nodes, redlock) = three_nodes_with(|builder| builder.ttl(TTL));
    let both = |_: &Parts| ["a", "b"].into_iter().collect::<LockKeys>();
    let inner = RedlockLayer::new(redlock.clone(), both).on_disconnect(RunToCompletion);
    let service = (RedlockLayer::new(redlock.clone(), "a"), inner).layer(handler(&done));
    let gone = timeout(secs(1), service.oneshot(post())).await;
    assert!(gone.is_err());
    sleep(WORK - secs(2)).await;
    assert_eq!(nodes.locks(), [2, 2, 2]);
    let drained = redlock.drain(2 * WORK).await;
    assert_eq!(
        (drained.held, &*done.lock().unwrap()),
        (vec![], &vec![true])
    );
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn run_to_completion_propagates_a_panic_and_releases_the_lock() {
    let nodes = ScriptedNodes::new(3);
    let inner = service_fn(async |_: Request<()>| -> Answer { panic!("planted") });
    let service = layer(&nodes).layer(inner);
    let call = std::panic::AssertUnwindSafe(service.oneshot(post()));
    assert!(call.catch_unwind().await.is_err());
    until_free(&nodes).await;
}

#[tokio::test(start_paused = true)]
async fn run_to_completion_drops_requests_without_a_lock() {
    let (nodes, done) = (ScriptedNodes::new(3), Done::default());
    let service = layer(&nodes).layer(handler(&done));
    let mut get = post();
    *get.method_mut() = Method::GET;
    let gone = timeout(secs(1), service.oneshot(get)).await;
    assert!(gone.is_err());
    sleep(2 * WORK).await;
    assert!(done.lock().unwrap().is_empty());
}

/// By default nothing is asked of the inner service's future.
#[tokio::test(start_paused = true)]
async fn layer_serves_a_future_that_is_not_send() {
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
