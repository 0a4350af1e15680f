//! Exposes readers of request heads and the default response to fuzz targets.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, Response};
use http_body_util::Full;

use crate::middleware::rejection::Rejection;
use crate::middleware::response::{self, RequestKind};
use crate::middleware::{body, token_header};

/// Removes every header that could be taken for the token header.
pub fn clear_token_header(headers: &mut HeaderMap, name: &HeaderName) {
    token_header::clear(headers, name);
}

/// Returns the length that a head declares for its body.
#[must_use]
pub fn declared_length(headers: &HeaderMap) -> Option<u64> {
    body::declared_length(headers)
}

/// Builds the default response for a refusal.
#[must_use]
pub fn refusal(rejection: Rejection, to: RequestKind) -> Response<Full<Bytes>> {
    response::refusal(rejection, to)
}
