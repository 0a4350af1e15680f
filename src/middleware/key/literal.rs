//! Keys that are the same for every request.

use http::request::Parts;

use crate::middleware::key::KeyExtractor;
use crate::protocol::{KeyError, LockKey, LockKeys};

/// A key, or a part of one, that is the same for every request. A `&'static str` does the same;
/// this takes what is known only at start-up.
///
/// ```
/// use tower_redlock::key;
///
/// # let shard = 7;
/// let by_shard = (key::literal(format!("shard-{shard}")), key::path("id"));
/// # let _: &dyn tower_redlock::KeyExtractor = &by_shard;
/// ```
pub fn literal(key: impl Into<LockKey>) -> Literal {
    Literal(key.into())
}

/// Extractor of [`literal`].
#[derive(Debug, Clone)]
pub struct Literal(LockKey);

impl KeyExtractor for Literal {
    fn extract(&self, _: &Parts) -> Result<Option<LockKeys>, KeyError> {
        Ok(Some(self.0.clone().into()))
    }

    fn is_constant(&self) -> bool {
        // An empty one names nothing.
        !self.0.is_empty()
    }
}
