//! draft
mod lock;
mod node;
pub mod protocol;
pub use lock::*;
pub use node::{NodeFailure, NodeState};
pub use protocol::{FencingToken, KeyError, LockKey, LockKeys, ParseFencingTokenError, Retry};
/// Tools for tests.
#[cfg(feature = "test-util")]
pub mod test_util {
    pub use crate::node::scripted::{Gate, OpKind, ScriptedNodes};
}
