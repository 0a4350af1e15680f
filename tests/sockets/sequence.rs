//! A client of two servers that reads each response to its end, and does not meet its own lock.

use std::convert::Infallible;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::header::CONTENT_LENGTH;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response};
use axum::routing::any;
use bytes::Bytes;
use futures_util::stream;
use http_body::Frame;
use http_body_util::StreamBody;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{RedlockLayer, ReleaseAt};

use crate::server::Server;
use crate::support::http::Client;

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
