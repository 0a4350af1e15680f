//! The reference node: the effect of each request on one node, as plain data and time.
//!
//! The embedded nodes run it, the Lua scripts of the Redis nodes mirror it step by step, and the
//! model checker drives it, so that one place defines a node.

mod readers;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::protocol::admission::Generation;
use crate::protocol::fence::FencingToken;
use crate::protocol::message::{Command, Op, Reply, SharedOp};
use crate::protocol::names::{IntentName, KeyNames, RecordNames};
use crate::protocol::owner::OwnerToken;
use crate::protocol::record::{Fingerprint, Record};

/// The memory of one node. Every call takes the time, measured from any fixed instant.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Store {
    locks: BTreeMap<Arc<[u8]>, Lock>,
    fences: BTreeMap<Arc<[u8]>, Fence>,
    records: BTreeMap<Arc<[u8]>, Kept>,
    /// The owners that were granted a key and may have executed.
    intents: BTreeMap<Arc<[u8]>, Mark>,
    /// The readers of each lock that they hold together.
    readers: BTreeMap<Arc<[u8]>, Readers>,
    /// The owners that wait to hold a key alone.
    writers: BTreeMap<Arc<[u8]>, Mark>,
    /// Created for the first client that asks; nodes that cannot lose their memory need none.
    generation: Option<Generation>,
    /// The number of entries at which the next sweep drops expired ones, so that its cost is amortised.
    sweep_at: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Lock {
    holder: Holder,
    expires: Duration,
}

/// The value of a lock.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Holder {
    One(OwnerToken),
    /// A constant that is no owner's token, so that readers exclude all owners, also of other clients.
    Readers,
}

/// An owner's mark beside a lock.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Mark {
    owner: OwnerToken,
    expires: Duration,
}

/// The readers that hold a lock together.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Readers {
    /// When the lock of each reader ends.
    ends: BTreeMap<OwnerToken, Duration>,
    /// Later than that of the lock: a release must find its reader for as long as the lock is there.
    expires: Duration,
}

impl Lock {
    fn fingerprint(&self) -> Option<Fingerprint> {
        match &self.holder {
            Holder::One(owner) => owner.fingerprint(),
            Holder::Readers => None,
        }
    }

