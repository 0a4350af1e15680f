//! Reads the body of a request before its lock is taken: the layer, service, future and body.

mod body;
mod config;
mod future;
mod layer;
mod service;

pub use body::{BufferedBody, BufferedRequestBody};
pub use future::BufferBodyFuture;
#[cfg(feature = "idempotency")]
pub(crate) use future::read_error;
pub use layer::BufferBodyLayer;
pub use service::BufferBodyService;
