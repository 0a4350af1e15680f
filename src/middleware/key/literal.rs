//! Keys that need no name of a part of the request: literals, and the method.

use http::request::Parts;

use crate::middleware::key::KeyExtractor;
use crate::middleware::key::extractor::{Described, Description};
use crate::protocol::LockKey;

/// Returns a key, or a part of one, that is the same for all requests. A `&'static str` does the same;
/// use this for values that are known only at start-up.
///
/// ```
/// use tower_redlock::key;
///
/// # let shard = 7;
/// let by_shard = (key::literal(format!("shard-{shard}")), key::path("id"));
/// # let _: &dyn tower_redlock::KeyExtractor = &by_shard;
/// ```
pub fn literal(key: impl Into<LockKey>) -> impl KeyExtractor + Clone {
    let key = key.into();
    let description = Description {
        // An empty literal names no resource.
        is_constant: !key.is_empty(),
        ..Description::default()
    };
    Described::new(description, move |_| Ok(Some(key.clone().into())))
}

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
pub fn method() -> impl KeyExtractor + Clone {
    |parts: &Parts| LockKey::from(parts.method.as_str())
}
