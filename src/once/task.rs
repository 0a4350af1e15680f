//! The state that all steps of an execution share, and its memo for later callers.

use std::any::Any;
use std::sync::Arc;

use tokio::time::Instant;

use crate::lock::{Group, LeaseTask};
use crate::protocol::{Fingerprint, LockKey, Record};

/// The task that owns the lock of one execution.
pub(super) struct OnceTask {
    pub(super) lease: LeaseTask,
    /// Identifies the request: another request with the same key is refused.
    pub(super) fingerprint: Fingerprint,
    pub(super) group: Arc<Group>,
}

/// The memo of an execution for the next callers of its key in this process.
pub(super) enum KeyMemo {
    /// A request with this fingerprint is being executed.
    Executing(Fingerprint),
    /// A majority of the nodes had this record at this time.
    Recorded(Instant, Record),
}

impl OnceTask {
    /// Returns the only key.
    pub(super) fn key(&self) -> &LockKey {
        &self.lease.keys.as_slice()[0]
    }
}

impl KeyMemo {
    /// Returns the memo that the queue holds, if it is one of these.
    pub(super) fn from_memo(memo: &(dyn Any + Send + Sync)) -> Option<&Self> {
        memo.downcast_ref()
    }

    pub(super) fn recorded(record: &Record) -> Arc<dyn Any + Send + Sync> {
        Self::Recorded(Instant::now(), record.clone()).into_memo()
    }

    pub(super) fn into_memo(self) -> Arc<dyn Any + Send + Sync> {
        Arc::new(self)
    }
}
