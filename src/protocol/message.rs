//! What a client asks one node, and what the node answers.

use std::sync::Arc;
use std::time::Duration;

use crate::protocol::names::KeyNames;
use crate::protocol::owner::OwnerToken;

/// One request to one node; the same value goes to all nodes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Command {
    /// The keys, all or none of which the request is for.
    pub names: Arc<[KeyNames]>,
    /// The attempt in whose name the request is made.
    pub owner: OwnerToken,
    /// What is asked.
    pub op: Op,
}

/// The three things that are ever asked of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Lock the keys if all of them are free or this owner's already.
    Acquire {
        /// Number to grant if it is higher than the fence; `None` with fencing off.
        proposal: Option<u64>,
        /// How long the lock lives if nothing renews it.
        ttl: Duration,
        /// How long the fence lives.
        retention: Duration,
    },
    /// Raise the fence to `token` and the expiry to `ttl`, if the keys are still this owner's.
    ///
    /// Serves both the second phase of an acquisition and the extension of a lock.
    Confirm {
        /// The token to confirm; `None` with fencing off.
        token: Option<u64>,
        /// The expiry that the lock has at least afterwards.
        ttl: Duration,
        /// How long the fence lives from now on.
        retention: Duration,
    },
    /// Delete those of the keys that are this owner's. The fence stays for ever.
    Release,
}

/// What a node answered. With fencing off the numbers are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reply {
    /// To acquire: the keys are this owner's, and this is the fence.
    Granted(u64),
    /// To acquire: somebody else holds one of the keys.
    Held {
        /// When the last of them expires, if the node said so.
        expires_in: Option<Duration>,
    },
    /// To confirm: the keys are still this owner's, and this is the fence *after* the write.
    At(u64),
    /// To confirm: one of the keys is not this owner's any more.
    Lost,
    /// To release: none of the keys is this owner's now.
    Released,
    /// To acquire and to confirm: the node lost its memory since the client was told its generation.
    Amnesia,
    /// To acquire: the fence has reached [`FencingToken::MAX`](crate::FencingToken::MAX).
    Overflow,
}
