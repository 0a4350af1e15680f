//! What an execution asks of its lease task.

use std::time::Duration;

use tokio::sync::oneshot;

use crate::once::error::BeginError;
use crate::protocol::Record;

/// A command of an execution.
pub(super) enum ExecutionCommand {
    /// May the execution begin?
    Begin(BeginSender),
    Record(RecordCommand),
}

/// Answers whether an execution may begin.
pub(super) type BeginSender = oneshot::Sender<Result<(), BeginError>>;

/// The command to record an outcome, which ends the lock.
pub(super) struct RecordCommand {
    pub(super) record: Record,
    pub(super) retention: Duration,
    pub(super) done: oneshot::Sender<Recorded>,
}

/// How a recording ended.
#[derive(Debug, Clone)]
pub(crate) enum Recorded {
    /// A majority of the nodes has the record.
    Yes,
    /// A majority has the record of another execution.
    Another(Record),
    /// No majority could be reached, or none has a record.
    No,
}
