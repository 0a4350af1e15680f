//! The extractor trait, and its implementations for literals, parts of a request, tuples, closures and pointers.

use std::sync::Arc;

use http::request::Parts;

use crate::node::sha256;
use crate::protocol::{KeyError, LockKey, LockKeys, hex};

/// Finds the resource that a request is about, from its head.
///
/// Implemented by
/// * `&'static str`: a literal part, the same for every request;
/// * tuples up to eight: a composite key; it names a resource only if every part does;
/// * closures `|parts: &Parts| ..` that return a key, as [`from_fn`](crate::key::from_fn) does;
/// * the extractors of the [`key`](crate::key) module, and `Arc<dyn KeyExtractor>`;
/// * types of your own.
///
/// ```
/// use std::sync::Arc;
/// use http::request::Parts;
/// use tower_redlock::{KeyError, KeyExtractor, LockKeys, key};
///
/// struct Tenant {
///     header: &'static str,
/// }
///
/// impl KeyExtractor for Tenant {
///     fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
///         let tenant = parts.headers.get(self.header);
///         Ok(tenant.map(|tenant| LockKeys::from(tenant.as_bytes())))
///     }
/// }
///
/// let by_tenant = ("tenant", Tenant { header: "x-tenant" });
/// let by_host = |parts: &Parts| parts.uri.host().map(str::to_owned);
/// let erased: Vec<Arc<dyn KeyExtractor>> = vec![Arc::new(by_tenant), Arc::new(by_host)];
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not find a lock key in requests",
    label = "this is not a `KeyExtractor`",
    note = "use a `&'static str`, a function of `tower_redlock::key`, a tuple of up to eight of these, or a closure `|parts: &http::request::Parts| ..` that returns a key",
    note = "for text that is known only at start-up, use `tower_redlock::key::literal`"
)]
pub trait KeyExtractor: Send + Sync + 'static {
    /// Returns the keys to lock for a request; `None` if it names no resource.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if the key is unusable: an error of the client, or of the set-up
    /// ([`KeyError::Misconfigured`]).
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError>;

    /// Describes the keys, for the extractors of this crate.
    #[doc(hidden)]
    fn describe(&self) -> Description {
        Description::default()
    }

    /// Puts a literal part in front: the same as the tuple `(literal, self)`.
    fn prefix(self, literal: &'static str) -> (&'static str, Self)
    where
        Self: Sized,
    {
        (literal, self)
    }

    /// Makes a composite key of this part and another: the same as the tuple `(self, other)`.
    fn and<E: KeyExtractor>(self, other: E) -> (Self, E)
    where
        Self: Sized,
    {
        (self, other)
    }

    /// Maps each key to anything that a closure of [`from_fn`](crate::key::from_fn) may return, such as the key in
    /// lower case.
    fn map<K: IntoKeys>(
        self,
        map: impl Fn(LockKey) -> K + Send + Sync + 'static,
    ) -> impl KeyExtractor + Clone
    where
        Self: Sized,
    {
        Described::new(self.describe(), move |parts| {
            let Some(keys) = self.extract(parts)?.filter(present) else {
                return Ok(None);
            };
            let keys = keys.as_slice().iter();
            union(keys.map(|key| map(key.clone()).into_keys()))
        })
    }

    /// Replaces each key by its SHA-256 in hexadecimal digits, so that secrets and personal data are not visible
    /// on the nodes.
    fn hashed(self) -> impl KeyExtractor + Clone
    where
        Self: Sized,
    {
        self.map(|key| hex(&sha256(key.as_bytes())))
    }

    /// Takes the key from `other` if `self` finds no resource. An error of `self` is returned.
    fn or<E: KeyExtractor>(self, other: E) -> impl KeyExtractor + Clone
    where
        Self: Sized,
    {
        let description = self.describe();
        let description = Description {
            // Then the alternative is never used.
            is_constant: description.is_constant,
            ..description.join(other.describe(), " or ")
        };
        Described::new(description, move |parts| {
            match self.extract(parts)?.filter(present) {
                Some(keys) => Ok(Some(keys)),
                None => other.extract(parts),
            }
        })
    }

    /// Names a resource only for requests for which `applies` returns true.
    ///
    /// Other requests have no key and are refused by default: add an alternative with
    /// [`or`](Self::or), or set [`missing_key`](crate::RedlockLayer::missing_key).
    fn when(
        self,
        applies: impl Fn(&Parts) -> bool + Send + Sync + 'static,
    ) -> impl KeyExtractor + Clone
    where
        Self: Sized,
    {
        let description = Description {
            // Other requests have no key, or that of an alternative.
            is_constant: false,
            ..self.describe()
        };
        Described::new(description, move |parts| match applies(parts) {
            true => self.extract(parts),
            false => Ok(None),
        })
    }
}

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
pub fn each<A: KeyExtractor, B: KeyExtractor>(first: A, second: B) -> impl KeyExtractor + Clone {
    let description = first.describe().join(second.describe(), " and ");
    Described::new(description, move |parts| {
        let both = [&first as &dyn KeyExtractor, &second].into_iter();
        union(both.map(|extractor| Ok(extractor.extract(parts)?.filter(present))))
    })
}

