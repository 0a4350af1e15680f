//! Extractors and keys that need axum: its routes, and the arguments of its handlers.

mod admin;
mod handle;
mod key_path;
mod locked;
mod path;
mod rejection;

pub use admin::{admin_router, health_router};
pub use locked::{LockResource, Locked, LockedRejection};
#[cfg(feature = "idempotency")]
pub(crate) use path::nested_at;
pub use path::{matched_path, path, typed_path};
pub use rejection::ExtractorRejection;
