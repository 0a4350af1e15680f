//! Exposes readers of request heads to fuzz targets.

use http::{HeaderMap, HeaderName};

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