/// Returns the keys of all sets; `None` if one of them is missing.
fn union(
    sets: impl Iterator<Item = Result<Option<LockKeys>, KeyError>>,
) -> Result<Option<LockKeys>, KeyError> {
    let sets: Option<Vec<LockKeys>> = sets.collect::<Result<_, _>>()?;
    Ok(sets.map(|sets| sets.iter().flat_map(LockKeys::as_slice).collect()))
}

/// What layers know of the keys of an extractor.
#[derive(Debug, Clone, Default)]
#[expect(
    unnameable_types,
    reason = "only extractors of this crate describe keys"
)]
pub struct Description {
    /// The name of the kind of resource, for spans and metrics, which never show a key: the first literal part.
    pub label: Option<&'static str>,
    /// Whether all requests that have a key have the same one. They share one lock, so a layer logs a warning.
    pub is_constant: bool,
    /// The part of a request that the key comes from, such as ``header `x-tenant` ``. A layer that refuses requests
    /// that name no resource logs it, and names it to the client.
    pub source: Option<String>,
}

impl Description {
    /// Describes two parts of a key, or two alternatives.
    fn join(self, other: Self, between: &str) -> Self {
        let sources: Vec<String> = self.source.into_iter().chain(other.source).collect();
        Self {
            label: self.label.or(other.label),
            is_constant: self.is_constant && other.is_constant,
            source: (!sources.is_empty()).then(|| sources.join(between)),
        }
    }
}

/// Extractor of a closure and its description.
#[derive(Clone)]
pub(crate) struct Described {
    description: Description,
    extract: Arc<dyn Fn(&Parts) -> Result<Option<LockKeys>, KeyError> + Send + Sync>,
}

impl Described {
    pub(super) fn new(
        description: Description,
        extract: impl Fn(&Parts) -> Result<Option<LockKeys>, KeyError> + Send + Sync + 'static,
    ) -> Self {
        let extract = Arc::new(extract);
        Self {
            description,
            extract,
        }
    }

    /// Creates an extractor that takes the key from one part of a request.
    pub(crate) fn part(
        source: impl Into<String>,
        extract: impl Fn(&Parts) -> Result<Option<LockKeys>, KeyError> + Send + Sync + 'static,
    ) -> Self {
        let description = Description {
            source: Some(source.into()),
            ..Description::default()
        };
        Self::new(description, extract)
    }
}

impl KeyExtractor for Described {
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        (self.extract)(parts)
    }

    fn describe(&self) -> Description {
        self.description.clone()
    }
}

/// Returns whether the keys name a resource: there is at least one, and none is empty. Otherwise all requests
/// without a key would share the lock on the empty key.
pub(crate) fn present(keys: &LockKeys) -> bool {
    let keys = keys.as_slice();
    !keys.is_empty() && !keys.iter().any(LockKey::is_empty)
}

/// Returns the key with this text; `None` if it is empty, and names no resource.
pub(crate) fn named(text: &str) -> Option<LockKeys> {
    (!text.is_empty()).then(|| LockKey::from(text.as_bytes()).into())
}

