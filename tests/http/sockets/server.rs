//! The server under test, with its nodes and the counters of its handlers.

use std::convert::Infallible;
use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::handler::Handler;
use axum::middleware::{Next, from_fn};
use axum::routing::{any, post};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use support::{http, secs, wait_until};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{LockGuard, Redlock, RedlockLayer};

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
    stop: watch::Sender<()>,
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

        let (listener, addr) = http::listen().await;
        let (stop, mut stopping) = watch::channel(());
        let serving = axum::serve(listener, app)
            .with_graceful_shutdown(async move { drop(stopping.changed().await) });
        Self {
            nodes: nodes.clone(),
            redlock,
            addr,
            in_flight,
            stop,
            serving: tokio::spawn(async move { serving.await.unwrap() }),
        }
    }

    /// A server whose handler counts those that work and never ends.
    pub(crate) async fn stuck(working: &Arc<AtomicUsize>) -> Self {
        let working = Arc::clone(working);
        let handler = move || {
            let working = Counted::new(&working);
            async move {
                let _working = working;
                pending::<()>().await;
            }
        };
        Self::with(&ScriptedNodes::new(3), handler).await
    }

    /// A server whose requests wait for the lock, and the number of handlers that began.
    pub(crate) async fn counting() -> (Self, Arc<AtomicUsize>) {
        let begun = Arc::<AtomicUsize>::default();
        let seen = Arc::clone(&begun);
        let handler = move || {
            seen.fetch_add(1, Ordering::Relaxed);
            async {}
        };
        let nodes = ScriptedNodes::new(3);
        let server = Self::start(&nodes, |layer| {
            Router::new()
                .route("/", post(handler))
                .layer(layer.wait(TTL))
        });
        (server.await, begun)
    }

    /// Takes the lock, in another process or in this server's.
    pub(crate) async fn hold(&self, elsewhere: bool) -> LockGuard {
        if elsewhere {
            let theirs = lock_service(&self.nodes);
            theirs.lock(KEY).await.unwrap()
        } else {
            self.redlock.lock(KEY).await.unwrap()
        }
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

    /// Checks that no other request holds the lock or waits for it.
    pub(crate) async fn serves_the_next(&self) {
        let next = timeout(SOON, http::request(self.addr, "POST", "/", &[], b"")).await;
        assert_eq!(next.expect("no request is before it").status, 200);
    }

    /// Shows that no request waits for a lock any more when its holder releases it.
    pub(crate) async fn has_no_waiter(&self, guard: LockGuard, begun: &AtomicUsize, what: &str) {
        guard.release().await.unwrap();
        self.serves_the_next().await;
        self.ends_clean().await;
        assert_eq!(begun.load(Ordering::Relaxed), 1, "{what}: one waits");
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

    /// Tells the server to take no new connections and to finish the requests that it has.
    pub(crate) fn shut_down(&self) {
        self.stop.send_replace(());
    }

    /// Waits until the last connection is closed.
    pub(crate) async fn wait_until_shut_down(&mut self) {
        let ended = timeout(SOON, &mut self.serving).await;
        ended
            .expect("it ends when the last response is out")
            .unwrap();
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
