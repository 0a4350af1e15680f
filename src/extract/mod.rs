//! Extractors and keys that need axum: its routes, and the arguments of its handlers.

mod admin;
mod handle;
mod health;
mod locked;
mod path;
mod rejection;
mod resource;

pub use admin::admin_router;
pub use handle::LockHandleRejection;
pub use health::health_router;
pub use locked::{LockRefused, Locked, LockedRejection};
#[cfg(feature = "idempotency")]
pub(crate) use path::nested_at;
pub use path::{MatchedPath, Path, TypedPath, matched_path, path, typed_path};
pub use rejection::ExtractorRejectionLayer;
#[cfg(feature = "idempotency")]
pub(crate) use rejection::Misplaced;
pub use resource::LockResource;
