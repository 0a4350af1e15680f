//! Types that name the resource to lock.

use axum::extract::{Extension, Path, Query, State};
use axum::{Form, Json};

use crate::lock::LockOptions;
use crate::protocol::LockKeys;

/// Type that names a resource to lock, such as an id from the path; used by [`Locked`].
///
/// The crate implements it for axum's [`Path`], [`Query`], [`Extension`], [`State`], [`Json`] and [`Form`] of anything
/// that implements it. Implement it for an extractor of your own to use that with [`Locked`].
///
/// ```
/// use serde::Deserialize;
/// use tower_redlock::{LockKey, LockKeys, LockResource};
///
/// #[derive(Deserialize)]
/// struct Seat {
///     flight: String,
///     row: u16,
/// }
///
/// impl LockResource for Seat {
///     fn lock_keys(&self) -> LockKeys {
///         LockKey::from(("seat", self.flight.as_str(), self.row)).into()
///     }
/// }
/// ```
///
/// [`Locked`]: crate::Locked
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say which resource to lock",
    label = "`Locked` needs `LockResource` for this",
    note = "implement `tower_redlock::LockResource` for the type inside of `Path`, `Query`, `Json`, `Form`, `Extension` or `State`"
)]
pub trait LockResource {
    /// Returns the keys to lock, all or nothing.
    ///
    /// An empty key, or an empty set of keys, is refused with 400 `key-missing`.
    fn lock_keys(&self) -> LockKeys;

    /// Returns the options of the lock. Default: the builder's ttl and `max_hold` (60 s if that
    /// is not set), without waiting, and `unnamed` in spans and metrics: the key comes from a client, and is no label.
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

delegate! { Path Query Extension State Json Form }
