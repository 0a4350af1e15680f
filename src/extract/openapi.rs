//! Refusals of the extractors as responses of an OpenAPI document.

use std::collections::BTreeMap;

use utoipa::IntoResponses;
use utoipa::openapi::{RefOr, Response};

use crate::extract::locked::{LockResource, Locked};
use crate::middleware::layer::RedlockLayer;

/// The refusals for the lock; see those of a [`RedlockLayer`](crate::RedlockLayer).
///
/// Those of `T` itself are not among them. 429 is for a resource with [`slots`](crate::LockOptions::slots).
impl<T: LockResource> IntoResponses for Locked<T> {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        <RedlockLayer>::responses()
    }
}
