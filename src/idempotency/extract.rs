//! Extractors of the idempotency key and of the execution.

use std::convert::Infallible;

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use http::request::Parts;

use crate::extract::{Misplaced, extension_extractor};
use crate::middleware::idempotency_key::IdempotencyKey;
use crate::once::ExecutionHandle;

extension_extractor! {
    /// The key of a request that an [`IdempotencyLayer`](crate::IdempotencyLayer) passed on.
    ///
    /// To test a handler without the layer, put one into the extensions: `"a1".parse::<IdempotencyKey>()`.
    IdempotencyKey, IdempotencyKeyRejection; "`None` if the request has no key, or no layer is applied."
}

extension_extractor! {
    /// The execution that the handler is part of, if an [`IdempotencyLayer`](crate::IdempotencyLayer) started it.
    ExecutionHandle, IdempotencyKeyRejection; "`None` if the request has no key, or no layer is applied."
}

/// Rejection of [`IdempotencyKey`] and [`ExecutionHandle`]: the router is misconfigured, 500. The message names the
/// route and the remedy, and is logged once for each route.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{}", .0.text())]
pub struct IdempotencyKeyRejection(Misplaced);

impl IdempotencyKeyRejection {
    fn missing(parts: &Parts) -> Self {
        Self(Misplaced::new(parts, |route| {
            let route = route.map(|route| format!("route `{route}`: "));
            format!(
                "{}the request has no idempotency key; apply an IdempotencyLayer with `required(true)`, or extract Option<IdempotencyKey>",
                route.unwrap_or_default()
            )
        }))
    }
}

impl IntoResponse for IdempotencyKeyRejection {
    fn into_response(self) -> Response {
        let mistake = "handler extracts an idempotency key from a request without one";
        self.0.refuse(mistake)
    }
}
