//! The memory of a node: what it keeps, and until when.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use crate::protocol::admission::Generation;
use crate::protocol::message::{HolderMark, Scanned};
use crate::protocol::names::KeyNames;
use crate::protocol::record::Record;
use crate::protocol::token::OwnerToken;

/// The memory of one node. Every call takes the time, measured from any fixed instant.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Store {
    /// The locks and their fences, of which most requests need both, by the names of the locks.
    pub(super) locks: BTreeMap<Arc<[u8]>, KnownLock>,
    pub(super) records: BTreeMap<Arc<[u8]>, Kept>,
    /// The owners that were granted a key and may have executed.
    pub(super) intents: BTreeMap<Arc<[u8]>, Mark>,
    /// The readers of each lock that they hold together.
    pub(super) readers: BTreeMap<Arc<[u8]>, Readers>,
    /// The owners that wait to hold a key alone.
    pub(super) writers: BTreeMap<Arc<[u8]>, Mark>,
    /// Created for the first client that asks; nodes that cannot lose their memory need none.
    pub(super) generation: Option<Generation>,
    /// The number of entries at which the next sweep drops expired ones, so that its cost is amortised: twice the number of
    /// locks, fences and others after the last one.
    pub(super) sweep_at: usize,
}

/// What a node knows of a lock.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct KnownLock {
    pub(super) lock: Option<Lock>,
    pub(super) fence: Option<Fence>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Lock {
    /// `None` if readers hold it together.
    pub(super) owner: Option<OwnerToken>,
    pub(super) expires: Duration,
}

/// An owner's mark beside a lock.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Mark {
    pub(super) owner: OwnerToken,
    pub(super) expires: Duration,
}

/// The readers that hold a lock together.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Readers {
    /// When the lock of each reader ends.
    pub(super) ends: BTreeMap<OwnerToken, Duration>,
    /// Later than that of the lock: a release must find its reader for as long as the lock is there.
    pub(super) expires: Duration,
}

impl KnownLock {
    pub(super) fn lock(&self, now: Duration) -> Option<&Lock> {
        self.lock.as_ref().filter(|lock| lock.expires > now)
    }

    pub(super) fn fence(&self, now: Duration) -> Option<&Fence> {
        self.fence.as_ref().filter(|fence| fence.expires > now)
    }

    /// Sets the fence to that of a grant to this owner.
    pub(super) fn raise_fence(&mut self, owner: &OwnerToken, number: u64, expires: Duration) {
        self.fence = Some(Fence {
            number,
            grantee: owner.clone(),
            expires,
        });
    }
}

impl Lock {
    pub(super) fn mark(&self) -> HolderMark {
        match &self.owner {
            Some(owner) => HolderMark::from_bytes(owner.to_value().as_bytes()),
            // No owner's token, so that readers exclude all owners, also of other clients.
            None => HolderMark::from_bytes(b"shared"),
        }
    }

    pub(super) fn is_of(&self, owner: &OwnerToken) -> bool {
        self.owner.as_ref() == Some(owner)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Fence {
    pub(super) number: u64,
    /// The last owner that was granted the key here; only this owner may record.
    pub(super) grantee: OwnerToken,
    pub(super) expires: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Kept {
    pub(super) record: Record,
    pub(super) expires: Duration,
}

impl Store {
    /// Creates an empty node.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of locks that are held at `now`.
    pub fn held(&self, now: Duration) -> usize {
        let known = self.locks.values();
        known.filter(|known| known.lock(now).is_some()).count()
    }

    /// Returns whether a lock is free at `now`.
    pub fn is_free(&self, name: &KeyNames, now: Duration) -> bool {
        self.lock(name, now).is_none()
    }

    /// Returns the owner of a lock at `now`, if one holds it alone.
    pub fn holder(&self, name: &KeyNames, now: Duration) -> Option<&OwnerToken> {
        self.lock(name, now)?.owner.as_ref()
    }

    pub(super) fn lock(&self, name: &KeyNames, now: Duration) -> Option<&Lock> {
        self.locks.get(&name.lock)?.lock(now)
    }

    pub(super) fn fence(&self, name: &KeyNames, now: Duration) -> Option<&Fence> {
        self.locks.get(&name.lock)?.fence(now)
    }

    /// Returns a lock to change it, although it may have expired.
    pub(super) fn lock_mut(&mut self, name: &KeyNames) -> Option<&mut Lock> {
        self.locks.get_mut(&name.lock)?.lock.as_mut()
    }

    /// Removes a lock if it is this one, and returns its end.
    pub(super) fn unlock(
        &mut self,
        name: &KeyNames,
        is_this: impl FnOnce(&Lock) -> bool,
    ) -> Option<Duration> {
        // Its entry stays until the next sweep, also without a fence: most keys are locked again.
        let known = self.locks.get_mut(&name.lock)?;
        let lock = known.lock.take_if(|lock| is_this(lock))?;
        Some(lock.expires)
    }

    /// Returns the next names of locks behind this one.
    pub(super) fn scan(&self, position: &[u8], now: Duration) -> Scanned {
        let behind = (Bound::Excluded(position), Bound::Unbounded);
        let known = self.locks.range::<[u8], _>(behind);
        let held = known.filter(|(_, known)| known.lock(now).is_some());
        let names: Vec<_> = held.map(|(name, _)| Arc::clone(name)).take(PAGE).collect();
        Scanned {
            next: names.get(PAGE - 1).cloned(),
            names,
        }
    }

    pub(super) fn sweep(&mut self, now: Duration) {
        if self.entries() < self.sweep_at {
            return;
        }
        let mut both = 0;
        self.locks.retain(|_, known| {
            known.lock.take_if(|lock| lock.expires <= now);
            known.fence.take_if(|fence| fence.expires <= now);
            both += usize::from(known.lock.is_some() && known.fence.is_some());
            *known != KnownLock::default()
        });
        self.records.retain(|_, kept| kept.expires > now);
        self.intents.retain(|_, intent| intent.expires > now);
        self.readers.retain(|_, readers| readers.expires > now);
        self.writers.retain(|_, writer| writer.expires > now);
        self.sweep_at = 2 * (self.entries() + both) + 64;
    }

    pub(super) fn entries(&self) -> usize {
        let marks = self.intents.len() + self.readers.len() + self.writers.len();
        self.locks.len() + self.records.len() + marks
    }
}

/// How many locks one request scans.
const PAGE: usize = 50;

/// Removes a mark if it is of this owner.
pub(super) fn unmark(marks: &mut BTreeMap<Arc<[u8]>, Mark>, name: &[u8], owner: &OwnerToken) {
    if marks.get(name).is_some_and(|mark| mark.owner == *owner) {
        marks.remove(name);
    }
}
