//! Tests of combinators.

use http::request::Parts;

use crate::middleware::key::{KeyExtractor, each, header, query};
use crate::protocol::{KeyError, LockKey, LockKeys};

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
    assert_eq!("".when(|_| true).or("other").extract(&parts), keys("other"));
    assert_eq!(("x", "".or("other")).extract(&parts), keys(("x", "other")));
    let missing = |_: &Parts| None::<String>;
    assert_eq!(missing.or("other").extract(&parts), keys("other"));
    assert_eq!(missing.hashed().or(missing).extract(&parts), Ok(None));
    assert_eq!(each("x", missing).extract(&parts), Ok(None));
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
