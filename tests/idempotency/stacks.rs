//! The layer among the layers and routers of a service: compression, authentication, timeouts, panics.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{RawQuery, Request};
use axum::http::header::{ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, TRAILER};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use futures_util::stream;
use http_body_util::{Limited, StreamBody};
use hyper::body::Frame;
use support::http::{Client, serve};
use support::{Answer, Executed, ms, redlock, secs, subscribe, wait_until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tower::{Layer, ServiceBuilder};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::timeout::TimeoutLayer;
use tower_redlock::test_util::{OpKind, ScriptedNodes};
use tower_redlock::{IdempotencyKey, IdempotencyLayer, Redlock, key, scope};
use tracing::Instrument;

use crate::stack_payments::{KEY, answering, layer, pay, payment, slow};

#[tokio::test(start_paused = true)]
async fn compression_outside_applies_to_replays_and_inside_prevents_the_record() {
    let receipt = || "a receipt that is worth compressing ".repeat(100);
    let gzip = |key: &str| {
        let request = payment("/payments", key).header(ACCEPT_ENCODING, "gzip");
        request.body(Body::from("amount=5")).unwrap()
    };
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let app = answering(&executed, receipt);
    let outside = app.layer(layer(&nodes)).layer(CompressionLayer::new());
    let first = Answer::to(&outside, gzip("a")).await;
    assert_eq!(first.headers[CONTENT_ENCODING], "gzip");
    let again = Answer::to(&outside, gzip("a")).await;
    assert!(again.is_replayed());
    assert_eq!(again.as_recorded(), first.as_recorded());
    // The retry comes by another way, and is read by another library.
    let plain = pay(&outside, "a").await;
    assert!(plain.is_replayed());
    assert!(!plain.headers.contains_key(CONTENT_ENCODING));
    assert_eq!((plain.body, executed.count()), (receipt().into(), 1));

    let app = answering(&executed, receipt).layer(CompressionLayer::new());
    let within = app.layer(layer(&nodes));
    let first = Answer::to(&within, gzip("b")).await;
    assert_eq!(first.headers[CONTENT_ENCODING], "gzip");
    let again = Answer::to(&within, gzip("b")).await;
    assert_eq!((again.code(), executed.count()), ("result-not-kept", 2));
}

#[derive(Debug, Clone)]
struct UserId(&'static str);

/// Tokens come and go; whose they are, stays.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let token = request.headers().get(AUTHORIZATION);
    let user = match token.map(HeaderValue::as_bytes) {
        Some(b"Bearer alice-1" | b"Bearer alice-2") => "alice",
        Some(b"Bearer bob-1") => "bob",
        _ => return StatusCode::UNAUTHORIZED.into_response(),
    };
    request.extensions_mut().insert(UserId(user));
    next.run(request).await
}

#[tokio::test(start_paused = true)]
async fn authentication_outside_refuses_unrecorded_and_scopes_callers() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let whose = key::extension::<UserId>(|user| user.0);
    let once = IdempotencyLayer::new(redlock(&nodes), whose);
    let app = answering(&executed, || "paid").layer(once);
    let app = app.layer(from_fn(authenticate));
    let with = async |token: &str| {
        let request = payment("/payments", "a").header(AUTHORIZATION, format!("Bearer {token}"));
        Answer::to(&app, request.body(Body::empty()).unwrap()).await
    };
    assert_eq!(with("expired").await.status, StatusCode::UNAUTHORIZED);
    assert_eq!(nodes.sent(0, OpKind::Acquire), 0);
    assert!(!with("alice-1").await.is_replayed());
    assert!(with("alice-2").await.is_replayed());
    assert!(!with("bob-1").await.is_replayed());
    // Who is not known any more is not shown what was recorded.
    let stranger = with("stolen").await;
    assert_eq!(stranger.status, StatusCode::UNAUTHORIZED);
    assert!(stranger.body.is_empty());
    assert_eq!(executed.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn timeout_outside_lets_the_execution_finish_and_inside_frees_the_key() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let short = TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, secs(1));
    let outside = slow(&executed).layer(layer(&nodes)).layer(short);
    let late = pay(&outside, "a").await;
    assert_eq!(late.status, StatusCode::REQUEST_TIMEOUT);
    assert_eq!(pay(&outside, "a").await.code(), "request-in-progress");
    sleep(secs(2)).await;
    let again = pay(&outside, "a").await;
    assert!(again.is_replayed());
    assert_eq!((again.body, executed.count()), ("payment 1".into(), 1));

    for (at_most_once, then) in [(false, ""), (true, "outcome-unknown")] {
        let once = layer(&nodes).at_most_once(at_most_once);
        let within = slow(&executed).layer(short).layer(once);
        for code in ["", then] {
            let late = pay(&within, &format!("b{at_most_once}")).await;
            assert_eq!(late.code(), code);
            assert!(!late.is_replayed());
        }
    }
    assert_eq!((executed.count(), nodes.locks()), (1, vec![0, 0, 0]));
}

