//! When exactly a request's lock is released, what the client can see of it, and what goes over HTTP.
//!
//! Over scripted nodes on tokio's paused clock, so that a held frame is told from one that is not by
//! the time it took. Responses are read as hyper reads them: it stops at trailers, at the end that
//! the body reports, and at the content-length, without polling further.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::future::{Future, pending};
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::header::{CONTENT_LENGTH, RETRY_AFTER};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Empty, Full};
use tokio::task::yield_now;
use tokio::time::{Instant, Sleep, sleep};
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    LockBody, LockHandle, LockLostError, LostReason, OnLost, OnMissingKey, OnUnavailable, Redlock,
    RedlockLayer, Rejection, ReleaseAt, RequestKind, Unprotected, key,
};

const TTL: Duration = ms(3_000);
const NODE_TIMEOUT: Duration = ms(50);

/// How long the nodes take to confirm a release in these tests: what is held back, is held so long.
const RELEASE: Duration = ms(20);

/// A tick more or less is the resolution of tokio's timers.
const TICK: Duration = ms(2);

/// What a body does next.
#[derive(Debug, Clone, Copy)]
enum Step {
    Data(&'static str),
    Trailers,
    Wait(Duration),
    Error,
    Panic,
}

use Step::{Data, Error, Panic, Trailers, Wait};

use crate::support::ms;

/// A body that does what it is told to, and ends.
struct Script {
    steps: VecDeque<Step>,
    waiting: Option<Pin<Box<Sleep>>>,
    hint: SizeHint,
    knows_its_end: bool,
    dropped: Flag,
}

/// Set when its holder is dropped.
#[derive(Debug, Clone, Default)]
struct Flag(Arc<AtomicBool>);

impl Flag {
    fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn set_when_dropped(&self) -> SetWhenDropped {
        SetWhenDropped(self.clone())
    }
}

struct SetWhenDropped(Flag);

impl Drop for SetWhenDropped {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Broken;

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the body broke")
    }
}

impl std::error::Error for Broken {}

/// A stream of unknown length that tells its end only by ending.
fn stream(steps: &[Step]) -> Script {
    Script {
        steps: steps.iter().copied().collect(),
        waiting: None,
        hint: SizeHint::default(),
        knows_its_end: false,
        dropped: Flag::default(),
    }
}

impl Script {
    /// Makes the body report an exact size.
    fn sized(mut self, size: u64) -> Self {
        self.hint = SizeHint::with_exact(size);
        self
    }

    /// Makes the body report its end with the last frame.
    fn ending(mut self) -> Self {
        self.knows_its_end = true;
        self
    }
}

impl Body for Script {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        if let Some(waiting) = &mut self.waiting {
            ready!(waiting.as_mut().poll(context));
            self.waiting = None;
        }
        match self.steps.pop_front() {
            None => Poll::Ready(None),
            Some(Error) => Poll::Ready(Some(Err(Broken))),
            Some(Panic) => panic!("the body panics"),
            Some(Trailers) => Poll::Ready(Some(Ok(Frame::trailers(HeaderMap::new())))),
            Some(Wait(delay)) => {
                self.waiting = Some(Box::pin(sleep(delay)));
                self.poll_frame(context)
            }
            Some(Data(data)) => {
                if let Some(size) = self.hint.exact() {
                    self.hint = SizeHint::with_exact(size - data.len() as u64);
                }
                Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(data.as_bytes())))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.knows_its_end && self.steps.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        self.hint
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        drop(self.dropped.set_when_dropped());
    }
}

fn redlock(nodes: &ScriptedNodes) -> Redlock {
    let builder = Redlock::builder().scripted(nodes).ttl(TTL);
    builder.node_timeout(NODE_TIMEOUT).build().unwrap()
}

fn layer(redlock: &Redlock) -> RedlockLayer {
    RedlockLayer::new(redlock.clone(), "resource")
}

fn post() -> Request<()> {
    Request::post("/").body(()).unwrap()
}

/// Nodes that grant at once and take [`RELEASE`] to confirm a release.
fn slow_to_release() -> ScriptedNodes {
    let nodes = ScriptedNodes::new(3);
    set_release(&nodes, [Gate::Slow(RELEASE); 3]);
    nodes
}

fn set_release(nodes: &ScriptedNodes, gates: [Gate; 3]) {
    for (node, gate) in gates.into_iter().enumerate() {
        nodes.set_for(node, OpKind::Release, gate);
    }
}

fn is_free(nodes: &ScriptedNodes) -> bool {
    nodes.locks().iter().sum::<usize>() == 0
}

/// Sends a request through a layer whose handler answers with `response`.
async fn answered<B>(
    layer: &RedlockLayer,
    request: Request<()>,
    response: Response<B>,
) -> Response<LockBody<B>>
where
    B: Body<Data = Bytes, Error: Into<BoxError>>,
{
    let response = Mutex::new(Some(response));
    let service = service_fn(|_: Request<()>| {
        let response = response.lock().unwrap().take().unwrap();
        async { Ok::<_, Infallible>(response) }
    });
    layer.layer(service).oneshot(request).await.unwrap()
}

/// The pieces of a response in order, each with whether it was held back.
struct Log {
    asked: Instant,
    pieces: Vec<String>,
}

