//! A client that sends one request after the other, now to this server, now to that, over healthy
//! nodes: it never meets the lock of its own last request.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]

mod support;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response};
use axum::routing::any;
use bytes::Bytes;
use futures_util::stream;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use support::Cluster;
use support::http::Client;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tower_redlock::{Redlock, RedlockLayer, ReleaseAt, RestartGuard};

/// How often each form of response is asked for, per release mode.
const REQUESTS: usize = 1_000;

/// Long, because what is promised is promised for nodes that answer in time, and a busy machine
/// makes them late.
const NODE_TIMEOUT: Duration = Duration::from_secs(2);

/// How a response ends on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Sized,
    Empty,
    Chunked,
    Trailers,
    NoContent,
    /// Of a response that would have a body.
    Head,
}

impl Form {
    const ALL: [Self; 6] = [
        Self::Sized,
        Self::Empty,
        Self::Chunked,
        Self::Trailers,
        Self::NoContent,
        Self::Head,
    ];

    fn method(self) -> &'static str {
        if self == Self::Head { "HEAD" } else { "POST" }
    }

    fn response(self) -> Response<Body> {
        let chunks = || stream::iter(["a", "b"].map(Ok::<_, Infallible>));
        match self {
            Self::Sized | Self::Head => Response::new(Body::from("sized")),
            Self::Empty => Response::new(Body::empty()),
            Self::Chunked => Response::new(Body::from_stream(chunks())),
            Self::Trailers => {
                let trailer = HeaderName::from_static("x-trailer");
                let trailers = HeaderMap::from_iter([(trailer, HeaderValue::from_static("1"))]);
                let frames = [
                    Frame::data(Bytes::from_static(b"a")),
                    Frame::trailers(trailers),
                ];
                let body = StreamBody::new(stream::iter(frames.map(Ok::<_, Infallible>)));
                let response = Response::builder().header("trailer", "x-trailer");
                response.body(Body::new(body)).unwrap()
            }
            Self::NoContent => {
                let response = Response::builder().status(204);
                response.body(Body::empty()).unwrap()
            }
        }
    }

    /// Sends one request and checks that the response has this form to its end.
    async fn ask(self, client: &mut Client) -> u16 {
        let headers = [("te", "trailers")];
        let response = client.send(self.method(), "/", &headers, b"").await;
        let (head, body) = response.unwrap().into_parts();
        let has = |name| head.headers.contains_key(name);
        let status = head.status.as_u16();
        let (chunked, sized) = (has("transfer-encoding"), has("content-length"));
        let read = body.collect().await.unwrap();
        let trailers = read.trailers().is_some_and(|all| all["x-trailer"] == "1");
        let length = read.to_bytes().len();
        if status < 300 {
            let expected = match self {
                Self::Sized => (false, true, false, 5),
                Self::Empty => (false, true, false, 0),
                Self::Chunked => (true, false, false, 2),
                Self::Trailers => (true, false, true, 1),
                Self::NoContent => (false, false, false, 0),
                Self::Head => (false, true, false, 0),
            };
            assert_eq!((chunked, sized, trailers, length), expected, "{self:?}");
        }
        status
    }
}

struct Server {
    addr: SocketAddr,
    serving: JoinHandle<()>,
}

impl Server {
    /// Starts a server with a Redlock of its own, as another process would have.
    async fn start(cluster: &Cluster, form: Form, release_at: ReleaseAt) -> Self {
        let redlock = Redlock::builder()
            .urls(cluster.urls())
            .node_timeout(NODE_TIMEOUT)
            .restart_guard(RestartGuard::Off)
            .build()
            .unwrap();
        let layer = RedlockLayer::new(redlock, "the one key")
            .methods([Method::POST, Method::HEAD])
            .release_at(release_at);
        let app = Router::new().route("/", any(move || async move { form.response() }));
        let app = app.layer(layer);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let serving = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { addr, serving }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn no_request_is_refused(release_at: ReleaseAt) {
    let cluster = Cluster::start(3);
    for form in Form::ALL {
        let servers = [
            Server::start(&cluster, form, release_at).await,
            Server::start(&cluster, form, release_at).await,
        ];
        let mut clients = [
            Client::connect(servers[0].addr).await,
            Client::connect(servers[1].addr).await,
        ];
        let began = Instant::now();
        for turn in 0..REQUESTS {
            let status = form.ask(&mut clients[turn % 2]).await;
            let expected = if form == Form::NoContent { 204 } else { 200 };
            assert_eq!(status, expected, "{form:?}, {release_at:?}, request {turn}");
        }
        let took = began.elapsed();
        eprintln!("{form:?}, {release_at:?}: {REQUESTS} requests in {took:?}, none refused");
    }
    cluster.wait_until_free(Duration::from_secs(1)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequential_client_is_never_refused_when_locks_end_with_the_body() {
    no_request_is_refused(ReleaseAt::BodyEnd).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequential_client_is_never_refused_when_locks_end_with_the_head() {
    no_request_is_refused(ReleaseAt::ResponseHead).await;
}
