//! The contract of `tower::Service`: the layer calls only ready services, keeps no readiness or permit
//! unused, and fits every place of a stack.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::poll;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use support::{ms, secs};
use tokio::time::{sleep, timeout};
use tower::buffer::{Buffer, BufferLayer};
use tower::limit::{ConcurrencyLimit, ConcurrencyLimitLayer};
use tower::util::BoxCloneSyncService;
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt};
use tower_redlock::middleware::{RedlockService, ResponseFuture};
use tower_redlock::{KeyExtractor, LockBody, Redlock, RedlockLayer, Rejection, key};

/// How long the probe works on a request, and how long a request may wait for its lock.
const WORK: Duration = ms(20);
const WAIT: Duration = secs(10);

/// More than all requests of a test take one after the other; beyond it they block each other.
const DEADLOCK: Duration = secs(60);

type Plain = Full<Bytes>;
type Stack = BoxCloneSyncService<Request<Plain>, Response<LockBody<Plain>>, BoxError>;

/// A service that notices when it is called without having been made ready.
///
/// Its clones are not ready: `service_fn`, which always is, cannot show that a layer calls a clone
/// instead of the instance that it was promised.
#[derive(Debug, Default)]
struct Probe {
    polls: usize,
    seen: Arc<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    calls: AtomicUsize,
    unready_calls: AtomicUsize,
}

impl Seen {
    /// Returns how often it was called, and how often without having been made ready.
    fn calls(&self) -> (usize, usize) {
        let calls = self.calls.load(Ordering::Relaxed);
        (calls, self.unready_calls.load(Ordering::Relaxed))
    }
}

impl Probe {
    /// Ready only at the second poll, as a service is that has to wait for something.
    const POLLS: usize = 2;
}

impl Clone for Probe {
    fn clone(&self) -> Self {
        Self {
            polls: 0,
            seen: Arc::clone(&self.seen),
        }
    }
}

impl Service<Request<Plain>> for Probe {
    type Response = Response<Plain>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Plain>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.polls += 1;
        if self.polls < Self::POLLS {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Plain>) -> Self::Future {
        self.seen.calls.fetch_add(1, Ordering::Relaxed);
        if self.polls < Self::POLLS {
            self.seen.unready_calls.fetch_add(1, Ordering::Relaxed);
        }
        self.polls = 0;
        Box::pin(async {
            sleep(WORK).await;
            Ok(Response::new(Full::from("done")))
        })
    }
}

/// Everything that may stand below and above the layer, by name.
const STACKS: [(&str, fn(RedlockLayer, Probe) -> Stack); 7] = [
    ("bare", |layer, probe| {
        boxed(layer.layer(probe).map_err(BoxError::from))
    }),
    ("limit below", |layer, probe| {
        let limited = ConcurrencyLimit::new(probe, 1);
        boxed(layer.layer(limited).map_err(BoxError::from))
    }),
    ("limit above", |layer, probe| {
        let limited = ConcurrencyLimit::new(layer.layer(probe), 1);
        boxed(limited.map_err(BoxError::from))
    }),
    ("buffer below", |layer, probe| {
        boxed(layer.layer(Buffer::new(probe, 1)))
    }),
    ("buffer above", |layer, probe| {
        boxed(Buffer::new(layer.layer(probe), 1))
    }),
    ("limit and buffer below", |layer, probe| {
        let limited = ConcurrencyLimit::new(Buffer::new(probe, 1), 1);
        boxed(layer.layer(limited))
    }),
    ("limits and buffers below and above", |layer, probe| {
        let stack = ServiceBuilder::new()
            .layer(BufferLayer::new(1))
            .layer(ConcurrencyLimitLayer::new(2))
            .layer(layer)
            .layer(BufferLayer::new(1))
            .layer(ConcurrencyLimitLayer::new(1));
        boxed(stack.service(probe))
    }),
];

fn boxed<S>(service: S) -> Stack
where
    S: Service<Request<Plain>, Response = Response<LockBody<Plain>>, Error = BoxError>,
    S: Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
{
    BoxCloneSyncService::new(service)
}

