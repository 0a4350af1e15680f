//! Keys from extensions of the request, which other middleware inserted.

use std::any::type_name;
use std::fmt;
use std::sync::Arc;

use http::request::Parts;

use crate::middleware::key::{KeyExtractor, named};
use crate::middleware::routed::matched_no_route;
use crate::protocol::{KeyError, LockKeys};

/// Takes the key from the extension of type `T`, such as the user that authentication found.
///
/// Empty: the request names no resource. Missing: 500 `misconfigured`, logged with the name of the
/// type. A client cannot leave an extension out: the layer that inserts it is missing, or stands inside
/// of the layer that needs it. A request that matched no route of an axum router names no resource, and
/// passes to its 404. If requests may lack the extension, such as those of anonymous clients, use
/// [`optional`](Extension::optional).
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
        key: Arc::new(move |extension| named(name(extension))),
        is_optional: false,
    }
}

/// Extractor of [`extension`].
pub struct Extension<T> {
    key: Arc<dyn Fn(&T) -> Option<LockKeys> + Send + Sync>,
    is_optional: bool,
}

impl<T> Extension<T> {
    /// Allows requests without the extension: they name no resource, as with an empty key.
    /// Default: such a request is refused as `misconfigured`.
    ///
    /// ```
    /// use tower_redlock::{KeyExtractor, key};
    ///
    /// # #[derive(Clone)]
    /// # struct UserId(String);
    /// // Identify users without a login by a header.
    /// let user = key::extension::<UserId>(|user| &user.0).optional();
    /// let by_caller = ("caller", user.or(key::header("x-device")));
    /// # let _: &dyn KeyExtractor = &by_caller;
    /// ```
    #[must_use]
    pub fn optional(mut self) -> Self {
        self.is_optional = true;
        self
    }
}

impl<T: Send + Sync + 'static> KeyExtractor for Extension<T> {
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        match parts.extensions.get::<T>() {
            Some(extension) => Ok((self.key)(extension)),
            // Authentication of routes does not see a request that matched none.
            None if self.is_optional || matched_no_route(parts) => Ok(None),
            None => Err(KeyError::misconfigured(format!(
                "the request has no extension `{}`; apply the layer that inserts it outside of the one that takes a key from it (with `.layer(..)` calls: after it), or use `key::extension(..).optional()` if requests may lack it",
                type_name::<T>()
            ))),
        }
    }

    fn source(&self) -> Option<String> {
        Some(format!("extension `{}`", type_name::<T>()))
    }
}

/// By hand: a derived one would require `T: Clone`.
impl<T> Clone for Extension<T> {
    fn clone(&self) -> Self {
        Self {
            key: Arc::clone(&self.key),
            is_optional: self.is_optional,
        }
    }
}

impl<T> fmt::Debug for Extension<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Extension<{}>", type_name::<T>())
    }
}
