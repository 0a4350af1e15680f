//! Reading a request's body before its lock is taken: the layer, service, future and body.

mod body;
mod future;
mod layer;
mod service;

pub use body::BufferedRequestBody;
pub use future::BufferBodyFuture;
#[cfg(feature = "idempotency")]
pub(crate) use future::unread;
pub use layer::{BufferBodyLayer, BufferedBody};
pub use service::BufferBodyService;
