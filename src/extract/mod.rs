//! Extractors and keys that need axum: its routes, and the arguments of its handlers.

mod admin;
mod handle;
mod locked;
mod path;
mod rejection;

pub use admin::{admin_router, health_router};
pub use handle::LockHandleRejection;
#[cfg(feature = "idempotency")]
pub(crate) use handle::extension_extractor;
pub use locked::{LockRefused, LockResource, Locked, LockedRejection};
#[cfg(feature = "idempotency")]
pub(crate) use path::nested_at;
pub use path::{matched_path, path, typed_path};
pub use rejection::ExtractorRejectionLayer;
#[cfg(feature = "idempotency")]
pub(crate) use rejection::Misplaced;
