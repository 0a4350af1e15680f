//! How a caller holds its keys: alone, together with other readers, or one slot of several.

use std::time::Duration;

use crate::protocol::message::{Op, SharedOp};

/// How a caller holds its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Access {
    /// Alone.
    #[default]
    Exclusive,
    /// Together with other callers that do the same.
    Shared,
    /// One of so many slots, alone.
    Slot(usize),
}

impl Access {
    /// Returns the request that asks for a lock.
    #[must_use]
    pub fn acquire(self, proposal: Option<u64>, ttl: Duration, retention: Duration) -> Op {
        match self {
            Self::Exclusive | Self::Slot(_) => Op::Acquire {
                proposal,
                ttl,
                retention,
            },
            Self::Shared => Op::Shared(SharedOp::Acquire { ttl }),
        }
    }

    /// Returns the request that confirms or extends a lock.
    #[must_use]
    pub fn confirm(self, token: Option<u64>, ttl: Duration, retention: Duration) -> Op {
        match self {
            Self::Exclusive | Self::Slot(_) => Op::Confirm {
                token,
                ttl,
                retention,
            },
            Self::Shared => Op::Shared(SharedOp::Confirm { ttl }),
        }
    }

    /// Returns the request that releases a lock, and leaves the keys taken for a while.
    #[must_use]
    pub fn release(self, left: Duration) -> Op {
        match self {
            Self::Shared => Op::Shared(SharedOp::Release),
            Self::Exclusive | Self::Slot(_) if left.is_zero() => Op::Release,
            Self::Exclusive | Self::Slot(_) => Op::ReleaseAfter { left },
        }
    }
}
