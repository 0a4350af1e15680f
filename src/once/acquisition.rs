//! Acquiring the right to execute: in the group of the key, or in two while the key moves from one to the other.
//!
//! # Implementation details
//!
//! Processes that know only the present group of a key that moves, or only its next one, execute and record there. A
//! process that knows both therefore executes and records in both: it acquires the key in the present group first and
//! then in the next, and an outcome is recorded once both groups have it.
//!
//! If only one group has a record, the other may not have got it in time, or the process that executed knows only the one.
//! The record counts when the other has it too, so it is copied there, and not replayed before: a process that
//! knows only the other group could otherwise execute again and record another outcome, and callers would be answered
//! both. If the groups have different records, the key was executed twice.

use std::sync::Arc;
use std::time::Duration;

use crate::lock::{Earlier, Group, LockError, LockSpan, Waited};
use crate::once::error::Denied;
use crate::once::execution::Execution;
use crate::once::fetch::fetch;
use crate::once::inspect::{names, request};
use crate::once::request::ExecuteOnce;
use crate::protocol::lease::Recorded;
use crate::protocol::message::{Op, Reply};
use crate::protocol::{LockKeys, Record};

impl ExecuteOnce {
    /// Acquires the right to execute the work.
    ///
    /// # Errors
    ///
    /// Returns [`Denied`] if the work must not be executed, with the record if there is one.
    ///
    /// # Cancel safety
    ///
    /// As for [`LockFuture`](crate::LockFuture).
    pub(crate) async fn acquire(&self) -> Result<Execution, Denied> {
        let layout = &self.core.layout;
        let group = layout.group_of(&self.key);
        let keys = LockKeys::from(self.key.clone());
        let span = LockSpan::new(
            self.options.label,
            group.cluster.quorum.nodes(),
            &keys,
            self.core.settings.log_keys,
        );
        let waited = Waited::default();
        let outcome = match layout.next_group_of(&self.key) {
            None => self.acquire_in(group, None, &keys, &span, &waited).await,
            Some(next) => {
                let groups = [group, next];
                Box::pin(self.acquire_in_both(groups, &keys, &span, &waited)).await
            }
        };
        match &outcome {
            Ok(execution) => {
                span.granted(execution.handle().fencing_token(), waited.so_far());
            }
            Err(denied @ Denied::Recorded(_)) => {
                span.ended("outcome replayed", denied.outcome(), waited.so_far());
            }
            Err(denied) => span.refused(denied.outcome(), waited.so_far()),
        }
        outcome
    }

    /// Reads the whole record of the key from its head.
    ///
    /// # Errors
    ///
    /// Returns a [`LockError`] if no node returned the record.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub(crate) async fn fetch(&self, head: &Record) -> Result<Record, LockError> {
        let layout = &self.core.layout;
        let fetched = fetch(layout.group_of(&self.key), &self.key, head).await;
        match layout.next_group_of(&self.key) {
            // The record may have been found there.
            Some(next) if fetched.is_err() => fetch(next, &self.key, head).await,
            _ => fetched,
        }
    }

    /// Acquires the right to execute the work in both groups.
    async fn acquire_in_both(
        &self,
        [present, next]: [&Arc<Group>; 2],
        keys: &LockKeys,
        span: &LockSpan,
        waited: &Waited,
    ) -> Result<Execution, Denied> {
        let mut earlier = Earlier::default();
        let first = self
            .acquire_in(present, Some(earlier), keys, span, waited)
            .await;
        match &first {
            Ok(first) => earlier.token = first.handle().fencing_token(),
            Err(Denied::Recorded(_)) => {}
            Err(_) => return first,
        }
        let second = self
            .acquire_in(next, Some(earlier), keys, span, waited)
            .await;
        match (first, second) {
            (Ok(first), Ok(second)) => {
                let joined = first.join(second).await;
                let ttl = self.options.ttl.unwrap_or(self.core.settings.ttl);
                joined.map_err(|error| {
                    let (names, elapsed) = (&present.cluster.names, span.began().elapsed());
                    LockError::from_raise(error, names, ttl, elapsed).into()
                })
            }
            (Ok(free), Err(Denied::Recorded(record))) => Err(self.copied(next, record, free).await),
            (Err(Denied::Recorded(record)), Ok(free)) => {
                Err(self.copied(present, record, free).await)
            }
            (Err(Denied::Recorded(one)), Err(Denied::Recorded(other))) => {
                Err(match one.execution() == other.execution() {
                    true => Denied::Recorded(one),
                    false => Denied::Conflicting,
                })
            }
            (Ok(first), Err(denied)) => {
                first.release().await;
                Err(denied)
            }
            (Err(_), second) => second,
        }
    }

    /// Copies the record of one group to the other, in which the key is free, and returns what is to be answered.
    async fn copied(&self, from: &Group, record: Record, to: Execution) -> Denied {
        let left = self.expires_in(from, &record).await;
        let whole = match record.is_whole() {
            true => Ok(record.clone()),
            false => fetch(from, &self.key, &record).await,
        };
        let (Some(left), Ok(whole)) = (left, whole) else {
            // It has expired meanwhile, or its nodes have failed.
            to.release().await;
            return Denied::Undecided;
        };
        match to.record(&whole, left).await {
            Recorded::Yes => Denied::Recorded(record),
            Recorded::Another(other) if other.execution() == record.execution() => {
                Denied::Recorded(record)
            }
            Recorded::Another(_) => Denied::Conflicting,
            Recorded::No => Denied::Undecided,
        }
    }

    /// Returns how much longer a group keeps a record; `None` if no node says so.
    async fn expires_in(&self, group: &Group, record: &Record) -> Option<Duration> {
        let names = names(&group.cluster, &self.key).ok()?;
        let asked = group
            .cluster
            .ask_all(|_| Some(request(&names, Op::Look, false)));
        let replies = asked.await.into_iter().flatten();
        let left = replies.filter_map(|asked| match asked.outcome {
            Ok(Reply::Done {
                record: found,
                expires_in,
            }) if found.execution() == record.execution() => Some(expires_in),
            _ => None,
        });
        left.max()
    }
}
