//! A raw HTTP/1.1 client, which shows what is on the wire and repairs nothing.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::serve::{ListenerExt, TapIo};
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::answer::Answer;

/// Returns a listener on a free port for axum, and its address.
///
/// Each answer would wait some 40 ms for the client's delayed ACK otherwise: its end is sent by itself.
pub async fn listen() -> (TapIo<TcpListener, fn(&mut TcpStream)>, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await;
    let listener = listener.expect("127.0.0.1 has a free port");
    let addr = listener.local_addr().expect("a bound listener has one");
    let set: fn(&mut TcpStream) = |stream| stream.set_nodelay(true).expect("TCP has it");
    (listener.tap_io(set), addr)
}

/// Serves on a free port until the task is aborted, and counts the connections.
pub async fn serve(app: Router) -> (SocketAddr, JoinHandle<()>, Arc<AtomicUsize>) {
    let (listener, addr) = listen().await;
    let connections = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&connections);
    let listener = listener.tap_io(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let serving = tokio::spawn(async move {
        let served = axum::serve(listener, app).await;
        served.expect("axum serves until it is aborted");
    });
    (addr, serving, connections)
}

/// Sends one request on a connection of its own and reads the response to its end.
pub async fn request(
    addr: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Answer {
    let mut client = Client::connect(addr).await;
    client.request(method, path, headers, body).await
}

/// One kept-alive connection; dropping it closes it, also in the middle of a response.
#[derive(Debug)]
pub struct Client {
    addr: SocketAddr,
    sender: SendRequest<Full<Bytes>>,
    connection: JoinHandle<hyper::Result<()>>,
}

impl Client {
    /// Connects to a server.
    pub async fn connect(addr: SocketAddr) -> Self {
        let stream = bounded(TcpStream::connect(addr)).await;
        let stream = stream.unwrap_or_else(|error| panic!("{addr}: {error}"));
        stream
            .set_nodelay(true)
            .expect("a TCP stream has the option");
        let (sender, connection) = handshake(TokioIo::new(stream))
            .await
            .expect("the handshake needs no bytes");
        Self {
            addr,
            sender,
            connection: tokio::spawn(connection),
        }
    }

    /// Sends a request and reads the response to its end; panics when the connection breaks.
    pub async fn request(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Answer {
        self.try_request(method, path, headers, body)
            .await
            .unwrap_or_else(|error| panic!("{method} {path}: {error:?}"))
    }

    /// Sends a request like [`Client::request`], for responses that may end in an error.
    pub async fn try_request(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> hyper::Result<Answer> {
        let response = self.send(method, path, headers, body).await?;
        bounded(Answer::of(response)).await
    }

    /// Sends a request and returns as soon as the head is there; the body is read by the test.
    pub async fn send(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> hyper::Result<hyper::Response<Incoming>> {
        let mut request = hyper::Request::builder()
            .method(method)
            .uri(path)
            .header("host", self.addr.to_string());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request
            .body(Full::new(Bytes::copy_from_slice(body)))
            .expect("the test's method, path and headers are valid");
        bounded(async {
            self.sender.ready().await?;
            self.sender.send_request(request).await
        })
        .await
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // The task would otherwise keep the connection until a response that no test reads.
        self.connection.abort();
    }
}

/// Ends a test that would wait for ever.
///
/// On tokio's clock: paused time has no place in a test with real sockets.
async fn bounded<F: Future>(future: F) -> F::Output {
    timeout(PATIENCE, future)
        .await
        .expect("the server answers within 30 s")
}

const PATIENCE: Duration = Duration::from_secs(30);