#[tokio::test(start_paused = true)]
async fn catch_panic_inside_frees_the_key_and_outside_leaves_it_to_its_ttl() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    for within in [false, true] {
        let before = executed.count();
        let counted = executed.clone();
        let pay_there = post(async move || {
            assert!(counted.one_more() > before + 1, "as the test wants it");
            "paid"
        });
        let app = Router::new().route("/payments", pay_there);
        let (catch, once) = (CatchPanicLayer::new(), layer(&nodes));
        let app = if within {
            app.layer(catch).layer(once)
        } else {
            app.layer(once).layer(catch)
        };
        let key = within.to_string();
        let panicked = pay(&app, &key).await;
        assert_eq!(panicked.status, StatusCode::INTERNAL_SERVER_ERROR);
        if !within {
            // What the handler did by then is not known.
            assert_eq!(pay(&app, &key).await.code(), "request-in-progress");
            sleep(secs(11)).await;
        }
        let paid = pay(&app, &key).await;
        assert_eq!((paid.status, paid.is_replayed()), (StatusCode::OK, false));
        assert!(pay(&app, &key).await.is_replayed());
    }
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn idempotency_layer_keys_whole_paths_wherever_it_is_applied() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let once = || layer(&nodes).required(true);
    let routes = || {
        let executed = executed.clone();
        let pay = async move || executed.one_more().to_string();
        Router::new()
            .route("/payments", post(pay))
            .route("/read", get(async || "read"))
    };
    let stacks = [
        routes().layer(once()),
        routes().route_layer(once()),
        Router::new().nest("/v1", routes().layer(once())),
        Router::new().nest("/v2", routes()).layer(once()),
        Router::new().merge(routes().route_layer(once())),
        Router::new().route_service("/payments", once().layer(routes())),
    ];
    for (number, (app, prefix)) in stacks
        .into_iter()
        .zip(["", "", "/v1", "/v2", "", ""])
        .enumerate()
    {
        let (path, key) = (format!("{prefix}/payments"), number.to_string());
        let request = || payment(&path, &key).body(Body::empty()).unwrap();
        let before = executed.count();
        let first = Answer::to(&app, request()).await;
        assert_eq!(first.status, StatusCode::OK, "{number}");
        let again = Answer::to(&app, request()).await;
        assert!(again.is_replayed(), "{number}");
        assert_eq!(again.as_recorded(), first.as_recorded(), "{number}");
        assert_eq!(executed.count(), before + 1, "{number}");
        let keyless = Request::post(&path).body(Body::empty()).unwrap();
        assert_eq!(
            Answer::to(&app, keyless).await.code(),
            "key-missing",
            "{number}"
        );
        if number != 5 {
            let read = Request::get(format!("{prefix}/read")).header(KEY, &key);
            let read = Answer::to(&app, read.body(Body::empty()).unwrap()).await;
            assert_eq!(read.body, "read", "{number}");
        }
        for path in ["/nowhere", "/v1/nowhere"] {
            let nowhere = payment(path, "unused").body(Body::empty()).unwrap();
            assert_eq!(
                Answer::to(&app, nowhere).await.status,
                StatusCode::NOT_FOUND
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn handler_sees_extensions_and_span_of_outer_layers_and_no_task_locals() {
    tokio::task_local! {
        static REQUEST: u32;
    }
    #[derive(Clone)]
    struct Outer;
    let _subscriber = subscribe(tracing_subscriber::registry());
    let see = post(async |request: Request| {
        let span = tracing::Span::current();
        let name = span.metadata().map(tracing::Metadata::name);
        let is_extended = request.extensions().get::<Outer>().is_some();
        let local = REQUEST.try_with(|number| *number);
        format!("{name:?} {is_extended} {:?}", local.ok())
    });
    let see = Router::new().route("/payments", see);
    let outer = from_fn(async |mut request: Request, next: Next| {
        request.extensions_mut().insert(Outer);
        let span = tracing::info_span!("request");
        REQUEST.scope(7, next.run(request)).instrument(span).await
    });
    let direct = see.clone().layer(outer.clone());
    assert_eq!(
        pay(&direct, "a").await.body,
        "Some(\"request\") true Some(7)"
    );
    let behind = see.layer(layer(&ScriptedNodes::new(3))).layer(outer);
    assert_eq!(pay(&behind, "a").await.body, "Some(\"request\") true None");
}

#[tokio::test(start_paused = true)]
async fn fallback_service_executes_once_per_key() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let counted = executed.clone();
    // A gateway, say: it has no routes of its own.
    let forward = any(async move || counted.one_more().to_string());
    let once = || layer(&nodes);
    let stacks = [
        Router::new().fallback_service(once().layer(forward.clone())),
        Router::new().fallback(forward.clone()).layer(once()),
        Router::new().fallback_service(forward.layer(once())),
    ];
    for (number, app) in stacks.into_iter().enumerate() {
        let first = pay(&app, &number.to_string()).await;
        assert_eq!(first.status, StatusCode::OK);
        let again = pay(&app, &number.to_string()).await;
        assert!(again.is_replayed(), "{number}");
        assert_eq!((again.body, executed.count()), (first.body, number + 1));
    }
    // Without a key it could be a missing page; what must not run then asks for the key itself.
    let counted = executed.clone();
    let forward = async move |_: IdempotencyKey| counted.one_more().to_string();
    let app = Router::new().fallback(forward);
    let app = app.layer(once().required(true));
    let keyless = Request::post("/payments").body(Body::empty()).unwrap();
    assert_eq!(Answer::to(&app, keyless).await.code(), "misconfigured");
    assert_eq!(executed.count(), 3);
    assert_eq!(pay(&app, "keyed").await.body, "4");
}

#[tokio::test(start_paused = true)]
async fn methods_outside_of_the_setting_ignore_an_idempotency_key() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let app = answering(&executed, || "paid").layer(layer(&nodes).required(true));
    for method in ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"] {
        for key in ["a", "a b"] {
            let mut request = payment("/payments", key).body(Body::empty()).unwrap();
            *request.method_mut() = Method::from_bytes(method.as_bytes()).unwrap();
            let answer = Answer::to(&app, request).await;
            assert_eq!(
                (answer.status, answer.is_replayed()),
                (StatusCode::OK, false)
            );
        }
    }
    assert_eq!(executed.count(), 10);
    assert_eq!(nodes.sent(0, OpKind::Acquire), 0);
}

