//! Keys from a request header.

use std::fmt::Debug;

use http::HeaderName;
use http::request::Parts;

use crate::middleware::key::KeyExtractor;
use crate::middleware::token_header::are_alike;
use crate::protocol::{KeyError, LockKey, LockKeys};

/// Takes the key from the request header `name`, byte for byte: `7` and `"7"` are two keys.
///
/// Missing or empty: the request names no resource. Sent more than once (also under a name that is equal
/// once `_` is read as `-`, as CGI and WSGI do), or not UTF-8: the request is malformed. The client chooses header values: put a literal in front
/// (`("upload", key::header("x-upload-id"))`), and an authentication layer outside.
///
/// ```
/// use tower_redlock::{KeyExtractor, key};
///
/// let key = ("upload", key::header("x-upload-id"));
/// # let _: &dyn KeyExtractor = &key;
/// ```
///
/// # Panics
///
/// If `name` is not a header name.
pub fn header<N>(name: N) -> Header
where
    N: TryInto<HeaderName, Error: Debug>,
{
    let name = name.try_into();
    Header {
        name: name.expect("key::header needs a valid header name"),
    }
}

/// Extractor of [`header`].
#[derive(Debug, Clone)]
pub struct Header {
    name: HeaderName,
}

impl KeyExtractor for Header {
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        let mut values = parts.headers.get_all(&self.name).iter();
        let Some(value) = values.next() else {
            return Ok(None);
        };
        let malformed = |what: &str| KeyError::malformed(format!("header `{}` {what}", self.name));
        // Proxies and frameworks disagree on which of the values counts.
        let is_other = |other: &HeaderName| {
            *other != self.name && are_alike(other.as_str().as_bytes(), &self.name)
        };
        if values.next().is_some() || parts.headers.keys().any(is_other) {
            return Err(malformed("is sent more than once"));
        }
        let text = std::str::from_utf8(value.as_bytes()).map_err(|_| malformed("is not UTF-8"))?;
        Ok((!text.is_empty()).then(|| LockKey::from(text).into()))
    }

    fn source(&self) -> Option<String> {
        Some(format!("header `{}`", self.name))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use http::{HeaderValue, Request};

    use super::*;

    /// Returns the head of a request with a header of each value.
    pub(crate) fn parts_with(name: &'static str, values: &[&[u8]]) -> Parts {
        let mut request = Request::new(());
        for value in values {
            let value = HeaderValue::from_bytes(value).unwrap();
            request.headers_mut().append(name, value);
        }
        request.into_parts().0
    }

    fn extract(values: &[&[u8]]) -> Result<Option<LockKeys>, KeyError> {
        header("X-Key").extract(&parts_with("x-key", values))
    }

    #[test]
    fn a_header_is_the_key_byte_for_byte() {
        for text in ["a b", "\"a b\"", "\"\"", "\"", r#""a";p=1"#, "a\"b"] {
            let key = LockKey::from(text).into();
            assert_eq!(extract(&[text.as_bytes()]), Ok(Some(key)));
        }
        assert_eq!(extract(&[]), Ok(None));
        assert_eq!(extract(&[b""]), Ok(None));
    }

    #[test]
    fn ambiguous_and_unreadable_headers_are_malformed() {
        assert!(matches!(
            extract(&[b"a", b"a"]),
            Err(KeyError::Malformed(_))
        ));
        assert!(matches!(extract(&[b"\xff"]), Err(KeyError::Malformed(_))));
    }
}
