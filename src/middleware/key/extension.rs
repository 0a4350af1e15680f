//! Keys from what other middleware left in the request's extensions.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use http::request::Parts;

use crate::middleware::key::KeyExtractor;
use crate::protocol::{KeyError, LockKey, LockKeys};

/// Takes the key from the extension of type `T`, such as the user that authentication found.
///
/// Missing or empty: the request names no resource.
///
/// ```
/// use tower_redlock::key;
///
/// #[derive(Clone)]
/// struct UserId(String);
///
/// impl UserId {
///     fn as_str(&self) -> &str {
///         &self.0
///     }
/// }
///
/// let by_user = ("user", key::extension::<UserId>(UserId::as_str));
/// # let _: &dyn tower_redlock::KeyExtractor = &by_user;
/// ```
pub fn extension<T>(name: impl Fn(&T) -> &str + Send + Sync + 'static) -> Extension<T>
where
    T: Send + Sync + 'static,
{
    Extension {
        name: Arc::new(move |extension, found| found(name(extension))),
        of: PhantomData,
    }
}

type Name<T> = dyn Fn(&T, &mut dyn FnMut(&str)) + Send + Sync;

/// Extractor of [`extension`].
pub struct Extension<T> {
    name: Arc<Name<T>>,
    of: PhantomData<fn(T)>,
}

impl<T: Send + Sync + 'static> KeyExtractor for Extension<T> {
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        let Some(extension) = parts.extensions.get::<T>() else {
            return Ok(None);
        };
        let mut key = None;
        (self.name)(extension, &mut |name| {
            key = (!name.is_empty()).then(|| LockKey::from(name).into());
        });
        Ok(key)
    }
}

/// By hand: a derived one would ask `T: Clone`.
impl<T> Clone for Extension<T> {
    fn clone(&self) -> Self {
        Self {
            name: Arc::clone(&self.name),
            of: PhantomData,
        }
    }
}

impl<T> fmt::Debug for Extension<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Extension<{}>", std::any::type_name::<T>())
    }
}
