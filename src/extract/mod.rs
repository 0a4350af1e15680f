//! Extractors and keys that need axum: its routes, and the arguments of its handlers.

mod admin;
mod handle;
mod key_path;
mod locked;
mod path;
mod rejection;

pub use admin::{admin_router, health_router};
pub use locked::{LockResource, Locked, LockedRejection};
pub use path::{matched_path, path, typed_path};
pub use rejection::ExtractorRejection;
#[cfg(feature = "idempotency")]
pub(crate) use {handle::extension_extractor, path::nested_at};
