//! An HTTP client for the callers: one connection per request, so that a caller that goes away closes it.

use std::error::Error;
use std::net::SocketAddr;

use axum::body::Bytes;
use axum::http::{Request, header};
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1::handshake;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

use crate::server::CALLER;

/// The answer to one request.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// `ok`, or why the request was not served.
    pub(crate) code: String,
    pub(crate) body: Value,
    /// Whether it is the recorded answer to an earlier request.
    pub(crate) is_replay: bool,
}

/// Sends a request; returns `None` if the server is gone.
pub(crate) async fn post(
    address: SocketAddr,
    path: &str,
    caller: usize,
    idempotency_key: Option<&str>,
) -> Option<Answer> {
    try_post(address, path, caller, idempotency_key).await.ok()
}

async fn try_post(
    address: SocketAddr,
    path: &str,
    caller: usize,
    idempotency_key: Option<&str>,
) -> Result<Answer, Box<dyn Error + Send + Sync>> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await?;
    let request = Request::post(path)
        .header(header::HOST, address.to_string())
        .header(CALLER, caller.to_string());
    let request = match idempotency_key {
        Some(key) => request.header("idempotency-key", key),
        None => request,
    };
    let exchange = async {
        let response = sender
            .send_request(request.body(Empty::<Bytes>::new())?)
            .await?;
        let status = response.status().as_u16();
        let is_replay = response.headers().contains_key("idempotency-replayed");
        let body = response.into_body().collect().await?.to_bytes();
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        let code = body["code"].as_str().unwrap_or("unknown").to_owned();
        Ok(Answer {
            status,
            code,
            body,
            is_replay,
        })
    };
    // Not in a task of its own: dropping this future must close the connection.
    tokio::select! {
        answer = exchange => answer,
        Err(error) = connection => Err(error.into()),
    }
}