/// Conversion of the value that a closure returns as the key of a request: a key, a `String`, an integer, several
/// keys, or any of these in an `Option` (`None`: the request names no resource) or a `Result`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a lock key",
    label = "the function must return a lock key",
    note = "return a `LockKey`, `LockKeys`, a `String`, an integer, or any of these in an `Option` or in a `Result` with `KeyError`"
)]
#[expect(unnameable_types, reason = "a closure may return no other types")]
pub trait IntoKeys {
    /// Converts to the return type of [`KeyExtractor::extract`].
    fn into_keys(self) -> Result<Option<LockKeys>, KeyError>;
}

macro_rules! keys {
    ($($keys:ty)+) => {$(
        impl IntoKeys for $keys {
            fn into_keys(self) -> Result<Option<LockKeys>, KeyError> {
                Ok(Some(self.into()))
            }
        }
    )+};
}

// Not for all that is `Into<LockKeys>`: the compiler would name that, instead of what a function may return.
keys! { LockKeys LockKey String &str Vec<u8> u16 u32 u64 usize i32 i64 }
#[cfg(feature = "uuid")]
keys! { uuid::Uuid }

impl<K: IntoKeys> IntoKeys for Option<K> {
    fn into_keys(self) -> Result<Option<LockKeys>, KeyError> {
        self.map_or(Ok(None), K::into_keys)
    }
}

impl<K: IntoKeys> IntoKeys for Result<K, KeyError> {
    fn into_keys(self) -> Result<Option<LockKeys>, KeyError> {
        self.and_then(K::into_keys)
    }
}

/// Creates an extractor from a closure, without a type annotation on its argument.
///
/// The closure returns a [`LockKey`], [`LockKeys`], a `String`, a `Vec<u8>`, an integer, or any of these in an `Option`
/// (`None`: the request names no resource) or a `Result` with [`KeyError`].
///
/// ```
/// use tower_redlock::key;
///
/// #[derive(Clone)]
/// struct Tenant(u64);
///
/// let by_tenant = key::from_fn(|parts| Some(parts.extensions.get::<Tenant>()?.0));
/// # let _: &dyn tower_redlock::KeyExtractor = &by_tenant;
/// ```
///
/// Do not use `parts.uri.path()` as a key: within a nested router it lacks the prefix, so that `/a/7` and
/// `/b/7` are equal, and `/a/%37` differs from `/a/7`.
pub fn from_fn<F, K>(extract: F) -> F
where
    F: Fn(&Parts) -> K + Send + Sync + 'static,
    K: IntoKeys,
{
    extract
}

// The list at the trait names them all; the page would repeat all methods of the trait for each.
#[doc(hidden)]
impl<F, K> KeyExtractor for F
where
    F: Fn(&Parts) -> K + Send + Sync + 'static,
    K: IntoKeys,
{
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        self(parts).into_keys()
    }
}

#[doc(hidden)]
impl KeyExtractor for &'static str {
    fn extract(&self, _: &Parts) -> Result<Option<LockKeys>, KeyError> {
        self.into_keys()
    }

    fn describe(&self) -> Description {
        Description {
            label: Some(self),
            // An empty literal names no resource.
            is_constant: !self.is_empty(),
            source: None,
        }
    }
}

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

#[doc(hidden)]
impl KeyExtractor for Arc<dyn KeyExtractor> {
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        (**self).extract(parts)
    }

    fn describe(&self) -> Description {
        (**self).describe()
    }
}

macro_rules! composite {
    ($($part:ident)+) => {
        #[allow(non_snake_case, reason = "the type parameters name the values too")]
        #[doc(hidden)]
        impl<$($part: KeyExtractor),+> KeyExtractor for ($($part,)+) {
            fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
                let ($($part,)+) = self;
                let found = [$(
                    match $part.extract(parts)?.filter(present) {
                        Some(keys) => keys,
                        None => return Ok(None),
                    }
                ),+];
                composed(&found).map(Some)
            }

            fn describe(&self) -> Description {
                let ($($part,)+) = self;
                let parts = [$($part.describe()),+].into_iter();
                parts.reduce(|one, next| one.join(next, " and ")).unwrap_or_default()
            }
        }
    };
}

for_tuples!(composite);

