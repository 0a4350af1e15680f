//! What a client asks one node, and what the node answers.

use std::sync::Arc;
use std::time::Duration;

use crate::protocol::names::KeyNames;
use crate::protocol::owner::OwnerToken;
use crate::protocol::record::{Fingerprint, Record};

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

/// All that is ever asked of a node.
///
/// Of a key that keeps records ([`KeyNames::record`]) the first two are answered with the record, if
/// there is one, before anything else is looked at.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
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
    /// Delete those of the keys that are this owner's, and its intent. The fence stays for ever.
    Release,
    /// The same, but leave the intent: something may have been executed, and was not recorded.
    ReleaseExecuted,
    /// Keep the record if there is none and nobody else was granted the key here since, and give the
    /// key back.
    Record {
        /// What to keep.
        record: Record,
        /// How long.
        retention: Duration,
    },
    /// Keep the record if there is none. Only for a record that a majority has.
    TopUp {
        /// What to keep.
        record: Record,
        /// How long: what is left of its time.
        retention: Duration,
    },
    /// Answer the record as to whoever wants the key: its head alone, if the rest is big.
    Look,
    /// Answer the whole record, however big. Nothing waits for its place among the other requests.
    Fetch,
}

/// What a node answered. With fencing off the numbers are zero.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Reply {
    /// To acquire: the keys are this owner's, and this is the fence.
    Granted(u64),
    /// To acquire: somebody else holds one of the keys.
    Held {
        /// When the last of them expires, if the node said so.
        expires_in: Option<Duration>,
        /// What the holder asked for, if its owner token tells.
        fingerprint: Option<Fingerprint>,
    },
    /// To confirm: the keys are still this owner's, and this is the fence *after* the write.
    At(u64),
    /// To confirm: one of the keys is not this owner's any more. To record: somebody else was granted
    /// the key here since, or that has been forgotten.
    Lost,
    /// To release: none of the keys is this owner's now.
    Released,
    /// There is a record; to a request to keep one, that one or another.
    Done {
        /// What is kept; its head alone if the rest is big.
        record: Record,
        /// When the node forgets it.
        expires_in: Duration,
    },
    /// To fetch: what is kept.
    Whole(Record),
    /// To look and to fetch: there is no record.
    NotDone,
    /// To acquire: somebody was granted the key who may have executed, and left no record.
    Intended,
    /// To acquire and to confirm: the node lost its memory since the client was told its generation.
    Amnesia,
    /// To acquire: the fence has reached [`FencingToken::MAX`](crate::FencingToken::MAX).
    Overflow,
}
