//! A raw HTTP/2 client, which shows how each stream ends.

use std::net::SocketAddr;

use axum::http::{HeaderMap, Request, Response};
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

/// A response that was read to the end of its stream.
#[derive(Debug)]
pub(crate) struct Http2Response {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    pub(crate) trailers: Option<HeaderMap>,
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
        headers: &[(&str, &str)],
    ) -> (ResponseFuture, SendStream<Bytes>) {
        let mut request = Request::builder().method(method).uri("http://a/");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(()).unwrap();
        let mut sender = self.sender.clone().ready().await.unwrap();
        sender.send_request(request, false).unwrap()
    }

    /// Sends a request, and returns as soon as the head of the response is there.
    pub(crate) async fn send(
        &self,
        method: &str,
        headers: &[(&str, &str)],
        body: &'static [u8],
    ) -> Result<(Response<RecvStream>, SendStream<Bytes>), h2::Error> {
        let (response, mut stream) = self.open(method, headers).await;
        stream.send_data(Bytes::from_static(body), true).unwrap();
        let response = timeout(PATIENCE, response).await;
        Ok((response.expect("it is answered")?, stream))
    }

    /// Sends a request, and reads the response to the end of its stream.
    pub(crate) async fn request(
        &self,
        method: &str,
        headers: &[(&str, &str)],
        body: &'static [u8],
    ) -> Http2Response {
        let (response, _stream) = self.send(method, headers, body).await.unwrap();
        let (head, mut incoming) = response.into_parts();
        let mut body = Vec::new();
        while let Some(data) = timeout(PATIENCE, incoming.data())
            .await
            .expect("it goes on")
        {
            let data = data.unwrap();
            incoming
                .flow_control()
                .release_capacity(data.len())
                .unwrap();
            body.extend_from_slice(&data);
        }
        Http2Response {
            status: head.status.as_u16(),
            headers: head.headers,
            body,
            trailers: incoming.trailers().await.unwrap(),
        }
    }
}

impl Drop for Http2Client {
    fn drop(&mut self) {
        self.connection.abort();
    }
}
