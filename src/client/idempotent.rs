//! One idempotency key per call: the layer and its service.

use std::task::{Context, Poll};

use http::{HeaderName, HeaderValue, Method, Request};
use tower::{Layer, Service};

use crate::middleware::idempotency_key::IdempotencyKey;
use crate::node::unguessable;

/// Layer that applies the [`IdempotentService`] middleware: sends each call with an `Idempotency-Key`.
///
/// The key is that of the header if the request has one, else the [`IdempotencyKey`] in its extensions, with any method.
/// For a `POST` or `PATCH` without either, 128 random bits are drawn. The header is a structured-field string, as
/// draft-ietf-httpapi-idempotency-key-header demands.
///
/// Put this layer outside of every layer that sends a request again: each request that reaches it is a call of its own,
/// unless its header or extensions say otherwise. Put the key into the extensions to repeat a call later, such as after a
/// restart of the client:
///
/// ```
/// use http::Request;
/// use tower_redlock::IdempotencyKey;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let key: IdempotencyKey = "8e03978e-40d5-43dd-bc93-6894a57f9324".parse()?; // stored with the order
/// let request = Request::post("http://bank.example/payments").extension(key).body("amount=5")?;
/// # Ok(())
/// # }
/// ```
///
/// Apply it only to requests of servers that honour the key. [`RetryLockedLayer`](crate::client::RetryLockedLayer) takes
/// the header as the promise that a request may be sent again after a lost connection.
#[derive(Debug, Clone, Default)]
#[must_use = "a layer does nothing until it is applied"]
#[non_exhaustive]
pub struct IdempotentLayer;

impl IdempotentLayer {
    /// Creates a layer.
    pub fn new() -> Self {
        Self
    }
}

impl<S> Layer<S> for IdempotentLayer {
    type Service = IdempotentService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        IdempotentService { inner }
    }
}

/// Middleware that gives each request an idempotency key.
///
/// Created by [`IdempotentLayer`].
#[derive(Debug, Clone)]
pub struct IdempotentService<S> {
    inner: S,
}

impl<S, B> Service<Request<B>> for IdempotentService<S>
where
    S: Service<Request<B>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<B>) -> S::Future {
        if !request.headers().contains_key(HEADER)
            && let Some(value) = header_value(&request)
        {
            request.headers_mut().insert(HEADER, value);
        }
        self.inner.call(request)
    }
}

/// Returns whether the server recognizes a repetition of the request by its key.
pub(super) fn has_key(parts: &http::request::Parts) -> bool {
    // An inner layer makes the header of the extension.
    parts.headers.contains_key(HEADER) || parts.extensions.get::<IdempotencyKey>().is_some()
}

fn header_value<B>(request: &Request<B>) -> Option<HeaderValue> {
    let value = match request.extensions().get::<IdempotencyKey>() {
        Some(key) => key.as_str().replace('\\', r"\\").replace('"', r#"\""#),
        None if [Method::POST, Method::PATCH].contains(request.method()) => {
            format!("{:032x}", u128::from_le_bytes(unguessable()))
        }
        None => return None,
    };
    // A key has visible ASCII characters only.
    HeaderValue::try_from(format!("\"{value}\"")).ok()
}

const HEADER: HeaderName = HeaderName::from_static("idempotency-key");
