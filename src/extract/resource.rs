//! What says of itself which resource it is about.

use axum::extract::{Extension, Path, Query, State};

use crate::lock::LockOptions;
use crate::protocol::LockKeys;

/// Something that names a resource to lock, such as an id from the path: what [`Locked`] locks.
///
/// The crate implements it for axum's [`Path`], [`Query`], [`Extension`] and [`State`] of anything
/// that implements it.
///
/// ```
/// use serde::Deserialize;
/// use tower_redlock::{LockKey, LockKeys, LockResource};
///
/// #[derive(Deserialize)]
/// struct OrderId(u64);
///
/// impl LockResource for OrderId {
///     fn lock_keys(&self) -> LockKeys {
///         LockKey::from(("order", self.0.to_string())).into()
///     }
/// }
/// ```
///
/// [`Locked`]: crate::Locked
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say which resource to lock",
    label = "`Locked` needs `LockResource` for this",
    note = "implement `tower_redlock::LockResource` for the type inside of `Path`, `Query`, `Extension` or `State`"
)]
pub trait LockResource {
    /// Returns the keys to lock, all or nothing.
    ///
    /// Empty keys, and none at all, name nothing and are refused with 400 `key-missing`.
    fn lock_keys(&self) -> LockKeys;

    /// Returns how to lock them. Default: the builder's ttl and `max_hold` (60 s if that
    /// is not set), without waiting.
    fn options(&self) -> LockOptions {
        LockOptions::default()
    }
}

macro_rules! delegate {
    ($($wrapper:ident)+) => {$(
        impl<T: LockResource> LockResource for $wrapper<T> {
            fn lock_keys(&self) -> LockKeys {
                self.0.lock_keys()
            }

            fn options(&self) -> LockOptions {
                self.0.options()
            }
        }
    )+};
}

delegate! { Path Query Extension State }
