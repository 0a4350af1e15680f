//! What only axum's router knows about a request.

mod path;

pub use path::{Path, path};
