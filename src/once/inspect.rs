//! Looking into a key and its record, and freeing a key that another caller holds: for operators.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::time::Instant;

use crate::lock::{Cluster, Group, LockError, Redlock};
use crate::node::{NodeFailure, Packet, sha256, unguessable};
use crate::protocol::message::{Command, KeyState, Op, Reply, Seen};
use crate::protocol::{FencingToken, Holder, KeyNames, LockKey, OwnerToken};

/// Report of [`Redlock::inspect`]: what the nodes know of a key.
///
/// A grant needs a majority only, so right after it a minority of the nodes may still show [`KeyState::Free`], as their
/// requests are on the way; [`state`](Self::state) is that of the majority.
///
/// ```
/// use tower_redlock::{KeyState, Redlock};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_redlock::LockError> {
/// let redlock = Redlock::in_memory(3);
/// let guard = redlock.lock(("account", 7)).await?;
/// let inspection = redlock.inspect(("account", 7)).await;
/// assert!(matches!(inspection.state(), Some(KeyState::Held { .. })));
/// assert_eq!(inspection.fencing_token(), guard.fencing_token());
/// for node in &inspection.nodes {
///     println!("{}: {:?}", node.node, node.outcome);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Inspection {
    /// The key.
    pub key: LockKey,
    /// The name of the group that the key belongs to; `0` if there is only one.
    pub group: Arc<str>,
    /// One entry per node of the group, in the order of the configuration.
    pub nodes: Vec<NodeInspection>,
    /// The number of nodes that make a majority.
    pub needed: usize,
    /// What the nodes know of the key in the group that it [moves to](crate::RedlockBuilder::moving_to), if it moves.
    pub next: Option<Box<Self>>,
}

/// What one node knows of a key.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NodeInspection {
    /// The node's address, without credentials.
    pub node: Arc<str>,
    /// What it knows, or why it did not say.
    pub outcome: Result<InspectedKey, NodeFailure>,
}

/// A key on one node.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct InspectedKey {
    /// Who holds the key there: of many readers, 16 at most, in no order. Holders without a label and a note are left
    /// out.
    pub holders: Vec<Holder>,
    /// Whether the key is locked there.
    pub state: KeyState,
    /// The fencing token of the last grant there; `None` if the node does not remember one.
    pub fencing_token: Option<FencingToken>,
    /// Whether the outcome of an execution is recorded under the key; see [`Redlock::once`].
    pub is_recorded: bool,
}

/// Report of [`Redlock::revoke`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Revoked {
    /// The number of nodes on which the key was locked, and is free now.
    pub held: usize,
    /// The failures of the nodes that did not confirm the revocation. The key may still be locked there.
    pub failures: Vec<NodeFailure>,
}

impl Redlock {
    /// Asks every node of the key's group what it knows of it: whether it is locked, for how long, and with which token.
    ///
    /// It is a look at a moment, for operators and dashboards: do not decide by it whether to do some work. Changes
    /// nothing, and never tells the owner value, with which a lock could be released. A node that is down, silent or
    /// quarantined is reported as such; the report of an invalid key says so for every node. Takes as long as the
    /// slowest node, like [`health`](Self::health).
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point.
    ///
    /// # Panics
    ///
    /// Panics outside of a tokio runtime with a timer.
    pub async fn inspect(&self, key: impl Into<LockKey>) -> Inspection {
        let (layout, key) = (&self.core().layout, key.into());
        let in_next = layout.next_group_of(&key).map(|next| inspect(next, &key));
        let in_next = OptionFuture::from(in_next);
        let (current, next) = tokio::join!(inspect(layout.group_of(&key), &key), in_next);
        Inspection {
            next: next.map(Box::new),
            ..current
        }
    }

