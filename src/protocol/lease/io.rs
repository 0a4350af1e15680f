//! What goes into a lease and comes out of it.

use std::time::Duration;

use crate::protocol::message::{Answer, Op, SharedOp};
use crate::protocol::round::{Decided, VoteStep};

use crate::protocol::acquire::Refusal;
use crate::protocol::holder::Holder;
use crate::protocol::quorum::NodeSet;
use crate::protocol::record::{Fingerprint, Record};
use crate::protocol::token::{OwnerToken, Shown};

/// The number of the `ACQUIRE`, the first request.
pub(super) const ACQUIRE: u32 = 1;

/// How a caller holds its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Access {
    /// Alone.
    #[default]
    Exclusive,
    /// Together with other callers that do the same.
    Shared,
    /// One of so many slots, alone.
    Slot(usize),
}

/// What a caller asks for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct LeaseSpec {
    /// How the caller is to hold the keys.
    pub access: Access,
    /// The lifetime of a lock that nothing renews.
    pub ttl: Duration,
    /// The number to propose as token; `None` with fencing off.
    pub proposal: Option<u64>,
    /// The lifetime of the fence.
    pub retention: Duration,
    /// How long a node may take for an answer.
    pub node_timeout: Duration,
    /// Whether to renew the lock while it is held.
    pub renews: bool,
    /// Whether the caller needs other locks too, and has this one only when it has all of them. Until then it is
    /// renewed in any case, because the caller may wait for longer than the ttl.
    pub is_partial: bool,
    /// How long it may be held: from the beginning of the acquisition on, and if it is partial, from when the caller
    /// has it.
    pub max_hold: Option<Duration>,
    /// How long the keys stay taken at least, from when the caller has the lock, although it is released earlier.
    pub hold_at_least: Option<Duration>,
    /// Present if something is executed under the lock, whose outcome counts for all later callers.
    pub once: Option<OnceSpec>,
}

/// What a caller that executes asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OnceSpec {
    /// Identifies the request: another request with the same key is refused.
    pub fingerprint: Fingerprint,
    /// Whether it executes if it is granted the key. Otherwise it only finds, and repairs, the record of another.
    pub executes: bool,
}

impl OnceSpec {
    /// Returns whether both callers ask for the same execution.
    pub fn is_same_request(self, other: Self) -> bool {
        self.fingerprint == other.fingerprint
    }
}

#[cfg(test)]
impl OnceSpec {
    /// That of a caller that executes one of several requests.
    pub(crate) fn of_request(number: u8) -> Self {
        Self {
            fingerprint: Fingerprint::from_digest([number; 32]),
            executes: true,
        }
    }
}

/// What a caller that executed says about its work when it goes without a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Effect {
    /// Nothing: it may have had an effect.
    #[default]
    Unknown,
    /// It was not begun.
    NotBegun,
    /// It had no effect.
    WithoutEffect,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Input {
    /// A node answered a request, or failed to.
    Answered {
        /// The number of the node.
        node: usize,
        /// The number of the request.
        number: u32,
        /// Its answer.
        answer: Answer,
    },
    /// The time of [`Lease::poll_timeout`](super::Lease::poll_timeout) has come.
    TimedOut,
    /// The caller got the lock at this time, and with it all others that it needs.
    Delivered {
        /// When it did.
        at: Duration,
    },
    /// A holder asks for an extension. Not while another one is [under way](super::Lease::is_extending).
    Extend {
        /// The ttl from now on; `None` for the one that the lease has.
        ttl: Option<Duration>,
        /// A higher token than the lease has.
        token: Option<u64>,
    },
    /// The lock was taken away from its holders.
    Revoked,
    /// No renewal is to begin any more.
    StopRenewing,
    /// The caller is gone, or the last holder.
    Dropped {
        /// Whether other processes wait for the release of a holder.
        publishes: bool,
        /// What the holder says about its work, if it is an execution.
        effect: Effect,
    },
    /// A caller that executes asks to begin. To be repeated after an extension that this asked for.
    Begin,
    /// The outcome of an execution is to be recorded.
    Record {
        /// The outcome.
        record: Record,
        /// How long to keep it.
        retention: Duration,
    },
    /// The record of an [`Event::Unread`] was read; `None` if it cannot be.
    Read(Option<Record>),
    /// What another lease, of a new owner that does not execute, has found after an [`Event::Unrepaired`].
    Repaired(Decided),
}

impl Access {
    /// Returns the request that asks for a lock.
    pub fn acquire(self, proposal: Option<u64>, ttl: Duration, retention: Duration) -> Op {
        match self {
            Self::Exclusive | Self::Slot(_) => Op::Acquire {
                proposal,
                ttl,
                retention,
            },
            Self::Shared => Op::Shared(SharedOp::Acquire { ttl }),
        }
    }

