//! Fetching: reads a large record once for all callers that want it at the same time.
//!
//! # Implementation details
//!
//! The nodes answer an `ACQUIRE` with only the head of a large record. A task, which all interested callers share,
//! asks one node after the other for the body until one returns it. The body is not cached beyond these callers, so
//! the requests under way bound the memory.
//!
//! A task may end without a result, if it panics or if its home ends. Its entry is then removed, and a caller begins
//! another fetch.

use std::sync::Arc;

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tracing::Instrument;

use crate::lock::{Cluster, Group, LockError, ReadSender, Reads};
use crate::node::{
    Job, NodeFailure, NodeState, Packet, Request, VoteReceiver, sha256, unguessable,
};
use crate::once::limits::MAX_BODY;
use crate::protocol::lease::Stored;
use crate::protocol::message::{Command, Op, Reply, transit};
use crate::protocol::{LockKey, OwnerToken, Record};

/// The number of fetches that a caller makes if they end without a result: bounded, in case each one panics.
const FETCHES: usize = 2;

type Wanted = (LockKey, Stored);
type ReadReceiver = watch::Receiver<Option<Result<Stored, LockError>>>;

/// The entry of a fetch, removed when it is dropped. Callers that still wait see the channel closed.
struct Fetch {
    fetches: Arc<Reads>,
    cluster: Arc<Cluster>,
    wanted: Wanted,
    sender: Arc<ReadSender>,
}

/// Returns the whole record with this head.
///
/// # Errors
///
/// Returns `Unavailable` if some node did not answer. Returns `Contended` if all nodes answered and none has the
/// record: it has expired meanwhile, so a retry may succeed. Returns `Closed` if the fetches ended without a result.
///
/// # Cancel safety
///
/// May be dropped at any point. The fetch is a task of its own, and goes on for other callers.
pub(super) async fn fetch(
    group: &Group,
    key: &LockKey,
    head: &Record,
) -> Result<Record, LockError> {
    let read = group.reads.fetch(&group.cluster, key, head).await;
    read.map(|Stored(record)| record)
}

impl Reads {
    async fn fetch(
        self: &Arc<Self>,
        cluster: &Arc<Cluster>,
        key: &LockKey,
        head: &Record,
    ) -> Result<Stored, LockError> {
        let wanted = (key.clone(), Stored(head.clone()));
        for _ in 0..FETCHES {
            let (mut receiver, fetch) = self.join(cluster, wanted.clone());
            if let Some(fetch) = fetch {
                let fetch = async move { fetch.run().await };
                cluster.home.spawn(fetch.in_current_span());
            }
            let ended = cluster.home.report(receiver.wait_for(Option::is_some));
            match ended.await {
                Some(Ok(outcome)) => {
                    if let Some(outcome) = &*outcome {
                        return outcome.clone();
                    }
                }
                Some(Err(_)) => {}
                None => return Err(unread(cluster.all_not_run())),
            }
        }
        Err(unread(cluster.all_ended()))
    }

    /// Joins the callers that want the same record. Also returns the fetch if the caller must run it.
    fn join(
        self: &Arc<Self>,
        cluster: &Arc<Cluster>,
        wanted: Wanted,
    ) -> (ReadReceiver, Option<Fetch>) {
        let mut fetches = self.0.lock();
        if let Some(sender) = fetches.get(&wanted) {
            return (sender.subscribe(), None);
        }
        let (sender, receiver) = watch::channel(None);
        let sender = Arc::new(sender);
        fetches.insert(wanted.clone(), Arc::clone(&sender));
        let fetch = Fetch {
            fetches: Arc::clone(self),
            cluster: Arc::clone(cluster),
            wanted,
            sender,
        };
        (receiver, Some(fetch))
    }

    /// Removes an entry, unless it belongs to a later fetch.
    fn remove(&self, wanted: &Wanted, is_own: impl Fn(&Arc<ReadSender>) -> bool) {
        let mut fetches = self.0.lock();
        if fetches.get(wanted).is_some_and(is_own) {
            fetches.remove(wanted);
        }
    }
}

impl Fetch {
    async fn run(self) {
        let outcome = self.read().await;
        self.finish(outcome.map(Stored));
    }

    /// Hands the outcome to the waiting callers. Later callers begin another fetch.
    fn finish(&self, outcome: Result<Stored, LockError>) {
        self.leave();
        self.sender.send_replace(Some(outcome));
    }

    fn leave(&self) {
        let is_own = |sender: &Arc<ReadSender>| Arc::ptr_eq(sender, &self.sender);
        self.fetches.remove(&self.wanted, is_own);
    }

