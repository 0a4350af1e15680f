//! The header that takes the token to the inner service: what a client sent that may pass for it.

use http::header::{CONNECTION, Entry};
use http::{HeaderMap, HeaderName, HeaderValue};

/// Removes every header of the client that may be taken for the one with this name, and its name from the
/// options of the connection, which the next proxy would remove the header for (RFC 9110, section 7.6.1).
///
/// CGI, WSGI and their kin read `_` as `-`, so `X_Token` would stand in for `X-Token` there.
pub(super) fn clear(headers: &mut HeaderMap, name: &HeaderName) {
    let is_alike = |other: &[u8]| are_alike(other, name);
    headers.remove(name);
    // Most requests have none, and pay nothing for those that do.
    while let Some(alike) = headers
        .keys()
        .find(|other| is_alike(other.as_str().as_bytes()))
    {
        let alike = alike.clone();
        headers.remove(alike);
    }
    for list in [CONNECTION, PROXY_CONNECTION] {
        clear_options(headers, &list, is_alike);
    }
}

/// Whether a name is that of a header to those who read `_` as `-`.
pub(super) fn are_alike(other: &[u8], name: &HeaderName) -> bool {
    let folded = |byte: &u8| match byte {
        b'_' => b'-',
        byte => byte.to_ascii_lowercase(),
    };
    let name = name.as_str().as_bytes();
    other.len() == name.len() && other.iter().map(folded).eq(name.iter().map(folded))
}

/// Removes options from a header that lists some; a value that has none of them stays as it is.
fn clear_options(headers: &mut HeaderMap, list: &HeaderName, is_ours: impl Fn(&[u8]) -> bool) {
    let options = |value: &HeaderValue| -> Vec<Vec<u8>> {
        let options = value.as_bytes().split(|byte| *byte == b',');
        options.map(|option| option.trim_ascii().to_vec()).collect()
    };
    let is_named = |value: &HeaderValue| options(value).iter().any(|option| is_ours(option));
    let Entry::Occupied(found) = headers.entry(list) else {
        return;
    };
    if !found.iter().any(is_named) {
        return;
    }
    let (_, values) = found.remove_entry_mult();
    let kept: Vec<HeaderValue> = values
        .filter_map(|value| {
            if !is_named(&value) {
                return Some(value);
            }
            let mut rest = options(&value);
            rest.retain(|option| !option.is_empty() && !is_ours(option));
            // Made of pieces of a header value, it is one.
            HeaderValue::from_bytes(&rest.join(&b", "[..])).ok()
        })
        .filter(|value| !value.is_empty())
        .collect();
    for value in kept {
        headers.append(list.clone(), value);
    }
}

/// What some clients say to proxies, and some proxies heed.
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
