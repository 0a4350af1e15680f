//! Builders and lock requests of other processes that the tests of locks share.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use support::{assert_matches, secs, three_nodes_with};
use tokio::time::Instant;
use tower_redlock::protocol::message::{Command, Op, Reply};
use tower_redlock::protocol::{KeyNames, LockKeys, Namespace, OwnerToken};
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{LockError, LockGuard, LockKey, LockRequest, Redlock, RedlockBuilder, Retry};

pub(crate) fn builder(nodes: &ScriptedNodes) -> RedlockBuilder {
    Redlock::builder().scripted(nodes).ttl(secs(10))
}

/// Three nodes, and a redlock with other settings.
pub(crate) fn process_with(
    set: impl FnOnce(RedlockBuilder) -> RedlockBuilder,
) -> (ScriptedNodes, Redlock) {
    three_nodes_with(|builder| set(builder.ttl(secs(10))))
}

/// Three nodes, and redlocks that know of each other as processes do, through the nodes alone.
pub(crate) fn processes<const N: usize>() -> (ScriptedNodes, [Redlock; N]) {
    let nodes = ScriptedNodes::new(3);
    let redlocks = processes_of(&nodes);
    (nodes, redlocks)
}

/// Redlocks like those of [`processes`], which poll so rarely that only a notification wakes their waiters in time.
pub(crate) fn polling<const N: usize>(nodes: &ScriptedNodes, interval: Duration) -> [Redlock; N] {
    let retry = Retry::default().poll_interval(interval);
    [(); N].map(|()| builder(nodes).retry(retry).build().unwrap())
}

pub(crate) fn processes_of<const N: usize>(nodes: &ScriptedNodes) -> [Redlock; N] {
    [(); N].map(|()| builder(nodes).build().unwrap())
}

pub(crate) fn end_of(guard: &LockGuard) -> Instant {
    Instant::now() + guard.valid_for()
}

pub(crate) fn is_contended<T>(outcome: &Result<T, LockError>) -> bool {
    matches!(outcome, Err(LockError::Contended { .. }))
}

/// Returns for how much longer the key is held, as the refusal of a request says.
pub(crate) async fn held_for(request: LockRequest) -> Duration {
    match request.await {
        Err(LockError::Contended { retry_after, .. }) => retry_after.expect("the holder is known"),
        other => panic!("not contended: {other:?}"),
    }
}

/// A hash of nothing under a random key: random enough for delays.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(())
}

/// The requests of some other process for one key, made by hand.
pub(crate) struct Foreign {
    pub(crate) names: Arc<[KeyNames]>,
    pub(crate) owner: OwnerToken,
}

impl Foreign {
    pub(crate) fn new(key: &str) -> Self {
        Self::of(&key.into())
    }

    pub(crate) fn of(key: &LockKey) -> Self {
        let keys = LockKeys::from_iter([key]);
        let names = Namespace::default().names(&keys, |_| [0; 32]);
        let names = names.expect("a short key");
        let mut owner = [0; 16];
        owner[..8].copy_from_slice(&random().to_be_bytes());
        Self {
            names,
            owner: OwnerToken::from_random(owner),
        }
    }

    /// Holds a key at all three nodes.
    pub(crate) fn holding(key: &str, nodes: &ScriptedNodes, ttl: Duration) -> Self {
        let foreign = Self::new(key);
        (0..3).for_each(|node| drop(foreign.acquire(nodes, node, ttl)));
        foreign
    }

    pub(crate) fn send(&self, nodes: &ScriptedNodes, node: usize, op: Op) -> Reply {
        let command = Command {
            names: Arc::clone(&self.names),
            owner: self.owner.clone(),
            op,
        };
        nodes.apply(node, &command)
    }

    pub(crate) fn acquire(&self, nodes: &ScriptedNodes, node: usize, ttl: Duration) -> Reply {
        self.acquire_with(nodes, node, 1, ttl)
    }

    /// Makes the fence of each node at least this number, and releases the key again.
    pub(crate) fn raise_fences(key: &LockKey, nodes: &ScriptedNodes, number: u64) {
        for node in 0..3 {
            let other = Self::of(key);
            other.acquire_with(nodes, node, number, secs(1));
            other.send(nodes, node, Op::Release);
        }
    }

    pub(crate) fn acquire_with(
        &self,
        nodes: &ScriptedNodes,
        node: usize,
        proposal: u64,
        ttl: Duration,
    ) -> Reply {
        let op = Op::Acquire {
            proposal: Some(proposal),
            ttl,
            retention: secs(3_600),
        };
        self.send(nodes, node, op)
    }
}

/// Gives the first two of three nodes fences of their own, far ahead of every proposal: all three then
/// grant a lock with different numbers.
pub(crate) fn spread_fences(nodes: &ScriptedNodes, key: &str) {
    for (node, fence) in [(0, 6_000_000_000_000_000), (1, 5_000_000_000_000_000)] {
        let foreign = Foreign::new(key);
        let granted = foreign.acquire_with(nodes, node, fence, secs(1));
        assert_matches!(granted, Reply::Granted(_));
        assert_eq!(foreign.send(nodes, node, Op::Release), Reply::Released);
    }
}
