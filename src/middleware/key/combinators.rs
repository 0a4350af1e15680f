//! Combinators of extractors: mapped, hashed, conditional, with an alternative, or several keys from one request.

use std::fmt;

use http::request::Parts;

use crate::middleware::key::extractor::{
    Each, Hashed, IntoKeys, KeyExtractor, Map, Or, When, describes, join, present,
};
use crate::protocol::{KeyError, LockKey, LockKeys};

impl<E, F, K> KeyExtractor for Map<E, F>
where
    E: KeyExtractor,
    F: Fn(LockKey) -> K + Send + Sync + 'static,
    K: IntoKeys + 'static,
{
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        let Some(keys) = self.inner.extract(parts)?.filter(present) else {
            return Ok(None);
        };
        let mut mapped = Vec::new();
        for key in keys.as_slice() {
            let Some(keys) = (self.map)(key.clone()).into_keys()? else {
                return Ok(None);
            };
            mapped.extend_from_slice(keys.as_slice());
        }
        Ok(Some(mapped.into_iter().collect()))
    }

    describes! { inner }
}

/// By hand: a closure has no `Debug`.
impl<E: fmt::Debug, F> fmt::Debug for Map<E, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Map").field(&self.inner).finish()
    }
}

impl<A: KeyExtractor, B: KeyExtractor> KeyExtractor for Each<A, B> {
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        let Some(first) = self.0.0.extract(parts)?.filter(present) else {
            return Ok(None);
        };
        let Some(second) = self.0.1.extract(parts)?.filter(present) else {
            return Ok(None);
        };
        let both = first.as_slice().iter().chain(second.as_slice());
        Ok(Some(both.cloned().collect()))
    }

    describes! { 0 }
}

impl<E: KeyExtractor> KeyExtractor for Hashed<E> {
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        self.0.extract(parts)
    }

    describes! { 0 }
}

impl<A: KeyExtractor, B: KeyExtractor> KeyExtractor for Or<A, B> {
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        match self.0.extract(parts)?.filter(present) {
            Some(keys) => Ok(Some(keys)),
            None => self.1.extract(parts),
        }
    }

    fn label(&self) -> Option<&'static str> {
        self.0.label().or_else(|| self.1.label())
    }

    fn is_constant(&self) -> bool {
        // Then the alternative is never used.
        self.0.is_constant()
    }

    fn source(&self) -> Option<String> {
        join([self.0.source(), self.1.source()], " or ")
    }
}

/// Never constant: other requests have no key, or that of an alternative.
impl<E, F> KeyExtractor for When<E, F>
where
    E: KeyExtractor,
    F: Fn(&Parts) -> bool + Send + Sync + 'static,
{
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        if (self.applies)(parts) {
            self.inner.extract(parts)
        } else {
            Ok(None)
        }
    }

    fn label(&self) -> Option<&'static str> {
        self.inner.label()
    }

    fn source(&self) -> Option<String> {
        self.inner.source()
    }
}

/// By hand: a closure has no `Debug`.
impl<E: fmt::Debug, F> fmt::Debug for When<E, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("When").field(&self.inner).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::middleware::key::{each, header, query};

    fn parts(target: &str) -> Parts {
        let request = http::Request::get(target).header("x-tenant", "T");
        request.body(()).unwrap().into_parts().0
    }

    fn keys<K: Into<LockKey>>(key: K) -> Result<Option<LockKeys>, KeyError> {
        Ok(Some(key.into().into()))
    }

    #[test]
    fn map_prefix_and_hashed_or_when_change_the_keys() {
        let parts = parts("/?id=A");
        let id = || query("id");
        let lower = |key: LockKey| key.as_bytes().to_ascii_lowercase();
        assert_eq!(id().map(lower).extract(&parts), keys("a"));
        assert_eq!(
            id().prefix("account").extract(&parts),
            keys(("account", "A"))
        );
        assert_eq!(
            id().and(header("x-tenant")).extract(&parts),
            keys(("A", "T"))
        );
        let digest = "559aead08264d5795d3909718cdd05abd49572e84fe55590eef31a88a08fdffd";
        assert_eq!(id().hashed().extract(&parts), keys(digest));
        assert_eq!(query("no").or(id()).extract(&parts), keys("A"));
        assert_eq!(id().or(query("no")).extract(&parts), keys("A"));
        assert_eq!(id().when(|_| true).extract(&parts), keys("A"));
        assert_eq!(id().when(|_| false).extract(&parts), Ok(None));
    }

    #[test]
    fn combinators_of_a_missing_key_name_no_resource() {
        let parts = parts("/?id=");
        let id = || query("id");
        assert_eq!(id().hashed().extract(&parts), Ok(None));
        assert_eq!(id().prefix("account").extract(&parts), Ok(None));
        assert_eq!(id().map(|key| key).extract(&parts), Ok(None));
        assert_eq!("".hashed().extract(&parts), Ok(None));
        assert_eq!("".or("other").extract(&parts), keys("other"));
        let nothing = |_: LockKey| None::<LockKey>;
        assert_eq!("a".map(nothing).extract(&parts), Ok(None));
    }

    #[test]
    fn or_does_not_replace_an_error() {
        let parts = parts("/?id=1&id=2");
        assert!(query("id").or("other").extract(&parts).is_err());
    }

    fn extract_both(target: &str) -> Option<LockKeys> {
        let request = http::Request::get(target).body(()).unwrap();
        let parts = request.into_parts().0;
        let both = ("account", each(query("from"), query("to")));
        both.extract(&parts).unwrap()
    }

    #[test]
    fn both_keys_are_taken_or_none() {
        let both = [("account", "a"), ("account", "b")];
        assert_eq!(
            extract_both("/?from=b&to=a"),
            Some(both.into_iter().collect())
        );
        let one = [("account", "a")];
        assert_eq!(
            extract_both("/?from=a&to=a"),
            Some(one.into_iter().collect())
        );
        for target in ["/", "/?from=a", "/?to=a", "/?from=a&to="] {
            assert_eq!(extract_both(target), None, "{target}");
        }
    }
}
