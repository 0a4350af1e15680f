//! Pending: a granted execution that has not begun.
//!
//! # Implementation details
//!
//! Between the grant and the beginning, a node may still answer with a record. The round therefore takes the votes
//! that arrive meanwhile, and the execution begins only if none of them changes its decision. When the caller asks
//! to begin, the task takes the votes that have arrived. If the grant is older than a node timeout, it asks all
//! nodes once more first.

use tokio::time::Instant;

use crate::lock::{Cleanup, Disposal, GrantedLock, HoldingLock, Progress};
use crate::node::Vote;
use crate::once::attempt::GrantedExecution;
use crate::once::command::BeginSender;
use crate::once::error::BeginError;
use crate::once::round::{RecordedRound, Step};
use crate::once::task::OnceTask;
use crate::protocol::message::Reply;
use crate::protocol::round::{AcquireStep, Answer};

/// A grant whose execution has not begun.
pub(super) struct Pending {
    /// The granted attempt, which still takes votes.
    progress: Progress<RecordedRound>,
    granted_at: Instant,
    /// The step that follows from a record that arrived since the grant.
    step: Option<Step>,
    /// Answers the execution that asks to begin.
    beginning: Option<BeginSender>,
    /// Whether the task has asked all nodes once more.
    asked_again: bool,
}

/// An execution that a record overtook before it began.
pub(super) struct Overtaken {
    pub(super) progress: Progress<RecordedRound>,
    pub(super) step: Step,
    pub(super) beginning: BeginSender,
}

impl Pending {
    /// Splits a grant into the lock and the execution that is pending.
    pub(super) fn from_granted(granted: GrantedExecution) -> (GrantedLock, Box<Self>) {
        let GrantedExecution { acquired, progress } = granted;
        let pending = Self {
            progress,
            granted_at: Instant::now(),
            step: None,
            beginning: None,
            asked_again: false,
        };
        (acquired, Box::new(pending))
    }

    /// Takes the command to begin.
    pub(super) fn set_beginning(&mut self, beginning: BeginSender) {
        self.beginning = Some(beginning);
    }

    /// Looks for a record in a vote.
    pub(super) fn observe(&mut self, vote: &Vote, cleanup: &mut Cleanup) {
        let step = if self.progress.is_current(vote.phase) {
            self.progress.on_vote(vote.clone(), cleanup)
        } else if let Ok(reply @ Reply::Done { .. }) = &vote.outcome {
            // The answer to an extension of the granted lock.
            let answer = Answer::Replied(reply.clone());
            self.progress.round.on_extension(vote.node, &answer)
        } else {
            return;
        };
        let is_decided = step != Ok(AcquireStep::Wait);
        if self.progress.round.round.is_recorded() && (self.step.is_none() || is_decided) {
            self.step = Some(step);
        }
    }
}

impl OnceTask {
    /// Begins an execution that asks for it, unless a record overtook it or the lock is lost.
    pub(super) fn try_begin(
        &mut self,
        holding: &mut HoldingLock,
        pending: &mut Option<Box<Pending>>,
    ) -> Option<Box<Overtaken>> {
        let is_asked = |pending: &Pending| pending.beginning.is_some();
        if holding.is_extending() || !pending.as_deref().is_some_and(is_asked) {
            return None;
        }
        let mut now_pending = pending.take()?;
        let mut observe = |vote: &Vote, cleanup: &mut Cleanup| now_pending.observe(vote, cleanup);
        self.lease.take_votes(holding, &mut observe);
        let now = Instant::now();
        holding.check_validity(now);
        let beginning = now_pending.beginning.take()?;
        if let Some(step) = now_pending.step.take() {
            return Some(Box::new(Overtaken {
                progress: now_pending.progress,
                step,
                beginning,
            }));
        }
        let is_late = now - now_pending.granted_at > self.lease.cluster.settings.node_timeout;
        match holding.lost() {
            // The receiver may be gone with the caller, here and below.
            Some(reason) => drop(beginning.send(Err(BeginError::Lost(reason)))),
            None if is_late && !now_pending.asked_again => {
                now_pending.asked_again = true;
                now_pending.beginning = Some(beginning);
                *pending = Some(now_pending);
                self.lease.ask_again(holding, now);
            }
            None => {
                holding.lease.set_disposal(Disposal::Expire);
                drop(beginning.send(Ok(())));
            }
        }
        None
    }
}
