//! Extractors of the idempotency key and of the execution.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use http::request::Parts;

use crate::extract::RefusalFormat;
use crate::idempotency::header::IdempotencyKey;
use crate::middleware::{LoggedMistakes, Rejection, route_of};
use crate::once::ExecutionHandle;
use crate::protocol::KeyError;

/// The key of a request that an [`IdempotencyLayer`](crate::IdempotencyLayer) passed on.
///
/// To test a handler without the layer, put one into the extensions: `"a1".parse::<IdempotencyKey>()`.
impl<S: Send + Sync> FromRequestParts<S> for IdempotencyKey {
    type Rejection = IdempotencyKeyRejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let key = parts.extensions.get::<Self>().cloned();
        key.ok_or_else(|| IdempotencyKeyRejection::new(parts))
    }
}

/// `None` if the request has no key, or no layer is applied.
impl<S: Send + Sync> OptionalFromRequestParts<S> for IdempotencyKey {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get().cloned())
    }
}

/// The execution that the handler is part of, if an [`IdempotencyLayer`](crate::IdempotencyLayer) started it.
impl<S: Send + Sync> FromRequestParts<S> for ExecutionHandle {
    type Rejection = IdempotencyKeyRejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let execution = parts.extensions.get::<Self>().cloned();
        execution.ok_or_else(|| IdempotencyKeyRejection::new(parts))
    }
}

/// `None` if the request has no key, or no layer is applied.
impl<S: Send + Sync> OptionalFromRequestParts<S> for ExecutionHandle {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get().cloned())
    }
}

/// Rejection of [`IdempotencyKey`] and [`ExecutionHandle`]: the router is misconfigured, 500. The message names the
/// route and the remedy, and is logged once for each route.
#[derive(Debug, Clone)]
pub struct IdempotencyKeyRejection {
    /// The matched route, if an axum router has matched one.
    route: Option<Arc<str>>,
    format: RefusalFormat,
}

impl IdempotencyKeyRejection {
    fn new(parts: &Parts) -> Self {
        Self {
            route: route_of(parts),
            format: RefusalFormat::from_parts(parts),
        }
    }
}

impl IntoResponse for IdempotencyKeyRejection {
    fn into_response(self) -> Response {
        let error = KeyError::misconfigured(self.to_string());
        if LOGGED.is_new(&self.to_string()) {
            tracing::error!(%error, "handler extracts an idempotency key from a request without one");
        }
        self.format.refuse(Rejection::Misconfigured(error))
    }
}

impl fmt::Display for IdempotencyKeyRejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(route) = &self.route {
            write!(f, "route `{route}`: ")?;
        }
        f.write_str(
            "the request has no idempotency key; apply an IdempotencyLayer with `required(true)`, or extract Option<IdempotencyKey>",
        )
    }
}

impl std::error::Error for IdempotencyKeyRejection {}

/// For the process, because no layer is there that could keep it.
static LOGGED: LoggedMistakes = LoggedMistakes::new();