    /// Asks one node, and the next one as soon as it fails or is silent for a node timeout.
    ///
    /// Asking all nodes at once would transfer the body from each, nearly always in vain.
    async fn read(&self) -> Result<Record, LockError> {
        let (cluster, (key, Stored(head))) = (&self.cluster, &self.wanted);
        let settings = &cluster.settings;
        let names = settings.namespace.names_with_record(key, None, sha256)?;
        let packet = Packet::new(Command {
            names: [names].into(),
            owner: OwnerToken::from_random(unguessable()),
            op: Op::Fetch,
        });
        let mut votes = VoteReceiver::new(&cluster.names);
        let mut failures = Vec::new();
        let mut nodes = self.order().into_iter().peekable();
        let mut silent = Vec::new();
        // The head does not contain the size of the body.
        let patience = settings.node_timeout + transit(MAX_BODY);
        let mut due = Instant::now();
        loop {
            let now = Instant::now();
            if let Some(node) = nodes.next() {
                due = now + patience;
                let request = Request::Command(Arc::clone(&packet));
                cluster.nodes[node].fetch(Job::new(request, votes.sender(node), due));
                silent.push(node);
            } else if silent.is_empty() {
                break;
            }
            let until = match nodes.peek() {
                Some(_) => now + settings.node_timeout,
                None => due,
            };
            let vote = match timeout_at(until, votes.recv_any()).await {
                Ok(vote) => vote,
                Err(_) if nodes.peek().is_some() => continue,
                Err(_) => break,
            };
            silent.retain(|node| *node != vote.node);
            match vote.outcome {
                Ok(Reply::Whole(record)) if is_whole_of(&record, head) => return Ok(record),
                // The node has no copy, or a damaged one.
                Ok(_) => {}
                Err(failure) => failures.push(failure),
            }
        }
        let timed_out = silent
            .into_iter()
            .map(|node| cluster.timed_out(node, patience));
        failures.extend(timed_out);
        Err(unread(failures))
    }

    /// Returns the nodes in the order in which to ask them: reachable ones first, and in an order that differs
    /// between records.
    fn order(&self) -> Vec<usize> {
        let (nodes, (_, Stored(head))) = (&self.cluster.nodes, &self.wanted);
        let first = usize::from(head.digest()[0]) % nodes.len();
        let mut order: Vec<usize> = (first..nodes.len()).chain(0..first).collect();
        order.sort_by_key(|node| matches!(nodes[*node].state(), NodeState::Unreachable { .. }));
        order
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        self.leave();
    }
}

fn unread(nodes: Vec<NodeFailure>) -> LockError {
    if nodes.is_empty() {
        return LockError::Contended { retry_after: None };
    }
    // One node with the record would be enough.
    let (reached, needed) = (0, 1);
    LockError::Unavailable {
        reached,
        needed,
        voted: Vec::new(),
        nodes,
    }
}

/// Returns whether this is the whole, undamaged record with this head.
///
/// Compares the whole head, on which a majority agreed. The id alone could be forged.
fn is_whole_of(record: &Record, head: &Record) -> bool {
    record.completes(head) && is_undamaged(record)
}

/// Returns whether the body of a whole record has the digest of its head.
pub(crate) fn is_undamaged(record: &Record) -> bool {
    sha256(record.rest()) == record.digest()
}

#[cfg(test)]
mod tests {
    use crate::lock::Redlock;
    use crate::protocol::{ExecutionId, Fingerprint};

    use super::*;

    fn cluster() -> Arc<Cluster> {
        Arc::clone(&Redlock::in_memory(1).core().layout.groups()[0].cluster)
    }

    fn wanted() -> Wanted {
        let id = ExecutionId::from_random([1; 16]);
        let record = Record::new(id, Fingerprint::from_digest([2; 32]), [3; 32], b"rest");
        ("k".into(), Stored(record))
    }

    /// The first fetch ends, a second one begins, and only then is the first dropped.
    #[tokio::test]
    async fn a_fetch_that_ends_leaves_the_entry_of_a_later_one() {
        let (fetches, cluster) = (Arc::new(Reads::default()), cluster());
        let (ended, first) = fetches.join(&cluster, wanted());
        let first = first.expect("no fetch is under way");
        first.finish(Err(LockError::Closed));
        assert!(ended.borrow().is_some());
        let (waiting, second) = fetches.join(&cluster, wanted());
        let second = second.expect("the first fetch has finished");
        drop(first);
        assert!(waiting.has_changed().is_ok(), "no fetch would finish");
        let again = fetches.join(&cluster, wanted()).1;
        assert!(again.is_none(), "it is fetched twice at once");
        second.finish(Err(LockError::Contended { retry_after: None }));
        let outcome = waiting.borrow().clone();
        assert!(matches!(outcome, Some(Err(LockError::Contended { .. }))));
        drop(second);
        assert!(fetches.join(&cluster, wanted()).1.is_some());
    }

    #[tokio::test]
    async fn a_fetch_that_ends_without_a_result_is_begun_anew_by_its_callers() {
        let (fetches, cluster) = (Arc::new(Reads::default()), cluster());
        let (key, Stored(head)) = wanted();
        let (_, lost) = fetches.join(&cluster, wanted());
        let mut waiting = tokio_test::task::spawn(fetches.fetch(&cluster, &key, &head));
        tokio_test::assert_pending!(waiting.poll());
        // As at the end of its runtime.
        drop(lost);
        let outcome = waiting.await;
        // The nodes were asked, and have no such record.
        assert!(
            matches!(outcome, Err(LockError::Contended { .. })),
            "{outcome:?}"
        );
    }
}
