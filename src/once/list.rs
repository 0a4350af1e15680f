//! Listing the locks that the nodes have: for operators.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures_util::future::join_all;

use crate::lock::{Cluster, LockError, Redlock};
use crate::node::NodeFailure;
use crate::once::inspect::{Inspection, UNEXPECTED, inspect, request};
use crate::protocol::LockKey;
use crate::protocol::message::{KeyState, Op, Reply, Scanned};

/// A page of [`Redlock::list`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LockPage {
    /// What the nodes of its group know of each lock, in the order of the keys. Often there are none, although further
    /// pages have some.
    ///
    /// The key of a slot is `(key, "slot", i)`; for a key of more than 512 bytes, it is its SHA-256 in hexadecimal digits,
    /// which is all that the nodes know.
    pub locks: Vec<Inspection>,
    /// Where the next page begins; `None` at the end of the list.
    pub next: Option<ListCursor>,
}

/// Where a page of [`Redlock::list`] begins. The default is the beginning of the list.
///
/// It belongs to the prefix and to the nodes with which the list began.
#[derive(Debug, Clone, Default)]
pub struct ListCursor {
    group: usize,
    /// The node that is scanned. Those before it have been, unless they failed.
    node: usize,
    failed: BTreeMap<usize, NodeFailure>,
    /// Where its scan goes on.
    position: Arc<[u8]>,
    /// The keys that it named last. If its table shrinks, a server names the last ones again.
    named: BTreeSet<LockKey>,
    /// The keys of the group that too few nodes told about, because one failed. The next node that names them decides.
    undecided: BTreeSet<LockKey>,
}

impl Redlock {
    /// Lists the keys with a prefix that a majority of the nodes has locked, by any process, one page at a time.
    ///
    /// The prefix selects each key whose bytes begin with those of the prefix, or whose first part does if it is a tuple:
    ///
    /// | prefix | selects | does not select |
    /// |---|---|---|
    /// | `("job",)` | `("job", 7)`, `("job", "eu", 7)`, and their slots | `("jobs", 7)`, `"job"` |
    /// | `("job", "eu")` | `("job", "eu")`, `("job", "eu", 7)` | `("job", 7)` |
    /// | `"job"` | `"job"`, `"job:7"`, `("job", 7)`, and also `"jobs"` and `("jobs", 7)` | `("nightly", "job")` |
    /// | `""` | every key | |
    ///
    /// A call scans some keys of one node, whether they have the prefix or not, and then asks all nodes of the group about
    /// those that have it. So no call blocks a server for longer than a lock does. A list takes a call for each fifty keys on a
    /// node, fences and records included: of one of three nodes, and of one more, for example.
    ///
    /// ```
    /// use tower_redlock::{ListCursor, LockKey, Redlock};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_redlock::LockError> {
    /// let redlock = Redlock::in_memory(3);
    /// let _guard = redlock.lock(("job", 7)).await?;
    /// let (mut keys, mut cursor) = (Vec::new(), Some(ListCursor::default()));
    /// while let Some(from) = cursor {
    ///     let page = redlock.list(("job",), from).await?;
    ///     for lock in page.locks {
    ///         println!("{:?}: {:?}", lock.key, lock.state());
    ///         keys.push(lock.key);
    ///     }
    ///     cursor = page.next;
    /// }
    /// assert_eq!(keys, [LockKey::from(("job", 7))]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # What the list misses
    ///
    /// It is not the state at one moment. A key that stays locked on the same nodes from the first call to the last is
    /// listed. Other keys may be missed: a key that is locked or released meanwhile, and one that is locked again
    /// on other nodes. A key may be listed twice if a node fails, or loses most of its keys, meanwhile. A node that is down is skipped while a majority
    /// is there.
    ///
    /// A key that [moves](crate::RedlockBuilder::moving_to) is listed in each group where it is locked. A key of more than 512
    /// bytes is selected by its digest, so in practice only by the empty prefix. In the empty namespace, every string on the
    /// nodes counts as a lock.
    ///
    /// # Errors
    ///
    /// Returns [`LockError::Unavailable`] if no majority of the nodes answers. A clone of the cursor continues the list
    /// later.
    ///
    /// # Panics
    ///
    /// As [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    pub async fn list(
        &self,
        prefix: impl Into<LockKey>,
        mut cursor: ListCursor,
    ) -> Result<LockPage, LockError> {
        let (groups, prefix) = (&self.core().layout.groups, prefix.into());
        let mut locks = Vec::new();
        let group = groups.get(cursor.group);
        // It may be the cursor of a service with more nodes.
        let Some(group) = group.filter(|group| cursor.node < group.cluster.nodes.len()) else {
            return Ok(LockPage { locks, next: None });
        };
        let cluster = &*group.cluster;
        let scanned = cursor.scan(cluster, &prefix).await?;
        let namespace = &cluster.settings.namespace;
        let keys = scanned
            .names
            .iter()
            .filter_map(|name| namespace.key_of(name));
        let keys = keys.filter(|key| key.begins_with(prefix.as_bytes()));
        let named: BTreeSet<LockKey> = keys.collect();
        let new: Vec<&LockKey> = named.difference(&cursor.named).collect();
        for keys in new.chunks(AT_ONCE) {
            let inspections = join_all(keys.iter().map(|key| inspect(group, key)));
            for inspection in inspections.await {
                let key = &inspection.key;
                let is_new = cursor.undecided.contains(key) || !cursor.has_passed(&inspection);
                let has_failed = inspection.nodes.iter().any(|node| node.outcome.is_err());
                match is_locked(&inspection)? {
                    true if is_new => {
                        cursor.undecided.remove(key);
                        locks.push(inspection);
                    }
                    false if has_failed => drop(cursor.undecided.insert(key.clone())),
                    _ => {}
                }
            }
        }
        match scanned.next {
            Some(position) => (cursor.position, cursor.named) = (position, named),
            None => cursor.advance(cluster),
        }
        let next = (cursor.group < groups.len()).then_some(cursor);
        Ok(LockPage { locks, next })
    }
}

