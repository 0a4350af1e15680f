//! Keys from the method of a request.

use http::request::Parts;

use crate::middleware::key::KeyExtractor;
use crate::protocol::{KeyError, LockKey, LockKeys};

/// Takes the request's method as a part of the key, so that `PUT /a/7` and `DELETE /a/7` do not
/// exclude each other.
///
/// ```
/// use tower_redlock::{KeyExtractor, key};
///
/// let key = ("document", key::method(), key::query("id"));
/// # let _: &dyn KeyExtractor = &key;
/// ```
#[must_use]
pub fn method() -> Method {
    Method { _private: () }
}

/// Extractor of [`method`].
#[derive(Debug, Clone)]
pub struct Method {
    _private: (),
}

impl KeyExtractor for Method {
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        Ok(Some(LockKey::from(parts.method.as_str()).into()))
    }
}
