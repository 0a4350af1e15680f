//! A raw HTTP/2 client, which shows how each stream ends.

use std::net::SocketAddr;

use axum::http::{Request, Response};
use bytes::Bytes;
use h2::client::{Connection, ResponseFuture, SendRequest, handshake};
use h2::{RecvStream, SendStream};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::sockets::server::PATIENCE;

/// One connection; dropping it closes it, whatever its streams are doing.
pub(crate) struct Http2Client {
    sender: SendRequest<Bytes>,
    connection: JoinHandle<Result<(), h2::Error>>,
}

impl Http2Client {
    pub(crate) async fn connect(addr: SocketAddr) -> Self {
        let stream = TcpStream::connect(addr).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (sender, connection): (_, Connection<_, _>) = handshake(stream).await.unwrap();
        Self {
            sender,
            connection: tokio::spawn(connection),
        }
    }

    /// Sends the head of a request, and leaves both sides of its stream to the test.
    pub(crate) async fn open(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
    ) -> (ResponseFuture, SendStream<Bytes>) {
        let uri = format!("http://a{path}");
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(()).unwrap();
        let mut sender = self.sender.clone().ready().await.unwrap();
        sender.send_request(request, false).unwrap()
    }

    /// Sends a request without a body, and returns as soon as the head of the response is there.
    pub(crate) async fn send(
        &self,
        method: &str,
        headers: &[(&str, &str)],
    ) -> (Response<RecvStream>, SendStream<Bytes>) {
        let (response, mut stream) = self.open(method, "/", headers).await;
        stream.send_data(Bytes::new(), true).unwrap();
        let response = timeout(PATIENCE, response).await;
        (response.expect("it is answered").unwrap(), stream)
    }

    /// Sends a request, reads the response to the end of its stream, and returns its status and its body.
    pub(crate) async fn request(&self, method: &str, headers: &[(&str, &str)]) -> (u16, String) {
        let (response, _stream) = self.send(method, headers).await;
        let (head, mut incoming) = response.into_parts();
        let mut body = String::new();
        while let Some(data) = timeout(PATIENCE, incoming.data()).await.unwrap() {
            let data = data.unwrap();
            let window = incoming.flow_control();
            window.release_capacity(data.len()).unwrap();
            body += str::from_utf8(&data).unwrap();
        }
        incoming.trailers().await.unwrap();
        (head.status.as_u16(), body)
    }
}

impl Drop for Http2Client {
    fn drop(&mut self) {
        self.connection.abort();
    }
}
