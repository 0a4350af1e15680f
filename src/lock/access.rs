//! How a caller holds its keys: alone, together with other readers, or one slot of several.

use std::time::Duration;

use crate::protocol::message::{Op, SharedOp};

/// How a caller holds its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Access {
    /// Alone.
    #[default]
    Exclusive,
    /// Together with other callers that do the same.
    Shared,
    /// One of so many slots, alone.
    Slot(usize),
}

impl Access {
    /// Returns the request that extends a lock.
    pub(crate) fn confirm(self, token: Option<u64>, ttl: Duration, retention: Duration) -> Op {
        match self {
            Self::Exclusive | Self::Slot(_) => Op::Confirm {
                token,
                ttl,
                retention,
            },
            Self::Shared => Op::Shared(SharedOp::Confirm { ttl }),
        }
    }
}
