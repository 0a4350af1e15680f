//! Keys from the query string.

use std::borrow::Cow;

use http::request::Parts;
use percent_encoding::percent_decode;

use crate::middleware::key::KeyExtractor;
use crate::protocol::{KeyError, LockKey, LockKeys};

/// Takes the key from the query parameter `name`, decoded as a form field: `%41` and `A` are the
/// same key, and so are `+` and `%20`.
///
/// Missing or empty: the request names no resource. Given more than once, or not UTF-8 when
/// decoded: the request is malformed.
///
/// ```
/// use tower_redlock::{KeyExtractor, key};
///
/// let key = ("invoice", key::query("number"));
/// # let _: &dyn KeyExtractor = &key;
/// ```
#[must_use]
pub fn query(name: &'static str) -> Query {
    Query { name }
}

/// Extractor of [`query`].
#[derive(Debug, Clone)]
pub struct Query {
    name: &'static str,
}

impl KeyExtractor for Query {
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        let query = parts.uri.query().unwrap_or_default();
        form_value(query, self.name, "query parameter")
    }

    fn source(&self) -> Option<String> {
        Some(format!("query parameter `{}`", self.name))
    }
}

/// Finds the value of a name in `application/x-www-form-urlencoded` data.
pub(super) fn form_value(form: &str, name: &str, what: &str) -> Result<Option<LockKeys>, KeyError> {
    let malformed = |problem: &str| KeyError::malformed(format!("{what} `{name}` {problem}"));
    let mut values = form
        .split('&')
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .filter(|(found, _)| *decode(found) == *name.as_bytes())
        .map(|(_, value)| decode(value));
    let Some(value) = values.next() else {
        return Ok(None);
    };
    if values.next().is_some() {
        return Err(malformed("is given more than once"));
    }
    let text = str::from_utf8(&value).map_err(|_| malformed("is not UTF-8"))?;
    Ok((!text.is_empty()).then(|| LockKey::from(text).into()))
}

/// Decodes a name or a value of `application/x-www-form-urlencoded` data.
fn decode(encoded: &str) -> Vec<u8> {
    let spaced = if encoded.contains('+') {
        Cow::Owned(encoded.replace('+', " "))
    } else {
        Cow::Borrowed(encoded)
    };
    percent_decode(spaced.as_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extract(query_string: &str) -> Result<Option<LockKeys>, KeyError> {
        let uri = format!("/path?{query_string}");
        let request = http::Request::get(uri).body(()).unwrap();
        query("id").extract(&request.into_parts().0)
    }

    #[test]
    fn a_parameter_is_decoded() {
        let key = |key: &str| Ok(Some(LockKey::from(key).into()));
        assert_eq!(extract("a=1&id=7"), key("7"));
        assert_eq!(extract("%69d=%41+b%20c"), key("A b c"));
    }

    #[test]
    fn missing_and_empty_parameters_name_nothing() {
        for query_string in ["", "a=1", "id", "id=", "xid=7"] {
            assert_eq!(extract(query_string), Ok(None), "{query_string}");
        }
    }

    #[test]
    fn ambiguous_and_unreadable_parameters_are_malformed() {
        assert!(matches!(extract("id=1&id=2"), Err(KeyError::Malformed(_))));
        assert!(matches!(extract("id=%ff"), Err(KeyError::Malformed(_))));
    }
}
