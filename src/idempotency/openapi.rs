//! Refusals of the layer as responses of an OpenAPI document.

use std::collections::BTreeMap;

use utoipa::IntoResponses;
use utoipa::openapi::{RefOr, Response};

use crate::idempotency::layer::IdempotencyLayer;
use crate::middleware::responses;

/// The refusals of the layer, with its default `rejection`; see those of a [`RedlockLayer`](crate::RedlockLayer).
///
/// A replay is one of the handler's own responses.
impl IntoResponses for IdempotencyLayer {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        responses(|status| matches!(status, 400 | 408 | 409 | 413 | 422 | 500 | 503))
    }
}
