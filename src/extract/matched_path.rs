//! Keys from the matched route.

use axum::extract::MatchedPath as Matched;
use http::request::Parts;

use crate::extract::path::unrouted;
use crate::middleware::KeyExtractor;
use crate::protocol::{KeyError, LockKey, LockKeys};

/// Takes the path of the matched axum route, as the program spells it (`/accounts/{id}`): one lock per
/// route, or, with other parts, a key that is unique to the route.
///
/// Outside of any axum router, the layer is misconfigured: 500 `misconfigured`.
///
/// ```
/// use tower_redlock::{KeyExtractor, key};
///
/// let key = ("route", key::matched_path(), key::path("id"));
/// # let _: &dyn KeyExtractor = &key;
/// ```
#[must_use]
pub fn matched_path() -> MatchedPath {
    MatchedPath { _private: () }
}

/// Extractor of [`matched_path`].
#[derive(Debug, Clone)]
pub struct MatchedPath {
    _private: (),
}

impl KeyExtractor for MatchedPath {
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        match parts.extensions.get::<Matched>() {
            Some(matched) => Ok(Some(LockKey::from(matched.as_str()).into())),
            None => unrouted(parts, "key::matched_path()"),
        }
    }

    fn source(&self) -> Option<String> {
        Some("the matched route".to_owned())
    }
}