#[tokio::test(start_paused = true)]
async fn multipart_body_is_equal_only_with_the_same_boundary() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let counted = executed.clone();
    let upload = post(async move |form: Bytes| {
        counted.one_more();
        form
    });
    let app = Router::new()
        .route("/payments", upload)
        .layer(layer(&nodes));
    let with = async |boundary: &str| {
        let kind = format!("multipart/form-data; boundary={boundary}");
        let part = "content-disposition: form-data; name=\"a\"\r\n\r\npaid";
        let body = format!("--{boundary}\r\n{part}\r\n--{boundary}--\r\n");
        let request = payment("/payments", "a").header(CONTENT_TYPE, kind);
        Answer::to(&app, request.body(Body::from(body)).unwrap()).await
    };
    assert!(with("x").await.body.starts_with(b"--x\r\n"));
    assert!(with("x").await.is_replayed());
    assert_eq!(with("y").await.code(), "idempotency-key-reused");
    assert_eq!(executed.count(), 1);
}

/// The service on a real socket.
struct Server {
    addr: SocketAddr,
    redlock: Redlock,
    executed: Executed,
    serving: JoinHandle<()>,
}

impl Server {
    /// Serves payments that end when they are let to.
    async fn start(may_end: &Arc<tokio::sync::Semaphore>) -> Self {
        let redlock = redlock(&ScriptedNodes::new(3));
        let (executed, may_end) = (Executed::default(), Arc::clone(may_end));
        let (begun, ended) = (executed.clone(), may_end);
        let pay = async move |body: Bytes| {
            let number = begun.one_more();
            let _end = ended.acquire().await;
            format!("payment {number} of {}", String::from_utf8_lossy(&body))
        };
        let once = IdempotencyLayer::new(redlock.clone(), scope::public());
        let once = ServiceBuilder::new().layer(once);
        let app = Router::new()
            .route("/", post(pay))
            .route("/trailers", post(with_trailers))
            .route_layer(once);
        let (addr, serving) = serve(app).await;
        Self {
            addr,
            redlock,
            executed,
            serving,
        }
    }

