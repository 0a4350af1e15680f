//! The rest of big records: read once for all who want it at the time, from one node after the other.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tracing::Instrument;

use crate::lock::error::LockError;
use crate::lock::redlock::Inner;
use crate::node::{
    Job, NodeFailure, NodeState, Packet, Request, VoteReceiver, sha256, transit_of, unguessable,
};
use crate::protocol::message::{Command, Op, Reply};
use crate::protocol::{LockKey, OwnerToken, Record};

/// The readings that are under way, by the key and the head of the record.
///
/// # Design
///
/// Nothing is kept beyond those who wait: what is read is shared by them and goes with the last, so that
/// memory is bounded by the requests that are being answered.
#[derive(Debug, Default)]
pub(super) struct Readings(Mutex<HashMap<Wanted, Arc<Told>>>);

type Wanted = (LockKey, Record);
type Told = watch::Sender<Option<Result<Record, LockError>>>;
type Waiting = watch::Receiver<Option<Result<Record, LockError>>>;

/// A reading's entry; removed when it is dropped, however the reading ends, and those who still wait are
/// told that it did.
struct Reading {
    inner: Arc<Inner>,
    wanted: Wanted,
    /// Which of several entries is its own: others may want the same again while it ends.
    told: Arc<Told>,
}

impl Inner {
    /// Returns the record of which the head is known.
    ///
    /// # Errors
    ///
    /// `Unavailable` if some node could not be read, and `Contended` if all were and none has it: it was
    /// forgotten meanwhile, and to ask again is of use.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point. The reading is a task of its own, and goes on for others.
    pub(super) async fn whole(
        self: &Arc<Self>,
        key: &LockKey,
        head: &Record,
    ) -> Result<Record, LockError> {
        let wanted = (key.clone(), head.clone());
        for _ in 0..READINGS {
            let (mut told, begun) = self.join(wanted.clone());
            if let Some(reading) = begun {
                tokio::spawn(async move { reading.run().await }.in_current_span());
            }
            let late = Instant::now() + self.reading_limit();
            if let Ok(ended) = timeout_at(late, told.wait_for(Option::is_some)).await {
                if let Ok(outcome) = ended
                    && let Some(outcome) = &*outcome
                {
                    return outcome.clone();
                }
                // It panicked, or the runtime is gone that it was begun in, which may be another one's.
                continue;
            }
            // That runtime rests, because nothing blocks on it any more.
            self.readings.remove(&wanted, &told);
        }
        Err(LockError::Closed)
    }

    /// Returns how long a reading takes at most if nothing keeps it: one node after the other is asked, and
    /// the last may take its time. Once more a node timeout for what is between.
    fn reading_limit(&self) -> Duration {
        let asked = u32::try_from(self.nodes.len()).unwrap_or(u32::MAX);
        let patience = self.settings.node_timeout;
        patience.saturating_mul(asked.saturating_add(1)) + transit_of(LARGEST)
    }

    /// Waits with the others who want the same; returns the reading too, if it is yet to be done.
    fn join(self: &Arc<Self>, wanted: Wanted) -> (Waiting, Option<Reading>) {
        let mut readings = self.readings.under_way();
        if let Some(told) = readings.get(&wanted) {
            return (told.subscribe(), None);
        }
        let (told, waiting) = watch::channel(None);
        let told = Arc::new(told);
        readings.insert(wanted.clone(), Arc::clone(&told));
        let inner = Arc::clone(self);
        let reading = Reading {
            inner,
            wanted,
            told,
        };
        (waiting, Some(reading))
    }
}

impl Readings {
    /// Removes what is waited for, unless that has been done.
    fn remove(&self, wanted: &Wanted, waiting: &Waiting) {
        let mut readings = self.under_way();
        let told = readings.get(wanted);
        if told.is_some_and(|told| told.subscribe().same_channel(waiting)) {
            readings.remove(wanted);
        }
    }

    fn under_way(&self) -> MutexGuard<'_, HashMap<Wanted, Arc<Told>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reading {
    async fn run(self) {
        let outcome = self.read().await;
        self.tell(outcome);
    }

    /// Tells those who wait.
    fn tell(&self, outcome: Result<Record, LockError>) {
        // Those who come later read again.
        self.leave();
        self.told.send_replace(Some(outcome));
    }

    /// Removes its entry, and not that of another which was begun since.
    fn leave(&self) {
        let mut readings = self.inner.readings.under_way();
        let told = readings.get(&self.wanted);
        if told.is_some_and(|told| Arc::ptr_eq(told, &self.told)) {
            readings.remove(&self.wanted);
        }
    }

