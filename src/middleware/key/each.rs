//! Several keys from one request.

use http::request::Parts;

use crate::middleware::key::KeyExtractor;
use crate::middleware::key::extractor::{join, present};
use crate::protocol::{KeyError, LockKeys};

/// Takes the keys of both extractors and locks them together, all or nothing, as for a transfer from
/// one account to another. A tuple makes one key of two parts; this makes two keys.
///
/// If either is missing, the request names no resource. Two equal keys count as one.
///
/// ```
/// use tower_redlock::key;
///
/// let both_accounts = ("account", key::each(key::query("from"), key::query("to")));
/// # let _: &dyn tower_redlock::KeyExtractor = &both_accounts;
/// ```
pub fn each<A: KeyExtractor, B: KeyExtractor>(first: A, second: B) -> Each<A, B> {
    Each(first, second)
}

/// Extractor of [`each`].
#[derive(Debug, Clone)]
pub struct Each<A, B>(A, B);

impl<A: KeyExtractor, B: KeyExtractor> KeyExtractor for Each<A, B> {
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        let Some(first) = self.0.extract(parts)?.filter(present) else {
            return Ok(None);
        };
        let Some(second) = self.1.extract(parts)?.filter(present) else {
            return Ok(None);
        };
        let both = first.as_slice().iter().chain(second.as_slice());
        Ok(Some(both.cloned().collect()))
    }

    fn label(&self) -> Option<&'static str> {
        self.0.label().or_else(|| self.1.label())
    }

    fn is_constant(&self) -> bool {
        self.0.is_constant() && self.1.is_constant()
    }

    fn source(&self) -> Option<String> {
        join([self.0.source(), self.1.source()], " and ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::middleware::key::query;

    fn extract(target: &str) -> Option<LockKeys> {
        let request = http::Request::get(target).body(()).unwrap();
        let parts = request.into_parts().0;
        let both = ("account", each(query("from"), query("to")));
        both.extract(&parts).unwrap()
    }

    #[test]
    fn both_keys_are_taken_or_none() {
        let both = [("account", "a"), ("account", "b")];
        assert_eq!(extract("/?from=b&to=a"), Some(both.into_iter().collect()));
        let one = [("account", "a")];
        assert_eq!(extract("/?from=a&to=a"), Some(one.into_iter().collect()));
        for target in ["/", "/?from=a", "/?to=a", "/?from=a&to="] {
            assert_eq!(extract(target), None, "{target}");
        }
    }
}
