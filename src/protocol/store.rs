//! The reference node: the effect of each request on one node, as plain data and time.
//!
//! The embedded nodes run it, the Lua scripts of the Redis nodes mirror it step by step, and the
//! model checker drives it, so that one place defines a node.

mod memory;
mod readers;

use std::sync::Arc;
use std::time::Duration;

use self::memory::{Kept, Lock, Mark, unmark};
use crate::protocol::admission::Generation;
use crate::protocol::message::{Command, HolderMark, KeyState, MAX_HOLDERS, Op, Reply, Seen};
use crate::protocol::names::{IntentName, KeyNames, SlotNames};
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
        // Not looked for by releases.
        let kept = || names.first().and_then(|name| self.kept(name, now));
        match op {
            Op::Acquire {
                proposal,
                ttl,
                retention,
            } => done(kept(), Record::answered).unwrap_or_else(|| {
                self.acquire(command, *proposal, (now + *ttl, now + *retention), now)
            }),
            Op::Confirm {
                token,
                ttl,
                retention,
            } => done(kept(), Record::answered).unwrap_or_else(|| {
                self.confirm(command, *token, (now + *ttl, now + *retention), now)
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
            Op::Record { record, retention } => done(kept(), Record::head).unwrap_or_else(|| {
                let Some(name) = names.first() else {
                    return Reply::Lost;
                };
                let granted = self.fence(name, now);
                // The last grantee, not the holder: an execution that outlived its lock may record as
                // long as no other owner was granted the key.
                if granted.is_none_or(|fence| fence.grantee != *owner) {
                    return Reply::Lost;
                }
                self.release(command, false, now);
                self.keep(name, record, now + *retention, now)
            }),
            Op::TopUp { record, retention } => done(kept(), Record::head).unwrap_or_else(|| {
                let Some(name) = names.first() else {
                    return Reply::NotDone;
                };
                // Any owner's: its outcome is this record, and an intent that outlives the record would
                // refuse the key.
                if let Some(intent) = &name.intent {
                    self.intents.remove(&intent.name);
                }
                self.keep(name, record, now + *retention, now)
            }),
            Op::Look => done(kept(), Record::answered).unwrap_or(Reply::NotDone),
            Op::Fetch => kept().map_or(Reply::NotDone, |(record, _)| Reply::Whole(record.clone())),
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
        let (mut ours, mut last, mut is_intended, mut fence) = (0, None::<&Lock>, false, 0);
        for name in names.iter() {
            let intent = name.intent.as_ref();
            let intent = intent.and_then(|intent| self.intents.get(&intent.name));
            let is_others = |intent: &Mark| intent.expires > now && intent.owner != *owner;
            is_intended |= intent.is_some_and(is_others);
            let known = self.locks.get(&name.lock);
            let of_known = known.and_then(|known| known.fence(now));
            fence = of_known.map_or(fence, |of_known| fence.max(of_known.number));
            match known.and_then(|known| known.lock(now)) {
                Some(lock) if lock.is_of(owner) => ours += 1,
                Some(lock) if last.is_none_or(|last| last.expires <= lock.expires) => {
                    last = Some(lock);
                }
                _ => {}
            }
        }
        if let Some(last) = last {
            let expires_in = Some(last.expires - now);
            if let Some(refusal) = self.slots(names, now) {
                return refusal;
            }
            let mut holders = names.iter().filter_map(|name| self.lock(name, now));
            if holders.any(|lock| lock.owner.is_none()) {
                return Reply::HeldShared { expires_in };
            }
            let shown = last.owner.as_ref().and_then(OwnerToken::shown).cloned();
            return Reply::Held { expires_in, shown };
        }
        if is_intended {
            return Reply::Intended;
        }
        let some_free = ours < names.len();
        let mut number = 0;
        if let Some(proposal) = proposal {
            // A new grant always raises the fence, which makes numbers unique.
            number = if some_free {
                proposal.max(fence + 1)
            } else {
                fence
            };
            if number > FencingToken::MAX.as_u64() {
                return Reply::Overflow;
            }
        }
        for name in names.iter() {
            let known = self.locks.entry(Arc::clone(&name.lock)).or_default();
            if proposal.is_some() {
                // Raise the fences of *all* keys, not only of the new ones: otherwise a set and one of its
                // members could be granted the same number.
                known.raise_fence(owner, number, fence_expires);
            }
            if known.lock(now).is_none() {
                let owner = owner.clone();
                if let Some(IntentName { name, retention }) = &name.intent {
                    let intent = Mark {
                        owner: owner.clone(),
                        expires: now + *retention,
                    };
                    self.intents.insert(Arc::clone(name), intent);
                }
                let owner = Some(owner);
                known.lock = Some(Lock { owner, expires });
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
        let mut fence = 0;
        for name in names.iter() {
            let known = self.locks.get(&name.lock);
            let lock = known.and_then(|known| known.lock(now));
            let (Some(known), true) = (known, lock.is_some_and(|lock| lock.is_of(owner))) else {
                return Reply::Lost;
            };
            let of_known = known.fence(now);
            fence = of_known.map_or(fence, |of_known| fence.max(of_known.number));
        }
        if token.is_some_and(|token| fence > token) {
            return Reply::At(fence);
        }
        for name in names.iter() {
            if let Some(known) = self.locks.get_mut(&name.lock) {
                if let Some(token) = token {
                    known.raise_fence(owner, token, fence_expires);
                }
                if let Some(lock) = &mut known.lock {
                    // Never shorten: an extension with lost answers must not shorten a lock on which its
                    // holder still relies.
                    lock.expires = lock.expires.max(expires);
                }
            }
        }
        Reply::At(token.unwrap_or(0))
    }

    /// Returns how many of the keys the owner held.
    fn release(&mut self, command: &Command, executed: bool, now: Duration) -> usize {
        let (owner, mut held) = (&command.owner, 0);
        for name in command.names.iter() {
            let expires = self.unlock(name, |lock| lock.is_of(owner));
            held += usize::from(expires > Some(now));
            if let Some(intent) = name.intent.as_ref().filter(|_| !executed) {
                unmark(&mut self.intents, &intent.name, owner);
            }
        }
        held
    }

    /// Returns how many of the keys the owner held.
    fn release_after(&mut self, command: &Command, expires: Duration, now: Duration) -> usize {
        let mut held = 0;
        for name in command.names.iter() {
            let lock = self.lock_mut(name);
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
                .filter_map(|slots| self.locks.get(&slots.locks[slot])?.lock.as_ref());
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
        let lock = self.lock(name, now);
        let left = lock.map(|lock| lock.expires - now);
        let (state, owners) = match lock.map(|lock| &lock.owner) {
            None => (KeyState::Free, Vec::new()),
            Some(Some(owner)) => (KeyState::Held { left }, vec![owner]),
            Some(None) => {
                let owners = self.reading(name, now);
                let readers = owners.len();
                (KeyState::Shared { readers, left }, owners)
            }
        };
        let owners = owners.into_iter().take(MAX_HOLDERS);
        let holders = owners.filter_map(|owner| owner.shown()?.holder.clone());
        Seen {
            state,
            fence: self.fence(name, now).map(|fence| fence.number),
            is_recorded: self.kept(name, now).is_some(),
            at: now,
            mark: lock.map(Lock::mark),
            holders: holders.collect(),
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
                self.unlock(name, |_| true);
                if let Some(shared) = &name.shared {
                    self.readers.remove(&shared.readers);
                }
            }
        }
        Reply::Revoked { was_held }
    }

    /// Returns the record and the time until it expires, if there is one.
    fn kept(&self, name: &KeyNames, now: Duration) -> Option<(&Record, Duration)> {
        let kept = self.records.get(name.record.as_ref()?)?;
        let left = kept.expires.checked_sub(now)?;
        (!left.is_zero()).then_some((&kept.record, left))
    }

    fn keep(&mut self, name: &KeyNames, record: &Record, until: Duration, now: Duration) -> Reply {
        let Some(record_name) = &name.record else {
            return Reply::NotDone;
        };
        let kept = Kept {
            record: record.clone(),
            expires: until,
        };
        self.records.insert(Arc::clone(record_name), kept);
        self.sweep(now);
        done(self.kept(name, now), Record::head).unwrap_or(Reply::NotDone)
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

#[cfg(test)]
mod tests;
