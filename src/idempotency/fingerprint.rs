//! What a request asks for, as a digest.

use http::header::CONTENT_TYPE;
use http::request::Parts;

use crate::node::sha256;
use crate::protocol::Fingerprint;

/// The default: method, full path, query, content type and body.
pub(super) fn of_request(parts: &Parts, body: &[u8]) -> Vec<u8> {
    let content_type = parts.headers.get(CONTENT_TYPE);
    let head = [
        parts.method.as_str().as_bytes(),
        full_path(parts).as_bytes(),
        parts.uri.query().unwrap_or_default().as_bytes(),
        content_type.map_or(&b""[..], |value| value.as_bytes()),
        body,
    ];
    let mut asked_for = Vec::with_capacity(body.len() + 256);
    for part in head {
        // Every part is preceded by its length: none can pose as two.
        asked_for.extend((part.len() as u64).to_be_bytes());
        asked_for.extend(part);
    }
    asked_for
}

pub(super) fn digest(asked_for: &[u8]) -> Fingerprint {
    Fingerprint::of_digest(sha256(asked_for))
}

/// Returns the path that the client asked for; within a nested router axum leaves only a part of it.
pub(super) fn full_path(parts: &Parts) -> &str {
    #[cfg(feature = "axum")]
    if let Some(original) = parts.extensions.get::<axum::extract::OriginalUri>() {
        return original.0.path();
    }
    parts.uri.path()
}
