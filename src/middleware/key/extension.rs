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
/// passes to its 404.
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
///
/// If requests may lack the extension, such as those of anonymous clients, a closure reads it:
///
/// ```
/// use tower_redlock::key;
///
/// # #[derive(Clone)]
/// # struct UserId(String);
/// let user = key::from_fn(|parts| Some(parts.extensions.get::<UserId>()?.0.clone()));
/// # let _: &dyn tower_redlock::KeyExtractor = &user;
/// ```
pub fn extension<T>(name: impl Fn(&T) -> &str + Send + Sync + 'static) -> impl KeyExtractor + Clone
where
    T: Send + Sync + 'static,
{
    Described::part(
        format!("extension `{}`", type_name::<T>()),
        move |parts| match parts.extensions.get::<T>() {
            Some(extension) => Ok(named(name(extension))),
            // Authentication of routes does not see a request that matched none.
            None if matched_no_route(parts) => Ok(None),
            None => Err(KeyError::misconfigured(format!(
                "the request has no extension `{}`; apply the layer that inserts it outside of the one that takes a key from it (with `.layer(..)` calls: after it), or read it with `key::from_fn` if requests may lack it",
                type_name::<T>()
            ))),
        },
    )
}
