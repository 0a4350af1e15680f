//! Clients on real sockets: those that go away, those that are refused before they have sent their
//! body, and those that send one request after the other.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]

mod support;

use std::convert::Infallible;
use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::header::CONTENT_LENGTH;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response};
use axum::routing::{any, post};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use support::http::Client;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{Redlock, RedlockLayer, ReleaseAt};

/// Until when the lock of a client that went away must be free.
const SOON: Duration = Duration::from_secs(1);

/// Longer than any test; the ttl must free nothing here.
const TTL: Duration = Duration::from_secs(60);

struct Server {
    nodes: ScriptedNodes,
    addr: SocketAddr,
    serving: JoinHandle<()>,
}

impl Server {
    async fn start(nodes: &ScriptedNodes, app: impl FnOnce(RedlockLayer) -> Router) -> Self {
        let redlock = Redlock::builder().scripted(nodes).ttl(TTL);
        let layer = RedlockLayer::new(redlock.build().unwrap(), "resource");
        let app = app(layer);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let serving = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        let nodes = nodes.clone();
        Self {
            nodes,
            addr,
            serving,
        }
    }

    /// A server whose handler counts those that work and never ends.
    async fn stuck(working: &Arc<AtomicUsize>) -> Self {
        let working = Arc::clone(working);
        let handler = move || {
            let working = Working::new(&working);
            async move {
                let _working = working;
                pending::<()>().await;
            }
        };
        let nodes = ScriptedNodes::new(3);
        Self::start(&nodes, |layer| {
            Router::new().route("/", post(handler)).layer(layer)
        })
        .await
    }

    async fn wait_until(&self, what: &str, is_so: impl Fn() -> bool) {
        let waiting = async {
            while !is_so() {
                sleep(Duration::from_millis(2)).await;
            }
        };
        let in_time = timeout(SOON, waiting).await;
        assert!(in_time.is_ok(), "not {what} after {SOON:?}");
    }

