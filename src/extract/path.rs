//! Keys from axum's routes: path parameters as text, or in the form in which the handler reads them, and the route.

#[cfg(feature = "idempotency")]
use axum::extract::NestedPath;
use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{FromRequestParts, MatchedPath, OriginalUri, Path, RawPathParams};
use futures_util::FutureExt;
use http::Request;
use http::request::Parts;
use serde::de::DeserializeOwned;

use crate::extract::locked::LockResource;
use crate::middleware::KeyExtractor;
use crate::middleware::key::{Described, named};
use crate::protocol::{KeyError, LockKeys};

/// Takes the key from the path parameter `name` of the matched axum route, percent-decoded.
///
/// Empty: the request names no resource. Not UTF-8 when decoded: the request is malformed. If the route
/// has no such parameter, or the layer stands outside of any axum router, the layer is misconfigured:
/// 500 `misconfigured`, never an unlocked handler. A layer around `nest_service` sees no
/// parameters of the routes inside: 400 `key-missing`.
///
/// The key is the text. A handler that parses a number reads `7`, `07` and `+7` as one resource,
/// but they are three keys, and the client chooses one. Use
/// [`typed_path`](crate::key::typed_path) there.
///
/// A path parameter does not contain its route: put a literal in front
/// (`("account", key::path("id"))`), or `/accounts/7` and `/orders/7` are one resource.
///
/// ```
/// use tower_redlock::{KeyExtractor, key};
///
/// // For the route `/flights/{flight}/seats/{seat}/book`.
/// let key = ("seat", key::path("flight"), key::path("seat"));
/// # let _: &dyn KeyExtractor = &key;
/// ```
#[must_use]
pub fn path(name: &'static str) -> impl KeyExtractor + Clone {
    Described::part(format!("path parameter `{name}`"), move |parts| {
        let params = raw_path_params(parts)?;
        let mut params = params.iter().flat_map(RawPathParams::iter);
        let Some((_, value)) = params.find(|(found, _)| *found == name) else {
            return match parts.extensions.get::<MatchedPath>() {
                Some(route) => Err(KeyError::misconfigured(format!(
                    "the route `{}` has no path parameter `{name}`",
                    route.as_str()
                ))),
                None => unrouted(parts, "key::path()"),
            };
        };
        // The parameter of the outer router would win, and all resources of the inner one would be equal.
        if params.any(|(found, _)| found == name) {
            return Err(KeyError::misconfigured(format!(
                "nested routers both have a path parameter `{name}`; give them different names"
            )));
        }
        Ok(named(value))
    })
}

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
pub fn matched_path() -> impl KeyExtractor + Clone {
    Described::part("the matched route", |parts| {
        match parts.extensions.get::<MatchedPath>() {
            Some(matched) => Ok(named(matched.as_str())),
            None => unrouted(parts, "key::matched_path()"),
        }
    })
}

/// Reads the path parameters as `T` and takes its keys. So the layer locks the same resource as
/// [`Locked<Path<T>>`](crate::Locked): `/invoices/7` and `/invoices/07` are one resource if `T` is a number.
///
/// If the parameters cannot be read as `T`, the request is malformed. Every request is malformed if two nested
/// routers have a parameter of the same name. Only the keys are used, not the options.
///
/// ```
/// use serde::Deserialize;
/// use tower_redlock::{LockKey, LockKeys, LockResource, key};
///
/// #[derive(Deserialize)]
/// struct InvoiceNumber(u32);
///
/// impl LockResource for InvoiceNumber {
///     fn lock_keys(&self) -> LockKeys {
///         LockKey::from(("invoice", self.0)).into()
///     }
/// }
///
/// let by_invoice = key::typed_path::<InvoiceNumber>();
/// # let _: &dyn tower_redlock::KeyExtractor = &by_invoice;
/// ```
#[must_use]
pub fn typed_path<T>() -> impl KeyExtractor + Clone
where
    T: DeserializeOwned + LockResource + Send + 'static,
{
    Described::part("the path parameters", |parts| match path_params(parts) {
        Some(Ok(Path::<T>(resource))) => Ok(Some(resource.lock_keys())),
        Some(Err(error)) if error.status().is_client_error() => Err(KeyError::malformed(
            "the path parameters do not name a resource",
        )),
        Some(Err(error)) if parts.extensions.get::<MatchedPath>().is_some() => {
            Err(KeyError::misconfigured(error.body_text()))
        }
        Some(Err(_)) | None => unrouted(parts, "key::typed_path()"),
    })
}

/// Returns the result of an extractor that needs a route, for a request without a known one.
fn unrouted(parts: &Parts, extractor: &str) -> Result<Option<LockKeys>, KeyError> {
    if parts.extensions.get::<OriginalUri>().is_some() {
        // A nested service, or no matched route; the layer distinguishes them.
        return Ok(None);
    }
    Err(KeyError::misconfigured(format!(
        "{extractor} is used outside of any axum router; apply the layer with `Router::route_layer` or `Router::layer`"
    )))
}

/// Returns the prefix that nested routers have taken off the path, without the names of its parameters, and the values
/// of the parameters.
#[cfg(feature = "idempotency")]
pub(crate) fn nested_at(parts: &Parts) -> Vec<String> {
    let Some(nested) = parts.extensions.get::<NestedPath>() else {
        return Vec::new();
    };
    let literals = nested.as_str().split('{');
    let literals =
        literals.map(|literal| literal.split_once('}').map_or(literal, |(_, rest)| rest));
    let literals: Vec<&str> = literals.collect();
    let mut nested = vec![literals.join("{}")];
    if literals.len() > 1 {
        let params = raw_path_params(parts).ok().flatten();
        let values = params.iter().flat_map(RawPathParams::iter);
        nested.extend(values.map(|(_, value)| value.to_owned()));
    }
    nested
}

/// Runs an extractor of path parameters. axum 0.8 exposes them only to an extractor, which never waits; so this polls it
/// once, on a copy of the extensions.
fn path_params<E>(parts: &Parts) -> Option<Result<E, E::Rejection>>
where
    E: FromRequestParts<()>,
{
    let (mut scratch, ()) = Request::new(()).into_parts();
    scratch.extensions = parts.extensions.clone();
    E::from_request_parts(&mut scratch, &()).now_or_never()
}

/// Reads the path parameters.
fn raw_path_params(parts: &Parts) -> Result<Option<RawPathParams>, KeyError> {
    match path_params(parts) {
        Some(Ok(params)) => Ok(Some(params)),
        Some(Err(RawPathParamsRejection::InvalidUtf8InPathParam(_))) => {
            Err(KeyError::malformed("a path parameter is not UTF-8"))
        }
        Some(Err(_)) | None => Ok(None),
    }
}