fn layer(redlock: &Redlock) -> RedlockLayer {
    RedlockLayer::new(redlock.clone(), key::header("x-key"))
}

fn request(method: &str, key: &str) -> Request<Plain> {
    let request = Request::builder().method(method).header("x-key", key);
    request.body(Full::default()).unwrap()
}

/// Sends a request as a client does: the response is read to its end.
async fn send(service: &mut Stack, request: Request<Plain>) -> u16 {
    let response = service.ready().await.unwrap().call(request).await.unwrap();
    let (head, body) = response.into_parts();
    body.collect().await.unwrap();
    head.status.as_u16()
}

/// A lock service, a stack with its layer, and what the probe below sees.
fn probed(stack: fn(RedlockLayer, Probe) -> Stack, wait: Duration) -> (Redlock, Stack, Arc<Seen>) {
    let (redlock, probe) = (Redlock::in_memory(3), Probe::default());
    let seen = Arc::clone(&probe.seen);
    let service = stack(layer(&redlock).wait(wait), probe);
    (redlock, service, seen)
}

/// Runs requests one after the other on one instance, then all at once on clones of it.
async fn sequentially_then_at_once(
    name: &str,
    mut service: Stack,
    requests: &[Request<Plain>],
) -> (Vec<u16>, Vec<u16>) {
    let one_by_one = async {
        let mut statuses = Vec::new();
        for request in requests {
            statuses.push(send(&mut service, request.clone()).await);
        }
        statuses
    };
    let deadlock = |_| panic!("deadlock: {name}");
    let one_by_one = timeout(DEADLOCK, one_by_one).await.unwrap_or_else(deadlock);
    let at_once = join_all(requests.iter().map(|request| {
        let mut service = service.clone();
        async move { send(&mut service, request.clone()).await }
    }));
    let at_once = timeout(DEADLOCK, at_once).await.unwrap_or_else(deadlock);
    (one_by_one, at_once)
}

