//! Recording: what was executed is kept on a majority of the nodes, and on the rest if it can be.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::lock::claim::Claim;
use crate::lock::front::Turn;
use crate::lock::lease::{Recording, Status, Wished};
use crate::lock::lost::LostReason;
use crate::lock::once::Recorded;
use crate::lock::task::acquire::{Caller, Missed, Stopped};
use crate::lock::task::state::{Failures, LeaseTask};
use crate::node::{Vote, transit};
use crate::protocol::Record;
use crate::protocol::message::{Op, Reply};
use crate::protocol::once::{LookRound, LookStep, OnceRound, RecordRound, RecordStep};
use crate::protocol::round::Answer;

/// A replay that has been answered, and the nodes that have not.
pub(super) struct Replay {
    pub(super) claim: Claim,
    pub(super) round: OnceRound,
    /// The phase of the `ACQUIRE` in the tally.
    pub(super) acquiring: u32,
    /// Until when each node may take to answer.
    pub(super) due: Vec<Instant>,
    pub(super) expires_in: Duration,
}

/// A record that was written to a majority after a minority had it, and what else is to be done with it.
struct Repaired {
    record: Record,
    retention: Duration,
    /// The nodes that are not known to have it.
    without: Vec<usize>,
}

impl LeaseTask {
    /// Keeps a record and gives the key back, and tells how that went as soon as it is decided.
    pub(super) async fn record(
        &mut self,
        mut claim: Claim,
        recording: Recording,
        turn: Turn,
        status: &watch::Sender<Status>,
        wished: &Wished,
    ) {
        let Recording {
            record,
            retention,
            done,
        } = recording;
        status.send_modify(|status| {
            status.lost.get_or_insert(LostReason::Released);
        });
        let began = Instant::now();
        let quorum = self.inner.settings.quorum;
        let mut round = RecordRound::new(quorum, record.execution());
        let write = Op::Record {
            record: record.clone(),
            retention,
        };
        let mut asking = self.ask(&claim, write, 0..quorum.nodes());
        let step = loop {
            let (node, answer) = self.next_answer(&mut asking).await;
            let step = round.on_record(node, &answer);
            if matches!(answer, Answer::Replied(Reply::Done { .. })) {
                claim.excuse(node);
            }
            if step != RecordStep::Wait {
                break step;
            }
        };
        if step == RecordStep::Recorded {
            wished.tell_released(Ok(()));
            // Whoever asked may have gone away.
            drop(done.send(Recorded::Yes));
            // Others of this process are told the outcome from now on.
            turn.set_recorded(&record);
            drop(turn);
            while round.silent().next().is_some() {
                let (node, answer) = self.next_answer(&mut asking).await;
                round.on_record(node, &answer);
                if matches!(answer, Answer::Replied(Reply::Done { .. })) {
                    claim.excuse(node);
                }
            }
            let without: Vec<usize> = round.without().collect();
            self.top_up(
                &claim,
                record,
                retention.saturating_sub(began.elapsed()),
                without,
            )
            .await;
            self.give_up(claim);
            return;
        }
        let left = retention.saturating_sub(began.elapsed());
        let (outcome, repaired) = self.recorded_after_all(&mut claim, &record, left).await;
        wished.tell_released(Ok(()));
        if let Some(Repaired {
            record,
            retention,
            without,
        }) = repaired
        {
            if matches!(outcome, Recorded::Yes) {
                turn.set_recorded(&record);
            }
            drop(done.send(outcome));
            drop(turn);
            self.top_up(&claim, record, retention, without).await;
            self.give_up(claim);
            return;
        }
        match outcome {
            // It is decided, so there is nothing to keep others from.
            Recorded::Yes | Recorded::Another(_) => self.give_up(claim),
            // Something was executed, and nobody knows: others are kept away as long as may be.
            Recorded::No => self.leave_to_its_ttl(claim),
        }
        drop(turn);
        drop(done.send(outcome));
    }

    /// Leaves the lock of an execution without a record where it is: it keeps others away until its ttl.
    pub(super) fn leave_to_its_ttl(&mut self, claim: Claim) {
        let gone_at = claim.gone_at();
        let nodes = claim.leave().into_iter();
        let names = nodes.map(|node| Arc::clone(self.inner.nodes[node].name()));
        self.ticket.set_unconfirmed(names, &self.keys, gone_at);
    }

    /// Finds out what became of a record that a majority did not take.
    async fn recorded_after_all(
        &mut self,
        claim: &mut Claim,
        record: &Record,
        retention: Duration,
    ) -> (Recorded, Option<Repaired>) {
        let own = record.execution();
        let found = |other: Record| {
            if other.execution() == own {
                Recorded::Yes
            } else {
                Recorded::Another(other)
            }
        };
        let quorum = self.inner.settings.quorum;
        let mut round = LookRound::new(quorum);
        let mut asking = self.ask(claim, Op::Look, 0..quorum.nodes());
        let mut left = retention;
        loop {
            let (node, answer) = self.next_answer(&mut asking).await;
            if let Answer::Replied(Reply::Done { expires_in, .. }) = &answer {
                left = left.min(*expires_in);
            }
            match round.on_look(node, &answer) {
                LookStep::Wait => {}
                LookStep::Found(other) => return (found(other), None),
                LookStep::Nothing => return (Recorded::No, None),
                LookStep::Minority => break,
            }
        }
        // With the owner that executed: its lock may still be there, and would keep a new one from it.
        if let Some(leading) = round.leading(own).cloned()
            && let Some(whole) = self.whole_of(&leading, record).await
            && let Some(repaired) = self.repair_as(claim, &whole, left).await
        {
            return (found(whole), Some(repaired));
        }
        let outcome = match Box::pin(self.attempt(Caller(None))).await {
            Err(Missed::Stopped(Stopped::Replayed(record, replay))) => {
                self.finish_replay(*replay).await;
                found(record)
            }
            Err(_) => Recorded::No,
            // Not to be executed again, whoever may.
            Ok(acquired) => {
                self.give_up(acquired.claim);
                Recorded::No
            }
        };
        (outcome, None)
    }

