//! The server under test, with its nodes and the counters of its handlers.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::handler::Handler;
use axum::middleware::{Next, from_fn};
use axum::routing::any;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use support::{http, secs, wait_until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{Redlock, RedlockLayer};

/// Until when a lock must be free, unless a test says otherwise.
pub(crate) const SOON: Duration = secs(1);

/// How long a test waits for what has no bound of its own.
pub(crate) const PATIENCE: Duration = secs(20);

/// Longer than any test; the ttl must free nothing here.
pub(crate) const TTL: Duration = secs(60);

/// The only key of most tests.
pub(crate) const KEY: &str = "resource";

/// A plain HTTP/1.1 request, as it is on the wire.
pub(crate) const REQUEST: &str = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n";

/// An axum server, which speaks HTTP/1.1 and HTTP/2 with prior knowledge.
pub(crate) struct Server {
    pub(crate) nodes: ScriptedNodes,
    pub(crate) redlock: Redlock,
    pub(crate) addr: SocketAddr,
    /// The requests whose response future is alive.
    in_flight: Arc<AtomicUsize>,
    connections: Arc<AtomicUsize>,
    serving: JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start(
        nodes: &ScriptedNodes,
        app: impl FnOnce(RedlockLayer) -> Router,
    ) -> Self {
        Self::serve(nodes, |redlock| {
            app(RedlockLayer::new(redlock.clone(), KEY))
        })
        .await
    }

    /// Starts a server whose layer locks requests for one handler.
    pub(crate) async fn with<H: Handler<T, ()>, T: 'static>(
        nodes: &ScriptedNodes,
        handler: H,
    ) -> Self {
        Self::start(nodes, |layer| {
            Router::new().route("/", any(handler)).layer(layer)
        })
        .await
    }

    /// Starts a server whose application makes layers of its own.
    pub(crate) async fn serve(nodes: &ScriptedNodes, app: impl FnOnce(&Redlock) -> Router) -> Self {
        let redlock = lock_service(nodes);
        let in_flight = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&in_flight);
        let count = move |request: Request, next: Next| {
            let here = Counted::new(&counted);
            async move {
                let response = next.run(request).await;
                drop(here);
                response
            }
        };
        let app = app(&redlock).layer(from_fn(count));

        let (addr, serving, connections) = http::serve(app).await;
        Self {
            nodes: nodes.clone(),
            redlock,
            addr,
            in_flight,
            connections,
            serving,
        }
    }

    /// How many connections there were.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// How many requests are in the layer or behind it, waiting or at work, without their bodies.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    pub(crate) async fn wait_until(&self, what: &str, is_so: impl Fn() -> bool) {
        wait_until(what, SOON, is_so).await;
    }

    pub(crate) async fn wait_until_free(&self) {
        let nodes = &self.nodes;
        self.wait_until("free", || nodes.locks() == [0, 0, 0]).await;
    }

    /// Shows that nothing is left: no key on any node, no request, no lease task.
    pub(crate) async fn ends_clean(&self) {
        self.wait_until_free().await;
        self.wait_until("gone", || self.in_flight() == 0).await;
        let drained = timeout(SOON, self.redlock.drain(2 * SOON)).await;
        let drained = drained.expect("no lease task goes on");
        assert!(drained.is_clean(), "{drained:?}");
        assert_eq!(self.nodes.locks(), [0, 0, 0]);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Counts those that are there.
pub(crate) struct Counted(Arc<AtomicUsize>);

impl Counted {
    pub(crate) fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A body that begins and does not end; if it goes on, it is more than a client takes that does not read.
pub(crate) fn unending(goes_on: bool) -> Body {
    let first = stream::iter([Ok::<_, Infallible>(Bytes::from_static(b"first"))]);
    if goes_on {
        let chunks = stream::repeat_with(|| Ok(Bytes::from(vec![0; 1 << 14])));
        Body::from_stream(first.chain(chunks))
    } else {
        Body::from_stream(first.chain(stream::pending()))
    }
}

/// A lock service over some nodes, as the servers have one each.
pub(crate) fn lock_service(nodes: &ScriptedNodes) -> Redlock {
    let builder = Redlock::builder().scripted(nodes).ttl(TTL);
    // Healthy nodes on a busy machine.
    builder.node_timeout(SOON / 2).build().unwrap()
}

/// Connects, sends bytes as they are, and leaves the rest to the test.
pub(crate) async fn send(addr: SocketAddr, text: &str) -> TcpStream {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream.set_nodelay(true).unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
    stream
}

/// Reads until a part of an answer is there.
pub(crate) async fn read_until(stream: &mut TcpStream, part: &str) {
    let mut answer = String::new();
    while !answer.contains(part) {
        let mut piece = [0; 2_000];
        let read = timeout(PATIENCE, stream.read(&mut piece)).await;
        let read = read.expect("the answer goes on").unwrap();
        assert_ne!(read, 0, "{answer}");
        answer += &String::from_utf8_lossy(&piece[..read]);
    }
}
