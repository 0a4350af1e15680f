//! Replaying: writes a replayed record to the nodes that lack it, in the background.

use std::time::Duration;

use tokio::time::Instant;

use crate::lock::{Attempt, Cleanup, Failures};
use crate::node::{Vote, transit};
use crate::once::fetch::fetch;
use crate::once::round::RecordedRound;
use crate::once::task::OnceTask;
use crate::protocol::Record;
use crate::protocol::message::Op;
use crate::protocol::once::OnceRound;
use crate::protocol::round::Answer;

/// A replay whose caller has its answer, but of whose attempt some nodes have not answered.
pub(super) struct Replay {
    cleanup: Cleanup,
    round: OnceRound,
    /// The phase of the `ACQUIRE`.
    acquiring: u32,
    /// The time until which the slowest node may answer.
    due: Option<Instant>,
    expires_in: Duration,
}

/// A request whose answers from some nodes are outstanding.
pub(super) struct Inquiry {
    pub(super) phase: u32,
    due: Instant,
    silent: Vec<usize>,
}

impl Replay {
    pub(super) fn new(attempt: Attempt<RecordedRound>) -> Self {
        let Attempt { cleanup, progress } = attempt;
        Self {
            cleanup,
            acquiring: progress.acquiring,
            due: Some(progress.last_due()),
            expires_in: progress.round.expires_in,
            round: progress.round.round,
        }
    }
}

impl Inquiry {
    /// Returns whether all nodes have answered.
    pub(super) fn is_answered(&self) -> bool {
        self.silent.is_empty()
    }

    /// Takes the answer of a node; returns whether it was outstanding.
    fn note(&mut self, node: usize) -> bool {
        let silent = self.silent.len();
        self.silent.retain(|other| *other != node);
        self.silent.len() < silent
    }
}

impl OnceTask {
    /// Waits for the nodes that had not answered when the replay was decided, and writes the record to the nodes that
    /// lack it.
    pub(super) async fn finish_replay(&mut self, replay: Replay) {
        let Replay {
            mut cleanup,
            mut round,
            acquiring,
            due,
            expires_in,
        } = replay;
        let answered = Instant::now();
        let mut asked = Inquiry {
            phase: acquiring,
            due: due.unwrap_or(answered),
            silent: round.unanswered().collect(),
        };
        while !asked.is_answered() {
            let (node, answer) = self.next_answer(&mut asked).await;
            round.on_acquire(node, &answer);
        }
        let nodes = 0..self.lease.cluster.nodes.len();
        for node in nodes.filter(|node| round.is_refused_by(*node)) {
            cleanup.mark_not_held(node);
        }
        let without: Vec<usize> = round.without_record().collect();
        if let Some(record) = round.record()
            && !without.is_empty()
            && let Some(record) = self.whole(record).await
        {
            let left = expires_in.saturating_sub(answered.elapsed());
            self.top_up(&cleanup, record, left, without).await;
        }
        self.lease.give_up(cleanup);
    }

    /// Returns the whole record, reading its body if this is a head; `None` if that fails.
    pub(super) async fn whole(&self, record: Record) -> Option<Record> {
        if record.is_whole() {
            return Some(record);
        }
        fetch(&self.group, self.key(), &record).await.ok()
    }

    /// Writes a record that a majority has to nodes that lack it.
    ///
    /// Waits for the answers although no caller needs them, because a request whose phase is over may not be sent.
    pub(super) async fn top_up(
        &mut self,
        cleanup: &Cleanup,
        record: Record,
        retention: Duration,
        nodes: Vec<usize>,
    ) {
        if nodes.is_empty() || retention.is_zero() {
            return;
        }
        let mut asked = self.ask(cleanup, Op::TopUp { record, retention }, nodes);
        while !asked.is_answered() {
            self.next_answer(&mut asked).await;
        }
    }

    /// Sends a request that neither locks nor extends a key to some nodes.
    pub(super) fn ask(
        &mut self,
        cleanup: &Cleanup,
        op: Op,
        nodes: impl IntoIterator<Item = usize>,
    ) -> Inquiry {
        let settings = &self.lease.cluster.settings;
        let silent: Vec<usize> = nodes.into_iter().collect();
        let phase = self.lease.votes.next_phase();
        let patience = settings.node_timeout + transit(&op);
        // A record ends the lock.
        let publishes = settings.wake_ups && matches!(op, Op::Record { .. });
        cleanup.ask(op, publishes, &self.lease.votes, silent.iter().copied());
        Inquiry {
            phase,
            due: Instant::now() + patience,
            silent,
        }
    }

    /// Returns the next answer. An overdue node counts as failed.
    pub(super) async fn next_answer(&mut self, asked: &mut Inquiry) -> (usize, Answer) {
        let mut failures = Failures::default();
        loop {
            tokio::select! {
                biased;
                vote = self.lease.votes.recv_any() => {
                    let vote = self.lease.count_release(vote);
                    let Some(Vote { node, phase, outcome, .. }) = vote else {
                        continue;
                    };
                    if phase == asked.phase && asked.note(node) {
                        return (node, failures.note(node, outcome));
                    }
                }
                () = self.lease.timer.at(asked.due) => {
                    if let Some(node) = asked.silent.pop() {
                        return (node, Answer::Failed);
                    }
                    std::future::pending::<()>().await;
                }
            }
        }
    }
}
