//! The extractor of the idempotency key.

use std::convert::Infallible;

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use http::request::Parts;

use crate::extract::{ExtractorRejection, extension_extractor};
use crate::middleware::idempotency_key::IdempotencyKey;

extension_extractor! {
    /// The key of a request that an [`IdempotencyLayer`](crate::IdempotencyLayer) passed on.
    ///
    /// To test a handler without the layer, put one into the extensions: `"a1".parse::<IdempotencyKey>()`.
    IdempotencyKey, without_key; "`None` if the request has no key, or no layer is applied."
}

fn without_key(parts: &Parts) -> ExtractorRejection {
    let mistake = "handler extracts an idempotency key from a request without one";
    let lacking = "idempotency key; apply an IdempotencyLayer with `required(true)`, or extract Option<IdempotencyKey>";
    ExtractorRejection::misplaced(parts, mistake, lacking)
}
