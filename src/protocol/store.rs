//! The reference node: the effect of each request on one node, as plain data and time.
//!
//! The embedded nodes run it, the Lua scripts of the Redis nodes mirror it step by step, and the
//! model checker drives it, so that one place defines a node.

mod memory;
mod readers;

use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use self::memory::{Fence, Kept, Lock, LockedBy, Mark, unmark};
use crate::protocol::admission::Generation;
use crate::protocol::message::{Command, HolderMark, Op, Reply, Seen};
use crate::protocol::names::{IntentName, KeyNames, RecordNames, SlotNames};
use crate::protocol::record::Record;
use crate::protocol::token::{FencingToken, OwnerToken};

pub use self::memory::Store;

impl Store {
    /// Returns the generation of the memory, and begins one if there is none or it belongs to another
    /// process. This is one step, so that the stamp comes from the node itself: if a client read the clock
    /// before a separate write, a node that is wiped in between would look old at once.
    pub fn admit(&mut self, random: &OwnerToken, run_id: &str, now: Duration) -> Generation {
        let generation = &mut self.generation;
        generation.take_if(|known| !known.is_of_process(run_id));
        let begin = || Generation::new(random, now, run_id);
        generation.get_or_insert_with(begin).clone()
    }

    /// Executes one request of a client that knows `generation`, atomically. Only locking depends on the
    /// memory: releases, reads and records are always allowed.
    pub fn apply_in(&mut self, generation: &Generation, command: &Command, now: Duration) -> Reply {
        if command.op.is_vote() && self.generation.as_ref() != Some(generation) {
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
                proposal: number,
                ttl,
                retention,
            }
            | Op::Confirm {
                token: number,
                ttl,
                retention,
            } => done(kept, Record::answered).unwrap_or_else(|| {
                let ends = (now + *ttl, now + *retention);
                match op {
                    Op::Acquire { .. } => self.acquire(command, *number, ends, now),
                    _ => self.confirm(command, *number, ends, now),
                }
            }),
            Op::Shared(op) => self.apply_shared(command, *op, now),
            Op::Release | Op::ReleaseExecuted | Op::ReleaseAfter { .. } => {
                let released = match op {
                    Op::ReleaseAfter { left } => self.release_after(command, now + *left, now),
                    _ => self.release(command, matches!(op, Op::ReleaseExecuted), now),
                };
                match released == names.len() {
                    true => Reply::Released,
                    false => Reply::Lost,
                }
            }
            Op::Inspect => names.first().map_or(Reply::Lost, |name| {
                Reply::Seen(Box::new(self.see(name, now)))
            }),
            Op::Scan { position, .. } => Reply::Scanned(Box::new(self.scan(position, now))),
            Op::Revoke { holder, until } => self.revoke(names, holder, *until, now),
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
                self.release(command, false, now);
                self.keep(name, record, now + *retention, now)
            }),
            Op::TopUp { record, retention } => done(kept, Record::head).unwrap_or_else(|| {
                let Some(name) = names.first() else {
                    return Reply::NotDone;
                };
                // Any owner's: its outcome is this record, and an intent that outlives the record would
                // refuse the key.
                if let Some(intent) = intent_of(name) {
                    self.intents.remove(&intent.name);
                }
                self.keep(name, record, now + *retention, now)
            }),
            Op::Look => done(kept, Record::answered).unwrap_or(Reply::NotDone),
            Op::Fetch => kept.map_or(Reply::NotDone, |(record, _)| Reply::Whole(record.clone())),
            Op::Ping => Reply::Released,
        }
    }

    fn acquire(
        &mut self,
        Command { names, owner, .. }: &Command,
        proposal: Option<u64>,
        (expires, fence_expires): (Duration, Duration),
        now: Duration,
    ) -> Reply {
        let (mut ours, mut last, mut is_intended) = (0, None::<&Lock>, false);
        for name in names.iter() {
            match self.lock(name, now) {
                Some(lock) if lock.is_of(owner) => ours += 1,
                Some(lock) if last.is_none_or(|last| last.expires <= lock.expires) => {
                    last = Some(lock);
                }
                _ => {}
            }
            let intent = intent_of(name).and_then(|intent| self.intents.get(&intent.name));
            let is_others = |intent: &Mark| intent.expires > now && intent.owner != *owner;
            is_intended |= intent.is_some_and(is_others);
        }
        if let Some(last) = last {
            let expires_in = Some(last.expires - now);
            if let Some(refusal) = self.slots(names, now) {
                return refusal;
            }
            let mut holders = names.iter().filter_map(|name| self.lock(name, now));
            if holders.any(|lock| lock.by == LockedBy::Readers) {
                return Reply::HeldShared { expires_in };
            }
            let shown = last.owner().and_then(OwnerToken::shown).cloned();
            return Reply::Held { expires_in, shown };
        }
        if is_intended {
            return Reply::Intended;
        }
        let some_free = ours < names.len();
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
        for name in names.iter() {
            if ours == 0 || self.lock(name, now).is_none() {
                let owner = owner.clone();
                if let Some(IntentName { name, retention }) = intent_of(name) {
                    let intent = Mark {
                        owner: owner.clone(),
                        expires: now + *retention,
                    };
                    self.intents.insert(Arc::clone(name), intent);
                }
                let by = LockedBy::One(owner);
                self.locks
                    .insert(Arc::clone(&name.lock), Lock { by, expires });
            }
        }
        self.sweep(now);
        Reply::Granted(number)
    }

    fn confirm(
        &mut self,
        Command { names, owner, .. }: &Command,
        token: Option<u64>,
        (expires, fence_expires): (Duration, Duration),
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
        for name in names.iter() {
            if let Some(lock) = self.locks.get_mut(&name.lock) {
                // Never shorten: an extension with lost answers must not shorten a lock on which its
                // holder still relies.
                lock.expires = lock.expires.max(expires);
            }
        }
        Reply::At(token.unwrap_or(0))
    }

    /// Returns how many of the keys the owner held.
    fn release(&mut self, command: &Command, executed: bool, now: Duration) -> usize {
        let (owner, mut held) = (&command.owner, 0);
        for name in command.names.iter() {
            if let Entry::Occupied(lock) = self.locks.entry(Arc::clone(&name.lock))
                && lock.get().is_of(owner)
            {
                held += usize::from(lock.remove().expires > now);
            }
            if let Some(intent) = intent_of(name).filter(|_| !executed) {
                unmark(&mut self.intents, &intent.name, owner);
            }
        }
        held
    }

    /// Returns how many of the keys the owner held.
    fn release_after(&mut self, command: &Command, expires: Duration, now: Duration) -> usize {
        let mut held = 0;
        for name in command.names.iter() {
            let lock = self.locks.get_mut(&name.lock);
            // One that has expired does not come back.
            if let Some(lock) = lock.filter(|lock| lock.is_of(&command.owner) && lock.expires > now)
            {
                lock.expires = expires;
                held += 1;
            }
        }
        held
    }

    /// Returns the refusal of a slot; `None` if the locks are no slots.
    ///
    /// Of several keys, a slot is free if it is for each key.
    fn slots(&self, names: &[KeyNames], now: Duration) -> Option<Reply> {
        let slots: Vec<&SlotNames> = names
            .iter()
            .filter_map(|name| name.slots.as_deref())
            .collect();
        let count = slots.iter().map(|slots| slots.locks.len()).min()?;
        let left = |slot: usize| {
            let locks = slots
                .iter()
                .filter_map(|slots| self.locks.get(&slots.locks[slot]));
            let left = locks.map(|lock| lock.expires.saturating_sub(now));
            left.max().unwrap_or_default()
        };
        let left: Vec<Duration> = (0..count).map(left).collect();
        let free = left.iter().enumerate().filter(|(_, left)| left.is_zero());
        Some(Reply::HeldSlot {
            expires_in: left.iter().copied().min(),
            free: free.fold(0, |free, (slot, _)| free | 1 << slot),
        })
    }

    /// Returns what is known of a key.
    fn see(&self, name: &KeyNames, now: Duration) -> Seen {
        let fence = self.fences.get(&name.fence);
        let record = name.record.as_ref();
        Seen {
            state: self.state(name, now),
            fence: fence
                .filter(|fence| fence.expires > now)
                .map(|fence| fence.number),
            is_recorded: record.is_some_and(|record| self.kept(record, now).is_some()),
            at: now,
            mark: self.lock(name, now).map(Lock::mark),
            holders: self.holders(name, now),
        }
    }

    fn revoke(
        &mut self,
        names: &[KeyNames],
        holder: &HolderMark,
        until: Duration,
        now: Duration,
    ) -> Reply {
        if now > until {
            return Reply::TooLate;
        }
        let mut was_held = false;
        for name in names {
            if self.lock(name, now).map(Lock::mark).as_ref() == Some(holder) {
                was_held = true;
                self.locks.remove(&name.lock);
                if let Some(shared) = &name.shared {
                    self.readers.remove(&shared.readers);
                }
            }
        }
        Reply::Revoked { was_held }
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
            match self.fences.get_mut(&name.fence) {
                Some(known) => *known = fence,
                None => drop(self.fences.insert(Arc::clone(&name.fence), fence)),
            }
        }
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

#[cfg(test)]
mod tests;
