//! The answer of a service that is called without a socket.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use http_body_util::BodyExt;
use tower::{Service, ServiceExt};
use tower_redlock::Rejection;

/// A response that was read to its end.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub trailers: Option<HeaderMap>,
    pub rejection: Option<Rejection>,
}

impl Answer {
    /// Sends a request and reads the response to its end.
    pub async fn to<S>(app: &S, request: Request) -> Self
    where
        S: Service<Request, Response = Response<Body>, Error = Infallible> + Clone,
    {
        let Ok(response) = app.clone().oneshot(request).await;
        let (head, body) = response.into_parts();
        let body = body.collect().await.expect("the body comes to its end");
        Self {
            status: head.status,
            headers: head.headers,
            trailers: body.trailers().cloned(),
            body: body.to_bytes(),
            rejection: head.extensions.get().cloned(),
        }
    }

    /// Returns whether it is what an idempotent request was answered before.
    pub fn is_replayed(&self) -> bool {
        let replayed = self.headers.get(REPLAYED);
        replayed.is_some_and(|value| value == "true")
    }

    /// Returns everything that a replay has in common with the first answer.
    pub fn as_recorded(&self) -> (StatusCode, HeaderMap, &Bytes, Option<&HeaderMap>) {
        let mut headers = self.headers.clone();
        headers.remove(REPLAYED);
        (self.status, headers, &self.body, self.trailers.as_ref())
    }

    /// Returns the status, and which refusal it is.
    pub fn told(&self) -> (u16, &'static str) {
        (self.status.as_u16(), self.code())
    }

    /// Returns which refusal it is; empty if it is none.
    pub fn code(&self) -> &'static str {
        self.rejection.as_ref().map_or("", Rejection::code)
    }
}

const REPLAYED: &str = "idempotency-replayed";