/// Returns the composite keys of all parts, of which there is one unless a part has several keys.
fn composed(parts: &[LockKeys]) -> Result<LockKeys, KeyError> {
    let parts = parts.iter().map(LockKeys::as_slice);
    let sizes = parts.clone().map(<[LockKey]>::len);
    let (count, max) = (sizes.fold(1, usize::saturating_mul), LockKeys::MAX);
    if count > max {
        return Err(KeyError::TooMany { count, max });
    }
    let composite = |mut number: usize| {
        // The number of a composite has a digit for each part.
        LockKey::from_parts(parts.clone().map(|part| {
            let key = &part[number % part.len()];
            number /= part.len();
            key
        }))
    };
    Ok((0..count).map(composite).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts() -> Parts {
        http::Request::new(()).into_parts().0
    }

    fn one(extractor: &impl KeyExtractor) -> LockKey {
        let keys = extractor.extract(&parts()).unwrap().unwrap();
        keys.as_slice()[0].clone()
    }

    #[test]
    fn a_tuple_of_extractors_makes_the_key_that_a_tuple_of_values_makes() {
        let id = |_: &Parts| "7".to_owned();
        assert_eq!(one(&("account", id)), LockKey::from(("account", "7")));
        assert_eq!(one(&(("a", "b"), "c")), LockKey::from((("a", "b"), "c")));
        assert_eq!(one(&"plain"), LockKey::from("plain"));
    }

    #[test]
    fn a_closure_returns_text_bytes_or_a_number() {
        assert_eq!(one(&|_: &Parts| 17_u64), LockKey::from("17"));
        assert_eq!(
            one(&("n", |_: &Parts| Some(-1))),
            LockKey::from(("n", "-1"))
        );
        assert_eq!(
            one(&|_: &Parts| vec![0, 255]),
            LockKey::from([0, 255].as_slice())
        );
        #[cfg(feature = "uuid")]
        assert_eq!(
            one(&|_: &Parts| uuid::Uuid::nil()),
            LockKey::from("00000000-0000-0000-0000-000000000000")
        );
    }

    #[test]
    fn a_tuple_names_a_resource_only_if_every_part_does() {
        let missing = |_: &Parts| None::<String>;
        assert_eq!(("account", missing).extract(&parts()), Ok(None));
        assert_eq!(("account", "").extract(&parts()), Ok(None));
    }

    #[test]
    fn source_names_every_part_that_reads_the_request() {
        use crate::middleware::key::{each, extension, form_field, header, host, query};

        let source = |extractor: &dyn KeyExtractor| extractor.describe().source.unwrap();
        let tenant = || header("x-tenant");
        assert_eq!(
            source(&("account", tenant(), query("id"))),
            "header `x-tenant` and query parameter `id`"
        );
        assert_eq!(
            source(&tenant().hashed().or(host())),
            "header `x-tenant` or header `host`"
        );
        assert_eq!(
            source(&each(form_field("from"), form_field("to")).when(|_| true)),
            "form field `from` and form field `to`"
        );
        let user: Arc<dyn KeyExtractor> = Arc::new(extension::<String>(String::as_str));
        assert_eq!(source(&user), "extension `alloc::string::String`");
        let closure = |_: &Parts| "7".to_owned();
        assert_eq!(("account", closure).describe().source, None);
    }

    #[test]
    fn a_part_with_several_keys_makes_several_composites() {
        let both = |_: &Parts| ["bob", "alice"].into_iter().collect::<LockKeys>();
        let keys = ("account", both).extract(&parts()).unwrap().unwrap();
        let expected = [("account", "alice"), ("account", "bob")];
        assert_eq!(keys, expected.into_iter().collect());
    }

    #[test]
    fn more_composites_than_one_lock_may_have_are_refused() {
        let many = |_: &Parts| (0..7).map(|i| i.to_string()).collect::<LockKeys>();
        assert_eq!(
            (many, many).extract(&parts()),
            Err(KeyError::TooMany { count: 49, max: 32 })
        );
    }

    #[test]
    fn errors_of_a_part_are_errors_of_the_whole() {
        let malformed = |_: &Parts| Err::<LockKey, _>(KeyError::malformed("no"));
        let error = Err(KeyError::malformed("no"));
        assert_eq!(("a", malformed).extract(&parts()), error);
        assert_eq!((malformed, "b", "c").extract(&parts()), error);
        assert_eq!(("a", ("b", malformed)).extract(&parts()), error);
    }
}