    fn is_of(&self, owner: &OwnerToken) -> bool {
        matches!(&self.holder, Holder::One(holder) if holder == owner)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Fence {
    number: u64,
    /// The last owner that was granted the key here; only this owner may record.
    grantee: OwnerToken,
    expires: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Kept {
    record: Record,
    expires: Duration,
}

impl Store {
    /// Creates an empty node.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the generation of the memory, and begins one if there is none or it belongs to another
    /// process. This is one step, so that the stamp comes from the node itself: if a client read the clock
    /// before a separate write, a node that is wiped in between would look old at once.
    pub fn admit(&mut self, random: &OwnerToken, run_id: &str, now: Duration) -> Generation {
        let ours = self
            .generation
            .take()
            .filter(|known| known.is_of_process(run_id));
        let generation = ours.unwrap_or_else(|| Generation::new(random, now, run_id));
        self.generation.insert(generation).clone()
    }

    /// Executes one request of a client that knows `generation`, atomically. Only locking depends on the
    /// memory: releases, reads and records are always allowed.
    pub fn apply_in(&mut self, generation: &Generation, command: &Command, now: Duration) -> Reply {
        let locks = matches!(
            command.op,
            Op::Acquire { .. }
                | Op::Confirm { .. }
                | Op::Shared(SharedOp::Acquire { .. } | SharedOp::Confirm { .. })
        );
        if locks && self.generation.as_ref() != Some(generation) {
            return Reply::Amnesia;
        }
        self.apply(command, now)
    }

    /// Executes one request, atomically.
    pub fn apply(&mut self, command: &Command, now: Duration) -> Reply {
        let Command { names, owner, op } = command;
        let first = names.first().and_then(|name| name.record.as_ref());
        let kept = first.and_then(|record| self.kept(record, now));
        match op {
            Op::Acquire {
                proposal,
                ttl,
                retention,
            } => done(kept, Record::answered).unwrap_or_else(|| {
                self.acquire(names, owner, *proposal, now + *ttl, now + *retention, now)
            }),
            Op::Confirm {
                token,
                ttl,
                retention,
            } => done(kept, Record::answered).unwrap_or_else(|| {
                self.confirm(names, owner, *token, now + *ttl, now + *retention, now)
            }),
            Op::Shared(op) => self.apply_shared(names, owner, *op, now),
            Op::Release => self.release(names, owner, false),
            Op::ReleaseExecuted => self.release(names, owner, true),
            Op::Record { record, retention } => done(kept, Record::head).unwrap_or_else(|| {
                let Some(name) = names.first() else {
                    return Reply::Lost;
                };
                let fence = self.fences.get(&name.fence);
                let granted = fence.filter(|fence| fence.expires > now);
                // The last grantee, not the holder: an execution that outlived its lock may record as
                // long as no other owner was granted the key.
                if granted.is_none_or(|fence| fence.grantee != *owner) {
                    return Reply::Lost;
                }
                self.release(names, owner, false);
                self.keep(name, record, now + *retention, now)
            }),
            Op::TopUp { record, retention } => done(kept, Record::head).unwrap_or_else(|| {
                let name = names.first();
                name.map_or(Reply::NotDone, |name| {
                    self.keep(name, record, now + *retention, now)
                })
            }),
            Op::Look => done(kept, Record::answered).unwrap_or(Reply::NotDone),
            Op::Fetch => kept.map_or(Reply::NotDone, |(record, _)| Reply::Whole(record.clone())),
        }
    }

    /// Returns the number of locks that are held at `now`.
    #[must_use]
    pub fn held(&self, now: Duration) -> usize {
        self.locks
            .values()
            .filter(|lock| lock.expires > now)
            .count()
    }

    /// Returns whether nobody holds a lock at `now`.
    #[must_use]
    pub fn is_free(&self, name: &KeyNames, now: Duration) -> bool {
        self.lock(name, now).is_none()
    }

    /// Returns the owner of a lock at `now`, if one holds it alone.
    #[must_use]
    pub fn holder(&self, name: &KeyNames, now: Duration) -> Option<&OwnerToken> {
        match &self.lock(name, now)?.holder {
            Holder::One(owner) => Some(owner),
            Holder::Readers => None,
        }
    }

    fn acquire(
        &mut self,
        names: &[KeyNames],
        owner: &OwnerToken,
        proposal: Option<u64>,
        expires: Duration,
        fence_expires: Duration,
        now: Duration,
    ) -> Reply {
        let holders = || names.iter().filter_map(|name| self.lock(name, now));
        if let Some(last) = holders()
            .filter(|lock| !lock.is_of(owner))
            .max_by_key(|lock| lock.expires)
        {
            let expires_in = Some(last.expires - now);
            if holders().any(|lock| lock.holder == Holder::Readers) {
                return Reply::HeldShared { expires_in };
            }
            let fingerprint = last.fingerprint();
            return Reply::Held {
                expires_in,
                fingerprint,
            };
        }
        let intents = names.iter().filter_map(intent_of);
        let others = intents.filter_map(|intent| self.intents.get(&intent.name));
        if others
            .filter(|intent| intent.expires > now)
            .any(|intent| intent.owner != *owner)
        {
            return Reply::Intended;
        }
        let some_free = holders().count() < names.len();
        let mut number = 0;
        if let Some(proposal) = proposal {
            let fence = self.highest_fence(names, now);
            // A new grant always raises the fence, which makes numbers unique.
            number = if some_free {
                proposal.max(fence + 1)
            } else {
                fence
            };
            if number > FencingToken::MAX.as_u64() {
                return Reply::Overflow;
            }
            // Raise the fences of *all* keys, not only of the new ones: otherwise a set and one of its
            // members could be granted the same number.
            self.raise_fences(names, owner, number, fence_expires);
        }
        for name in names {
            if self.lock(name, now).is_none() {
                let owner = owner.clone();
                if let Some(IntentName { name, retention }) = intent_of(name) {
                    let intent = Mark {
                        owner: owner.clone(),
                        expires: now + *retention,
                    };
                    self.intents.insert(Arc::clone(name), intent);
                }
                let holder = Holder::One(owner);
                self.locks
                    .insert(Arc::clone(&name.lock), Lock { holder, expires });
            }
        }
        self.sweep(now);
        Reply::Granted(number)
    }

    fn confirm(
        &mut self,
        names: &[KeyNames],
        owner: &OwnerToken,
        token: Option<u64>,
        expires: Duration,
        fence_expires: Duration,
        now: Duration,
    ) -> Reply {
        let all_ours = names
            .iter()
            .all(|name| self.lock(name, now).is_some_and(|lock| lock.is_of(owner)));
        if !all_ours {
            return Reply::Lost;
        }
        if let Some(token) = token {
            let fence = self.highest_fence(names, now);
            if fence > token {
                return Reply::At(fence);
            }
            self.raise_fences(names, owner, token, fence_expires);
        }
        for name in names {
            if let Some(lock) = self.locks.get_mut(&name.lock) {
                // Never shorten: an extension with lost answers must not shorten a lock on which its
                // holder still relies.
                lock.expires = lock.expires.max(expires);
            }
        }
        Reply::At(token.unwrap_or(0))
    }

    fn release(&mut self, names: &[KeyNames], owner: &OwnerToken, executed: bool) -> Reply {
        for name in names {
            remove_if(&mut self.locks, &name.lock, |lock| lock.is_of(owner));
            if let Some(intent) = intent_of(name).filter(|_| !executed) {
                remove_if(&mut self.intents, &intent.name, |mark| mark.owner == *owner);
            }
        }
        Reply::Released
    }

    /// Returns the record and the time until it expires, if there is one.
    fn kept(&self, names: &RecordNames, now: Duration) -> Option<(&Record, Duration)> {
        let kept = self.records.get(&names.done)?;
        let left = kept.expires.checked_sub(now)?;
        (!left.is_zero()).then_some((&kept.record, left))
    }

    fn keep(
        &mut self,
        name: &KeyNames,
        record: &Record,
        expires: Duration,
        now: Duration,
    ) -> Reply {
        let Some(names) = &name.record else {
            return Reply::NotDone;
        };
        let kept = Kept {
            record: record.clone(),
            expires,
        };
        self.records.insert(Arc::clone(&names.done), kept);
        self.sweep(now);
        done(self.kept(names, now), Record::head).unwrap_or(Reply::NotDone)
    }

    fn lock(&self, name: &KeyNames, now: Duration) -> Option<&Lock> {
        self.locks.get(&name.lock).filter(|lock| lock.expires > now)
    }

    fn highest_fence(&self, names: &[KeyNames], now: Duration) -> u64 {
        names
            .iter()
            .filter_map(|name| self.fences.get(&name.fence))
            .filter(|fence| fence.expires > now)
            .map(|fence| fence.number)
            .max()
            .unwrap_or(0)
    }

    fn raise_fences(
        &mut self,
        names: &[KeyNames],
        owner: &OwnerToken,
        number: u64,
        expires: Duration,
    ) {
        for name in names {
            let fence = Fence {
                number,
                grantee: owner.clone(),
                expires,
            };
            self.fences.insert(Arc::clone(&name.fence), fence);
        }
    }

    fn sweep(&mut self, now: Duration) {
        if self.len() < self.sweep_at {
            return;
        }
        self.locks.retain(|_, lock| lock.expires > now);
        self.fences.retain(|_, fence| fence.expires > now);
        self.records.retain(|_, kept| kept.expires > now);
        self.intents.retain(|_, intent| intent.expires > now);
        self.readers.retain(|_, readers| readers.expires > now);
        self.writers.retain(|_, writer| writer.expires > now);
        self.sweep_at = 2 * self.len() + 64;
    }

    fn len(&self) -> usize {
        self.locks.len()
            + self.fences.len()
            + self.records.len()
            + self.intents.len()
            + self.readers.len()
            + self.writers.len()
    }
}

/// Returns the reply with the requested part of a record.
fn done(kept: Option<(&Record, Duration)>, part: fn(&Record) -> Record) -> Option<Reply> {
    let (record, expires_in) = kept?;
    Some(Reply::Done {
        record: part(record),
        expires_in,
    })
}

fn intent_of(name: &KeyNames) -> Option<&IntentName> {
    name.record.as_ref()?.intent.as_ref()
}

fn remove_if<T>(
    entries: &mut BTreeMap<Arc<[u8]>, T>,
    name: &Arc<[u8]>,
    condition: impl FnOnce(&T) -> bool,
) {
    if entries.get(name).is_some_and(condition) {
        entries.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{LockKey, LockKeys, Namespace};

    const TTL: Duration = Duration::from_secs(10);
    const RETENTION: Duration = Duration::from_secs(3_600);
    const NOW: Duration = Duration::from_secs(1);

    struct Client {
        names: Arc<[KeyNames]>,
        owner: OwnerToken,
    }

    fn client(id: u8, keys: &[&str]) -> Client {
        let keys: LockKeys = keys.iter().map(|key| LockKey::from(*key)).collect();
        let names = Namespace::default().names(&keys, |_| [0; 32]).unwrap();
        Client {
            names: names.into(),
            owner: OwnerToken::from_random([id; 16]),
        }
    }

    impl Client {
        fn command(&self, op: Op) -> Command {
            Command {
                names: Arc::clone(&self.names),
                owner: self.owner.clone(),
                op,
            }
        }

        fn acquire(&self, store: &mut Store, proposal: u64, now: Duration) -> Reply {
            let op = Op::Acquire {
                proposal: Some(proposal),
                ttl: TTL,
                retention: RETENTION,
            };
            store.apply(&self.command(op), now)
        }

        fn confirm(&self, store: &mut Store, token: u64, ttl: Duration, now: Duration) -> Reply {
            let op = Op::Confirm {
                token: Some(token),
                ttl,
                retention: RETENTION,
            };
            store.apply(&self.command(op), now)
        }
    }

    #[test]
    fn acquire_raises_the_fence_for_a_new_grant_and_not_for_a_repeated_one() {
        let mut store = Store::new();
        let (a, b) = (client(1, &["k"]), client(2, &["k"]));
        assert_eq!(a.acquire(&mut store, 5, NOW), Reply::Granted(5));
        assert_eq!(a.acquire(&mut store, 9, NOW), Reply::Granted(5));
        let held = Reply::Held {
            expires_in: Some(TTL),
            fingerprint: None,
        };
        assert_eq!(b.acquire(&mut store, 9, NOW), held);
        store.apply(&a.command(Op::Release), NOW);
        assert_eq!(b.acquire(&mut store, 3, NOW), Reply::Granted(6));
    }

    #[test]
    fn confirm_returns_the_fence_after_the_write() {
        let mut store = Store::new();
        let a = client(1, &["k"]);
        a.acquire(&mut store, 5, NOW);
        assert_eq!(a.confirm(&mut store, 8, TTL, NOW), Reply::At(8));
        assert_eq!(a.confirm(&mut store, 7, TTL, NOW), Reply::At(8));
        assert_eq!(a.confirm(&mut store, 8, TTL, NOW + TTL), Reply::Lost);
    }

    #[test]
    fn confirm_never_shortens_a_lock() {
        let mut store = Store::new();
        let (a, b) = (client(1, &["k"]), client(2, &["k"]));
        a.acquire(&mut store, 5, NOW);
        a.confirm(&mut store, 5, TTL / 10, NOW);
        let held = Reply::Held {
            expires_in: Some(TTL - TTL / 2),
            fingerprint: None,
        };
        assert_eq!(b.acquire(&mut store, 6, NOW + TTL / 2), held);
    }

    #[test]
    fn acquire_of_a_set_raises_the_fences_of_all_its_keys() {
        let mut store = Store::new();
        let (both, x) = (client(1, &["x", "y"]), client(2, &["x"]));
        assert_eq!(both.acquire(&mut store, 1, NOW), Reply::Granted(1));
        store.apply(&client(1, &["y"]).command(Op::Release), NOW);
        // The retry finds y free, so the whole set gets a new number, including x's fence.
        assert_eq!(both.acquire(&mut store, 1, NOW), Reply::Granted(2));
        store.apply(&both.command(Op::Release), NOW);
        assert_eq!(x.acquire(&mut store, 1, NOW), Reply::Granted(3));
    }

    #[test]
    fn acquire_of_a_set_is_granted_all_or_nothing() {
        let mut store = Store::new();
        let (y, both) = (client(1, &["y"]), client(2, &["x", "y"]));
        y.acquire(&mut store, 1, NOW);
        assert!(matches!(
            both.acquire(&mut store, 1, NOW),
            Reply::Held { .. }
        ));
        assert_eq!(store.held(NOW), 1);
    }

    #[test]
    fn acquire_overflows_below_the_range_of_json() {
        let mut store = Store::new();
        let (a, max) = (client(1, &["k"]), FencingToken::MAX.as_u64());
        assert_eq!(a.acquire(&mut store, max, NOW), Reply::Granted(max));
        store.apply(&a.command(Op::Release), NOW);
        assert_eq!(a.acquire(&mut store, 1, NOW), Reply::Overflow);
    }

    #[test]
    fn generation_ends_with_the_memory_and_with_the_process() {
        let (mut store, random) = (Store::new(), |id| OwnerToken::from_random([id; 16]));
        let first = store.admit(&random(1), "a", NOW);
        assert_eq!(store.admit(&random(2), "a", NOW + TTL), first);
        assert_eq!(first.age(NOW + TTL), TTL);
        // The same data in another process, as after a restart with persistence.
        let second = store.admit(&random(3), "b", NOW);
        assert_ne!(second, first);
        assert_ne!(Store::new().admit(&random(4), "b", NOW), second);
    }

    #[test]
    fn store_with_a_new_generation_refuses_votes_and_still_releases() {
        let (mut store, a) = (Store::new(), client(1, &["k"]));
        let generation = store.admit(&OwnerToken::from_random([1; 16]), "run", NOW);
        let acquire = a.command(Op::Acquire {
            proposal: Some(5),
            ttl: TTL,
            retention: RETENTION,
        });
        let granted = store.apply_in(&generation, &acquire, NOW);
        assert_eq!(granted, Reply::Granted(5));
        store = Store::new();
        store.admit(&OwnerToken::from_random([2; 16]), "run", NOW);
        assert_eq!(store.apply_in(&generation, &acquire, NOW), Reply::Amnesia);
        let release = a.command(Op::Release);
        assert_eq!(store.apply_in(&generation, &release, NOW), Reply::Released);
    }

    #[test]
    fn sweep_frees_the_memory_of_expired_keys() {
        let mut store = Store::new();
        for i in 0..1_000_u64 {
            let now = NOW + RETENTION * u32::try_from(i).unwrap();
            client(1, &[&i.to_string()]).acquire(&mut store, 1, now);
        }
        assert!(store.locks.len() + store.fences.len() < 200);
    }
}
