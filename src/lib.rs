//! draft
mod node;
pub mod protocol;
pub use protocol::{FencingToken, KeyError, LockKey, LockKeys, ParseFencingTokenError, Retry};
