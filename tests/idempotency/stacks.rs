//! The layer among the layers and routers of a service: compression, authentication, timeouts, panics.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{RawQuery, Request};
use axum::http::header::{AUTHORIZATION, CONTENT_ENCODING, TRAILER};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use futures_util::stream;
use http_body_util::{Limited, StreamBody};
use hyper::body::Frame;
use support::http::serve;
use support::{Answer, Executed, redlock, request_with, secs, send, subscribe};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tower::Layer;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::timeout::TimeoutLayer;
use tower_redlock::test_util::{OpKind, ScriptedNodes};
use tower_redlock::{IdempotencyKey, IdempotencyLayer, key};
use tracing::Instrument;

use crate::payments::{answering, counts_ended, layer, request};

const KEY: &str = "idempotency-key";

async fn pay(app: &Router, key: &str) -> Answer {
    Answer::to(app, request("/payments", key)).await
}

#[tokio::test(start_paused = true)]
async fn compression_outside_applies_to_replays_and_inside_prevents_the_record() {
    let receipt = || "a receipt that is worth compressing ".repeat(100);
    let gzip = |key| {
        let headers = [(KEY, key), ("accept-encoding", "gzip")];
        request_with("POST", "/payments", &headers)
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
        let headers = [(KEY, "a"), ("authorization", &*format!("Bearer {token}"))];
        Answer::to(&app, request_with("POST", "/payments", &headers)).await
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
    let pay = async |app: &Router, key: &str| {
        let slow = request("/payments?ms=2000", key);
        Answer::to(app, slow).await
    };
    let outside = counts_ended(&executed).layer(layer(&nodes)).layer(short);
    let late = pay(&outside, "a").await;
    assert_eq!(late.status, StatusCode::REQUEST_TIMEOUT);
    assert_eq!(pay(&outside, "a").await.code(), "request-in-progress");
    sleep(secs(2)).await;
    let again = pay(&outside, "a").await;
    assert!(again.is_replayed());
    assert_eq!((again.body, executed.count()), ("payment 1".into(), 1));

    for (at_most_once, then) in [(false, ""), (true, "outcome-unknown")] {
        let once = layer(&nodes).at_most_once(at_most_once);
        let within = counts_ended(&executed).layer(short).layer(once);
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
        let before = executed.count();
        let first = Answer::to(&app, request(&path, &key)).await;
        assert_eq!(first.status, StatusCode::OK, "{number}");
        let again = Answer::to(&app, request(&path, &key)).await;
        assert!(again.is_replayed(), "{number}");
        assert_eq!(again.as_recorded(), first.as_recorded(), "{number}");
        assert_eq!(executed.count(), before + 1, "{number}");
        let keyless = send(&app, "POST", &path).await;
        assert_eq!(keyless.code(), "key-missing", "{number}");
        if number != 5 {
            let read = request_with("GET", &format!("{prefix}/read"), &[(KEY, &key)]);
            assert_eq!(Answer::to(&app, read).await.body, "read", "{number}");
        }
        for path in ["/nowhere", "/v1/nowhere"] {
            let nowhere = Answer::to(&app, request(path, "unused")).await;
            assert_eq!(nowhere.status, StatusCode::NOT_FOUND, "{number}");
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
    let keyless = send(&app, "POST", "/payments").await;
    assert_eq!(keyless.code(), "misconfigured");
    assert_eq!(executed.count(), 3);
    assert_eq!(pay(&app, "keyed").await.body, "4");
}

#[tokio::test(start_paused = true)]
async fn methods_outside_of_the_setting_ignore_an_idempotency_key() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let app = answering(&executed, || "paid").layer(layer(&nodes).required(true));
    for method in ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"] {
        for key in ["a", "a b"] {
            let answer = Answer::to(&app, request_with(method, "/payments", &[(KEY, key)])).await;
            let told = (answer.status, answer.is_replayed());
            assert_eq!(told, (StatusCode::OK, false), "{method}");
        }
    }
    assert_eq!(executed.count(), 10);
    assert_eq!(nodes.sent(0, OpKind::Acquire), 0);
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

#[tokio::test]
async fn trailers_are_on_the_wire_the_first_time_and_replayed() {
    let app = Router::new().route("/", post(with_trailers));
    let (addr, serving) = serve(app.layer(layer(&ScriptedNodes::new(3)))).await;
    let tell = async |bytes: &str| {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        stream.write_all(bytes.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let read = timeout(PATIENCE, stream.read_to_string(&mut answer)).await;
        read.expect("it ends the connection").expect("it is text");
        answer
    };
    for (piece, key) in [("paid", "a"), ("", "b")] {
        let target = format!("POST /?{piece} HTTP/1.1\r\nhost: a\r\nte: trailers");
        let request = format!("{target}\r\nidempotency-key: {key}\r\nconnection: close\r\n\r\n");
        let first = tell(&request).await;
        assert!(first.starts_with("HTTP/1.1 200"), "{first}");
        assert!(first.contains("\r\ntrailer: x-sum\r\n"), "{first}");
        assert!(first.contains(piece), "{first}");
        assert!(first.ends_with("\r\n0\r\nx-sum: 7\r\n\r\n"), "{first}");
        let again = tell(&request).await;
        assert_eq!(
            again.matches("\r\nidempotency-replayed: true\r\n").count(),
            1,
            "{again}"
        );
        // Headers may come in another order.
        let [first, again] = [&first, &again].map(|answer| {
            let (head, body) = answer.split_once("\r\n\r\n").expect("the head ends");
            let own = ["date: ", "idempotency-replayed: "];
            let head = head
                .split("\r\n")
                .filter(|line| !own.iter().any(|own| line.starts_with(own)));
            (BTreeSet::from_iter(head), body)
        });
        assert_eq!(again, first);
    }
    serving.abort();
}

/// How long anything may take that must happen.
const PATIENCE: Duration = secs(10);
