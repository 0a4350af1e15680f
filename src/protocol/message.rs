//! The requests of a client to one node, and the replies.

use std::sync::Arc;
use std::time::Duration;

use crate::protocol::holder::Holder;
use crate::protocol::names::KeyNames;
use crate::protocol::record::Record;
use crate::protocol::token::{OwnerToken, Shown};

/// One request to one node; the same value goes to all nodes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Command {
    /// The keys; the request applies to all of them or to none.
    pub names: Arc<[KeyNames]>,
    /// The owner token of the attempt.
    pub owner: OwnerToken,
    /// The operation.
    pub op: Op,
}

/// The operations of a node.
///
/// If a key keeps records ([`KeyNames::record`]) and has one, the node answers the first two with the record,
/// before any other check.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Op {
    /// Lock the keys if each of them is free or belongs to this owner.
    Acquire {
        /// The number to grant if it is higher than the fence; `None` with fencing off.
        proposal: Option<u64>,
        /// The lifetime of a lock that nothing renews.
        ttl: Duration,
        /// The lifetime of the fence.
        retention: Duration,
    },
    /// Raise the fence to `token` and the expiry to `ttl`, if the keys still belong to this owner.
    ///
    /// Serves both the second phase of an acquisition and the extension of a lock.
    Confirm {
        /// The token to confirm; `None` with fencing off.
        token: Option<u64>,
        /// The lower bound of the expiry afterwards.
        ttl: Duration,
        /// The remaining lifetime of the fence.
        retention: Duration,
    },
    /// A request on keys that readers share.
    Shared(SharedOp),
    /// Delete the keys that belong to this owner, and its intent. The fence stays.
    Release,
    /// The same, but keep the intent: the owner may have executed, and has not recorded.
    ReleaseExecuted,
    /// Let the keys that belong to this owner expire after a while: they are released, and stay taken until then.
    ReleaseAfter {
        /// The expiry of the keys from now on.
        left: Duration,
    },
    /// Return what the node knows of the key, which needs [`KeyNames::shared`] and [`KeyNames::record`].
    Inspect,
    /// Delete the lock of the key if it still has this holder, of any owner; the fence stays. It needs
    /// [`KeyNames::shared`].
    Revoke {
        /// The holder that was seen. Another one may have come since.
        holder: HolderMark,
        /// The time of this node until which to do it: readers that came later have the same mark.
        until: Duration,
    },
    /// Return the names of some locks of the node. Over several requests, it returns all. It needs no names.
    Scan {
        /// Where the reply before this one ended; empty at first.
        position: Arc<[u8]>,
        /// A glob pattern of the names. Names that it does not match may be returned too.
        pattern: Arc<[u8]>,
    },
    /// Store the record if there is none and no other owner was granted the key here since, and release the
    /// key.
    Record {
        /// The record.
        record: Record,
        /// The lifetime of the record.
        retention: Duration,
    },
    /// Store the record if there is none, and delete the intent. Only for a record that a majority has.
    TopUp {
        /// The record.
        record: Record,
        /// The remaining lifetime of the record.
        retention: Duration,
    },
    /// Return the record as in the reply to `Acquire`: only its head if the rest is big.
    Look,
    /// Return the whole record of any size. Its order relative to other requests does not matter.
    Fetch,
    /// Do nothing: a health check. It needs no names.
    Ping,
}

impl Op {
    /// Returns whether this asks for a lock or its extension, which depends on the memory of the node.
    pub(crate) fn is_vote(&self) -> bool {
        matches!(
            self,
            Self::Acquire { .. }
                | Self::Confirm { .. }
                | Self::Shared(SharedOp::Acquire { .. } | SharedOp::Confirm { .. })
        )
    }

    /// Returns whether this takes back what earlier requests of its owner did. It must reach every node that may have
    /// executed one of them.
    pub fn is_release(&self) -> bool {
        matches!(
            self,
            Self::Release
                | Self::ReleaseExecuted
                | Self::ReleaseAfter { .. }
                | Self::Shared(SharedOp::Release | SharedOp::Withdraw)
        )
    }

    /// Returns how much longer than the node timeout the request may take because of its size.
    pub fn transit(&self) -> Duration {
        match self.record_bytes() {
            0 => Duration::ZERO,
            bytes => transit(bytes),
        }
    }

    /// Returns the size of the record that the request carries.
    pub(crate) fn record_bytes(&self) -> usize {
        match self {
            Self::Record { record, .. } | Self::TopUp { record, .. } => record.as_bytes().len(),
            _ => 0,
        }
    }
}

/// Returns how much longer than the node timeout the transfer of this many bytes may take: one second for each
/// mebibyte, at ten megabits a second, and nothing for records that come with every reply.
pub(crate) fn transit(bytes: usize) -> Duration {
    if bytes <= Record::MAX_INLINE {
        return Duration::ZERO;
    }
    let kibibytes = u32::try_from(bytes / 1024).unwrap_or(u32::MAX);
    Duration::from_secs(1) * kibibytes / 1024
}

