//! Keys from extensions of the request, which other middleware inserted.

use std::any::type_name;

use crate::middleware::key::{Described, KeyExtractor, named};
use crate::middleware::routed::matched_no_route;
use crate::protocol::KeyError;

/// Takes the key from the extension of type `T`, such as the user that authentication found.
///
/// Empty: the request names no resource. Missing: 500 `misconfigured`, logged with the name of the
/// type. A client cannot leave an extension out: the layer that inserts it is missing, or stands inside
/// of the layer that needs it. A request that matched no route of an axum router names no resource, and
/// passes to its 404. If requests may lack the extension, such as those of anonymous clients, use
/// [`optional_extension`].
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
pub fn extension<T>(name: impl Fn(&T) -> &str + Send + Sync + 'static) -> impl KeyExtractor + Clone
where
    T: Send + Sync + 'static,
{
    from_extension(name, false)
}

/// Takes the key from the extension of type `T` as [`extension`] does, and allows requests without it: they name no
/// resource, as with an empty key.
///
/// ```
/// use tower_redlock::{KeyExtractor, key};
///
/// # #[derive(Clone)]
/// # struct UserId(String);
/// // Identify users without a login by a header.
/// let user = key::optional_extension::<UserId>(|user| &user.0);
/// let by_caller = ("caller", user.or(key::header("x-device")));
/// # let _: &dyn KeyExtractor = &by_caller;
/// ```
pub fn optional_extension<T>(
    name: impl Fn(&T) -> &str + Send + Sync + 'static,
) -> impl KeyExtractor + Clone
where
    T: Send + Sync + 'static,
{
    from_extension(name, true)
}

fn from_extension<T: Send + Sync + 'static>(
    name: impl Fn(&T) -> &str + Send + Sync + 'static,
    is_optional: bool,
) -> Described {
    Described::part(
        format!("extension `{}`", type_name::<T>()),
        move |parts| match parts.extensions.get::<T>() {
            Some(extension) => Ok(named(name(extension))),
            // Authentication of routes does not see a request that matched none.
            None if is_optional || matched_no_route(parts) => Ok(None),
            None => Err(KeyError::misconfigured(format!(
                "the request has no extension `{}`; apply the layer that inserts it outside of the one that takes a key from it (with `.layer(..)` calls: after it), or use `key::optional_extension` if requests may lack it",
                type_name::<T>()
            ))),
        },
    )
}
