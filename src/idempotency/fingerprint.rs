//! Fingerprints of requests, and the path as a part of the key.

use http::header::CONTENT_TYPE;
use http::request::Parts;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};

use crate::node::sha256;
use crate::protocol::Fingerprint;

/// Returns the bytes of the default fingerprint: method, full path, query, content type and body. Path and query
/// are normalized (RFC 3986, section 6.2.2).
pub(super) fn of_request(parts: &Parts, body: &[u8]) -> Vec<u8> {
    let content_type = parts.headers.get(CONTENT_TYPE);
    let path = normalized(full_path(parts));
    let query = normalized(parts.uri.query().unwrap_or_default());
    let head = [
        parts.method.as_str().as_bytes(),
        path.as_bytes(),
        query.as_bytes(),
        content_type.map_or(&b""[..], |value| value.as_bytes()),
        body,
    ];
    let mut bytes = Vec::with_capacity(body.len() + 256);
    for part in head {
        // The length in front keeps one part from being read as two.
        bytes.extend((part.len() as u64).to_be_bytes());
        bytes.extend(part);
    }
    bytes
}

pub(super) fn digest(bytes: &[u8]) -> Fingerprint {
    Fingerprint::from_digest(sha256(bytes))
}

/// Returns the full path with each segment decoded, as handlers read it, and encoded again uniformly.
///
/// # Design
///
/// More spellings are equal here than in the fingerprint. `@` and `%40` are equal to a handler, but may differ to
/// a server behind it. Because they are one resource, they are not executed concurrently; because they have two
/// fingerprints, neither is answered with the response to the other. `%2F` never equals `/`.
pub(super) fn resource_path(parts: &Parts) -> String {
    let segments = full_path(parts).split('/').map(|segment| {
        let decoded: Vec<u8> = percent_decode_str(segment).collect();
        percent_encode(&decoded, RESERVED).to_string()
    });
    segments.collect::<Vec<_>>().join("/")
}

/// Decodes unreserved characters, and writes the remaining encodings in upper case (RFC 3986, sections
/// 6.2.2.1 and 6.2.2.2).
fn normalized(text: &str) -> String {
    let mut pieces = text.split('%');
    let mut normalized = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let encoded = piece.split_at_checked(2);
        let encoded =
            encoded.filter(|(digits, _)| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        let byte =
            encoded.and_then(|(digits, rest)| Some((u8::from_str_radix(digits, 16).ok()?, rest)));
        match byte {
            Some((byte, rest)) => {
                if is_unreserved(byte) {
                    normalized.push(char::from(byte));
                } else {
                    normalized.push_str(&format!("%{byte:02X}"));
                }
                normalized.push_str(rest);
            }
            // Not a percent-encoding.
            None => {
                normalized.push('%');
                normalized.push_str(piece);
            }
        }
    }
    normalized
}

/// Returns whether an octet is unreserved: encoded or not, it means the same (RFC 3986, section 2.3).
fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~')
}

/// All but the characters of [`is_unreserved`].
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// Returns the path that the client sent. Within a nested router, axum strips a part of it from the URI.
fn full_path(parts: &Parts) -> &str {
    #[cfg(feature = "axum")]
    if let Some(original) = parts.extensions.get::<axum::extract::OriginalUri>() {
        return original.0.path();
    }
    parts.uri.path()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equivalent_spellings_are_normalized_and_no_others() {
        for (text, expected) in [
            ("/a", "/a"),
            ("/%7ebob/%41%2d", "/~bob/A-"),
            ("/a%2fb%3A%c3%a9", "/a%2Fb%3A%C3%A9"),
            ("/%2541", "/%2541"),
            ("%", "%"),
            ("%4", "%4"),
            ("%zz%+1%e", "%zz%+1%e"),
            ("%%41", "%A"),
        ] {
            assert_eq!(normalized(text), expected, "{text}");
        }
    }

    #[test]
    fn the_resource_path_has_each_segment_encoded_uniformly() {
        let path = |text: &str| {
            let request = http::Request::get(text).body(()).unwrap();
            resource_path(&request.into_parts().0)
        };
        assert_eq!(path("/~a/%7Eb@c/%40"), "/~a/~b%40c/%40");
        assert_eq!(path("/a%2fb//"), "/a%2Fb//");
        assert_eq!(path("/%2541/%zz"), "/%2541/%25zz");
    }
}
