//! A sequential client of two servers, which reads each response to its end, never meets its own lock.

use std::convert::Infallible;
use std::net::SocketAddr;

use axum::Router;
use axum::body::Body;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response};
use axum::routing::any;
use bytes::Bytes;
use futures_util::stream;
use http_body::Frame;
use http_body_util::StreamBody;
use support::http::Client;
use support::{ms, set_all};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{RedlockLayer, ReleaseAt};

use crate::sockets::http2_client::Http2Client;
use crate::sockets::server::{KEY, Server, lock_service};

/// Every form that the end of a response can have on the wire: its name, the request's method, the
/// response's status, and the body that the client gets.
const FORMS: [(&str, &str, u16, &str); 10] = [
    ("sized", "POST", 200, "sized"),
    ("empty", "POST", 200, ""),
    ("chunked", "POST", 200, "ab"),
    ("no chunks", "POST", 200, ""),
    ("declared", "POST", 200, "ab"),
    ("declared empty", "POST", 200, ""),
    ("head of a stream", "HEAD", 200, ""),
    ("no content", "POST", 204, ""),
    ("not modified", "POST", 304, ""),
    ("trailers", "POST", 200, "a"),
];

async fn some_response(method: Method, headers: HeaderMap) -> Response<Body> {
    let chunks = |chunks: &'static [&str]| {
        let chunks = chunks.iter().map(|chunk| Ok::<_, Infallible>(*chunk));
        Body::from_stream(stream::iter(chunks))
    };
    let respond = |status: u16, body| Response::builder().status(status).body(body).unwrap();
    let declared = |length: &str, body| {
        let response = Response::builder().header(CONTENT_LENGTH, length);
        response.body(body).unwrap()
    };
    match headers["x-form"].to_str().unwrap() {
        "sized" => Response::new(Body::from("sized")),
        "empty" => Response::new(Body::empty()),
        "chunked" => Response::new(chunks(&["a", "b"])),
        "no chunks" => Response::new(chunks(&[])),
        "declared" => declared("2", chunks(&["a", "b"])),
        "declared empty" => declared("0", chunks(&[])),
        "head of a stream" => {
            assert_eq!(method, Method::HEAD);
            Response::new(chunks(&["a", "b"]))
        }
        // Bodies that do not tell that they are empty: the status does.
        "no content" => respond(204, chunks(&[])),
        "not modified" => respond(304, chunks(&[])),
        "trailers" => {
            let mut response = Response::new(with_trailers(&["a"], "x-trailer", "1"));
            let name = HeaderValue::from_static("x-trailer");
            response.headers_mut().insert("trailer", name);
            response
        }
        other => panic!("{other}"),
    }
}

#[derive(Debug, Clone, Copy)]
enum Protocol {
    Http1,
    Http2,
}

enum AnyClient {
    Http1(Client),
    Http2(Http2Client),
}

impl AnyClient {
    async fn connect(protocol: Protocol, addr: SocketAddr) -> Self {
        match protocol {
            Protocol::Http1 => Self::Http1(Client::connect(addr).await),
            Protocol::Http2 => Self::Http2(Http2Client::connect(addr).await),
        }
    }

    /// Reads the response to its end, and returns its status and its body.
    async fn request(&mut self, method: &str, headers: &[(&str, &str)]) -> (u16, String) {
        match self {
            Self::Http1(client) => {
                let response = client.request(method, "/", headers, b"").await;
                (response.status.as_u16(), response.text())
            }
            Self::Http2(client) => {
                let response = client.request(method, headers, b"").await;
                (response.status, String::from_utf8(response.body).unwrap())
            }
        }
    }
}

// Rules: http.sequence
#[tokio::test]
async fn sequential_http_client_of_two_servers_does_not_meet_its_own_lock() {
    for protocol in [Protocol::Http1, Protocol::Http2] {
        for release_at in [ReleaseAt::BodyEnd, ReleaseAt::ResponseHead] {
            let nodes = ScriptedNodes::new(3);
            let app = |layer: RedlockLayer| {
                let layer = layer
                    .release_at(release_at)
                    .methods([Method::POST, Method::HEAD]);
                Router::new().route("/", any(some_response)).layer(layer)
            };
            let servers = two_servers(&nodes, app).await;
            let mut clients = Vec::new();
            for server in &servers {
                clients.push(AnyClient::connect(protocol, server.addr).await);
            }
            for turn in 0..5 {
                for (form, method, status, body) in FORMS {
                    for client in &mut clients {
                        let headers = [("x-form", form), ("te", "trailers")];
                        let response = client.request(method, &headers).await;
                        assert_eq!(
                            response,
                            (status, body.to_owned()),
                            "{form}, {protocol:?}, {release_at:?}, turn {turn}"
                        );
                    }
                }
            }
            for server in &servers {
                server.ends_clean().await;
            }
        }
    }
}