    /// Asks one node, and the next as soon as that failed or was silent for as long as it may take to vote.
    ///
    /// Not all at once: most of the time that would be as many bodies as there are nodes for one.
    async fn read(&self) -> Result<Record, LockError> {
        let Self { inner, wanted, .. } = self;
        let (key, head) = wanted;
        let Inner {
            nodes, settings, ..
        } = &**inner;
        let names = settings.namespace.names_with_record(key, None, sha256)?;
        let packet = Packet::new(Command {
            names: [names].into(),
            owner: OwnerToken::from_random(unguessable()),
            op: Op::Fetch,
        });
        let mut votes = VoteReceiver::new(&inner.names);
        let mut failures = Vec::new();
        let mut places = self.places().into_iter().peekable();
        let mut silent = Vec::new();
        let mut due = Instant::now();
        loop {
            let now = Instant::now();
            if let Some(place) = places.next() {
                due = now + settings.node_timeout + transit_of(LARGEST);
                let request = Request::Command(Arc::clone(&packet));
                let sender = votes.sender(place);
                nodes[place].fetch(Job::new(request, sender, due));
                silent.push(place);
            } else if silent.is_empty() {
                break;
            }
            let patience = match places.peek() {
                Some(_) => now + settings.node_timeout,
                None => due,
            };
            let vote = match timeout_at(patience, votes.recv_any()).await {
                Ok(vote) => vote,
                Err(_) if places.peek().is_some() => continue,
                Err(_) => break,
            };
            silent.retain(|place| *place != vote.node);
            match vote.outcome {
                Ok(Reply::Whole(record)) if is_whole_of(&record, head) => return Ok(record),
                // Of a damaged copy there is a better one elsewhere.
                Ok(_) => {}
                Err(failure) => failures.push(failure),
            }
        }
        failures.extend(silent.into_iter().map(|place| NodeFailure::TimedOut {
            node: Arc::clone(nodes[place].name()),
            after: settings.node_timeout + transit_of(LARGEST),
        }));
        Err(if failures.is_empty() {
            LockError::Contended { retry_after: None }
        } else {
            // One that has it would do.
            let (reached, needed, nodes) = (0, 1, failures);
            LockError::Unavailable {
                reached,
                needed,
                nodes,
            }
        })
    }

    /// Returns the nodes in the order in which to ask them: those that answer first, and not the same first
    /// for every record.
    fn places(&self) -> Vec<usize> {
        let (nodes, (_, head)) = (&self.inner.nodes, &self.wanted);
        let first = usize::from(head.digest()[0]) % nodes.len();
        let mut places: Vec<usize> = (first..nodes.len()).chain(0..first).collect();
        places.sort_by_key(|place| matches!(nodes[*place].state(), NodeState::Unreachable { .. }));
        places
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Whether this is the record of which the head is known, undamaged.
///
/// By all of the head, which is what a majority agreed on; the id alone could be made up.
fn is_whole_of(record: &Record, head: &Record) -> bool {
    record.completes(head) && is_undamaged(record)
}

/// Whether the rest of a whole record is what its head says it is.
pub(crate) fn is_undamaged(record: &Record) -> bool {
    sha256(record.rest()) == record.digest()
}

/// How often a reading is begun that ends untold: not again and again, if it is ours that panics.
const READINGS: usize = 2;

/// The head does not say how big a record is: as big as any that is kept.
const LARGEST: usize = 1024 * 1024;

#[cfg(test)]
mod tests {
    use crate::lock::Redlock;
    use crate::protocol::{ExecutionId, Fingerprint};

    use super::*;

    fn wanted() -> Wanted {
        let id = ExecutionId::from_random([1; 16]);
        let record = Record::new(id, Fingerprint::of_digest([2; 32]), [3; 32], b"rest");
        ("k".into(), record)
    }

    /// The first is told, the second begins, and only then does the first end.
    #[tokio::test]
    async fn a_reading_that_ends_leaves_that_of_others_alone_which_began_meanwhile() {
        let redlock = Redlock::builder().embedded(1).build().unwrap();
        let inner = redlock.inner();
        let (told, first) = inner.join(wanted());
        let first = first.expect("no reading is under way");
        first.tell(Err(LockError::Closed));
        assert!(told.borrow().is_some());
        let (waiting, second) = inner.join(wanted());
        let second = second.expect("the first reading has been told");
        drop(first);
        assert!(waiting.has_changed().is_ok(), "no reading would tell them");
        assert!(inner.join(wanted()).1.is_none(), "it is read twice at once");
        second.tell(Err(LockError::Contended { retry_after: None }));
        let told = waiting.borrow().clone();
        assert!(matches!(told, Some(Err(LockError::Contended { .. }))));
        drop(second);
        assert!(inner.join(wanted()).1.is_some());
    }

    #[tokio::test]
    async fn a_reading_that_ends_untold_is_begun_again_by_those_who_wait() {
        let redlock = Redlock::builder().embedded(1).build().unwrap();
        let inner = redlock.inner();
        let (key, head) = wanted();
        let (_, lost) = inner.join(wanted());
        let mut waiting = tokio_test::task::spawn(inner.whole(&key, &head));
        tokio_test::assert_pending!(waiting.poll());
        // As by the end of the runtime that it ran in.
        drop(lost);
        let outcome = waiting.await;
        // It was looked for, and is not there.
        assert!(
            matches!(outcome, Err(LockError::Contended { .. })),
            "{outcome:?}"
        );
    }
}