#[tokio::test(start_paused = true)]
async fn locked_requests_call_only_ready_services() {
    for (name, stack) in STACKS {
        for (wait, least) in [(Duration::ZERO, 3), (WAIT, 6)] {
            let (redlock, service, seen) = probed(stack, wait);
            let requests = ["a", "a", "b", "c", "c", "c"].map(|key| request("POST", key));
            let name = format!("{name}, waiting {wait:?}");
            let (one_by_one, at_once) = sequentially_then_at_once(&name, service, &requests).await;
            assert_eq!(one_by_one, [200; 6], "{name}");
            let served = at_once.iter().filter(|status| **status == 200).count();
            assert!(served >= least, "{name}: {at_once:?}");
            assert_eq!(seen.calls(), (6 + served, 0), "{name}");
            assert_eq!(redlock.drain(DEADLOCK).await.held, [], "{name}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn passed_and_refused_requests_call_only_ready_services() {
    for (name, stack) in STACKS {
        for wait in [Duration::ZERO, WORK] {
            let (redlock, service, seen) = probed(stack, wait);
            let _elsewhere = redlock.lock("held").await.unwrap();
            // Passing, contended, and without a key, each before and after each other.
            let requests = [
                ("GET", "a"),
                ("POST", "held"),
                ("POST", ""),
                ("POST", "held"),
                ("GET", "held"),
                ("POST", "a"),
            ];
            let requests = requests.map(|(method, key)| request(method, key));
            let name = format!("{name}, waiting {wait:?}");
            let (one_by_one, at_once) = sequentially_then_at_once(&name, service, &requests).await;
            let expected = [200, 423, 400, 423, 200, 200];
            assert_eq!([&*one_by_one, &*at_once], [expected; 2], "{name}");
            assert_eq!(seen.calls(), (6, 0), "{name}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_request_leaves_the_service_usable() {
    for (name, stack) in STACKS {
        let (_redlock, mut service, seen) = probed(stack, WAIT);
        for polls in 0..12 {
            let mut left = pin!(send(&mut service, request("POST", "a")));
            for _ in 0..polls {
                if poll!(&mut left).is_ready() {
                    break;
                }
                sleep(WORK / 4).await;
            }
        }
        let last = timeout(DEADLOCK, send(&mut service, request("POST", "a"))).await;
        assert_eq!(last, Ok(200), "{name}");
        assert_eq!(seen.calls().1, 0, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_request_holds_no_concurrency_permit_and_no_buffer_slot() {
    for (name, stack) in STACKS {
        if name.contains("above") {
            // What stands above the layer is held by its requests, waiting or not.
            continue;
        }
        let (redlock, mut service, _seen) = probed(stack, WAIT);
        let elsewhere = redlock.lock("hot").await.unwrap();
        let mut hot_one = service.clone();
        let mut hot = pin!(send(&mut hot_one, request("POST", "hot")));
        for _ in 0..5 {
            assert!(poll!(&mut hot).is_pending());
            sleep(WORK).await;
        }

        let other = timeout(3 * WORK, send(&mut service, request("POST", "other"))).await;
        assert_eq!(other, Ok(200), "{name}: the hot key starves the route");
        elsewhere.release().await.unwrap();
        assert_eq!(hot.await, 200, "{name}");
    }
}

/// A service whose readiness fails from the second time on, and so does each of its calls.
#[derive(Debug, Clone, Default)]
struct Failing {
    was_ready: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Custom {
    Readiness,
    Call,
}

impl Service<Request<Plain>> for Failing {
    type Response = Response<Plain>;
    type Error = Custom;
    type Future = std::future::Ready<Result<Response<Plain>, Custom>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Custom>> {
        if std::mem::replace(&mut self.was_ready, true) {
            return Poll::Ready(Err(Custom::Readiness));
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Plain>) -> Self::Future {
        std::future::ready(Err(Custom::Call))
    }
}

/// In wait mode the layer asks a clone for readiness itself, once it has the lock.
#[tokio::test(start_paused = true)]
async fn errors_of_the_inner_service_keep_their_type_and_leave_no_lock() {
    for (wait, expected) in [(Duration::ZERO, Custom::Call), (WAIT, Custom::Readiness)] {
        let redlock = Redlock::in_memory(3);
        let mut service = layer(&redlock).wait(wait).layer(Failing::default());
        let ready = service.ready().await.unwrap();
        assert_eq!(ready.call(request("POST", "a")).await.err(), Some(expected));
        assert_eq!(service.ready().await.err(), Some(Custom::Readiness));
        assert_eq!(redlock.drain(DEADLOCK).await.held, []);
    }
}

/// What users may do with the public types, checked by the compiler alone.
#[test]
fn public_types_have_their_documented_auto_traits() {
    macro_rules! check {
        ($($type:ty => [$($bound:tt)+]),+ $(,)?) => {$({
            fn holds<T: $($bound)+>() {}
            holds::<$type>();
        })+};
    }
    check! {
        RedlockLayer => [Clone + Send + Sync + fmt::Debug + 'static],
        RedlockService<Probe> => [Clone + Send + Sync + fmt::Debug + 'static],
        ResponseFuture<Probe, Plain> => [Send + fmt::Debug + 'static],
        ResponseFuture<axum::routing::Route, Body> => [Send + 'static],
        LockBody<Plain> => [Send + Unpin + http_body::Body<Data = Bytes> + fmt::Debug + 'static],
        // For `BodyExt::boxed`, and for the layers that make responses of their own, such as tower-http's
        // CORS and timeouts.
        LockBody<Plain> => [Sync + Default],
        LockBody<Body> => [Send + http_body::Body<Data = Bytes, Error = BoxError> + 'static],
        Rejection => [Clone + Send + Sync + fmt::Debug + 'static],
        Arc<dyn KeyExtractor> => [KeyExtractor + Clone],
        (&'static str, Arc<dyn KeyExtractor>) => [KeyExtractor + Clone],
    }
}
