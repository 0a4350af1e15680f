//! Keys from a request header.

use std::fmt::Debug;

use http::HeaderName;
use http::request::Parts;

use crate::middleware::key::KeyExtractor;
use crate::protocol::{KeyError, LockKey, LockKeys};

/// Takes the key from the request header `name`, byte for byte.
///
/// Missing or empty: the request names no resource. Sent more than once, or not UTF-8: the request
/// is malformed. Header values are the client's choice: put a literal beside it
/// (`("upload", key::header("x-upload-id"))`), and authentication in front of it.
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
        name: name.expect("the name of a header to take keys from is a valid header name"),
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
        // Which of them would be the resource? Proxies and frameworks disagree.
        if values.next().is_some() {
            return Err(malformed("is sent more than once"));
        }
        let text = std::str::from_utf8(value.as_bytes()).map_err(|_| malformed("is not UTF-8"))?;
        Ok((!text.is_empty()).then(|| LockKey::from(text).into()))
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderValue, Request};

    use super::*;

    fn extract(values: &[&[u8]]) -> Result<Option<LockKeys>, KeyError> {
        let mut request = Request::new(());
        for value in values {
            let value = HeaderValue::from_bytes(value).unwrap();
            request.headers_mut().append("x-key", value);
        }
        header("X-Key").extract(&request.into_parts().0)
    }

    #[test]
    fn a_header_is_taken_as_it_is() {
        assert_eq!(extract(&[b"a b"]), Ok(Some(LockKey::from("a b").into())));
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
