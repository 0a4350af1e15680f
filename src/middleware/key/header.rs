//! Keys from a request header.

use std::fmt::Debug;

use http::HeaderName;
use http::request::Parts;

use crate::middleware::key::KeyExtractor;
use crate::middleware::token_header::are_alike;
use crate::protocol::{KeyError, LockKey, LockKeys};

/// Takes the key from the request header `name`: bare, byte for byte, or a structured-field string
/// (`"order 7"`, RFC 9651, section 3.3.3), which is the same key as its text.
///
/// Missing or empty: the request names no resource. Sent more than once (also under a name that is equal
/// once `_` is read as `-`, as CGI and WSGI do), not UTF-8, or a quote without a complete
/// string: the request is malformed. The client chooses header values: put a literal in front
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
        let key = match text.strip_prefix('"') {
            Some(rest) => unquote(rest).ok_or_else(|| malformed("is an unfinished string"))?,
            None => text.to_owned(),
        };
        Ok((!key.is_empty()).then(|| LockKey::from(key).into()))
    }

    fn source(&self) -> Option<String> {
        Some(format!("header `{}`", self.name))
    }
}

/// Reads a structured-field string behind its first quote.
fn unquote(quoted: &str) -> Option<String> {
    let mut text = String::new();
    let mut chars = quoted.chars();
    loop {
        match chars.next()? {
            '"' => return chars.as_str().is_empty().then_some(text),
            '\\' => text.push(chars.next().filter(|next| matches!(next, '"' | '\\'))?),
            plain @ ' '..='~' => text.push(plain),
            _ => return None,
        }
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
    fn a_bare_header_is_the_key_byte_for_byte() {
        assert_eq!(extract(&[b"a b"]), Ok(Some(LockKey::from("a b").into())));
        assert_eq!(extract(&[]), Ok(None));
        assert_eq!(extract(&[b""]), Ok(None));
    }

    #[test]
    fn a_quoted_header_is_its_text() {
        let key = |key: &str| Ok(Some(LockKey::from(key).into()));
        assert_eq!(extract(&[b"\"a b\""]), key("a b"));
        assert_eq!(extract(&[br#""a\"\\""#]), key("a\"\\"));
        assert_eq!(extract(&[b"\"\""]), Ok(None));
        assert_eq!(extract(&[b"a\"b"]), key("a\"b"));
        for unfinished in [
            r#"""#,
            r#""a"#,
            r#""a\""#,
            r#""a\b""#,
            r#""a"b"#,
            r#""a";p=1"#,
        ] {
            assert!(matches!(
                extract(&[unfinished.as_bytes()]),
                Err(KeyError::Malformed(_))
            ));
        }
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
