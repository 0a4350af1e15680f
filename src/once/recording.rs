//! Recording: writes the outcome of an execution to a majority of the nodes, and then to the rest.
//!
//! # Implementation details
//!
//! The task sends `RECORD` to all nodes. A node accepts it if the owner of the execution was the last one that it
//! granted the key. If a majority accepts, the outcome counts. Otherwise the task asks all nodes for their records
//! (`LOOK`):
//!
//! 1. A majority has a record: that record counts, ours or another.
//! 2. A minority has a record: the task sends the leading one as `RECORD` under the old owner value first, because
//!    its grants may still stand. Only if that misses the majority, one attempt with a fresh owner value repairs the
//!    record, as any other request does; it never executes.
//! 3. No node has a record: the outcome is not recorded, and the key stays locked until its ttl.

use std::time::Duration;

use tokio::time::Instant;

use crate::lock::{Cleanup, HoldingLock, Permit};
use crate::once::attempt::AttemptError;
use crate::once::command::{RecordCommand, Recorded};
use crate::once::replay::Inquiry;
use crate::once::task::{KeyMemo, OnceTask};
use crate::protocol::Record;
use crate::protocol::message::{Op, Reply};
use crate::protocol::once::{LookRound, LookStep, RecordRound, RecordStep};
use crate::protocol::round::Answer;

/// A record that has been sent to all nodes.
struct Written {
    record: Record,
    round: RecordRound,
    asked: Inquiry,
    /// When the record was sent.
    began: Instant,
    retention: Duration,
}

impl OnceTask {
    /// Records an outcome and frees the key, and reports how that went as soon as it is decided.
    pub(super) async fn record(
        &mut self,
        holding: HoldingLock,
        command: RecordCommand,
        permit: Permit,
    ) {
        let RecordCommand {
            record,
            retention,
            done,
        } = command;
        holding.set_released();
        let HoldingLock {
            mut cleanup,
            control,
            ..
        } = holding;
        let mut written = self.write(&cleanup, record.clone(), retention);
        let (outcome, written) = match self.decided(&mut written, &mut cleanup).await {
            RecordStep::Recorded => (Recorded::Yes, Some(written)),
            _ => {
                let left = written.left();
                self.look(&mut cleanup, &record, left).await
            }
        };
        control.close(Ok(()));
        // The receiver of the outcome may be gone with the caller, here and below.
        let Some(written) = written else {
            match outcome {
                Recorded::Yes | Recorded::Another(_) => self.lease.give_up(cleanup),
                // The key was executed with an unknown outcome, so it stays locked for as long as possible.
                Recorded::No => self.lease.leave_to_expire(cleanup),
            }
            drop(permit);
            drop(done.send(outcome));
            return;
        };
        if matches!(outcome, Recorded::Yes) {
            // The next callers of this process replay the record without asking the nodes.
            permit.set_memo(KeyMemo::recorded(&written.record));
        }
        drop(done.send(outcome));
        drop(permit);
        self.finish_record(&mut cleanup, written).await;
        self.lease.give_up(cleanup);
    }

    fn write(&mut self, cleanup: &Cleanup, record: Record, retention: Duration) -> Written {
        let began = Instant::now();
        let quorum = self.lease.cluster.quorum;
        let round = RecordRound::new(quorum, record.execution());
        let write = Op::Record {
            record: record.clone(),
            retention,
        };
        Written {
            asked: self.ask(cleanup, write, 0..quorum.nodes()),
            record,
            round,
            began,
            retention,
        }
    }

    /// Waits until a majority has accepted a record, or cannot.
    async fn decided(&mut self, written: &mut Written, cleanup: &mut Cleanup) -> RecordStep {
        loop {
            let step = self.next_recorded(written, cleanup).await;
            if step != RecordStep::Wait {
                return step;
            }
        }
    }

    /// Waits for the remaining nodes, and writes the record to those that lack it.
    async fn finish_record(&mut self, cleanup: &mut Cleanup, mut written: Written) {
        while written.round.silent().next().is_some() {
            self.next_recorded(&mut written, cleanup).await;
        }
        let without: Vec<usize> = written.round.without().collect();
        let left = written.left();
        self.top_up(cleanup, written.record, left, without).await;
    }

    async fn next_recorded(&mut self, written: &mut Written, cleanup: &mut Cleanup) -> RecordStep {
        let (node, answer) = self.next_answer(&mut written.asked).await;
        if matches!(answer, Answer::Replied(Reply::Done { .. })) {
            cleanup.mark_not_held(node);
        }
        written.round.on_record(node, &answer)
    }

    /// Finds the outcome of a recording that no majority accepted. Also returns the second write, if one succeeded.
    async fn look(
        &mut self,
        cleanup: &mut Cleanup,
        record: &Record,
        retention: Duration,
    ) -> (Recorded, Option<Written>) {
        let own = record.execution();
        let found = |other: Record| {
            if other.execution() == own {
                Recorded::Yes
            } else {
                Recorded::Another(other)
            }
        };
        let quorum = self.lease.cluster.quorum;
        let mut round = LookRound::new(quorum);
        let mut asked = self.ask(cleanup, Op::Look, 0..quorum.nodes());
        let mut left = retention;
        loop {
            let (node, answer) = self.next_answer(&mut asked).await;
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
        if let Some(leading) = round.leading(own) {
            let whole = if leading.execution() == own {
                Some(record.clone())
            } else {
                self.whole(leading.clone()).await
            };
            if let Some(whole) = whole {
                // With the owner of the execution, whose lock would refuse a new owner. Each node checks that it
                // granted the key to this owner last.
                let mut written = self.write(cleanup, whole.clone(), left);
                if self.decided(&mut written, cleanup).await == RecordStep::Recorded {
                    return (found(whole), Some(written));
                }
            }
        }
        let attempt = Box::pin(self.attempt(std::future::pending()));
        let outcome = match attempt.await {
            Err(AttemptError::Recorded(record, replay)) => {
                self.finish_replay(*replay).await;
                found(record)
            }
            Err(_) => Recorded::No,
            // The key is not executed again, even if this attempt is granted.
            Ok(granted) => {
                self.lease.give_up(granted.acquired.cleanup);
                Recorded::No
            }
        };
        (outcome, None)
    }
}

impl Written {
    /// Returns how much longer the record lives.
    fn left(&self) -> Duration {
        self.retention.saturating_sub(self.began.elapsed())
    }
}