    /// Sends bytes, and returns all that is answered until the connection ends.
    async fn tell(&self, bytes: &str) -> String {
        let mut stream = TcpStream::connect(self.addr).await.expect("it listens");
        stream.write_all(bytes.as_bytes()).await.expect("it reads");
        stream.shutdown().await.expect("half of it is closed");
        let mut answer = String::new();
        let read = timeout(PATIENCE, stream.read_to_string(&mut answer)).await;
        read.expect("it ends the connection").expect("it is text");
        answer
    }

    async fn pay(&self, key: &str, body: &[u8]) -> support::http::Response {
        support::http::request(self.addr, "POST", "/", &[(KEY, key)], body).await
    }

    async fn wait_until_executed(&self, times: usize) {
        wait_until("executed", PATIENCE, || self.executed.count() >= times).await;
    }
}

/// Answers with the query, in a body that has a bound but no exact size, and with trailers.
async fn with_trailers(RawQuery(query): RawQuery) -> Response {
    let trailers = HeaderMap::from_iter([(HeaderName::from_static("x-sum"), 7.into())]);
    let data = query
        .filter(|query| !query.is_empty())
        .map(|query| Frame::data(Bytes::from(query)));
    let frames = data.into_iter().chain([Frame::trailers(trailers)]);
    let body = StreamBody::new(stream::iter(frames.map(Ok::<_, Infallible>)));
    ([(TRAILER, "x-sum")], Body::new(Limited::new(body, 64))).into_response()
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

#[tokio::test]
async fn upload_is_equal_in_any_framing_and_refused_when_truncated() {
    let server = Server::start(&Arc::new(tokio::sync::Semaphore::new(10))).await;
    let head = |key: &str, more: &str| {
        format!("POST / HTTP/1.1\r\nhost: a\r\nidempotency-key: {key}\r\n{more}\r\n\r\n")
    };
    // Less than is promised, by length and by chunks, and chunks that are none.
    for (more, body) in [
        ("content-length: 300", "amount=5"),
        ("transfer-encoding: chunked", "8\r\namount=5\r\n"),
        (
            "transfer-encoding: chunked",
            "eight\r\namount=5\r\n0\r\n\r\n",
        ),
    ] {
        let answer = server.tell(&(head("a", more) + body)).await;
        assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    }
    assert_eq!(server.executed.count(), 0);

    let first = server.pay("a", b"amount=5").await;
    assert_eq!(
        (first.status, first.text().as_str()),
        (200, "payment 1 of amount=5")
    );
    let chunked = head("a", "connection: close\r\ntransfer-encoding: chunked");
    let waits = head(
        "a",
        "connection: close\r\nexpect: 100-continue\r\ncontent-length: 8",
    );
    for (request, is_continued) in [
        (
            chunked.clone() + "3\r\namo\r\n5\r\nunt=5\r\n0\r\n\r\n",
            false,
        ),
        (chunked + "8\r\namount=5\r\n0\r\nx-sum: 1\r\n\r\n", false),
        (waits + "amount=5", true),
        // What is beyond the length is another request, and a bad one.
        (head("a", "content-length: 8") + "amount=5 and more", false),
    ] {
        let answer = server.tell(&request).await;
        let answer = if is_continued {
            let answer = answer.strip_prefix("HTTP/1.1 100 Continue\r\n\r\n");
            answer.expect("it asks for the body")
        } else {
            &answer
        };
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(
            answer.contains("\r\nidempotency-replayed: true\r\n"),
            "{answer}"
        );
        assert!(answer.contains("payment 1 of amount=5"), "{answer}");
    }
    assert_eq!(server.executed.count(), 1);
}

#[tokio::test]
async fn trailers_are_on_the_wire_the_first_time_and_replayed() {
    let server = Server::start(&Arc::new(tokio::sync::Semaphore::new(10))).await;
    for (piece, key) in [("paid", "a"), ("", "b")] {
        let target = format!("POST /trailers?{piece} HTTP/1.1\r\nhost: a\r\nte: trailers");
        let request = format!("{target}\r\nidempotency-key: {key}\r\nconnection: close\r\n\r\n");
        let first = server.tell(&request).await;
        assert!(first.starts_with("HTTP/1.1 200"), "{first}");
        assert!(first.contains("\r\ntrailer: x-sum\r\n"), "{first}");
        assert!(first.contains(piece), "{first}");
        assert!(first.ends_with("\r\n0\r\nx-sum: 7\r\n\r\n"), "{first}");
        let again = server.tell(&request).await;
        let (replayed, marked): (Vec<_>, Vec<_>) = again
            .split("\r\n")
            .filter(|line| !line.starts_with("date: "))
            .partition(|line| *line == "idempotency-replayed: true");
        assert_eq!((replayed.len(), marked.is_empty()), (1, false), "{again}");
        let mut first: Vec<_> = first
            .split("\r\n")
            .filter(|line| !line.starts_with("date: "))
            .collect();
        let mut marked = marked;
        // Headers may come in another order.
        let head = first
            .iter()
            .position(|line| line.is_empty())
            .expect("the head ends");
        first[..head].sort_unstable();
        marked[..head].sort_unstable();
        assert_eq!(marked, first);
    }
}

#[tokio::test]
async fn client_that_disconnects_gets_a_replay_also_from_a_draining_server() {
    let may_end = Arc::new(tokio::sync::Semaphore::new(0));
    let server = Server::start(&may_end).await;
    let mut client = Client::connect(server.addr).await;
    let asked = timeout(ms(200), async {
        client
            .request("POST", "/", &[(KEY, "a")], b"amount=5")
            .await
    });
    let (hung_up, ()) = tokio::join!(asked, server.wait_until_executed(1));
    assert!(hung_up.is_err());
    drop(client);
    let refused = server.pay("a", b"amount=5").await;
    assert_eq!(refused.json()["code"], "request-in-progress");
    // No client waits for the answer any more; drain waits for the record.
    let redlock = server.redlock.clone();
    let draining = tokio::spawn(async move { redlock.drain(PATIENCE).await });
    sleep(ms(50)).await;
    assert!(!draining.is_finished());
    may_end.add_permits(1);
    let drained = draining.await.unwrap();
    assert!(drained.is_clean(), "{drained:?}");
    assert_eq!(server.executed.count(), 1);
}

/// How long anything may take that must happen.
const PATIENCE: Duration = secs(10);
