//! Response bodies that follow a script, and a layer whose nodes are slow to release.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, HeaderValue, Method, Request, Response};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use support::ms;
use tokio::time::{Instant, Sleep, sleep};
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{LockBody, Redlock, RedlockLayer, Rejection};

use crate::scripted_bodies::Step::{Data, Error, Panic, Trailers, Wait};

pub(crate) const TTL: Duration = ms(3_000);

pub(crate) const NODE_TIMEOUT: Duration = ms(50);

/// How long the nodes take to confirm a release in these tests: what is held back, is held so long.
pub(crate) const RELEASE: Duration = ms(20);

/// A tick more or less is the resolution of tokio's timers.
pub(crate) const TICK: Duration = ms(2);

/// What a body does next.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Step {
    Data(&'static str),
    Trailers,
    Wait(Duration),
    Error,
    Panic,
}

/// A body that does what it is told to, and ends.
pub(crate) struct Script {
    pub(crate) steps: VecDeque<Step>,
    pub(crate) waiting: Option<Pin<Box<Sleep>>>,
    pub(crate) hint: SizeHint,
    pub(crate) knows_its_end: bool,
    pub(crate) dropped: Flag,
}

/// Set when its holder is dropped.
#[derive(Debug, Clone, Default)]
pub(crate) struct Flag(pub(crate) Arc<AtomicBool>);

impl Flag {
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn set_when_dropped(&self) -> SetWhenDropped {
        SetWhenDropped(self.clone())
    }
}

pub(crate) struct SetWhenDropped(pub(crate) Flag);

impl Drop for SetWhenDropped {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}

/// A stream of unknown length that tells its end only by ending.
pub(crate) fn stream(steps: &[Step]) -> Script {
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
    pub(crate) fn sized(mut self, size: u64) -> Self {
        self.hint = SizeHint::with_exact(size);
        self
    }

    /// Makes the body report its end with the last frame.
    pub(crate) fn ending(mut self) -> Self {
        self.knows_its_end = true;
        self
    }
}

impl Body for Script {
    type Data = Bytes;
    type Error = fmt::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, fmt::Error>>> {
        if let Some(waiting) = &mut self.waiting {
            ready!(waiting.as_mut().poll(context));
            self.waiting = None;
        }
        match self.steps.pop_front() {
            None => Poll::Ready(None),
            Some(Error) => Poll::Ready(Some(Err(fmt::Error))),
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

pub(crate) fn redlock(nodes: &ScriptedNodes) -> Redlock {
    let builder = Redlock::builder().scripted(nodes).ttl(TTL);
    builder.node_timeout(NODE_TIMEOUT).build().unwrap()
}

pub(crate) fn layer(redlock: &Redlock) -> RedlockLayer {
    RedlockLayer::new(redlock.clone(), "resource")
}

pub(crate) fn post() -> Request<()> {
    Request::post("/").body(()).unwrap()
}

/// Nodes that grant at once and take [`RELEASE`] to confirm a release.
pub(crate) fn slow_to_release() -> ScriptedNodes {
    let nodes = ScriptedNodes::new(3);
    set_release(&nodes, [Gate::Slow(RELEASE); 3]);
    nodes
}

pub(crate) fn set_release(nodes: &ScriptedNodes, gates: [Gate; 3]) {
    for (node, gate) in gates.into_iter().enumerate() {
        nodes.set_for(node, OpKind::Release, gate);
    }
}

pub(crate) fn is_free(nodes: &ScriptedNodes) -> bool {
    nodes.locks().iter().sum::<usize>() == 0
}

/// Sends a request through a layer whose handler answers with `response`.
pub(crate) async fn answered<B>(
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
pub(crate) struct Log {
    pub(crate) asked: Instant,
    pub(crate) pieces: Vec<String>,
}

impl Log {
    pub(crate) fn note(&mut self, piece: &str) {
        let took = self.asked.elapsed();
        let held = took >= RELEASE;
        assert!(took <= if held { RELEASE + TICK } else { TICK }, "{took:?}");
        let held = if held { "held " } else { "" };
        self.pieces.push(format!("{held}{piece}"));
        self.asked = Instant::now();
    }
}

/// Takes a request and a handler's response through a layer with a lock service of its own, reads it as hyper does, and
/// notes its pieces.
///
/// When it is done, the lock must be free on a majority: the client may send its next request.
pub(crate) async fn pieces<B>(request: Request<()>, response: Response<B>) -> Vec<String>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
{
    let nodes = slow_to_release();
    let methods = [Method::POST, Method::HEAD, Method::CONNECT];
    let layer = layer(&redlock(&nodes)).methods(methods);
    let method = request.method().clone();
    let (asked, pieces) = (Instant::now(), Vec::new());
    let mut log = Log { asked, pieces };

    let (head, mut body) = answered(&layer, request, response).await.into_parts();
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
    assert!(is_free(&nodes), "done, but still locked: {:?}", log.pieces);
    log.pieces
}

pub(crate) fn ok<B>(body: B) -> Response<B> {
    Response::new(body)
}

pub(crate) fn with_length<B>(length: &'static str, body: B) -> Response<B> {
    let mut response = ok(body);
    let length = HeaderValue::from_static(length);
    response.headers_mut().insert(CONTENT_LENGTH, length);
    response
}

/// Calls the handler with a flag that is set when its future is dropped.
pub(crate) fn working<F, B>(
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
pub(crate) fn lose(nodes: &ScriptedNodes) {
    nodes.wipe(0);
    nodes.wipe(1);
}

pub(crate) fn code(response: &Response<impl Body>) -> &'static str {
    let rejection = response.extensions().get::<Rejection>();
    rejection.map_or("none", Rejection::code)
}
