//! Fingerprints of requests, and the paths as parts of the key.

use std::iter;

use http::header::{CONTENT_ENCODING, CONTENT_TYPE, IF_MATCH};
use http::request::Parts;
use percent_encoding::{AsciiSet, percent_decode_str, percent_encode};

use crate::middleware::key::RESERVED;

/// Returns the bytes of the default fingerprint: method, paths, queries, the headers `If-Match`, `Content-Type` and
/// `Content-Encoding`, and the body. Paths and queries are normalized (RFC 3986, section 6.2.2).
#[must_use]
#[allow(unreachable_pub, reason = "a fuzz target calls it")]
pub fn of_request(parts: &Parts, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(body.len() + 256);
    let mut push = |part: &[u8]| {
        // The length in front keeps one part from being read as two.
        bytes.extend((part.len() as u64).to_be_bytes());
        bytes.extend(part);
    };
    push(parts.method.as_str().as_bytes());
    for target in targets(parts) {
        push(normalized(&target).as_bytes());
    }
    push(normalized(parts.uri.query().unwrap_or_default()).as_bytes());
    for name in [IF_MATCH, CONTENT_TYPE, CONTENT_ENCODING] {
        let values = parts.headers.get_all(name).iter();
        let values: Vec<&[u8]> = values.map(|value| value.as_bytes()).collect();
        push(&values.join(&b","[..]));
    }
    push(body);
    bytes
}

/// Returns the paths of [`targets`], decoded as handlers read them, and encoded again uniformly.
///
/// # Design
///
/// More spellings are equal here than in the fingerprint. `@` and `%40` are equal to a handler, and so are `/` and
/// `%2F` behind a wildcard, but they may differ to a server behind it. Because they are one resource, they are not
/// executed concurrently; because they have two fingerprints, neither is answered with the response to the other.
#[must_use]
#[allow(unreachable_pub, reason = "a fuzz target calls it")]
pub fn resource_paths(parts: &Parts) -> Vec<String> {
    let targets = targets(parts).into_iter().map(|target| {
        let path = target.split('?').next().unwrap_or_default();
        let decoded: Vec<u8> = percent_decode_str(path).collect();
        percent_encode(&decoded, RESERVED_IN_PATHS).to_string()
    });
    targets.collect()
}

/// Decodes unreserved characters, and writes the remaining encodings in upper case (RFC 3986, sections
/// 6.2.2.1 and 6.2.2.2).
fn normalized(text: &str) -> String {
    let mut pieces = text.split('%');
    let mut normalized = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let digits = piece.get(..2).unwrap_or_default();
        // Without the sign that `from_str_radix` accepts.
        let is_encoding = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        match u8::from_str_radix(digits, 16) {
            Ok(byte) if is_encoding => {
                normalized.extend(percent_encode(&[byte], RESERVED));
                normalized.push_str(&piece[2..]);
            }
            _ => normalized.extend(["%", piece]),
        }
    }
    normalized
}

/// The reserved characters without the slash.
const RESERVED_IN_PATHS: &AsciiSet = &RESERVED.remove(b'/');

/// Returns what a request is sent to: its path, the target that the first router saw if that is another, and the
/// prefix that nested routers have taken off the path.
///
/// # Design
///
/// A handler may send requests on with the extensions of its own request, as a batch does, or a gateway that rewrites
/// paths. The original target then names what the client asked for, and the present path what is executed. Several of
/// these may differ only in the prefix that nested routers have taken off, or in the values of its parameters.
fn targets(parts: &Parts) -> Vec<String> {
    #[cfg(feature = "axum")]
    let routed = {
        let original = parts.extensions.get::<axum::extract::OriginalUri>();
        let original = original.and_then(|original| original.0.path_and_query());
        // Most requests are what the client sent. That keeps their keys short.
        let original = original.filter(|original| parts.uri.path_and_query() != Some(original));
        let nested = crate::extract::nested_at(parts).into_iter();
        let nested =
            nested.map(|text| percent_encode(text.as_bytes(), RESERVED_IN_PATHS).to_string());
        iter::once(original.map_or_else(String::new, ToString::to_string)).chain(nested)
    };
    #[cfg(not(feature = "axum"))]
    let routed = iter::empty();
    let path = parts.uri.path().to_owned();
    iter::once(path).chain(routed).collect()
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
    fn the_resource_path_is_encoded_uniformly() {
        let path = |text: &str| {
            let request = http::Request::get(text).body(()).unwrap();
            resource_paths(&request.into_parts().0).concat()
        };
        assert_eq!(path("/~a/%7Eb@c/%40?d=e"), "/~a/~b%40c/%40");
        assert_eq!(path("/a%2fb//"), "/a/b//");
        assert_eq!(path("/%2541/%zz"), "/%2541/%25zz");
    }
}