    /// Returns the request that confirms or extends a lock.
    pub fn confirm(self, token: Option<u64>, ttl: Duration, retention: Duration) -> Op {
        match self {
            Self::Exclusive | Self::Slot(_) => Op::Confirm {
                token,
                ttl,
                retention,
            },
            Self::Shared => Op::Shared(SharedOp::Confirm { ttl }),
        }
    }

    /// Returns the request that releases a lock, and leaves the keys taken for a while.
    pub fn release(self, left: Duration) -> Op {
        match self {
            Self::Shared => Op::Shared(SharedOp::Release),
            Self::Exclusive | Self::Slot(_) if left.is_zero() => Op::Release,
            Self::Exclusive | Self::Slot(_) => Op::ReleaseAfter { left },
        }
    }
}

impl LeaseSpec {
    /// Returns an owner token of these random bits, for this holder.
    pub fn owner(&self, random: [u8; 16], holder: Option<Holder>) -> OwnerToken {
        if self.once.is_none() && holder.is_none() {
            return OwnerToken::from_random(random);
        }
        let fingerprint = self.once.map(|once| once.fingerprint);
        OwnerToken::showing(random, Shown::new(fingerprint, holder))
    }
}

impl Input {
    /// Returns whether a holder may go after this, because the lease goes on without one.
    pub fn outlives_holder(&self) -> bool {
        matches!(self, Self::Record { .. })
    }
}

/// A request to some nodes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LeaseRequest {
    /// Its number: that of the first is 1, and each further one has the next.
    pub number: u32,
    /// The operation.
    pub op: Op,
    /// The nodes to ask.
    pub nodes: NodeSet,
    /// Whether a node that releases the lock publishes that.
    pub publishes: bool,
}

/// What the driver tells the caller or the holders.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// The lock is held.
    Granted {
        /// The token; zero with fencing off.
        number: u64,
        /// The number of nodes that granted exactly this token so far.
        acknowledged: usize,
        /// The end of the validity.
        valid_until: Duration,
    },
    /// The attempt has failed.
    Refused(Refusal),
    /// A majority granted the lock, but so late that its validity was over.
    TooLate {
        /// How long that took.
        elapsed: Duration,
    },
    /// The lock is valid until a later time.
    Extended {
        /// The end of the validity.
        valid_until: Duration,
        /// The token from now on; `None` with fencing off.
        token: Option<u64>,
        /// Whether a holder asked for it.
        is_asked: bool,
    },
    /// The extension that a holder asked for has no majority. The lock is as valid as before.
    NotExtended {
        /// The number of nodes that answered.
        reached: usize,
        /// The nodes that had not answered when the others decided.
        silent: NodeSet,
    },
    /// The lock is lost, although it has holders. So is an extension that they asked for.
    Lost(LostReason),
    /// A majority has confirmed the release, or cannot.
    Released(VoteStep),
    /// The execution may begin.
    Begun,
    /// Nothing is to be executed.
    Decided(Decided),
    /// The recording has ended. A majority has this record: that of the caller, or of another execution. Without one, no
    /// majority could be reached, or no node of it has a record.
    Recorded(Option<Record>),
    /// A minority has a record that this owner cannot repair: another lease is to do it. [`Input::Repaired`] follows.
    Unrepaired,
    /// The rest of this record is to be read from a node. [`Input::Read`] follows.
    Unread(Record),
    /// Every node has answered the release, or is overdue. Final.
    Settled,
}

impl Event {
    /// Returns what this tells the next callers of the key: that a majority has a record.
    pub fn memo(self) -> Option<Decided> {
        match self {
            Self::Decided(decided) => Some(decided).filter(Decided::is_memorable),
            Self::Recorded(record) => record.map(Decided::Recorded),
            _ => None,
        }
    }
}

/// The reason for which a lock is no longer held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LostReason {
    /// A majority of the nodes reported that the key no longer belongs to this holder: it expired early, was
    /// deleted, or was acquired by another client.
    Gone,
    /// The validity ended: a majority of the nodes could not be reached to renew the lock, or renewal
    /// is off.
    Expired,
    /// The lock was renewed for as long as `max_hold` allows.
    MaxHold,
    /// The lock was released. Only a handle or a [`Lost`](crate::Lost) future that outlives the guards resolves to this.
    Released,
    /// The lock was revoked by [`Redlock::revoke`](crate::Redlock::revoke) in this process. A revocation in another
    /// process is reported as [`Gone`](Self::Gone).
    Revoked,
    /// The lease task is gone: the runtime shut down, or the task panicked. The key expires by its ttl.
    Abandoned,
}

/// How many answers to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Awaited {
    /// The number of the request.
    pub number: u32,
    /// The number of further answers to it that may decide something; zero if any answer to any request may.
    pub answers: usize,
}