    /// Frees a key that another caller holds: for an operator who knows that the holder is stuck.
    ///
    /// The holder is not stopped. It learns of the revocation at its next renewal, a third of the ttl later at most:
    /// [`lost()`](crate::LockGuard::lost) resolves. If the holder is in this process, it learns of it at once, as
    /// [`LostReason::Revoked`](crate::LostReason::Revoked). Until then, two callers may believe that they hold the key;
    /// only a storage that checks the fencing token keeps them apart. The next holder has a higher token.
    ///
    /// A key that [moves](crate::RedlockBuilder::moving_to) is freed in both groups.
    ///
    /// Frees what each node tells that it has: the lock of the holder and of callers that compete with it, or of all
    /// readers, also of those that come during the call. A caller whose request reaches the nodes later keeps its lock. A
    /// slot is the key `(key, "slot", i)`.
    ///
    /// # Errors
    ///
    /// Returns [`LockError::Unavailable`] if no majority of the nodes confirmed: the key may be free on some of them. Call
    /// again. A node that was stopped and goes on later does not carry out a revocation that has timed out. A
    /// quarantined node is not asked: it grants nothing before all locks that it may have known have ended.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the key may be freed on some nodes.
    ///
    /// # Panics
    ///
    /// Panics outside of a tokio runtime with a timer.
    pub async fn revoke(&self, key: impl Into<LockKey>) -> Result<Revoked, LockError> {
        let (layout, key) = (&self.core().layout, key.into());
        let in_next = layout.next_group_of(&key).map(|next| revoke(next, &key));
        let in_next = OptionFuture::from(in_next);
        // Also if the other group fails.
        let (revoked, also) = tokio::join!(revoke(layout.group_of(&key), &key), in_next);
        let mut revoked = revoked?;
        if let Some(also) = also.transpose()? {
            revoked.held += also.held;
            revoked.failures.extend(also.failures);
        }
        Ok(revoked)
    }
}

#[cfg(feature = "axum")]
impl Redlock {
    /// Returns whether the nodes can have a lock with this key.
    pub(crate) fn is_valid_key(&self, key: &LockKey) -> bool {
        names(&self.core().layout.group_of(key).cluster, key).is_ok()
    }
}

impl Inspection {
    /// Returns the state of the key as a majority of the nodes has it; `None` if no majority agrees, for example
    /// while callers compete for the key or nodes are down.
    ///
    /// A key that a majority holds may have different owners on different nodes, if callers compete. The time left is
    /// that until which a majority holds the key, if the lock is not renewed. The number of readers is the highest that
    /// a node reports.
    #[must_use]
    pub fn state(&self) -> Option<KeyState> {
        let (mut free, mut held, mut shared, mut most) = (0, Vec::new(), Vec::new(), 0);
        for key in self.keys() {
            match key.state {
                KeyState::Free => free += 1,
                KeyState::Held { left } => held.push(left),
                KeyState::Shared { readers, left } => {
                    shared.push(left);
                    most = most.max(readers);
                }
            }
        }
        if free >= self.needed {
            Some(KeyState::Free)
        } else if held.len() >= self.needed {
            let left = self.kept_by_a_majority(held);
            Some(KeyState::Held { left })
        } else if shared.len() >= self.needed {
            let (readers, left) = (most, self.kept_by_a_majority(shared));
            Some(KeyState::Shared { readers, left })
        } else {
            None
        }
    }

    /// Returns the highest fencing token that a node remembers for the key.
    ///
    /// It is the token of the last holder, or higher: an acquisition that failed may have raised it.
    #[must_use]
    pub fn fencing_token(&self) -> Option<FencingToken> {
        self.keys().filter_map(|key| key.fencing_token).max()
    }

    /// Returns who holds the key, as far as the holders say so: each that a majority of the nodes names. More readers than
    /// 16 are not all named.
    #[must_use]
    pub fn holders(&self) -> Vec<Holder> {
        let named: Vec<&Holder> = self.keys().flat_map(|key| &key.holders).collect();
        let all: BTreeSet<&Holder> = named.iter().copied().collect();
        let by_majority = |holder: &&Holder| {
            let naming = named.iter().filter(|named| *named == holder);
            naming.count() >= self.needed
        };
        all.into_iter().filter(by_majority).cloned().collect()
    }

