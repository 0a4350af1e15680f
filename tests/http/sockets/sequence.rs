//! A sequential client of two servers, which reads each response to its end, never meets its own lock.

use std::convert::Infallible;
use std::net::SocketAddr;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response};
use axum::routing::any;
use bytes::Bytes;
use futures_util::stream;
use http_body::Frame;
use http_body_util::StreamBody;
use support::http::Client;
use support::{ms, set_all};
use tower_redlock::ReleaseAt;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};

use crate::scripted_bodies::with_length;
use crate::sockets::http2_client::Http2Client;
use crate::sockets::server::Server;

/// Every form that the end of a response can have on the wire: its name, the request's method, the response, and the
/// body that the client gets.
fn forms() -> [(&'static str, &'static str, Response<Body>, &'static str); 10] {
    let body = |chunks: &'static [&str]| {
        let chunks = chunks.iter().map(|chunk| Ok::<_, Infallible>(*chunk));
        Body::from_stream(stream::iter(chunks))
    };
    let chunks = |chunks| Response::new(body(chunks));
    let whole = |text: &'static str| Response::new(Body::from(text));
    let declared = |length, chunks| with_length(length, body(chunks));
    // Bodies that do not tell that they are empty: the status does.
    let status = |status: u16| Response::builder().status(status).body(body(&[]));
    [
        ("sized", "POST", whole("sized"), "sized"),
        ("empty", "POST", whole(""), ""),
        ("chunked", "POST", chunks(&["a", "b"]), "ab"),
        ("no chunks", "POST", chunks(&[]), ""),
        ("declared", "POST", declared("2", &["a", "b"]), "ab"),
        ("declared empty", "POST", declared("0", &[]), ""),
        ("head of a stream", "HEAD", chunks(&["a", "b"]), ""),
        ("no content", "POST", status(204).unwrap(), ""),
        ("not modified", "POST", status(304).unwrap(), ""),
        ("trailers", "POST", with_trailers(), "a"),
    ]
}

/// Over HTTP/1.1, only trailers that the head names are sent.
fn with_trailers() -> Response<Body> {
    let name = HeaderName::from_static("x-trailer");
    let trailers = HeaderMap::from_iter([(name, HeaderValue::from_static("1"))]);
    let data = Frame::data(Bytes::from_static(b"a"));
    let frames = [data, Frame::trailers(trailers)].map(Ok::<_, Infallible>);
    let mut response = Response::new(Body::new(StreamBody::new(stream::iter(frames))));
    let name = HeaderValue::from_static("x-trailer");
    response.headers_mut().insert("trailer", name);
    response
}

enum AnyClient {
    Http1(Client),
    Http2(Http2Client),
}

impl AnyClient {
    async fn connect(addr: SocketAddr, http2: bool) -> Self {
        if http2 {
            Self::Http2(Http2Client::connect(addr).await)
        } else {
            Self::Http1(Client::connect(addr).await)
        }
    }

    /// Reads the response to its end, and returns its status and its body.
    async fn request(&mut self, method: &str, headers: &[(&str, &str)]) -> (u16, String) {
        match self {
            Self::Http1(client) => {
                let response = client.request(method, "/", headers, b"").await;
                (response.status.as_u16(), response.text())
            }
            Self::Http2(client) => client.request(method, headers).await,
        }
    }
}

/// The nodes hear of a release late, and of the other server's next lock at once: a client that did not wait for the
/// release would meet it.
// Rules: http.sequence
#[tokio::test]
async fn sequential_http_client_of_two_servers_does_not_meet_its_own_lock() {
    for (http2, release_at) in [
        (false, ReleaseAt::BodyEnd),
        (false, ReleaseAt::ResponseHead),
        (true, ReleaseAt::BodyEnd),
        (true, ReleaseAt::ResponseHead),
    ] {
        let nodes = ScriptedNodes::new(3);
        set_all(&nodes, OpKind::Release, Gate::Slow(ms(3)));
        let (mut servers, mut clients) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            let server = Server::start(&nodes, |layer| {
                let layer = layer.release_at(release_at);
                let layer = layer.methods([Method::POST, Method::HEAD]);
                let respond = async |headers: HeaderMap| {
                    let form = forms()
                        .into_iter()
                        .find(|form| headers["x-form"] == *form.0);
                    form.unwrap().2
                };
                Router::new().route("/", any(respond)).layer(layer)
            });
            servers.push(server.await);
            clients.push(AnyClient::connect(servers[clients.len()].addr, http2).await);
        }
        for turn in 0..5 {
            for (form, method, expected, body) in forms() {
                let expected = (expected.status().as_u16(), body.to_owned());
                for client in &mut clients {
                    let headers = [("x-form", form), ("te", "trailers")];
                    let response = client.request(method, &headers).await;
                    let what = format!("{form}, HTTP/2: {http2}, {release_at:?}, turn {turn}");
                    assert_eq!(response, expected, "{what}");
                }
            }
        }
        for server in &servers {
            server.ends_clean().await;
        }
    }
}