impl Log {
    fn note(&mut self, piece: &str) {
        let took = self.asked.elapsed();
        let held = took >= RELEASE;
        assert!(took <= if held { RELEASE + TICK } else { TICK }, "{took:?}");
        let held = if held { "held " } else { "" };
        self.pieces.push(format!("{held}{piece}"));
        self.asked = Instant::now();
    }
}

/// Reads a response as hyper does, and notes its pieces.
///
/// When it is done, the lock must be free on a majority: the client may send its next request.
async fn read<B>(
    nodes: &ScriptedNodes,
    layer: &RedlockLayer,
    request: Request<()>,
    response: Response<B>,
) -> Vec<String>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
{
    let method = request.method().clone();
    let (asked, pieces) = (Instant::now(), Vec::new());
    let mut log = Log { asked, pieces };

    let (head, mut body) = answered(layer, request, response).await.into_parts();
    log.note("head");
    let declared = head.headers.get(CONTENT_LENGTH);
    let declared = declared.map(|length| length.to_str().unwrap().parse().unwrap());
    let mut left: Option<u64> = declared.or_else(|| body.size_hint().exact());
    let bodiless = method == Method::HEAD
        || (method == Method::CONNECT && head.status.is_success())
        || matches!(head.status.as_u16(), 204 | 304);
    let mut is_done = bodiless || body.is_end_stream() || left == Some(0);
    while !is_done {
        let Some(frame) = body.frame().await else {
            log.note("end");
            break;
        };
        match frame.unwrap().into_data() {
            Ok(data) => {
                log.note(&format!("data {}", String::from_utf8_lossy(&data)));
                left = left.map(|left| left - data.len() as u64);
                is_done = body.is_end_stream() || left == Some(0);
            }
            Err(_) => {
                log.note("trailers");
                is_done = true;
            }
        }
    }
    assert!(is_free(nodes), "done, but still locked: {:?}", log.pieces);
    log.pieces
}

/// Takes [`post`] and a handler's response through the layer, with a lock service of its own.
async fn pieces<B>(request: Request<()>, response: Response<B>) -> Vec<String>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
{
    let nodes = slow_to_release();
    let methods = [Method::POST, Method::HEAD, Method::CONNECT];
    let layer = layer(&redlock(&nodes)).methods(methods);
    read(&nodes, &layer, request, response).await
}

fn ok<B>(body: B) -> Response<B> {
    Response::new(body)
}

fn with_length<B>(length: &'static str, body: B) -> Response<B> {
    let mut response = ok(body);
    let length = HeaderValue::from_static(length);
    response.headers_mut().insert(CONTENT_LENGTH, length);
    response
}

#[tokio::test(start_paused = true)]
async fn last_frame_of_a_body_that_reports_its_end_is_held() {
    let full = ok(Full::<Bytes>::from("ab"));
    assert_eq!(pieces(post(), full).await, ["head", "held data ab"]);
    let ending = ok(stream(&[Data("ab"), Data("cd")]).ending());
    assert_eq!(
        pieces(post(), ending).await,
        ["head", "data ab", "held data cd"]
    );
}

#[tokio::test(start_paused = true)]
async fn frame_that_completes_the_declared_size_is_held() {
    let sized = ok(stream(&[Data("ab"), Data("cd")]).sized(4));
    assert_eq!(
        pieces(post(), sized).await,
        ["head", "data ab", "held data cd"]
    );
    // hyper does not poll beyond the declared length, so the end of the stream is too late.
    let never_ends = stream(&[Data("ab"), Data("cd"), Wait(10 * TTL)]);
    assert_eq!(
        pieces(post(), with_length("4", never_ends)).await,
        ["head", "data ab", "held data cd"]
    );
}

#[tokio::test(start_paused = true)]
async fn trailers_and_the_end_of_a_plain_stream_are_held() {
    let trailers = ok(stream(&[Data("ab"), Trailers]));
    assert_eq!(
        pieces(post(), trailers).await,
        ["head", "data ab", "held trailers"]
    );
    let plain = ok(stream(&[Data("ab"), Data("cd")]));
    assert_eq!(
        pieces(post(), plain).await,
        ["head", "data ab", "data cd", "held end"]
    );
    let empty = ok(stream(&[]));
    assert_eq!(pieces(post(), empty).await, ["head", "held end"]);
}

#[tokio::test(start_paused = true)]
async fn head_is_held_when_no_body_is_sent() {
    let endless = || stream(&[Wait(10 * TTL)]);
    let request = |method| Request::builder().method(method).uri("/").body(()).unwrap();
    let with_status = |status, body| {
        let mut response = ok(body);
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        response
    };
    assert_eq!(
        pieces(post(), ok(Empty::<Bytes>::new())).await,
        ["held head"]
    );
    assert_eq!(
        pieces(post(), ok(stream(&[]).sized(0))).await,
        ["held head"]
    );
    for status in [204, 304] {
        let response = with_status(status, endless());
        assert_eq!(pieces(post(), response).await, ["held head"], "{status}");
    }
    for status in [200, 404] {
        let response = with_status(status, endless());
        let pieces = pieces(request("HEAD"), response).await;
        assert_eq!(pieces, ["held head"], "HEAD {status}");
    }
    let tunnel = with_status(200, endless());
    assert_eq!(pieces(request("CONNECT"), tunnel).await, ["held head"]);
    let no_tunnel = with_status(404, stream(&[Data("no")]));
    assert_eq!(
        pieces(request("CONNECT"), no_tunnel).await,
        ["head", "data no", "held end"]
    );
}

