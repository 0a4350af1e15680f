//! The answer of a service, whether it is called with or without a socket.

use std::convert::Infallible;
use std::fmt::Debug;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::header::DATE;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use http_body_util::BodyExt;
use serde_json::Value;
use tokio::task::JoinHandle;
use tower::{Service, ServiceExt};
use tower_redlock::Rejection;

/// Returns a request without a body.
pub fn request(method: &str, target: &str) -> Request {
    request_with(method, target, &[])
}

/// Returns a request with headers and without a body.
#[track_caller]
pub fn request_with(method: &str, target: &str, headers: &[(&str, &str)]) -> Request {
    let request = Request::builder().method(method).uri(target);
    let request = headers.iter().fold(request, |request, (name, value)| {
        request.header(*name, *value)
    });
    let request = request.body(Body::empty());
    request.expect("the test's method, target and headers are valid")
}

/// Sends a request without a body, and reads the response to its end.
pub async fn send(app: &Router, method: &str, target: &str) -> Answer {
    Answer::to(app, request(method, target)).await
}

/// Sends a request without a body, in a task of its own.
pub fn spawn_send(app: &Router, method: &str, target: &str) -> JoinHandle<Answer> {
    let (app, request) = (app.clone(), request(method, target));
    tokio::spawn(async move { Answer::to(&app, request).await })
}

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
    pub async fn to<S, B>(app: &S, request: Request) -> Self
    where
        S: Service<Request, Response = Response<B>, Error = Infallible> + Clone,
        B: HttpBody<Error: Debug>,
    {
        let Ok(response) = app.clone().oneshot(request).await;
        let answer = Self::of(response).await;
        answer.expect("the body comes to its end")
    }

    /// Reads a response to its end.
    pub async fn of<B: HttpBody>(response: Response<B>) -> Result<Self, B::Error> {
        let (head, body) = response.into_parts();
        let body = body.collect().await?;
        Ok(Self {
            status: head.status,
            headers: head.headers,
            trailers: body.trailers().cloned(),
            body: body.to_bytes(),
            rejection: head.extensions.get().cloned(),
        })
    }

    /// Returns the first header of a name, if it is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// Returns whether it is what an idempotent request was answered before.
    pub fn is_replayed(&self) -> bool {
        self.header(REPLAYED) == Some("true")
    }

    /// Returns everything that a replay has in common with the first answer.
    pub fn as_recorded(&self) -> (StatusCode, HeaderMap, &Bytes, Option<&HeaderMap>) {
        let mut headers = self.headers.clone();
        headers.remove(REPLAYED);
        headers.remove(DATE);
        (self.status, headers, &self.body, self.trailers.as_ref())
    }

    /// Returns the body as text.
    pub fn text(&self) -> String {
        String::from_utf8(self.body.to_vec()).expect("the body is text")
    }

    /// Returns the body as JSON; panics with its text if it is something else.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", self.text()))
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