    /// Returns all of a record of which perhaps only the head is known; the own one is known.
    async fn whole_of(&self, record: &Record, own: &Record) -> Option<Record> {
        if record.execution() == own.execution() {
            Some(own.clone())
        } else if record.is_whole() {
            Some(record.clone())
        } else {
            self.inner.whole(self.recorded_key(), record).await.ok()
        }
    }

    /// Writes a record that a minority has to more nodes, in the name of a claim; returns what is left to
    /// do if a majority has it then.
    ///
    /// Only where the claim's owner was the last to be granted the key, which each node sees to: whose
    /// outcome it is makes no difference to that.
    async fn repair_as(
        &mut self,
        claim: &mut Claim,
        record: &Record,
        retention: Duration,
    ) -> Option<Repaired> {
        let began = Instant::now();
        let quorum = self.inner.settings.quorum;
        let mut round = RecordRound::new(quorum, record.execution());
        let write = Op::Record {
            record: record.clone(),
            retention,
        };
        let mut asking = self.ask(claim, write, 0..quorum.nodes());
        loop {
            let (node, answer) = self.next_answer(&mut asking).await;
            if matches!(answer, Answer::Replied(Reply::Done { .. })) {
                claim.excuse(node);
            }
            match round.on_record(node, &answer) {
                RecordStep::Wait => {}
                RecordStep::Recorded => break,
                RecordStep::Missed => return None,
            }
        }
        Some(Repaired {
            record: record.clone(),
            retention: retention.saturating_sub(began.elapsed()),
            without: round.without().collect(),
        })
    }

    /// Waits for the nodes that had not answered when a replay was decided, and writes the record to
    /// those that do not have it.
    pub(super) async fn finish_replay(&mut self, replay: Replay) {
        let Replay {
            mut claim,
            mut round,
            acquiring,
            due,
            expires_in,
        } = replay;
        let answered = Instant::now();
        let due = due.into_iter().max().unwrap_or(answered);
        let mut asking = Asking {
            phase: acquiring,
            due,
            silent: round.unanswered().collect(),
        };
        while !asking.silent.is_empty() {
            let (node, answer) = self.next_answer(&mut asking).await;
            round.on_acquire(node, &answer);
        }
        for node in (0..self.inner.nodes.len()).filter(|node| round.refused_by(*node)) {
            claim.excuse(node);
        }
        let without: Vec<usize> = round.without_record().collect();
        if let Some(record) = round.record()
            && !without.is_empty()
        {
            let record = match record.is_whole() {
                true => Some(record),
                false => {
                    let whole = self.inner.whole(self.recorded_key(), &record).await;
                    whole.ok()
                }
            };
            if let Some(record) = record {
                let left = expires_in.saturating_sub(answered.elapsed());
                self.top_up(&claim, record, left, without).await;
            }
        }
        self.give_up(claim);
    }

    /// Writes a record that a majority has to nodes that do not.
    ///
    /// No caller waits for it any more; the phase must last all the same, because a node is not sent
    /// what belongs to one that is over.
    async fn top_up(
        &mut self,
        claim: &Claim,
        record: Record,
        retention: Duration,
        nodes: Vec<usize>,
    ) {
        if nodes.is_empty() || retention.is_zero() {
            return;
        }
        let mut asking = self.ask(claim, Op::TopUp { record, retention }, nodes);
        while !asking.silent.is_empty() {
            self.next_answer(&mut asking).await;
        }
    }

    fn ask(&mut self, claim: &Claim, op: Op, nodes: impl IntoIterator<Item = usize>) -> Asking {
        let silent: Vec<usize> = nodes.into_iter().collect();
        let phase = self.votes.next_phase();
        let patience = self.inner.settings.node_timeout + transit(&op);
        claim.ask(op, &self.votes, silent.iter().copied());
        Asking {
            phase,
            due: Instant::now() + patience,
            silent,
        }
    }

    /// Returns the next answer to what was asked; silence for too long is one.
    async fn next_answer(&mut self, asking: &mut Asking) -> (usize, Answer) {
        let mut failures = Failures::default();
        loop {
            tokio::select! {
                biased;
                vote = self.votes.recv_any() => {
                    let Some(Vote { node, phase, outcome, .. }) = self.count_release(vote) else {
                        continue;
                    };
                    if phase == asking.phase && asking.answered(node) {
                        return (node, failures.note(node, outcome));
                    }
                }
                () = self.alarm.at(asking.due) => {
                    if let Some(node) = asking.silent.pop() {
                        return (node, Answer::Failed);
                    }
                    std::future::pending::<()>().await;
                }
            }
        }
    }
}

/// Something that was asked of some nodes.
struct Asking {
    phase: u32,
    due: Instant,
    silent: Vec<usize>,
}

impl Asking {
    /// Notes an answer; returns whether it was waited for.
    fn answered(&mut self, node: usize) -> bool {
        let silent = self.silent.len();
        self.silent.retain(|other| *other != node);
        self.silent.len() < silent
    }
}
