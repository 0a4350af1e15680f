//! Extractors and keys that need axum: its routes, and the arguments of its handlers.

mod admin;
mod handle;
mod health;
mod locked;
mod matched_path;
mod path;
mod rejection;
mod resource;
mod typed_path;

pub use admin::admin_router;
pub use handle::LockHandleRejection;
pub use health::health_router;
pub use locked::{LockRefused, Locked, LockedRejection};
pub use matched_path::{MatchedPath, matched_path};
#[cfg(feature = "idempotency")]
pub(crate) use path::nested_at;
pub use path::{Path, path};
pub use rejection::ExtractorRejectionLayer;
#[cfg(feature = "idempotency")]
pub(crate) use rejection::RefusalFormat;
pub use resource::LockResource;
pub use typed_path::{TypedPath, typed_path};
