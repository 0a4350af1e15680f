//! Removes headers of the client that the inner service could take for the token header.

use http::header::CONNECTION;
use http::{HeaderMap, HeaderName, HeaderValue};

/// Removes every header that could be taken for the one with this name, and the name from the connection
/// options, which would make the next proxy remove the header (RFC 9110, section 7.6.1).
///
/// CGI and WSGI read `_` as `-`: there, `X_Token` could be taken for `X-Token`.
#[allow(unreachable_pub, reason = "a fuzz target calls it")]
pub fn clear(headers: &mut HeaderMap, name: &HeaderName) {
    let is_alike = |other: &[u8]| are_alike(other, name);
    let alike = headers
        .keys()
        .filter(|other| is_alike(other.as_str().as_bytes()));
    // Allocates only for a request that has such a header.
    for alike in alike.cloned().collect::<Vec<_>>() {
        headers.remove(alike);
    }
    for list in [CONNECTION, PROXY_CONNECTION] {
        clear_options(headers, &list, is_alike);
    }
}

/// Returns whether a name equals that of a header once `_` is read as `-`.
pub(super) fn are_alike(other: &[u8], name: &HeaderName) -> bool {
    let folded = |byte: &u8| match byte {
        b'_' => b'-',
        byte => byte.to_ascii_lowercase(),
    };
    let name = name.as_str().as_bytes();
    other.len() == name.len() && other.iter().map(folded).eq(name.iter().map(folded))
}

/// Removes options from a header that lists options, which is not changed if it has none of them.
fn clear_options(headers: &mut HeaderMap, list: &HeaderName, is_ours: impl Fn(&[u8]) -> bool) {
    let options = || {
        let values = headers.get_all(list).iter();
        let options = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
        options.map(<[u8]>::trim_ascii)
    };
    if !options().any(&is_ours) {
        return;
    }
    let kept = options().filter(|option| !option.is_empty() && !is_ours(option));
    // A piece of a header value is a header value.
    let kept = kept.filter_map(|option| HeaderValue::from_bytes(option).ok());
    let kept: Vec<HeaderValue> = kept.collect();
    headers.remove(list);
    for option in kept {
        headers.append(list, option);
    }
}

/// Non-standard, but some clients send it and some proxies obey it.
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
