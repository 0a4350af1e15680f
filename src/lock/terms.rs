//! What a caller asks for.

use std::sync::Arc;
use std::time::Duration;

use crate::lock::slots::SlotTable;
use crate::protocol::lease::{Access, OnceSpec};
use crate::protocol::{FencingToken, KeyNames};

/// What a caller asked for.
pub(crate) struct Terms {
    pub(crate) names: Arc<[KeyNames]>,
    pub(crate) ttl: Duration,
    /// Whether the lock comes with a fencing token.
    pub(crate) is_fenced: bool,
    pub(crate) access: Access,
    /// The slots of a caller that takes any of them. Dropped when it has one.
    pub(crate) slot_table: Option<Box<SlotTable>>,
    /// Present if the lock is one of several leases of its caller. The times of all of them begin when it has them.
    pub(crate) earlier: Option<Earlier>,
    /// How long the keys stay taken at least, counted from the grant.
    pub(crate) hold_at_least: Option<Duration>,
    /// Present if something is executed under the lock.
    pub(crate) once: Option<OnceSpec>,
}

/// The leases that a caller has acquired before, in other groups, for the same lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Earlier {
    /// Their highest token. That of the next lease is not lower.
    pub(crate) token: Option<FencingToken>,
    /// The slots that the next lease may have, one bit for each.
    pub(crate) slots: u64,
}

impl Default for Earlier {
    fn default() -> Self {
        Self {
            token: None,
            slots: u64::MAX,
        }
    }
}
