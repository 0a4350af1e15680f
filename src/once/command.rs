//! The commands of an execution to its lease task.

use std::time::Duration;

use tokio::sync::oneshot;

use crate::once::error::BeginError;
use crate::protocol::Record;

/// A command of an execution.
pub(super) enum ExecutionCommand {
    /// The question whether the execution may begin.
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

/// The outcome of a recording.
#[derive(Debug, Clone)]
pub(crate) enum Recorded {
    /// A majority of the nodes has the record.
    Yes,
    /// A majority has the record of another execution.
    Another(Record),
    /// No majority of the nodes could be reached, or none of them has a record.
    No,
}
