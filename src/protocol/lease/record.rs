//! The life of an execution: what records add to that of a lock.
//!
//! # The algorithm
//!
//! ```text
//!               granted              begun                   the outcome is known
//!   Acquiring ──────────▶ Holding ──────────▶ Holding, begun ─────────────────────▶ Recording ──▶ Releasing
//!     │    ▲              │ pending                │                                  ▲
//!     │    └──────────────┘                        └─ without one: the keys stay      │
//!     │     a record overtook it                                                      │
//!     └─ a majority has a record, which is replayed ──────────────────────────────────┘
//! ```
//!
//! *Acquiring.* Until a node answers with a record, this is the acquisition of a lock. With one, the round waits for
//! all nodes and decides by the number of copies. The record of a majority is replayed. That of a minority is first
//! written to the nodes that granted the key to this attempt, if that makes a majority.
//!
//! *Pending.* Between the grant and the beginning, a node may still answer with a record. All answers therefore go to
//! the round, and the execution begins only if none of them changed its decision. If the grant is older than a node
//! timeout by then, all nodes are asked once more.
//!
//! *Recording.* `RECORD` goes to all nodes. If no majority accepts it, the nodes are asked for their records:
//!
//! 1. A majority has a record: that record counts, ours or another.
//! 2. A minority has a record: the leading one is sent as `RECORD` under the old owner value first, because its grants
//!    may still stand. Only if that misses the majority, another lease with a fresh owner value repairs the record, as
//!    any other request does; it never executes.
//! 3. No node has a record, nor said so before: the outcome is not recorded, and the key stays locked until its ttl.
//!
//! *Topping up.* Once the outcome is told, the nodes that lack the record get it too, and then the key is released
//! where it may still be held.
//!
//! The rules for the answers are those of [`acquire`](crate::protocol::acquire).

use std::time::Duration;

use crate::protocol::acquire::AcquireStep;
use crate::protocol::lease::io::{ACQUIRE, Event};
use crate::protocol::lease::life::{Finish, FinishStep, Lease, LifeStage, Pending, TICK};
use crate::protocol::message::{Answer, Op, Reply};
use crate::protocol::quorum::NodeSet;
use crate::protocol::record::Record;
use crate::protocol::round::{Decided, LookRound, LookStep, Sought, VoteRound, VoteStep};
use crate::protocol::validity::whole_millis;

impl Lease {
    /// Writes the record of a minority to the nodes that granted the key.
    pub(super) fn repair(&mut self, record: Record, now: Duration) {
        let LifeStage::Acquiring(acquiring) = &mut self.stage else {
            return;
        };
        if !record.is_whole() {
            self.unread = Some(record);
            return;
        }
        acquiring.repair = Some(self.number + 1);
        let (nodes, retention) = (acquiring.round.repairers(), acquiring.round.expires_in());
        let write = Op::Record { record, retention };
        // As for a request of its own: that a node was silent is known only at the end of the time for the others. A
        // large record needs additional time on the wire.
        let due = now + self.spec.node_timeout;
        acquiring.deadline = acquiring.deadline.max(due) + write.transit();
        self.ask(write, nodes, true);
    }

    pub(super) fn replay(&mut self, record: Record, now: Duration) {
        self.tell(Event::Decided(Decided::Recorded(record)));
        if let LifeStage::Acquiring(acquiring) = &self.stage {
            self.stage = LifeStage::Recording(Box::new(Finish {
                number: ACQUIRE,
                due: acquiring.last_due(),
                until: now.saturating_add(acquiring.round.expires_in()),
                own: None,
                step: FinishStep::Replaying(acquiring.round.clone()),
            }));
            self.end_replay(now);
        }
    }

    /// Goes on with a replay of whose attempt every node has answered or is overdue.
    fn end_replay(&mut self, now: Duration) {
        if let LifeStage::Recording(recording) = &mut self.stage
            && let FinishStep::Replaying(round) = &recording.step
            && round.unanswered().is_empty()
        {
            self.may_hold = self.may_hold.without(round.refused());
            let record = round.record();
            let record = record.map(|(record, without)| (record.clone(), without));
            match record {
                Some((record, without)) if record.is_whole() => self.top_up(record, without, now),
                Some((record, without)) if !without.is_empty() => {
                    recording.step = FinishStep::ReadingReplay(without);
                    self.unread = Some(record);
                }
                _ => self.release(false, None, now),
            }
        }
    }