#[tokio::test]
async fn sequential_grpc_client_of_two_servers_does_not_meet_its_own_lock() {
    for release_at in [ReleaseAt::BodyEnd, ReleaseAt::ResponseHead] {
        let nodes = ScriptedNodes::new(3);
        let app = |layer: RedlockLayer| {
            let layer = layer.release_at(release_at);
            Router::new().route("/", any(some_rpc)).layer(layer)
        };
        let servers = two_servers(&nodes, app).await;
        let mut clients = Vec::new();
        for server in &servers {
            clients.push(Http2Client::connect(server.addr).await);
        }
        for turn in 0..5 {
            for (kind, grpc_status, messages) in [
                ("unary", "0", "m1"),
                ("server streaming", "0", "m1m2m3"),
                ("failed after a message", "13", "m1"),
                ("failed at once", "5", ""),
            ] {
                for client in &clients {
                    let trailers_only = kind == "failed at once";
                    let expected = (200, grpc_status.into(), trailers_only, messages.into());
                    let rpc = call(client, kind).await;
                    assert_eq!(rpc, expected, "{kind}, {release_at:?}, turn {turn}");
                }
            }
        }
        let guard = lock_service(&nodes).lock(KEY).await.unwrap();
        let refused = (200, ABORTED.into(), true, String::new());
        assert_eq!(call(&clients[0], "unary").await, refused);
        guard.release().await.unwrap();
        assert_eq!(call(&clients[0], "unary").await.1, "0");
        for server in &servers {
            server.ends_clean().await;
        }
    }
}

/// Without the five bytes before each message, which are no business of the layer.
async fn some_rpc(headers: HeaderMap, request: Bytes) -> Response<Body> {
    assert_eq!(request, "request");
    let response = Response::builder().header(CONTENT_TYPE, "application/grpc");
    let status = "grpc-status";
    let response = match headers["x-kind"].to_str().unwrap() {
        "unary" => response.body(with_trailers(&["m1"], status, "0")),
        "server streaming" => response.body(with_trailers(&["m1", "m2", "m3"], status, "0")),
        "failed after a message" => response.body(with_trailers(&["m1"], status, "13")),
        "failed at once" => response.header(status, "5").body(Body::empty()),
        other => panic!("{other}"),
    };
    response.unwrap()
}

/// Returns the status of HTTP and of gRPC, whether that came with the head and ended the stream, and the messages.
async fn call(client: &Http2Client, kind: &str) -> (u16, String, bool, String) {
    let headers = [
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        ("x-kind", kind),
    ];
    let response = client.request("POST", &headers, b"request").await;
    let trailers_only = response.trailers.is_none();
    let trailers = response.trailers.unwrap_or(response.headers);
    let grpc_status = trailers["grpc-status"].to_str().unwrap().into();
    let messages = String::from_utf8(response.body).unwrap();
    (response.status, grpc_status, trailers_only, messages)
}

fn with_trailers(data: &'static [&str], name: &'static str, value: &'static str) -> Body {
    let name = HeaderName::from_static(name);
    let trailers = HeaderMap::from_iter([(name, HeaderValue::from_static(value))]);
    let data = data
        .iter()
        .map(|data| Frame::data(Bytes::from_static(data.as_bytes())));
    let frames = data.chain([Frame::trailers(trailers)]);
    Body::new(StreamBody::new(stream::iter(
        frames.map(Ok::<_, Infallible>),
    )))
}

/// Two servers whose nodes hear of a release late, and of the other server's next lock at once: a client
/// that did not wait for the release would meet it.
async fn two_servers(nodes: &ScriptedNodes, app: impl Fn(RedlockLayer) -> Router) -> [Server; 2] {
    set_all(nodes, OpKind::Release, Gate::Slow(ms(3)));
    [
        Server::start(nodes, &app).await,
        Server::start(nodes, &app).await,
    ]
}

const ABORTED: &str = "10";