#[tokio::test(start_paused = true)]
async fn head_is_held_when_the_declared_length_is_zero() {
    // hyper ends such a message with its head and drops the body without a poll.
    let response = with_length("0", stream(&[]));
    assert_eq!(pieces(post(), response).await, ["held head"]);
}

#[tokio::test(start_paused = true)]
async fn body_reads_no_frame_ahead_and_delays_only_the_last() {
    let nodes = slow_to_release();
    let steps = [Data("a"), Wait(ms(7)), Data("b"), Wait(ms(7)), Data("c")];
    let body = stream(&steps).ending();
    let mut body = answered(&layer(&redlock(&nodes)), post(), ok(body))
        .await
        .into_body();
    let mut after = Vec::new();
    loop {
        let began = Instant::now();
        let Some(frame) = body.frame().await else {
            break;
        };
        assert!(frame.unwrap().is_data());
        after.push(began.elapsed());
        // Time that the client takes is not the body's.
        sleep(ms(100)).await;
    }
    assert_eq!(after.len(), 3);
    assert_eq!(after[0], Duration::ZERO);
    assert!(after[1] >= ms(7) && after[1] <= ms(7) + TICK, "{after:?}");
    assert!(after[2] >= ms(7) + RELEASE && after[2] <= ms(7) + RELEASE + 2 * TICK);
}