    pub(super) fn on_begin(&mut self, now: Duration) {
        let node_timeout = self.spec.node_timeout;
        if let LifeStage::Holding(holding) = &mut self.stage
            && let Some(pending) = holding.pending.take_if(|pending| pending.step.is_some())
        {
            let Pending {
                mut acquiring,
                step,
                ..
            } = *pending;
            // The time between the grant and the beginning does not count.
            acquiring.deadline = now + node_timeout;
            self.stage = LifeStage::Acquiring(acquiring);
            return self.on_step(step.unwrap_or(AcquireStep::Wait), now);
        }
        self.check_validity(now);
        let LifeStage::Holding(holding) = &mut self.stage else {
            return;
        };
        if holding.lost.is_some() {
            return;
        }
        let is_old = |granted_at: &mut Duration| now.saturating_sub(*granted_at) > node_timeout;
        if let Some(pending) = &mut holding.pending
            && pending.granted_at.take_if(is_old).is_some()
        {
            let (is_renewed, valid_until) = (holding.renew_at.is_some(), holding.valid_until);
            let renewed = match &self.stage {
                LifeStage::Holding(holding) if is_renewed => self.renewal_ttl(holding, now),
                _ => None,
            };
            // A lock that is not to be renewed is confirmed for the rest of its validity.
            let left = || whole_millis(valid_until.saturating_sub(now)).max(TICK);
            return self.extend(renewed.unwrap_or_else(left), None, false, now);
        }
        holding.pending = None;
        self.is_begun = true;
        self.tell(Event::Begun);
    }

    pub(super) fn on_record(&mut self, record: Record, retention: Duration, now: Duration) {
        if let LifeStage::Holding(_) = self.stage {
            self.stage = LifeStage::Recording(Box::new(Finish {
                number: self.number,
                due: now,
                until: now.saturating_add(retention),
                own: Some(record.clone()),
                step: FinishStep::Repairing,
            }));
            self.write(record, false, now);
        }
    }

    /// Writes a record to all nodes, with the owner of the execution: each node checks that it granted the key to this
    /// owner last.
    fn write(&mut self, record: Record, is_repair: bool, now: Duration) {
        let LifeStage::Recording(recording) = &self.stage else {
            return;
        };
        let retention = recording.until.saturating_sub(now);
        let round = VoteRound::new(self.quorum, Sought::Record(record.execution()));
        let step = FinishStep::Writing {
            record: record.clone(),
            round,
            is_repair,
        };
        let write = Op::Record { record, retention };
        self.go_on(step, write, NodeSet::all(self.quorum), now);
    }

    /// Goes on with a record by a request to these nodes.
    fn go_on(&mut self, step: FinishStep, op: Op, nodes: NodeSet, now: Duration) {
        if let LifeStage::Recording(recording) = &mut self.stage {
            recording.step = step;
            recording.number = self.number + 1;
            recording.due = now + self.spec.node_timeout + op.transit();
            // A record ends the lock.
            let publishes = matches!(op, Op::Record { .. });
            self.ask(op, nodes, publishes);
        }
    }

