//! Extractors of what the layer says about a request.

use std::convert::Infallible;
use std::fmt;

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use http::request::Parts;

use crate::idempotency::header::IdempotencyKey;
use crate::middleware::{Rejection, RequestKind, refusal};
use crate::once::ExecutionHandle;
use crate::protocol::KeyError;

/// The key of a request that an [`IdempotencyLayer`](crate::IdempotencyLayer) let through.
///
/// To test a handler without the layer, put one into the extensions: `"a1".parse::<IdempotencyKey>()`.
impl<S: Send + Sync> FromRequestParts<S> for IdempotencyKey {
    type Rejection = IdempotencyKeyRejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let key = parts.extensions.get::<Self>().cloned();
        key.ok_or_else(|| IdempotencyKeyRejection(RequestKind::of(parts)))
    }
}

/// `None` if the request has no key, or there is no layer.
impl<S: Send + Sync> OptionalFromRequestParts<S> for IdempotencyKey {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get().cloned())
    }
}

/// The execution that an [`IdempotencyLayer`](crate::IdempotencyLayer) lets the handler do.
impl<S: Send + Sync> FromRequestParts<S> for ExecutionHandle {
    type Rejection = IdempotencyKeyRejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let execution = parts.extensions.get::<Self>().cloned();
        execution.ok_or_else(|| IdempotencyKeyRejection(RequestKind::of(parts)))
    }
}

/// `None` if the request has no key, or there is no layer.
impl<S: Send + Sync> OptionalFromRequestParts<S> for ExecutionHandle {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get().cloned())
    }
}

/// Why there is no [`IdempotencyKey`] and no [`ExecutionHandle`]: a mistake of the program, 500, which says what to do.
#[derive(Debug, Clone)]
pub struct IdempotencyKeyRejection(RequestKind);

impl IntoResponse for IdempotencyKeyRejection {
    fn into_response(self) -> Response {
        let error = KeyError::misconfigured(self.to_string());
        tracing::error!(%error, "a handler asks for an idempotency key that there is not");
        refusal(Rejection::Misconfigured(error), self.0).into_response()
    }
}

impl fmt::Display for IdempotencyKeyRejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "the request has no idempotency key: apply an IdempotencyLayer with `required(true)`, or take Option<IdempotencyKey>",
        )
    }
}

impl std::error::Error for IdempotencyKeyRejection {}