#[tokio::test(start_paused = true)]
async fn body_with_a_held_frame_is_not_at_its_end_and_counts_the_frame() {
    let nodes = slow_to_release();
    let body = Full::<Bytes>::from("abcd");
    let body = answered(&layer(&redlock(&nodes)), post(), ok(body))
        .await
        .into_body();
    let mut body = pin!(body);
    assert!(!body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(4));
    assert!(futures_util::poll!(body.as_mut().frame()).is_pending());
    // The inner body is at its end now, but its frame is here.
    assert!(!body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(4));
    let frame = body.as_mut().frame().await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "abcd");
    assert!(body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(0));
    assert!(body.as_mut().frame().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn body_that_fails_passes_its_error_on_and_releases_in_the_background() {
    let nodes = slow_to_release();
    let redlock = redlock(&nodes);
    let body = stream(&[Data("ab"), Error]);
    let mut body = answered(&layer(&redlock), post(), ok(body))
        .await
        .into_body();
    body.frame().await.unwrap().unwrap();
    let began = Instant::now();
    let error = body.frame().await.unwrap().unwrap_err();
    assert_eq!(error.downcast_ref(), Some(&Broken));
    assert_eq!(began.elapsed(), Duration::ZERO, "the error is not held");
    sleep(RELEASE + TICK).await;
    assert!(is_free(&nodes), "the body is still there, its lock is not");
}

#[tokio::test(start_paused = true)]
async fn dropped_body_releases_in_the_background() {
    for frames in 0..=2 {
        let nodes = slow_to_release();
        let redlock = redlock(&nodes);
        let inner = stream(&[Data("ab"), Data("cd"), Wait(10 * TTL)]);
        let dropped = inner.dropped.clone();
        let mut body = answered(&layer(&redlock), post(), ok(inner))
            .await
            .into_body();
        for _ in 0..frames {
            body.frame().await.unwrap().unwrap();
        }
        assert!(!is_free(&nodes));
        drop(body);
        assert!(dropped.is_set());
        sleep(RELEASE + TICK).await;
        assert!(is_free(&nodes), "after {frames} frames");
        assert_eq!(redlock.drain(TTL).await.held, []);
    }
}

#[tokio::test(start_paused = true)]
async fn response_future_dropped_while_the_head_is_held_releases() {
    let nodes = slow_to_release();
    let redlock = redlock(&nodes);
    let layer = layer(&redlock);
    let response = ok(Empty::<Bytes>::new());
    let mut asking = Box::pin(answered(&layer, post(), response));
    while nodes.sent(0, OpKind::Release) == 0 {
        assert!(futures_util::poll!(&mut asking).is_pending());
        yield_now().await;
    }
    drop(asking);
    sleep(RELEASE + TICK).await;
    assert!(is_free(&nodes));
}

#[tokio::test(start_paused = true)]
async fn release_at_head_awaits_a_majority_and_not_the_slowest_node() {
    let slow = |millis| Gate::Slow(ms(millis));
    for (gates, expected) in [
        ([Gate::Ready, Gate::Ready, Gate::Never], ms(0)),
        ([Gate::Ready, slow(20), slow(40)], ms(20)),
        ([slow(20), Gate::Never, slow(30)], ms(30)),
        ([slow(10), Gate::Failing, slow(10)], ms(10)),
    ] {
        let nodes = ScriptedNodes::new(3);
        set_release(&nodes, gates);
        let redlock = redlock(&nodes);
        let layer = layer(&redlock).release_at(ReleaseAt::ResponseHead);
        let began = Instant::now();
        let body = stream(&[Data("ab"), Wait(TTL), Data("cd")]);
        let response = answered(&layer, post(), ok(body)).await;
        let took = began.elapsed();
        assert!(
            took >= expected && took <= expected + TICK,
            "{gates:?}: {took:?}"
        );
        let free = nodes.locks().iter().filter(|locks| **locks == 0).count();
        assert!(free >= 2, "{gates:?}: {:?}", nodes.locks());
        // The body has nothing to do with the lock any more.
        let began = Instant::now();
        assert_eq!(
            response.into_body().collect().await.unwrap().to_bytes(),
            "abcd"
        );
        assert!(began.elapsed() <= TTL + TICK);
    }
}

#[tokio::test(start_paused = true)]
async fn unconfirmed_release_holds_the_response_for_one_node_timeout() {
    for gate in [Gate::Mute, Gate::Never] {
        for release_at in [ReleaseAt::BodyEnd, ReleaseAt::ResponseHead] {
            let nodes = ScriptedNodes::new(3);
            set_release(&nodes, [gate, gate, Gate::Ready]);
            let layer = layer(&redlock(&nodes)).release_at(release_at);
            let began = Instant::now();
            let response = answered(&layer, post(), ok(Full::<Bytes>::from("ab"))).await;
            let body = response.into_body().collect().await.unwrap();
            let took = began.elapsed();
            assert_eq!(body.to_bytes(), "ab", "the response is what it is");
            assert!(
                took >= NODE_TIMEOUT && took <= NODE_TIMEOUT + TICK,
                "{gate:?} {release_at:?}: {took:?}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn await_release_off_holds_no_frame() {
    for release_at in [ReleaseAt::BodyEnd, ReleaseAt::ResponseHead] {
        let nodes = slow_to_release();
        let layer = layer(&redlock(&nodes)).release_at(release_at);
        let layer = layer.await_release(false);
        let began = Instant::now();
        let response = answered(&layer, post(), ok(stream(&[Data("ab"), Data("cd")]))).await;
        response.into_body().collect().await.unwrap();
        // A client's next request may find its own lock at another server: that is the price.
        let other = self::layer(&redlock(&nodes));
        let response = answered(&other, post(), ok(Empty::<Bytes>::new()));
        let refused = response.await.status() == StatusCode::LOCKED;
        assert!(refused, "{release_at:?}");
        assert_eq!(began.elapsed(), Duration::ZERO, "{release_at:?}");
        sleep(RELEASE + TICK).await;
        assert!(is_free(&nodes));
    }
}

/// Calls the handler with a flag that is set when its future is dropped.
fn working<F, B>(
    dropped: &Flag,
    work: impl Fn(Request<()>) -> F + Clone + Send + 'static,
) -> impl Service<Request<()>, Response = Response<B>, Error = Infallible, Future: Send> + Clone + Send
where
    F: Future<Output = Response<B>> + Send,
{
    let dropped = dropped.clone();
    service_fn(move |request| {
        let guard = dropped.set_when_dropped();
        let working = work(request);
        async move {
            let _guard = guard;
            Ok(working.await)
        }
    })
}

/// Makes a majority forget the lock, as if it were deleted there.
fn lose(nodes: &ScriptedNodes) {
    nodes.wipe(0);
    nodes.wipe(1);
}

fn code(response: &Response<impl Body>) -> &'static str {
    let rejection = response.extensions().get::<Rejection>();
    rejection.map_or("none", Rejection::code)
}

#[tokio::test(start_paused = true)]
async fn lock_lost_during_the_handler_aborts_it_with_503() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let dropped = Flag::default();
    let service = working(&dropped, |_| pending::<Response<Full<Bytes>>>());
    // Called directly: `oneshot` would drop the future as soon as it is done.
    let mut calling = pin!(layer(&redlock).layer(service).call(post()));
    assert!(futures_util::poll!(&mut calling).is_pending());
    sleep(ms(5)).await;
    lose(&nodes);
    let began = Instant::now();
    let response = calling.as_mut().await.unwrap();
    // The next renewal finds out.
    assert!(began.elapsed() <= TTL / 3 + TICK, "{:?}", began.elapsed());
    assert!(dropped.is_set(), "not only when the future is dropped");
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(code(&response), "lock-lost");
    assert_eq!(response.headers().get(RETRY_AFTER), None);
    let rejection = response.extensions().get::<Rejection>();
    assert_eq!(rejection, Some(&Rejection::Lost(LostReason::Gone)));
    sleep(NODE_TIMEOUT).await;
    assert!(is_free(&nodes), "the third node has nothing left either");
}

#[tokio::test(start_paused = true)]
async fn lock_lost_during_the_body_ends_it_with_an_error() {
    for max_hold in [ms(60_000), ms(500)] {
        let nodes = ScriptedNodes::new(3);
        let redlock = redlock(&nodes);
        let layer = layer(&redlock).max_hold(max_hold);
        let inner = stream(&[Data("ab"), Wait(10 * TTL), Data("cd")]);
        let dropped = inner.dropped.clone();
        let mut body = answered(&layer, post(), ok(inner)).await.into_body();
        body.frame().await.unwrap().unwrap();
        let expected = if max_hold < TTL {
            LostReason::MaxHold
        } else {
            lose(&nodes);
            LostReason::Gone
        };
        let error = body.frame().await.unwrap().unwrap_err();
        let lost = error.downcast_ref::<LockLostError>().unwrap();
        assert_eq!(lost.reason(), expected);
        assert!(dropped.is_set(), "the inner body is of no use any more");
        assert!(body.frame().await.is_none());
        assert!(body.is_end_stream());
        sleep(NODE_TIMEOUT).await;
        assert!(is_free(&nodes));
    }
}

#[tokio::test(start_paused = true)]
async fn on_lost_notify_lets_handler_and_body_go_on() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let dropped = Flag::default();
    let losing = nodes.clone();
    let service = working(&dropped, move |request| {
        let losing = losing.clone();
        async move {
            let lock = request.extensions().get::<LockHandle>().unwrap().clone();
            assert!(lock.is_valid());
            lose(&losing);
            assert_eq!(lock.lost().await, LostReason::Gone);
            assert!(!lock.is_valid());
            ok(stream(&[Data("ab"), Wait(TTL), Data("cd")]))
        }
    });
    let service = layer(&redlock).on_lost(OnLost::Notify).layer(service);
    let response = service.oneshot(post()).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let body = response.into_body().collect().await.unwrap();
    assert_eq!(body.to_bytes(), "abcd");
    assert_eq!(redlock.drain(TTL).await.held, []);
}

#[tokio::test(start_paused = true)]
async fn hold_until_sent_releases_with_the_last_frame() {
    let nodes = slow_to_release();
    let redlock = redlock(&nodes);
    let guard = redlock.lock("a").await.unwrap();
    let response = guard.hold_until_sent(ok(stream(&[Data("ab"), Data("cd")]).ending()));
    let mut body = response.into_body();
    let began = Instant::now();
    body.frame().await.unwrap().unwrap();
    assert_eq!(began.elapsed(), Duration::ZERO);
    assert!(!is_free(&nodes));
    body.frame().await.unwrap().unwrap();
    assert!(began.elapsed() >= RELEASE && is_free(&nodes));

    let guard = redlock.lock("a").await.unwrap();
    let response = guard.hold_until_sent(ok(stream(&[Wait(10 * TTL)])));
    lose(&nodes);
    let error = response.into_body().frame().await.unwrap().unwrap_err();
    assert!(error.is::<LockLostError>());
}

#[tokio::test(start_paused = true)]
async fn panic_in_the_handler_or_the_body_releases_the_lock() {
    type Handled = Pin<Box<dyn Future<Output = Response<Script>> + Send>>;
    let handlers: [fn() -> Handled; 3] = [
        || panic!("in the call"),
        || {
            Box::pin(async {
                sleep(ms(5)).await;
                panic!("in the future")
            })
        },
        || Box::pin(async { ok(stream(&[Data("ab"), Panic])) }),
    ];
    for handler in handlers {
        for as_task in [true, false] {
            let nodes = ScriptedNodes::new(3);
            let redlock = redlock(&nodes);
            let service = service_fn(move |_| handler().map(Ok::<_, Infallible>));
            let service = layer(&redlock).layer(service);
            let serving = async {
                let response = service.oneshot(post()).await.unwrap();
                drop(response.into_body().collect().await);
            };
            if as_task {
                assert!(tokio::spawn(serving).await.unwrap_err().is_panic());
            } else {
                AssertUnwindSafe(serving).catch_unwind().await.unwrap_err();
            }
            assert_eq!(redlock.drain(TTL).await.held, []);
            assert!(is_free(&nodes));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn inner_service_error_releases_the_lock() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let service = service_fn(|_: Request<()>| async {
        sleep(ms(5)).await;
        Err::<Response<Script>, _>(Broken)
    });
    let failed = layer(&redlock).layer(service).oneshot(post()).await;
    assert_eq!(failed.err(), Some(Broken));
    sleep(NODE_TIMEOUT).await;
    assert!(is_free(&nodes));
}

/// Polls a future so many times; between polls the other tasks get a turn, and now and then 10 ms
/// pass, of which all delays of nodes, handler and body are multiples.
async fn poll_times<F: Future + Unpin>(future: &mut F, times: usize) -> Option<F::Output> {
    for poll in 0..times {
        if let Poll::Ready(output) = futures_util::poll!(&mut *future) {
            return Some(output);
        }
        if poll % 3 == 2 {
            sleep(ms(10)).await;
        } else {
            yield_now().await;
        }
    }
    None
}

/// Drops a request at every poll of its head and body, over all kinds of nodes.
async fn drop_the_request_everywhere(configure: fn(RedlockLayer) -> RedlockLayer) {
    const GATES: [Gate; 4] = [Gate::Ready, Gate::Slow(RELEASE), Gate::Never, Gate::Failing];
    let all = |i: usize| [GATES[i % 4], GATES[i / 4 % 4], GATES[i / 16]];
    for gates in (0..64).map(all) {
        for polls in 0.. {
            let what = format!("{gates:?} after {polls} polls");
            let nodes = ScriptedNodes::new(3);
            for (node, gate) in gates.into_iter().enumerate() {
                nodes.set(node, gate);
            }
            let redlock = redlock(&nodes);
            let service = service_fn(|_: Request<()>| async {
                sleep(ms(10)).await;
                Ok::<_, Infallible>(ok(stream(&[
                    Data("ab"),
                    Wait(ms(10)),
                    Data("cd"),
                    Trailers,
                ])))
            });
            let service = configure(layer(&redlock)).layer(service);
            let mut serving = Box::pin(async {
                let response = service.oneshot(post()).await.unwrap();
                response.into_body().collect().await.unwrap();
            });
            let finished = poll_times(&mut serving, polls).await.is_some();
            drop(serving);

            let began = Instant::now();
            assert_eq!(redlock.drain(10 * TTL).await.held, [], "{what}");
            assert!(began.elapsed() <= 3 * NODE_TIMEOUT, "{what}");
            // What is on a slow wire arrives.
            sleep(RELEASE + TICK).await;
            assert!(is_free(&nodes), "{what}: {:?}", nodes.locks());
            if finished {
                break;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn response_future_dropped_at_any_poll_leaves_no_key() {
    drop_the_request_everywhere(|layer| layer).await;
}

#[tokio::test(start_paused = true)]
async fn response_future_dropped_at_any_poll_leaves_no_key_with_release_at_head() {
    drop_the_request_everywhere(|layer| layer.release_at(ReleaseAt::ResponseHead)).await;
}

#[tokio::test(start_paused = true)]
async fn waiting_request_dropped_at_any_poll_leaves_no_key() {
    drop_the_request_everywhere(|layer| layer.wait(TTL).await_release(false)).await;
}

/// What the handler saw of the request.
type Seen = Arc<Mutex<Option<Parts>>>;

/// A handler that keeps the head of the last request.
fn keeping(
    seen: &Seen,
) -> impl Service<Request<()>, Response = Response<Full<Bytes>>, Error = Infallible, Future: Send> + Clone
{
    let seen = Arc::clone(seen);
    service_fn(move |request: Request<()>| {
        *seen.lock().unwrap() = Some(request.into_parts().0);
        async { Ok(ok(Full::from("done"))) }
    })
}

async fn call(layer: &RedlockLayer, request: Request<()>) -> (Response<Bytes>, Option<Parts>) {
    let seen = Seen::default();
    let response = layer.layer(keeping(&seen)).oneshot(request).await.unwrap();
    let (head, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let seen = seen.lock().unwrap().take();
    (Response::from_parts(head, body), seen)
}

fn request(method: &str, headers: &[(&str, &str)]) -> Request<()> {
    let request = Request::builder().method(method).uri("/");
    let request = headers.iter().fold(request, |request, (name, value)| {
        request.header(*name, *value)
    });
    request.body(()).unwrap()
}

const TOKEN: HeaderName = HeaderName::from_static("x-fencing-token");

#[tokio::test(start_paused = true)]
async fn forward_token_replaces_a_token_sent_by_the_client() {
    let redlock = Redlock::in_memory(3);
    let layer = layer(&redlock)
        .forward_token(TOKEN)
        .skip(|parts| parts.headers.contains_key("x-skip"));
    let forged = ["1", "2"].map(|token| ("x-fencing-token", token));

    let (_, seen) = call(&layer, request("POST", &forged)).await;
    let seen = seen.unwrap();
    let handle = seen.extensions.get::<LockHandle>().unwrap();
    let token = handle.fencing_token().unwrap().to_string();
    let values: Vec<_> = seen.headers.get_all(TOKEN).iter().collect();
    assert_eq!(values, [token.as_str()]);

    // Requests without a lock must not arrive with a token of the client's either.
    for method in ["GET", "HEAD", "OPTIONS", "TRACE", "QUERY"] {
        let (_, seen) = call(&layer, request(method, &forged)).await;
        assert!(!seen.unwrap().headers.contains_key(TOKEN), "{method}");
    }
    let skipped = [forged[0], ("x-skip", "1")];
    let (_, seen) = call(&layer, request("POST", &skipped)).await;
    assert!(!seen.unwrap().headers.contains_key(TOKEN));
    // Without fencing there is no token, but still none of the client's.
    let unfenced = Redlock::builder().embedded(3).fencing(false).build();
    let layer = RedlockLayer::new(unfenced.unwrap(), "resource").forward_token(TOKEN);
    let (_, seen) = call(&layer, request("POST", &forged)).await;
    assert!(!seen.unwrap().headers.contains_key(TOKEN));
}

#[tokio::test(start_paused = true)]
async fn expose_token_sends_the_token_of_the_handler() {
    let redlock = Redlock::in_memory(3);
    let layer = layer(&redlock).expose_token(TOKEN);
    let mut last = 0;
    for _ in 0..3 {
        let (response, seen) = call(&layer, post()).await;
        let seen = seen.unwrap();
        let handle = seen.extensions.get::<LockHandle>().unwrap();
        let token = handle.fencing_token().unwrap().as_u64();
        assert_eq!(response.headers()[TOKEN], token.to_string());
        assert!(token > last);
        last = token;
    }
    let (passed, _) = call(&layer, request("GET", &[])).await;
    assert!(!passed.headers().contains_key(TOKEN));
}

#[tokio::test(start_paused = true)]
async fn unavailable_lock_is_503_or_proceeds_with_a_mark() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    nodes.set(0, Gate::Failing);
    nodes.set(1, Gate::Never);
    let rejecting = layer(&redlock);
    let (refused, seen) = call(&rejecting, post()).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(code(&refused.map(Full::new)), "lock-unavailable");
    assert!(seen.is_none());

    let proceeding = layer(&redlock)
        .on_unavailable(OnUnavailable::Proceed)
        .forward_token(TOKEN);
    let (served, seen) = call(&proceeding, request("POST", &[("x-fencing-token", "1")])).await;
    assert_eq!(served.status(), StatusCode::OK);
    let seen = seen.unwrap();
    assert!(seen.extensions.get::<Unprotected>().is_some());
    assert!(seen.extensions.get::<LockHandle>().is_none());
    assert!(!seen.headers.contains_key(TOKEN));

    // Proceeding is for nodes that are away, never for a lock that somebody has.
    nodes.set(0, Gate::Ready);
    nodes.set(1, Gate::Ready);
    let guard = redlock.lock("resource").await.unwrap();
    let (refused, seen) = call(&proceeding, post()).await;
    assert_eq!(refused.status(), StatusCode::LOCKED);
    assert!(seen.is_none());
    drop(guard);
    redlock.drain(TTL).await;
    let (refused, seen) = call(&proceeding, post()).await;
    assert_eq!(code(&refused.map(Full::new)), "shutting-down");
    assert!(seen.is_none());
    // With the lock there, nothing is marked.
    let healthy = RedlockLayer::new(Redlock::in_memory(3), "resource");
    let healthy = healthy.on_unavailable(OnUnavailable::Proceed);
    let seen = call(&healthy, post()).await.1.unwrap();
    assert!(seen.extensions.get::<Unprotected>().is_none());
}

#[tokio::test(start_paused = true)]
async fn contended_lock_is_423_with_retry_after_and_without_the_key() {
    let nodes = ScriptedNodes::new(3);
    let (ours, theirs) = (redlock(&nodes), redlock(&nodes));
    // Held by another process, and then by this one.
    for holder in [&theirs, &ours] {
        let guard = holder.lock("se-cret").await.unwrap();
        let layer = RedlockLayer::new(ours.clone(), "se-cret");
        let (refused, seen) = call(&layer, post()).await;
        assert!(seen.is_none());
        assert_eq!(refused.status(), StatusCode::LOCKED);
        assert_eq!(
            refused.headers()["content-type"],
            "application/problem+json"
        );
        assert_eq!(refused.headers()[RETRY_AFTER], "3");
        let text = String::from_utf8(refused.body().to_vec()).unwrap();
        let problem: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(problem["code"], "lock-contended");
        assert_eq!(problem["status"], 423);
        let everything = format!("{text}{:?}", refused.headers());
        let token = guard.fencing_token().unwrap().to_string();
        for secret in ["se-cret", "embedded", &token] {
            assert!(!everything.contains(secret), "{everything}");
        }
        guard.release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn rejection_sets_the_response_and_keeps_the_extension() {
    let redlock = Redlock::in_memory(3);
    let guard = redlock.lock("resource").await.unwrap();
    let conflict = layer(&redlock).contended_status(StatusCode::CONFLICT);
    let (refused, _) = call(&conflict, post()).await;
    assert_eq!(refused.status(), StatusCode::CONFLICT);
    assert_eq!(code(&refused.map(Full::new)), "lock-contended");

    let kinds = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&kinds);
    let dressed = conflict.rejection(move |rejection: &Rejection, to: &RequestKind| {
        seen.lock().unwrap().push(*to);
        let text = format!("{} {}", rejection.status(), rejection.code());
        let mut response = Response::new(Full::from(text));
        *response.status_mut() = StatusCode::IM_A_TEAPOT;
        response
    });
    let (refused, _) = call(&dressed, post()).await;
    assert_eq!(refused.status(), StatusCode::IM_A_TEAPOT);
    assert_eq!(refused.body(), "409 Conflict lock-contended");
    assert_eq!(code(&refused.map(Full::new)), "lock-contended");
    call(
        &dressed,
        request("POST", &[("content-type", "application/grpc+proto")]),
    )
    .await;
    assert_eq!(
        *kinds.lock().unwrap(),
        [RequestKind::Http, RequestKind::Grpc]
    );
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn grpc_rejections_are_200_with_grpc_status_in_the_head() {
    let grpc = || request("POST", &[("content-type", "application/grpc")]);
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let check = |(response, seen): (Response<Bytes>, Option<Parts>), status: &str, code: &str| {
        assert!(seen.is_none());
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "application/grpc");
        assert_eq!(response.headers()["grpc-status"], status);
        assert_eq!(response.headers()["grpc-message"], code);
        assert!(response.body().is_empty());
    };
    let guard = redlock.lock("resource").await.unwrap();
    check(call(&layer(&redlock), grpc()).await, "10", "lock-contended");
    guard.release().await.unwrap();
    let no_key = RedlockLayer::new(redlock.clone(), key::header("x-key"));
    check(call(&no_key, grpc()).await, "3", "key-missing");
    let no_router = RedlockLayer::new(redlock.clone(), key::path("id"));
    check(call(&no_router, grpc()).await, "13", "misconfigured");
    nodes.set(0, Gate::Down);
    nodes.set(1, Gate::Down);
    check(
        call(&layer(&redlock), grpc()).await,
        "14",
        "lock-unavailable",
    );
}

#[tokio::test(start_paused = true)]
async fn lost_lock_is_aborted_for_a_grpc_request() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let dropped = Flag::default();
    let service = working(&dropped, |_| pending::<Response<Full<Bytes>>>());
    let call = request("POST", &[("content-type", "application/grpc")]);
    let mut calling = pin!(layer(&redlock).layer(service).oneshot(call));
    assert!(futures_util::poll!(&mut calling).is_pending());
    sleep(ms(5)).await;
    lose(&nodes);
    let response = calling.await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()["grpc-status"], "10");
    assert_eq!(response.headers()["grpc-message"], "lock-lost");
}

#[tokio::test(start_paused = true)]
async fn safe_methods_and_skipped_requests_pass_while_the_lock_is_held() {
    let redlock = Redlock::in_memory(3);
    let guard = redlock.lock("resource").await.unwrap();
    let layer = layer(&redlock).skip(|parts| parts.headers.contains_key("x-skip"));
    for method in ["GET", "HEAD", "OPTIONS", "TRACE", "QUERY"] {
        let (served, seen) = call(&layer, request(method, &[])).await;
        assert_eq!(served.status(), StatusCode::OK, "{method}");
        assert!(seen.unwrap().extensions.get::<LockHandle>().is_none());
    }
    for method in [
        "POST", "PUT", "PATCH", "DELETE", "CONNECT", "PROPFIND", "get",
    ] {
        let (refused, seen) = call(&layer, request(method, &[])).await;
        assert_eq!(refused.status(), StatusCode::LOCKED, "{method}");
        assert!(seen.is_none());
    }
    let (skipped, _) = call(&layer, request("POST", &[("x-skip", "1")])).await;
    assert_eq!(skipped.status(), StatusCode::OK);
    // Chosen methods replace the default, they do not add to it.
    let only_get = layer.methods([Method::GET]);
    let (refused, _) = call(&only_get, request("GET", &[])).await;
    assert_eq!(refused.status(), StatusCode::LOCKED);
    let (served, _) = call(&only_get, request("POST", &[])).await;
    assert_eq!(served.status(), StatusCode::OK);
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn missing_key_is_refused_unless_on_missing_key_is_pass() {
    let redlock = Redlock::in_memory(3);
    let layer = RedlockLayer::new(redlock, key::header("x-key"));
    let (refused, seen) = call(&layer, post()).await;
    assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
    assert_eq!(code(&refused.map(Full::new)), "key-missing");
    assert!(seen.is_none());
    let layer = layer.missing_key(OnMissingKey::Pass);
    let (served, seen) = call(&layer, post()).await;
    assert_eq!(served.status(), StatusCode::OK);
    assert!(seen.unwrap().extensions.get::<LockHandle>().is_none());
}

#[tokio::test(start_paused = true)]
async fn max_waiters_refuses_one_more_request_with_503() {
    let redlock = Redlock::in_memory(3);
    let guard = redlock.lock("resource").await.unwrap();
    let layer = layer(&redlock).wait(TTL).max_waiters(1);
    let mut first = pin!(call(&layer, post()));
    assert!(futures_util::poll!(&mut first).is_pending());
    let (refused, _) = call(&layer, post()).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(refused.headers().contains_key(RETRY_AFTER));
    assert_eq!(code(&refused.map(Full::new)), "lock-overloaded");
    guard.release().await.unwrap();
    assert_eq!(first.await.0.status(), StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn request_without_a_route_passes_unlocked_to_its_404() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let handler = move || {
        counted.fetch_add(1, Ordering::Relaxed);
        async { "done" }
    };
    let redlock = Redlock::in_memory(3);
    for layer in [
        RedlockLayer::new(redlock.clone(), key::header("x-key")),
        RedlockLayer::new(redlock.clone(), ("thing", key::path("id"))),
    ] {
        let app = axum::Router::new()
            .route("/things/{id}", axum::routing::post(handler.clone()))
            .layer(layer);
        let nowhere = Request::post("/nowhere").body(axum::body::Body::empty());
        let response = app.oneshot(nowhere.unwrap()).await.unwrap();
        assert_eq!(response.status(), StatusCode::NOT_FOUND);
    }
    assert_eq!(calls.load(Ordering::Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn missing_key_reject_always_refuses_a_fallback_too() {
    let send = async |missing_key: OnMissingKey| {
        let layer = RedlockLayer::new(Redlock::in_memory(3), key::header("x-key"));
        let layer = layer.missing_key(missing_key);
        let fallback = axum::routing::post(|| async { "done" }).layer(layer);
        let app: axum::Router = axum::Router::new().fallback_service(fallback);
        let anywhere = Request::post("/anywhere").body(axum::body::Body::empty());
        app.oneshot(anywhere.unwrap()).await.unwrap().status()
    };
    assert_eq!(send(OnMissingKey::Reject).await, StatusCode::OK);
    let refused = send(OnMissingKey::RejectAlways).await;
    assert_eq!(refused, StatusCode::BAD_REQUEST);
}
