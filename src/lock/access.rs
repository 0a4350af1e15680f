//! How a caller holds its keys: alone, or together with other readers.

use crate::protocol::message::{Op, SharedOp};
use std::time::Duration;

/// How a caller holds its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Access {
    /// Alone.
    #[default]
    Exclusive,
    /// Together with other callers that do the same.
    Shared,
}

impl Access {
    /// Returns the request that extends a lock.
    pub(crate) fn confirm(self, token: Option<u64>, ttl: Duration, retention: Duration) -> Op {
        match self {
            Self::Exclusive => Op::Confirm {
                token,
                ttl,
                retention,
            },
            Self::Shared => Op::Shared(SharedOp::Confirm { ttl }),
        }
    }
}
