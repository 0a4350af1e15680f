//! A sequential client never meets its own lock, on any server and with any response.

use std::net::SocketAddr;

use axum::body::Body;
use axum::error_handling::HandleErrorLayer;
use axum::http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use axum::routing::any;
use axum::{BoxError, Router, extract::Query};
use bytes::Bytes;
use futures_util::stream;
use http_body::Frame;
use http_body_util::StreamBody;
use serde_json::Value;
use support::http::{Client, serve};
use support::{Cluster, ms, secs};
use tokio::time::sleep;
use tower::ServiceBuilder;
use tower::timeout::TimeoutLayer;
use tower_http::catch_panic::CatchPanicLayer;
use tower_redlock::{RedlockLayer, ReleaseAt};

use crate::patient::builder;

/// Requests for each form of response and moment of release: over a thousand for each moment.
const REQUESTS: usize = 180;

async fn respond(Query(form): Query<Value>) -> Response<Body> {
    let frames = |frames: Vec<Frame<Bytes>>| {
        let frames = frames.into_iter().map(Ok::<_, std::io::Error>);
        Body::new(StreamBody::new(stream::iter(frames)))
    };
    let data = || Frame::data(Bytes::from_static(b"some data"));
    let mut response = Response::new(match form["form"].as_str() {
        Some("sized" | "head") => Body::from("some data"),
        Some("chunked") => frames(vec![data(), data(), data()]),
        Some("trailers") => {
            let mut trailers = HeaderMap::new();
            trailers.insert("x-sum", "1".parse().expect("it is a value"));
            frames(vec![data(), Frame::trailers(trailers)])
        }
        Some("declared") => frames(vec![data(), data()]),
        _ => Body::empty(),
    });
    match form["form"].as_str() {
        Some("no-content") => *response.status_mut() = StatusCode::NO_CONTENT,
        Some("declared") => {
            response.headers_mut().insert("content-length", 18.into());
        }
        Some("trailers") => {
            let trailer = HeaderValue::from_static("x-sum");
            response.headers_mut().insert("trailer", trailer);
        }
        _ => {}
    }
    response
}

async fn server(cluster: &Cluster, release_at: ReleaseAt) -> SocketAddr {
    let redlock = builder(cluster.urls()).build().unwrap();
    let layer = RedlockLayer::new(redlock, "the only key")
        .methods([Method::POST, Method::HEAD])
        .release_at(release_at);
    let late = any(async || sleep(secs(60)).await);
    let late = late.layer(
        ServiceBuilder::new()
            .layer(HandleErrorLayer::new(async |_: BoxError| {
                StatusCode::GATEWAY_TIMEOUT
            }))
            .layer(layer.clone())
            .layer(TimeoutLayer::new(ms(1))),
    );
    let panicking = any(async || -> () { panic!("as the test wants it") });
    let panicking = panicking.layer((CatchPanicLayer::new(), layer.clone()));
    let app = Router::new()
        .route("/", any(respond))
        .route_layer(layer)
        .route("/late", late)
        .route("/panicking", panicking);
    serve(app).await.0
}

async fn two_clients(cluster: &Cluster, release_at: ReleaseAt) -> [Client; 2] {
    let server = async || Client::connect(server(cluster, release_at).await).await;
    [server().await, server().await]
}

async fn alternate(release_at: ReleaseAt) {
    let cluster = Cluster::start(3);
    let mut clients = two_clients(&cluster, release_at).await;
    for form in "sized empty chunked trailers declared no-content head".split(' ') {
        let method = if form == "head" { "HEAD" } else { "POST" };
        let path = format!("/?form={form}");
        for i in 0..REQUESTS {
            let client = &mut clients[i % 2];
            // TE: a client has to ask for trailers.
            let headers = [("te", "trailers")];
            let response = client.request(method, &path, &headers, b"").await;
            let (status, text) = (response.status, response.text());
            let what = format!("{release_at:?}, {form}, request {i}");
            assert!(status < 300, "{what}: {status} {text}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequential_client_is_never_refused_with_release_at_body_end() {
    alternate(ReleaseAt::BodyEnd).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequential_client_is_never_refused_with_release_at_response_head() {
    alternate(ReleaseAt::ResponseHead).await;
}

/// An error of the inner service and a panic of the handler end a request as well.
// Rules: http.errors
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequential_client_is_never_refused_after_an_error_or_a_panic() {
    let cluster = Cluster::start(3);
    let mut clients = two_clients(&cluster, ReleaseAt::BodyEnd).await;
    for (path, status) in [("/late", 504), ("/panicking", 500)] {
        for i in 0..REQUESTS {
            let response = clients[i % 2].request("POST", path, &[], b"").await;
            let text = response.text();
            assert_eq!(response.status, status, "{path}, request {i}: {text}");
        }
    }
}