    /// Returns whether a majority of the nodes has a record of an execution under the key.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        let recorded = self.keys().filter(|key| key.is_recorded);
        recorded.count() >= self.needed
    }

    /// Returns the token of the holder, if the key has one: that which a majority of the nodes remembers that have the key
    /// locked. An acquisition that fails raises fences elsewhere. The error is that they do not agree.
    pub(super) fn token_of_holder(&self) -> Result<Option<FencingToken>, ()> {
        let locked = || self.keys().filter(|key| key.state != KeyState::Free);
        let agrees = |token: &Option<FencingToken>| {
            let same = locked().filter(|key| key.fencing_token == *token);
            same.count() >= self.needed
        };
        locked().map(|key| key.fencing_token).find(agrees).ok_or(())
    }

    fn keys(&self) -> impl Iterator<Item = &InspectedKey> {
        let nodes = self.nodes.iter();
        nodes.filter_map(|node| node.outcome.as_ref().ok())
    }

    /// Returns the time for which a majority keeps the key; `None` if that is for ever.
    fn kept_by_a_majority(&self, mut left: Vec<Option<Duration>>) -> Option<Duration> {
        // A key that never expires is kept for longest.
        left.sort_unstable_by_key(|left| Reverse(left.unwrap_or(Duration::MAX)));
        left.get(self.needed.saturating_sub(1)).copied().flatten()
    }
}

impl Revoked {
    /// Returns whether some node had the key locked.
    #[must_use]
    pub fn was_held(&self) -> bool {
        self.held > 0
    }
}

/// Asks every node of a group what it knows of a key.
pub(super) async fn inspect(group: &Group, key: &LockKey) -> Inspection {
    let cluster = &*group.cluster;
    let seen = match names(cluster, key) {
        Ok(names) => see(cluster, &names).await,
        Err(error) => {
            let why = error.to_string();
            let names = cluster.names.iter();
            names
                .map(|node| Err(NodeFailure::refused(node, &*why)))
                .collect()
        }
    };
    let nodes = cluster.names.iter().zip(seen);
    let nodes = nodes.map(|(node, seen)| NodeInspection {
        node: Arc::clone(node),
        outcome: seen.map(|(seen, _)| InspectedKey {
            state: seen.state,
            fencing_token: seen.fence.and_then(|fence| fence.try_into().ok()),
            is_recorded: seen.is_recorded,
            holders: seen.holders,
        }),
    });
    Inspection {
        key: key.clone(),
        group: Arc::clone(&group.name),
        nodes: nodes.collect(),
        needed: cluster.quorum.majority(),
        next: None,
    }
}

/// Frees a key on every node of a group.
///
/// Each node is asked first which holder it has, and then told to delete the lock of that one. A caller whose request comes
/// in between must not lose its lock without its knowledge.
///
/// All readers have the same mark, and a node that was stopped would carry out the revocation when it goes on, perhaps
/// with other readers. So each node is also told until when, by its own clock, the revocation is wanted: the time that
/// it told first, and the rest of this call.
async fn revoke(group: &Group, key: &LockKey) -> Result<Revoked, LockError> {
    let cluster = &group.cluster;
    let names = names(cluster, key)?;
    // Before the nodes are asked: a lock that is granted later is not the one that they tell of.
    let leases = group.queue.leases_of(key);
    let asked = Instant::now();
    let seen = see(cluster, &names).await;
    let ends = asked.elapsed() + cluster.settings.node_timeout;
    let revocations = seen.iter().enumerate().filter_map(|(node, seen)| {
        let (seen, latency) = seen.as_ref().ok()?;
        let op = Op::Revoke {
            holder: seen.mark.clone()?,
            until: seen.at + ends.saturating_sub(*latency),
        };
        Some((node, request(&names, op, true)))
    });
    let freed = cluster.ask(revocations).await;
    let (mut confirmed, mut held, mut failures) = (Vec::new(), 0, Vec::new());
    for (number, (seen, freed)) in seen.into_iter().zip(freed).enumerate() {
        let node = &cluster.names[number];
        // If the key was free there, it was not asked.
        let free = Ok(Reply::Revoked { was_held: false });
        match seen.and_then(|_| freed.map_or(free, |freed| freed.outcome)) {
            Ok(Reply::Revoked { was_held }) => {
                confirmed.push(Arc::clone(node));
                held += usize::from(was_held);
            }
            Ok(Reply::TooLate) => failures.push(NodeFailure::refused(node, TOO_LATE)),
            Ok(_) => failures.push(NodeFailure::refused(node, UNEXPECTED)),
            Err(failure) => failures.push(failure),
        }
    }
    let needed = cluster.quorum.majority();
    if confirmed.len() < needed {
        return Err(LockError::without_quorum(needed, confirmed, failures));
    }
    if held > 0 {
        leases.iter().for_each(|lease| lease.revoke());
        tracing::warn!(held, "redlock lock revoked");
    }
    Ok(Revoked { held, failures })
}

