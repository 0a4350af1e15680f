//! Many requests at once: waiters that hold only their place in the queue, and 10,000 dropped requests.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use futures_util::stream;
use http::{Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use support::{ms, secs, three_nodes};
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};
use tower::limit::ConcurrencyLimit;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{Redlock, RedlockLayer, Rejection, ReleaseAt, RunToCompletion, key};

use crate::sockets::server::Counted;

/// After a third of the ttl, nothing is due for any lock, and what wakes them ends.
const WAKER_ENDS: Duration = secs(4);

fn post(target: &str) -> Request<()> {
    Request::post(target).body(()).unwrap()
}

async fn answer(_: Request<()>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new("done".into()))
}

// Rules: lock-overloaded
#[tokio::test(start_paused = true)]
async fn max_waiters_refuses_request_1001_and_waiters_hold_no_concurrency_permit() {
    const WAITERS: usize = 1_000;
    let (nodes, redlock) = three_nodes();
    let layer = RedlockLayer::new(redlock.clone(), key::query("id"));
    let layer = layer.wait(secs(60)).max_waiters(WAITERS);
    let service = layer.layer(ConcurrencyLimit::new(service_fn(answer), 1));
    let guard = redlock.lock("hot").await.unwrap();
    let call = |target| service.clone().oneshot(post(target));
    let waiting: Vec<_> = (0..WAITERS)
        .map(|_| tokio::spawn(call("/?id=hot")))
        .collect();
    sleep(ms(10)).await;

    let served = timeout(ms(100), call("/?id=cold")).await.unwrap().unwrap();
    assert_eq!(served.status(), StatusCode::OK);
    drop(served);
    let refused = call("/?id=hot").await.unwrap();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    let rejection = refused.extensions().get::<Rejection>().unwrap();
    assert_eq!(rejection.code(), "lock-overloaded");

    // A place that is given up is free at once.
    waiting[WAITERS / 2].abort();
    sleep(ms(1)).await;
    let mut late = Box::pin(call("/?id=hot"));
    assert!(timeout(ms(10), &mut late).await.is_err(), "it waits");
    drop(late);

    drop(guard);
    let mut served = 0;
    for waiter in waiting {
        let Ok(response) = waiter.await else { continue };
        let response = response.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        response.into_body().collect().await.unwrap();
        served += 1;
    }
    assert_eq!(served, WAITERS - 1);
    assert_eq!(redlock.drain(secs(1)).await.held, []);
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

/// An inner service that takes its time, streams some of its answers, and counts what is in it.
fn inner(
    counts: &Arc<Counts>,
) -> impl Service<
    Request<()>,
    Response = Response<http_body_util::combinators::UnsyncBoxBody<Bytes, Infallible>>,
    Error = Infallible,
    Future: Send + 'static,
> + Clone
+ use<> {
    let counts = Arc::clone(counts);
    service_fn(move |request: Request<()>| {
        let counts = Arc::clone(&counts);
        async move {
            let here = Counted::new(&counts.inside);
            let inside = counts.inside.load(Ordering::Relaxed);
            assert_eq!(inside, 1, "two are inside");
            counts.begun.fetch_add(1, Ordering::Relaxed);
            sleep(ms(3)).await;
            counts.done.fetch_add(1, Ordering::Relaxed);
            drop(here);
            let streams = request.uri().path() == "/stream";
            let body = if streams {
                let frames = stream::unfold(0_u8, |sent| async move {
                    sleep(ms(1)).await;
                    let frame = Ok(Frame::data(Bytes::from_static(b"piece")));
                    (sent < 3).then_some((frame, sent + 1))
                });
                StreamBody::new(frames).boxed_unsync()
            } else {
                Full::from("done").boxed_unsync()
            };
            Ok(Response::new(body))
        }
    })
}

/// Of handlers.
#[derive(Debug, Default)]
struct Counts {
    inside: Arc<AtomicUsize>,
    begun: AtomicUsize,
    /// Those that were not dropped.
    done: AtomicUsize,
}

#[tokio::test(start_paused = true)]
async fn requests_dropped_at_10000_instants_leave_no_lock_and_no_task() {
    const REQUESTS: usize = 10_000;
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let nodes = ScriptedNodes::new(3);
    for (node, op, delay) in [
        (0, OpKind::Acquire, 1),
        (1, OpKind::Acquire, 2),
        (1, OpKind::Release, 3),
        (2, OpKind::Acquire, 7),
        (2, OpKind::Release, 1),
    ] {
        nodes.set_for(node, op, Gate::Slow(ms(delay)));
    }
    let redlock = Redlock::builder().scripted(&nodes).build().unwrap();
    let counts = Arc::default();
    let layer = RedlockLayer::new(redlock.clone(), "hot").wait(ms(20));
    let head = layer.clone().release_at(ReleaseAt::ResponseHead);
    let hasty = layer.clone().await_release(false);
    let (layer, head, hasty) = (
        layer.layer(inner(&counts)),
        head.layer(inner(&counts)),
        hasty.layer(inner(&counts)),
    );
    let (mut done, mut tasks) = (0, Vec::new());
    for number in 0..REQUESTS {
        let service = [&layer, &head, &hasty][rng.usize(..3)].clone();
        let target = ["/", "/stream"][rng.usize(..2)];
        let patience = Duration::from_micros(rng.u64(0..30_000));
        tasks.push(tokio::spawn(timeout(patience, async move {
            let response = service.oneshot(post(target)).await.unwrap();
            response.into_body().collect().await.map(drop).unwrap();
        })));
        // A few at a time.
        if number % 4 == 3 {
            for task in tasks.drain(..) {
                done += usize::from(task.await.unwrap().is_ok());
            }
        }
    }
    assert!(done > REQUESTS / 10 && done < REQUESTS, "{done} were done");
    let drained = redlock.drain(secs(1)).await;
    assert_eq!((drained.held, drained.unconfirmed), (vec![], vec![]));
    sleep(WAKER_ENDS).await;
    assert_eq!(nodes.locks(), [0, 0, 0]);
    // The slow nodes have a task each, and so has the home.
    assert_eq!(Handle::current().metrics().num_alive_tasks(), 4);
}

/// The same with handlers that run on; they end all the same.
#[tokio::test(start_paused = true)]
async fn run_to_completion_handlers_of_1000_dropped_requests_all_end() {
    let (nodes, redlock) = three_nodes();
    let counts = Arc::<Counts>::default();
    let layer = RedlockLayer::new(redlock.clone(), "hot").wait(ms(20));
    let service = layer.on_disconnect(RunToCompletion).layer(inner(&counts));
    // Of requests: answered, gone while some handler ran, and gone without a handler.
    let (mut answered, mut gone_amid, mut gone_before) = (0, 0, 0);
    for micros in 0..1_000 {
        let patience = Duration::from_micros(10 * micros);
        let begun = counts.begun.load(Ordering::Relaxed);
        let call = service.clone().oneshot(post("/"));
        match timeout(patience, call).await {
            Ok(response) => {
                assert_eq!(response.unwrap().status(), StatusCode::OK);
                answered += 1;
            }
            // Its own handler: no other request is left that could begin one.
            Err(_) if counts.begun.load(Ordering::Relaxed) > begun => gone_amid += 1,
            Err(_) => gone_before += 1,
        }
    }
    let drained = redlock.drain(secs(1)).await;
    assert_eq!((drained.held, drained.unconfirmed), (vec![], vec![]));
    sleep(WAKER_ENDS).await;
    assert_eq!(nodes.locks(), [0, 0, 0]);
    // That of the home.
    assert_eq!(Handle::current().metrics().num_alive_tasks(), 1);
    let done = counts.done.load(Ordering::Relaxed);
    assert_eq!(
        done,
        answered + gone_amid,
        "every handler that began ran to its end"
    );
    assert!(
        answered >= 100 && gone_amid >= 100,
        "{answered} answered, {gone_amid} gone while they were served, {gone_before} before"
    );
}
