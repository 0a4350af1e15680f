//! Keys from path parameters in the form in which the handler reads them.

use std::fmt;
use std::marker::PhantomData;

use axum::extract::rejection::PathRejection;
use axum::extract::{MatchedPath, Path};
use http::request::Parts;
use serde::de::DeserializeOwned;

use crate::extract::path::unrouted;
use crate::extract::resource::LockResource;
use crate::middleware::{KeyExtractor, path_params};
use crate::protocol::{KeyError, LockKeys};

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
pub fn typed_path<T>() -> TypedPath<T>
where
    T: DeserializeOwned + LockResource + Send + 'static,
{
    TypedPath(PhantomData)
}

/// Extractor of [`typed_path`].
pub struct TypedPath<T>(PhantomData<fn() -> T>);

impl<T> KeyExtractor for TypedPath<T>
where
    T: DeserializeOwned + LockResource + Send + 'static,
{
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        match path_params(parts) {
            Some(Ok(Path::<T>(resource))) => Ok(Some(resource.lock_keys())),
            Some(Err(PathRejection::FailedToDeserializePathParams(failed)))
                if failed.status().is_client_error() =>
            {
                Err(KeyError::malformed(
                    "the path parameters do not name a resource",
                ))
            }
            Some(Err(error)) if parts.extensions.get::<MatchedPath>().is_some() => {
                Err(KeyError::misconfigured(error.body_text()))
            }
            Some(Err(_)) | None => unrouted(parts, "key::typed_path()"),
        }
    }

    fn source(&self) -> Option<String> {
        Some("the path parameters".to_owned())
    }
}

/// By hand: a derived one would require `T: Clone`.
impl<T> Clone for TypedPath<T> {
    fn clone(&self) -> Self {
        Self(PhantomData)
    }
}

impl<T> fmt::Debug for TypedPath<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TypedPath<{}>", std::any::type_name::<T>())
    }
}