/// Asks every node what it knows of a key, and measures how long it takes to answer.
async fn see(
    cluster: &Cluster,
    names: &Arc<[KeyNames]>,
) -> Vec<Result<(Seen, Duration), NodeFailure>> {
    let asked = cluster.ask_all(request(names, Op::Inspect, false)).await;
    let seen = cluster
        .names
        .iter()
        .zip(asked)
        .map(|(node, asked)| match asked.outcome? {
            Reply::Seen(seen) => Ok((*seen, asked.latency)),
            _ => Err(NodeFailure::refused(node, UNEXPECTED)),
        });
    seen.collect()
}

/// Returns all the names that belong to a key.
pub(super) fn names(cluster: &Cluster, key: &LockKey) -> Result<Arc<[KeyNames]>, LockError> {
    let namespace = &cluster.settings.namespace;
    let names = namespace.names_with_record(key, None, sha256)?;
    Ok([namespace.with_shared(names)].into())
}

pub(super) fn request(names: &Arc<[KeyNames]>, op: Op, publishes: bool) -> Arc<Packet> {
    let command = Command {
        names: Arc::clone(names),
        // Not looked at.
        owner: OwnerToken::from_random(unguessable()),
        op,
    };
    Arc::new(Packet::new(command, publishes, None))
}

pub(super) const UNEXPECTED: &str =
    "unexpected reply; check that the URL names the Redis server itself";
const TOO_LATE: &str = "the revocation came too late, so it freed nothing; call again";

#[cfg(test)]
mod tests {
    use super::*;

    fn state(nodes: [KeyState; 3]) -> Option<KeyState> {
        let nodes = nodes.map(|state| NodeInspection {
            node: "n".into(),
            outcome: Ok(InspectedKey {
                state,
                fencing_token: None,
                is_recorded: false,
                holders: Vec::new(),
            }),
        });
        let inspection = Inspection {
            key: "k".into(),
            group: "0".into(),
            nodes: nodes.into(),
            needed: 2,
            next: None,
        };
        inspection.state()
    }

    /// Another client may have locked it without an expiry.
    #[test]
    fn a_key_that_never_expires_at_a_node_is_held_there_for_longest() {
        let held = |seconds: Option<u64>| KeyState::Held {
            left: seconds.map(Duration::from_secs),
        };
        for (nodes, expected) in [
            ([None, Some(5), Some(3)], Some(5)),
            ([Some(5), None, None], None),
            ([Some(5), Some(3), None], Some(5)),
        ] {
            assert_eq!(state(nodes.map(held)), Some(held(expected)), "{nodes:?}");
        }
    }

    #[test]
    fn no_state_of_a_minority_is_that_of_the_key() {
        let left = Some(Duration::from_secs(1));
        let held = KeyState::Held { left };
        let shared = KeyState::Shared { readers: 1, left };
        assert_eq!(state([KeyState::Free, held, shared]), None);
        assert_eq!(state([shared, KeyState::Free, shared]), Some(shared));
    }
}
