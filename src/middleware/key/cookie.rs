//! Keys from a cookie.

use http::header::COOKIE;
use http::request::Parts;
use percent_encoding::percent_decode;

use crate::middleware::key::KeyExtractor;
use crate::protocol::{KeyError, LockKey, LockKeys};

/// Takes the key from the cookie `name` as a `CookieJar` reads it: name and value are percent-decoded
/// and trimmed, and quotes around the value are removed.
///
/// So `sid=REAL`, `sid=%52EAL` and `%73id="REAL"` are one key, because they are one session. Missing or
/// empty: the request names no resource. Sent more than once, in any spelling, or not UTF-8 when
/// decoded: the request is malformed. A session cookie is a secret and would be visible on the nodes: use its hash
/// ([`hashed`](KeyExtractor::hashed)).
///
/// ```
/// use tower_redlock::{KeyExtractor, key};
///
/// let key = ("session", key::cookie("sid").hashed());
/// # let _: &dyn KeyExtractor = &key;
/// ```
#[must_use]
pub fn cookie(name: &'static str) -> Cookie {
    Cookie { name }
}

/// Extractor of [`cookie`].
#[derive(Debug, Clone)]
pub struct Cookie {
    name: &'static str,
}

impl KeyExtractor for Cookie {
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        let malformed = |what: &str| KeyError::malformed(format!("cookie `{}` {what}", self.name));
        // HTTP/2 may send each cookie in a header of its own (RFC 9113, section 8.2.3).
        let headers = parts.headers.get_all(COOKIE).iter();
        let pairs = headers.flat_map(|header| header.as_bytes().split(|byte| *byte == b';'));
        let mut values = pairs.filter_map(|pair| {
            let sign = pair.iter().position(|byte| *byte == b'=')?;
            let (name, value) = (&pair[..sign], &pair[sign + 1..]);
            let is_ours = percent_decode(trimmed(name)).eq(self.name.bytes());
            is_ours.then(|| percent_decode(trimmed(value)))
        });
        let Some(value) = values.next() else {
            return Ok(None);
        };
        if values.next().is_some() {
            return Err(malformed("is sent more than once"));
        }
        let text = value.decode_utf8().map_err(|_| malformed("is not UTF-8"))?;
        // After decoding, because a jar reads `%22` as a quote.
        let quoted = text
            .strip_prefix('"')
            .and_then(|text| text.strip_suffix('"'));
        let text = quoted.unwrap_or(&text);
        Ok((!text.is_empty()).then(|| LockKey::from(text).into()))
    }

    fn source(&self) -> Option<String> {
        Some(format!("cookie `{}`", self.name))
    }
}

/// Removes the white space that a `CookieJar` removes: that of Unicode, in a header that is UTF-8.
fn trimmed(text: &[u8]) -> &[u8] {
    match str::from_utf8(text) {
        Ok(text) => text.trim().as_bytes(),
        Err(_) => text.trim_ascii(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::middleware::key::header::tests::parts_with;

    fn extract(values: &[&[u8]]) -> Result<Option<LockKeys>, KeyError> {
        cookie("id").extract(&parts_with("cookie", values))
    }

    #[test]
    fn a_cookie_is_found_among_others() {
        let key = |key: &str| Ok(Some(LockKey::from(key).into()));
        assert_eq!(extract(&[b"a=1; id=7; b=2"]), key("7"));
        assert_eq!(extract(&[b"a=1", b"id=a=b"]), key("a=b"));
        assert_eq!(extract(&[b"id=\"7\""]), key("7"));
        // A no-break space.
        assert_eq!(extract(&[b"\xc2\xa0id=\xc2\xa07"]), key("7"));
    }

    #[test]
    fn missing_and_empty_cookies_name_nothing() {
        for value in ["", "a=1", "id", "id=", "id=\"\"", "xid=7", "ID=7", "idx=7"] {
            assert_eq!(extract(&[value.as_bytes()]), Ok(None), "{value}");
        }
    }

    #[test]
    fn ambiguous_and_unreadable_cookies_are_malformed() {
        for headers in [[b"id=1; id=2".as_slice()], [b"id=\xff"]] {
            assert!(matches!(extract(&headers), Err(KeyError::Malformed(_))));
        }
    }
}