impl ListCursor {
    /// Returns names of locks of its node, or else of the next one that answers.
    async fn scan(&mut self, cluster: &Cluster, prefix: &LockKey) -> Result<Scanned, LockError> {
        let pattern = cluster.settings.namespace.pattern(prefix.as_bytes());
        loop {
            let node = self.node;
            let (position, pattern) = (Arc::clone(&self.position), Arc::clone(&pattern));
            let packet = request(&[].into(), Op::Scan { position, pattern }, false);
            let mut asked = cluster.ask([(node, packet)].into_iter()).await;
            let failure = match asked[node].take().map(|asked| asked.outcome) {
                Some(Ok(Reply::Scanned(scanned))) => return Ok(*scanned),
                Some(Err(failure)) => failure,
                _ => NodeFailure::refused(&cluster.names[node], UNEXPECTED),
            };
            self.failed.insert(node, failure);
            if self.failed.len() >= cluster.quorum.decisive() {
                let passed = (0..node).filter(|node| !self.failed.contains_key(node));
                let voted = passed.map(|node| Arc::clone(&cluster.names[node]));
                let failures = self.failed.values().cloned().collect();
                let needed = cluster.quorum.majority();
                return Err(LockError::without_quorum(needed, voted.collect(), failures));
            }
            self.advance(cluster);
        }
    }

    /// Goes on to the next node. Each majority has one of those that are scanned.
    fn advance(&mut self, cluster: &Cluster) {
        (self.position, self.named) = Default::default();
        self.node += 1;
        if self.node - self.failed.len() >= cluster.quorum.decisive() {
            self.group += 1;
            (self.node, self.failed, self.undecided) = Default::default();
        }
    }

    /// Returns whether a node that has been scanned has the key locked, so that it is listed already.
    fn has_passed(&self, inspection: &Inspection) -> bool {
        let mut nodes = inspection.nodes.iter().enumerate().take(self.node);
        nodes.any(|(number, node)| {
            let is_locked = |state| state != KeyState::Free;
            let outcome = node.outcome.as_ref();
            !self.failed.contains_key(&number) && outcome.is_ok_and(|key| is_locked(key.state))
        })
    }
}

/// How many keys the nodes are asked about at a time. Locks wait behind them.
const AT_ONCE: usize = 16;

/// Returns whether a majority of the nodes has the key locked. The error is that none has answered.
fn is_locked(inspection: &Inspection) -> Result<bool, LockError> {
    let (nodes, needed) = (inspection.nodes.iter(), inspection.needed);
    let voted = nodes.clone().filter(|node| node.outcome.is_ok());
    if voted.clone().count() < needed {
        let voted = voted.map(|node| Arc::clone(&node.node)).collect();
        let failures = nodes.filter_map(|node| node.outcome.clone().err());
        return Err(LockError::without_quorum(needed, voted, failures.collect()));
    }
    let state = inspection.state();
    Ok(state.is_some_and(|state| state != KeyState::Free))
}
