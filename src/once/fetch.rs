//! Fetching: reads a large record once for all callers that want it at the same time.
//!
//! # Implementation details
//!
//! The nodes answer an `ACQUIRE` with only the head of a large record. A task, which all interested callers share,
//! asks one node after the other for the body until one returns it. The body is not cached beyond these callers, so
//! the requests under way bound the memory.
//!
//! A task may end without a result, if it panics or if its home ends. Its entry is then closed, and a caller begins
//! another fetch.

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tracing::Instrument;

use crate::lock::{Cluster, Group, LockError, ReadReceiver};
use crate::node::{Job, NodeFailure, NodeState, Packet, VoteReceiver, sha256};
use crate::once::inspect::request;
use crate::protocol::message::{Op, Reply, transit};
use crate::protocol::{LockKey, Record};

/// The largest body of a record. Larger ones keep nodes from answering other locks within the node timeout.
pub(crate) const MAX_BODY: usize = 1024 * 1024;

/// The number of fetches that a caller makes if they end without a result: bounded, in case each one panics.
const FETCHES: usize = 2;

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
    group: &Arc<Group>,
    key: &LockKey,
    head: &Record,
) -> Result<Record, LockError> {
    let cluster = &group.cluster;
    for _ in 0..FETCHES {
        let mut reading = join(group, key, head);
        let ended = cluster.home.report(reading.wait_for(Option::is_some));
        let Some(ended) = ended.await else {
            return Err(unread(cluster.all_not_run()));
        };
        if let Some(outcome) = ended.ok().and_then(|outcome| outcome.clone()) {
            return outcome;
        }
    }
    Err(unread(cluster.all_ended()))
}

/// Joins the callers that want the same record. The first of them begins the fetch.
fn join(group: &Arc<Group>, key: &LockKey, head: &Record) -> ReadReceiver {
    let wanted = (key.clone(), head.clone());
    let mut reads = group.reads.lock();
    // Without those that ended without a result.
    reads.retain(|_, reading| reading.has_changed().is_ok());
    if let Some(reading) = reads.get(&wanted) {
        return reading.clone();
    }
    let (sender, reading) = watch::channel(None);
    reads.insert(wanted.clone(), reading.clone());
    drop(reads);
    let group = Arc::clone(group);
    let home = Arc::clone(&group.cluster.home);
    let fetching = async move {
        let outcome = read(&group.cluster, &wanted).await;
        // Later callers begin another fetch.
        group.reads.lock().remove(&wanted);
        sender.send_replace(Some(outcome));
    };
    home.spawn(fetching.in_current_span());
    reading
}

/// Asks one node, and the next one as soon as it fails or is silent for a node timeout.
///
/// Asking all nodes at once would transfer the body from each, nearly always in vain.
async fn read(cluster: &Cluster, (key, head): &(LockKey, Record)) -> Result<Record, LockError> {
    let settings = &cluster.settings;
    let names = settings.namespace.names_with_record(key, None, sha256)?;
    let packet = request(&[names].into(), Op::Fetch, false);
    let mut nodes = order(cluster, head).into_iter().peekable();
    let (mut asked, mut failures) = (FuturesUnordered::new(), Vec::new());
    loop {
        asked.extend(nodes.next().map(|node| ask(cluster, node, &packet)));
        let answer = match nodes.peek() {
            Some(_) => match timeout(settings.node_timeout, asked.next()).await {
                Ok(answer) => answer,
                Err(_) => continue,
            },
            None => asked.next().await,
        };
        match answer {
            // Compares the whole head, on which a majority agreed. The id alone could be forged.
            Some(Ok(Reply::Whole(record))) if record.completes(head) && is_undamaged(&record) => {
                return Ok(record);
            }
            // The node has no copy, or a damaged one.
            Some(Ok(_)) => {}
            Some(Err(failure)) => failures.push(failure),
            None => return Err(unread(failures)),
        }
    }
}

/// Asks a node for a body of any size, because the head does not contain it.
async fn ask(cluster: &Cluster, node: usize, packet: &Arc<Packet>) -> Result<Reply, NodeFailure> {
    let patience = cluster.settings.node_timeout + transit(MAX_BODY);
    let due = Instant::now() + patience;
    let mut votes = VoteReceiver::new(&cluster.names);
    cluster.nodes[node].fetch(Job::new(Arc::clone(packet), votes.sender(node), due));
    let vote = votes.recv_until(due).await;
    vote.map_or_else(
        || Err(cluster.timed_out(node, patience)),
        |vote| vote.outcome,
    )
}

/// Returns the nodes in the order in which to ask them: reachable ones first, and in an order that differs
/// between records.
fn order(cluster: &Cluster, head: &Record) -> Vec<usize> {
    let nodes = &cluster.nodes;
    let first = usize::from(head.digest()[0]) % nodes.len();
    let mut order: Vec<usize> = (first..nodes.len()).chain(0..first).collect();
    order.sort_by_key(|node| matches!(nodes[*node].state(), NodeState::Unreachable { .. }));
    order
}

fn unread(nodes: Vec<NodeFailure>) -> LockError {
    if nodes.is_empty() {
        return LockError::contended(None, None);
    }
    // One node with the record would be enough.
    LockError::without_quorum(1, Vec::new(), nodes)
}

/// Returns whether a record is whole, and its body has the digest of its head.
pub(super) fn is_undamaged(record: &Record) -> bool {
    record.is_whole() && sha256(record.rest()) == record.digest()
}

#[cfg(test)]
mod tests {
    use crate::lock::Redlock;
    use crate::protocol::{ExecutionId, Fingerprint};

    use super::*;

    fn group() -> Arc<Group> {
        Arc::clone(&Redlock::in_memory(1).core().layout.groups[0])
    }

    fn head() -> Record {
        let id = ExecutionId::from_random([1; 16]);
        Record::new(id, Fingerprint::from_digest([2; 32]), [3; 32], b"rest")
    }

    /// The first fetch ends, a second one begins, and only then do the callers of the first go.
    #[tokio::test]
    async fn a_fetch_that_ends_leaves_the_entry_of_a_later_one() {
        let (group, key) = (group(), LockKey::from("k"));
        let join = || join(&group, &key, &head());
        let mut first = join();
        assert!(first.same_channel(&join()), "it is fetched twice at once");
        assert!(first.wait_for(Option::is_some).await.is_ok());
        let mut second = join();
        assert!(!first.same_channel(&second), "the first fetch has finished");
        drop(first);
        assert!(second.has_changed().is_ok(), "no fetch would finish");
        assert!(second.same_channel(&join()), "it is fetched twice at once");
        let outcome = second.wait_for(Option::is_some).await.unwrap().clone();
        assert!(matches!(outcome, Some(Err(LockError::Contended { .. }))));
        assert!(group.reads.lock().is_empty());
        assert!(!second.same_channel(&join()));
    }

    #[tokio::test]
    async fn a_fetch_that_ends_without_a_result_is_begun_anew_by_its_callers() {
        let (group, key) = (group(), LockKey::from("k"));
        let (lost, entry) = watch::channel(None);
        let wanted = (key.clone(), head());
        group.reads.lock().insert(wanted, entry);
        let head = head();
        let mut waiting = tokio_test::task::spawn(fetch(&group, &key, &head));
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