    pub(super) fn on_recording_answer(&mut self, node: usize, answer: &Answer, now: Duration) {
        let LifeStage::Recording(recording) = &mut self.stage else {
            return;
        };
        match &mut recording.step {
            FinishStep::Writing {
                record,
                round,
                is_repair,
            } => {
                if matches!(answer, Answer::Replied(Reply::Done { .. })) {
                    // A record ends the lock.
                    self.may_hold.remove(node);
                }
                let is_new = round.step() == VoteStep::Wait;
                let step = round.on_answer(node, answer);
                let (record, without) = (record.clone(), round.without());
                let is_answered = round.silent().is_empty();
                match step {
                    VoteStep::Wait => {}
                    VoteStep::Lost | VoteStep::Missed { .. } if *is_repair => {
                        self.give_repair_away();
                    }
                    VoteStep::Lost | VoteStep::Missed { .. } => {
                        let own = record.execution();
                        let step = FinishStep::Looking {
                            round: LookRound::new(self.quorum, own),
                            is_stored: without.len() < self.quorum.nodes(),
                        };
                        self.go_on(step, Op::Look, NodeSet::all(self.quorum), now);
                    }
                    VoteStep::Agreed => {
                        if is_new {
                            self.tell(Event::Recorded(Some(record.clone())));
                        }
                        if is_answered {
                            self.top_up(record, without, now);
                        }
                    }
                }
            }
            FinishStep::Looking { round, is_stored } => {
                if let Answer::Replied(Reply::Done { expires_in, .. }) = answer {
                    recording.until = recording.until.min(now.saturating_add(*expires_in));
                }
                match round.on_look(node, answer) {
                    LookStep::Wait => {}
                    LookStep::Found(record) => self.end_look(Some(record), now),
                    // A node that said so may not be reached any more.
                    LookStep::Nothing if *is_stored => self.lead(None, now),
                    LookStep::Nothing => self.end_look(None, now),
                    LookStep::Minority(leader) => self.lead(Some(leader), now),
                }
            }
            FinishStep::Replaying(round) => {
                round.on_acquire(node, answer);
                self.end_replay(now);
            }
            FinishStep::ToppingUp(silent) => {
                silent.remove(node);
                if silent.is_empty() {
                    self.release(false, None, now);
                }
            }
            FinishStep::ReadingLeader | FinishStep::Repairing | FinishStep::ReadingReplay(_) => {}
        }
    }

    /// Writes the leading record of a minority; without one, the own record.
    fn lead(&mut self, leader: Option<Record>, now: Duration) {
        let LifeStage::Recording(recording) = &mut self.stage else {
            return;
        };
        // Of the own record, the nodes have told the head.
        let own = recording.own.clone();
        let is_own = own.as_ref().map(Record::execution) == leader.as_ref().map(Record::execution);
        match leader.filter(|_| !is_own).or(own) {
            Some(record) if record.is_whole() => self.write(record, true, now),
            Some(record) => {
                recording.step = FinishStep::ReadingLeader;
                self.unread = Some(record);
            }
            None => self.give_repair_away(),
        }
    }

    fn give_repair_away(&mut self) {
        if let LifeStage::Recording(recording) = &mut self.stage {
            recording.step = FinishStep::Repairing;
            self.tell(Event::Unrepaired);
        }
    }

    pub(super) fn on_repaired(&mut self, decided: Decided, now: Duration) {
        if let LifeStage::Recording(recording) = &self.stage
            && recording.step == FinishStep::Repairing
        {
            let record = match decided {
                Decided::Recorded(record) => Some(record),
                _ => None,
            };
            self.end_look(record, now);
        }
    }

    /// Ends a recording with the record that a majority has, if there is one.
    fn end_look(&mut self, record: Option<Record>, now: Duration) {
        let is_recorded = record.is_some();
        self.tell(Event::Recorded(record));
        match is_recorded {
            true => self.release(false, None, now),
            // The key was executed with an unknown outcome, so it stays locked for as long as possible.
            false => self.leave(),
        }
    }

    pub(super) fn on_read(&mut self, record: Option<Record>, now: Duration) {
        match &mut self.stage {
            LifeStage::Acquiring(acquiring) if acquiring.is_reading() => match record {
                Some(record) => self.repair(record, now),
                None => {
                    let step = acquiring.round.on_unreadable();
                    self.on_step(step, now);
                }
            },
            LifeStage::Recording(recording) => match (&recording.step, record) {
                (FinishStep::ReadingLeader, Some(record)) => self.write(record, true, now),
                (FinishStep::ReadingLeader, None) => self.give_repair_away(),
                (&FinishStep::ReadingReplay(without), Some(record)) => {
                    self.top_up(record, without, now);
                }
                (FinishStep::ReadingReplay(_), None) => self.release(false, None, now),
                _ => {}
            },
            _ => {}
        }
    }

    /// Writes a record that a majority has to the nodes that lack it, and then releases the key.
    ///
    /// Waits for the answers although no caller needs them, because a request whose phase is over may not be sent.
    fn top_up(&mut self, record: Record, without: NodeSet, now: Duration) {
        let LifeStage::Recording(recording) = &self.stage else {
            return;
        };
        let retention = recording.until.saturating_sub(now);
        if without.is_empty() || retention.is_zero() {
            return self.release(false, None, now);
        }
        let write = Op::TopUp { record, retention };
        self.go_on(FinishStep::ToppingUp(without), write, without, now);
    }
}