    async fn wait_until_free(&self) {
        let nodes = &self.nodes;
        self.wait_until("free", || nodes.locks() == [0, 0, 0]).await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Counts handlers that are at work.
struct Working(Arc<AtomicUsize>);

impl Working {
    fn new(working: &Arc<AtomicUsize>) -> Self {
        working.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(working))
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Connects, sends bytes as they are, and leaves the rest to the test.
async fn send(addr: SocketAddr, text: &str) -> TcpStream {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
    stream
}

const REQUEST: &str = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n";

#[tokio::test]
async fn a_client_that_disconnects_under_the_handler_frees_the_lock() {
    let working = Arc::default();
    let server = Server::stuck(&working).await;
    let at_work = || working.load(Ordering::Relaxed) == 1;
    for half_close in [false, true] {
        let mut client = send(server.addr, REQUEST).await;
        server.wait_until("working", at_work).await;
        assert_eq!(server.nodes.locks(), [1, 1, 1]);
        if half_close {
            client.shutdown().await.unwrap();
        } else {
            drop(client);
        }
        server.wait_until("stopped", || !at_work()).await;
        server.wait_until_free().await;
    }
}

#[tokio::test]
async fn a_client_that_disconnects_while_it_waits_gives_up_its_place() {
    let nodes = ScriptedNodes::new(3);
    let elsewhere = Redlock::builder()
        .scripted(&nodes)
        .ttl(TTL)
        .build()
        .unwrap();
    let guard = elsewhere.lock("resource").await.unwrap();
    let working = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&working);
    let server = Server::start(&nodes, |layer| {
        let handler = move || {
            seen.fetch_add(1, Ordering::Relaxed);
            async {}
        };
        let layer = layer.wait(TTL);
        Router::new().route("/", post(handler)).layer(layer)
    })
    .await;
    let waiting = send(server.addr, REQUEST).await;
    let asked = || nodes.sent(0, OpKind::Acquire) >= 2;
    server.wait_until("waiting", asked).await;
    drop(waiting);
    sleep(Duration::from_millis(100)).await;
    guard.release().await.unwrap();
    sleep(Duration::from_millis(300)).await;
    assert_eq!(nodes.locks(), [0, 0, 0], "nobody waits any more");
    assert_eq!(working.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_client_that_disconnects_amid_the_body_frees_the_lock() {
    let first = || stream::iter([Ok::<_, Infallible>(Bytes::from_static(b"first"))]);
    let handler = move || async move { Body::from_stream(first().chain(stream::pending())) };
    let nodes = ScriptedNodes::new(3);
    let server = Server::start(&nodes, |layer| {
        Router::new().route("/", post(handler)).layer(layer)
    })
    .await;
    let mut client = Client::connect(server.addr).await;
    let response = client.send("POST", "/", &[], b"").await.unwrap();
    let mut body = response.into_body();
    let frame = body.frame().await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "first");
    assert_eq!(server.nodes.locks(), [1, 1, 1]);
    drop((client, body));
    server.wait_until_free().await;
}

#[tokio::test]
async fn a_panic_in_the_handler_breaks_the_connection_and_frees_the_lock() {
    let nodes = ScriptedNodes::new(3);
    let server = Server::start(&nodes, |layer| {
        let handler = |body: String| async move {
            assert!(body.is_empty(), "as the test wants it");
            "done"
        };
        Router::new().route("/", post(handler)).layer(layer)
    })
    .await;
    for _ in 0..3 {
        let mut client = Client::connect(server.addr).await;
        let broken = client.try_request("POST", "/", &[], b"panic").await;
        assert!(broken.is_err(), "{broken:?}");
        server.wait_until_free().await;
        let mut client = Client::connect(server.addr).await;
        let served = client.request("POST", "/", &[], b"").await;
        assert_eq!(served.status, 200);
    }
}

#[tokio::test]
async fn a_lock_lost_amid_the_body_is_no_clean_end_on_the_wire() {
    let nodes = ScriptedNodes::new(3);
    let server = Server::start(&nodes, |layer| {
        let first = || stream::iter([Ok::<_, Infallible>(Bytes::from_static(b"first"))]);
        let handler = move || async move { Body::from_stream(first().chain(stream::pending())) };
        // A third of it later, the renewal finds out.
        let layer = layer.ttl(Duration::from_millis(300)).unwrap();
        Router::new().route("/", post(handler)).layer(layer)
    })
    .await;
    let mut client = send(server.addr, REQUEST).await;
    let held = || nodes.locks() == [1, 1, 1];
    server.wait_until("locked", held).await;
    nodes.wipe(0);
    nodes.wipe(1);
    let mut text = String::new();
    let ended = timeout(Duration::from_secs(10), client.read_to_string(&mut text)).await;
    // A reset connection is as good as one that ends amid a chunked body.
    drop(ended.expect("the connection is closed when the lock is lost"));
    assert!(text.contains("first"), "{text}");
    assert!(
        !text.contains("\r\n0\r\n"),
        "the last chunk says that all is there: {text}"
    );
}

#[tokio::test]
async fn a_refused_request_is_answered_before_its_body_is_read() {
    let working = Arc::default();
    let server = Server::stuck(&working).await;
    let holder = send(server.addr, REQUEST).await;
    let at_work = || working.load(Ordering::Relaxed) == 1;
    server.wait_until("working", at_work).await;

    for (expect, part) in [("expect: 100-continue\r\n", ""), ("", "only the beginning")] {
        let head =
            format!("POST / HTTP/1.1\r\nhost: a\r\n{expect}content-length: 50000000\r\n\r\n");
        let began = Instant::now();
        let mut client = send(server.addr, &(head + part)).await;
        let mut answer = vec![0; 2_000];
        let read = timeout(SOON, client.read(&mut answer)).await;
        let read = read.expect("it is answered at once").unwrap();
        let answer = String::from_utf8_lossy(&answer[..read]);
        // First of all: with 100 Continue the client would begin to send its 50 MB.
        assert!(answer.starts_with("HTTP/1.1 423 "), "{answer}");
        assert!(answer.contains("retry-after: "), "{answer}");
        assert!(began.elapsed() < SOON);
    }
    drop(holder);
    server.wait_until_free().await;
}

#[tokio::test]
async fn a_connection_goes_on_after_a_refusal() {
    let nodes = ScriptedNodes::new(3);
    let elsewhere = Redlock::builder()
        .scripted(&nodes)
        .ttl(TTL)
        .build()
        .unwrap();
    let server = Server::start(&nodes, |layer| {
        let app = Router::new().route("/", post(|| async { "done" }));
        app.layer(layer)
    })
    .await;
    // One connection: this client does not open another.
    let mut client = Client::connect(server.addr).await;
    for _ in 0..5 {
        let guard = elsewhere.lock("resource").await.unwrap();
        for _ in 0..3 {
            let refused = client.request("POST", "/", &[], b"").await;
            assert_eq!(refused.status, 423);
            assert_eq!(refused.json()["code"], "lock-contended");
            assert_eq!(refused.header("connection"), None);
        }
        guard.release().await.unwrap();
        let served = client.request("POST", "/", &[], b"").await;
        assert_eq!((served.status, served.text().as_str()), (200, "done"));
    }
}

/// Every form that the end of a response can have on the wire.
async fn some_response(method: Method, headers: HeaderMap) -> Response<Body> {
    let chunks = |chunks: &'static [&str]| {
        stream::iter(chunks.iter().map(|chunk| Ok::<_, Infallible>(*chunk)))
    };
    let declared = |length: &str, body| {
        let response = Response::builder().header(CONTENT_LENGTH, length);
        response.body(body).unwrap()
    };
    match headers["x-form"].to_str().unwrap() {
        "sized" => Response::new(Body::from("sized")),
        "empty" => Response::new(Body::empty()),
        "chunked" => Response::new(Body::from_stream(chunks(&["a", "b"]))),
        "no chunks" => Response::new(Body::from_stream(chunks(&[]))),
        "declared" => declared("2", Body::from_stream(chunks(&["a", "b"]))),
        "declared empty" => declared("0", Body::from_stream(chunks(&[]))),
        "head of a stream" => {
            assert_eq!(method, Method::HEAD);
            Response::new(Body::from_stream(chunks(&["a", "b"])))
        }
        "no content" => {
            let response = Response::builder().status(204);
            response.body(Body::empty()).unwrap()
        }
        "trailers" => {
            let frames = [
                Frame::data(Bytes::from_static(b"a")),
                Frame::trailers(HeaderMap::from_iter([(
                    HeaderName::from_static("x-trailer"),
                    HeaderValue::from_static("1"),
                )])),
            ];
            let frames = stream::iter(frames.map(Ok::<_, Infallible>));
            let response = Response::builder().header("trailer", "x-trailer");
            response.body(Body::new(StreamBody::new(frames))).unwrap()
        }
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn a_sequential_client_of_two_servers_does_not_meet_its_own_lock() {
    const FORMS: [&str; 9] = [
        "sized",
        "empty",
        "chunked",
        "no chunks",
        "declared",
        "declared empty",
        "head of a stream",
        "no content",
        "trailers",
    ];
    for release_at in [ReleaseAt::BodyEnd, ReleaseAt::ResponseHead] {
        let nodes = ScriptedNodes::new(3);
        // So slow that a client that did not wait for the release would meet it.
        for node in 0..3 {
            nodes.set_for(node, OpKind::Release, Gate::Slow(Duration::from_millis(3)));
        }
        let app = |layer: RedlockLayer| {
            let layer = layer
                .release_at(release_at)
                .methods([Method::POST, Method::HEAD]);
            Router::new().route("/", any(some_response)).layer(layer)
        };
        let servers = [
            Server::start(&nodes, app).await,
            Server::start(&nodes, app).await,
        ];
        let mut clients = Vec::new();
        for server in &servers {
            clients.push(Client::connect(server.addr).await);
        }
        for turn in 0..8 {
            for form in FORMS {
                let method = if form.starts_with("head") {
                    "HEAD"
                } else {
                    "POST"
                };
                for client in &mut clients {
                    let headers = [("x-form", form), ("te", "trailers")];
                    let response = client.request(method, "/", &headers, b"").await;
                    let what = format!("{form}, {release_at:?}, turn {turn}");
                    assert!(
                        [200, 204].contains(&response.status),
                        "{what}: {response:?}"
                    );
                }
            }
        }
    }
}