/// The operations on keys that readers share, which need [`KeyNames::shared`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SharedOp {
    /// Lock the keys as one reader of several, if no owner holds any of them alone and no writer waits.
    Acquire {
        /// The lifetime of a lock that nothing renews.
        ttl: Duration,
    },
    /// Extend the lock of this reader, if it still has one.
    Confirm {
        /// The lower bound of the expiry afterwards.
        ttl: Duration,
    },
    /// Take this reader away; the last one frees the keys.
    Release,
    /// Keep new readers out for a while, because this owner waits to hold the keys alone. Only where readers hold them.
    Announce {
        /// How long new readers are kept out.
        patience: Duration,
    },
    /// Let readers in again: this owner no longer waits.
    Withdraw,
}

/// The reply of a node. With fencing off the numbers are zero.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Reply {
    /// To acquire: the keys belong to this owner, and this is the fence.
    Granted(u64),
    /// To acquire: another owner holds one of the keys.
    Held {
        /// The time until the last of them expires, if the node reported it.
        expires_in: Option<Duration>,
        /// What the owner token of the last of them to expire shows, if anything.
        shown: Option<Arc<Shown>>,
    },
    /// To acquire: readers hold one of the keys.
    HeldShared {
        /// The time until the last of them expires, if the node reported it.
        expires_in: Option<Duration>,
    },
    /// To acquire a slot: another owner holds it.
    HeldSlot {
        /// The time until the first slot expires, zero if one is free; `None` if none expires.
        expires_in: Option<Duration>,
        /// The free slots, one bit for each.
        free: u64,
    },
    /// To confirm: the keys still belong to this owner, and this is the fence *after* the write.
    At(u64),
    /// To confirm: one of the keys no longer belongs to this owner. To release: one of them did not, and none does now.
    /// To record: another owner was granted the key here since, or the node has forgotten the last owner.
    Lost,
    /// To release: none of the keys belongs to this owner now. To announce, to withdraw and to a health check: it is done.
    Released,
    /// To inspect: what the node knows of the key.
    Seen(Box<Seen>),
    /// To scan: the names of some locks.
    Scanned(Box<Scanned>),
    /// To revoke: that holder does not hold the lock now.
    Revoked {
        /// Whether it did before.
        was_held: bool,
    },
    /// To revoke: the request came too late.
    TooLate,
    /// There is a record; in the reply to a request to store one, that one or another.
    Done {
        /// The record; only its head if the rest is big.
        record: Record,
        /// The time until the node forgets it.
        expires_in: Duration,
    },
    /// To fetch: the whole record.
    Whole(Record),
    /// To look and to fetch: there is no record.
    NotDone,
    /// To acquire: an earlier owner of the key may have executed and left no record.
    Intended,
    /// To acquire and to confirm: the node lost its memory since it reported this generation.
    Amnesia,
    /// To acquire: the fence has reached [`FencingToken::MAX`](crate::FencingToken::MAX).
    Overflow,
}

/// One node's answer to one request, as a round takes it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Answer {
    /// The node answered the request.
    Replied(Reply),
    /// The node gave no vote: it was not reached, did not answer in time, or answered with an error.
    Failed,
    /// The request was certainly not sent to the node, and will not be.
    NeverSent,
}

/// What one node knows of a key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Seen {
    /// Whether the key is locked.
    pub state: KeyState,
    /// The fence: the number of the last grant, if the node remembers it.
    pub fence: Option<u64>,
    /// Whether the key has a record.
    pub is_recorded: bool,
    /// The time of the node.
    pub at: Duration,
    /// What holds the lock, if it is locked.
    pub mark: Option<HolderMark>,
    /// Who holds the lock, [`MAX_HOLDERS`] at most: those whose owner tokens show it.
    pub holders: Vec<Holder>,
}

/// How many holders of a key a node names at most. Readers may be many.
pub const MAX_HOLDERS: usize = 16;

/// Some of the names of locks on one node. Names may come twice, and may be of other keys.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Scanned {
    /// The names.
    pub names: Vec<Arc<[u8]>>,
    /// Where the next names begin; `None` at the end.
    pub next: Option<Arc<[u8]>>,
}

/// What holds a lock on a node, as an opaque mark. All readers have the same one.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct HolderMark(Arc<[u8]>);

impl HolderMark {
    /// Creates a mark from the bytes of the node.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }

    /// Returns the bytes of the node.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

// Who knows the value of an owner can release its lock.
opaque_debug! { HolderMark }

/// Whether a key is locked on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyState {
    /// The key is free.
    Free,
    /// One caller holds the key.
    Held {
        /// The time until the lock expires if its holder does not renew it; `None` if it never does.
        left: Option<Duration>,
    },
    /// Readers hold the key together.
    Shared {
        /// The number of readers.
        readers: usize,
        /// The time until the last of them expires if it does not renew its lock; `None` if it never does.
        left: Option<Duration>,
    },
}
