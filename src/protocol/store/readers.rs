//! Locks that several readers hold together.
//!
//! While they do, the lock has a constant as its value, which keeps every other owner out, and ends no earlier than
//! the lock of any of its readers. Only a reader's own release, or time, takes the reader away.

use std::sync::Arc;
use std::time::Duration;

use crate::protocol::message::{Command, Reply, SharedOp};
use crate::protocol::names::{KeyNames, SharedNames};
use crate::protocol::store::memory::{Lock, Mark, Store, unmark};
use crate::protocol::token::OwnerToken;

/// How much longer than its lock a node knows the readers. A release that finds its reader no more must not free a
/// lock that others still read under.
const READERS_OUTLIVE: Duration = Duration::from_secs(1);

impl Store {
    /// Executes a request on keys that readers share.
    pub(super) fn apply_shared(&mut self, command: &Command, op: SharedOp, now: Duration) -> Reply {
        match op {
            SharedOp::Acquire { ttl } => self.acquire_shared(command, now + ttl, now),
            SharedOp::Confirm { ttl } => self.confirm_shared(command, now + ttl, now),
            SharedOp::Release => self.release_shared(command, now),
            SharedOp::Announce { patience } => self.announce(command, now + patience, now),
            SharedOp::Withdraw => self.withdraw(command),
        }
    }

    fn acquire_shared(&mut self, command: &Command, expires: Duration, now: Duration) -> Reply {
        let Command { names, owner, .. } = command;
        let refusals = names
            .iter()
            .filter_map(|name| self.refusal(name, owner, now));
        if let Some((longest, owner)) = refusals.max_by_key(|(expires_in, _)| *expires_in) {
            return Reply::Held {
                expires_in: Some(longest),
                shown: owner.and_then(OwnerToken::shown).cloned(),
            };
        }
        for name in names.iter() {
            let Some(shared) = &name.shared else {
                return Reply::Lost;
            };
            if self.lock(name, now).is_none() {
                // Left behind by a lock that went away by other means than its readers' releases.
                self.readers.remove(&shared.readers);
                let known = self.locks.entry(Arc::clone(&name.lock)).or_default();
                let owner = None;
                known.lock = Some(Lock { owner, expires });
            }
            self.prolong(shared, owner, expires, now);
            self.end_with_the_last(name, shared);
        }
        self.sweep(now);
        Reply::Granted(0)
    }

    fn confirm_shared(&mut self, command: &Command, expires: Duration, now: Duration) -> Reply {
        let Command { names, owner, .. } = command;
        let is_ours = |name: &KeyNames| {
            let shared = name.shared.as_ref();
            self.is_shared(name, now)
                && shared.is_some_and(|shared| self.end_of(shared, owner, now) > Some(now))
        };
        if !names.iter().all(is_ours) {
            return Reply::Lost;
        }
        for (name, shared) in with_shared(names) {
            self.prolong(shared, owner, expires, now);
            self.end_with_the_last(name, shared);
        }
        Reply::At(0)
    }

    fn release_shared(&mut self, command: &Command, now: Duration) -> Reply {
        let Command { names, owner, .. } = command;
        let mut reply = Reply::Released;
        for (name, shared) in with_shared(names) {
            let readers = self.readers.get_mut(&shared.readers);
            let readers = readers.filter(|readers| readers.expires > now);
            let was_reader = readers.is_some_and(|readers| readers.ends.remove(owner).is_some());
            // The release of an owner that is no reader touches nothing.
            if was_reader && self.is_shared(name, now) {
                self.forget_ended(shared, now);
                self.end_with_the_last(name, shared);
            } else {
                reply = Reply::Lost;
            }
        }
        reply
    }

    /// Keeps new readers out of the keys that readers hold.
    fn announce(&mut self, command: &Command, expires: Duration, now: Duration) -> Reply {
        let Command { names, owner, .. } = command;
        for (name, shared) in with_shared(names) {
            if self.is_shared(name, now) {
                let owner = owner.clone();
                self.writers
                    .insert(Arc::clone(&shared.writer), Mark { owner, expires });
            }
        }
        self.sweep(now);
        Reply::Released
    }

    fn withdraw(&mut self, command: &Command) -> Reply {
        for (_, shared) in with_shared(&command.names) {
            unmark(&mut self.writers, &shared.writer, &command.owner);
        }
        Reply::Released
    }

    /// Returns for how long a key refuses a reader, and the owner that holds it, if it does.
    fn refusal(
        &self,
        name: &KeyNames,
        owner: &OwnerToken,
        now: Duration,
    ) -> Option<(Duration, Option<&OwnerToken>)> {
        if let Some(lock) = self.lock(name, now)
            && let Some(owner) = &lock.owner
        {
            return Some((lock.expires - now, Some(owner)));
        }
        let shared = name.shared.as_ref()?;
        // Also where the key is free: otherwise readers would overtake the writer at the nodes that the last
        // readers have left first.
        let waiting = self.writers.get(&shared.writer)?.expires;
        let is_new = self.end_of(shared, owner, now) <= Some(now);
        (is_new && waiting > now).then(|| (waiting - now, None))
    }

    /// Returns the readers of a key that readers hold.
    pub(super) fn reading(&self, name: &KeyNames, now: Duration) -> Vec<&OwnerToken> {
        let shared = name.shared.as_ref();
        let readers = shared.and_then(|shared| self.readers.get(&shared.readers));
        let ends = readers.into_iter().flat_map(|readers| &readers.ends);
        let reading = ends.filter(|(_, end)| **end > now);
        reading.map(|(owner, _)| owner).collect()
    }

    fn is_shared(&self, name: &KeyNames, now: Duration) -> bool {
        let lock = self.lock(name, now);
        lock.is_some_and(|lock| lock.owner.is_none())
    }

    fn end_of(&self, shared: &SharedNames, owner: &OwnerToken, now: Duration) -> Option<Duration> {
        let readers = self.readers.get(&shared.readers)?;
        readers
            .ends
            .get(owner)
            .copied()
            .filter(|_| readers.expires > now)
    }

    /// Adds a reader, or moves its end. Never to an earlier one: the reader may rely on the later.
    fn prolong(
        &mut self,
        shared: &SharedNames,
        owner: &OwnerToken,
        expires: Duration,
        now: Duration,
    ) {
        self.forget_ended(shared, now);
        let readers = self.readers.entry(Arc::clone(&shared.readers)).or_default();
        let end = readers.ends.entry(owner.clone()).or_insert(expires);
        *end = expires.max(*end);
    }

    fn forget_ended(&mut self, shared: &SharedNames, now: Duration) {
        if let Some(readers) = self.readers.get_mut(&shared.readers) {
            let is_over = readers.expires <= now;
            readers.ends.retain(|_, end| !is_over && *end > now);
        }
    }

    /// Ends a lock with the last of its readers, or now if there is none.
    fn end_with_the_last(&mut self, name: &KeyNames, shared: &SharedNames) {
        let readers = self.readers.get_mut(&shared.readers);
        let last = readers.and_then(|readers| {
            let last = readers.ends.values().copied().max()?;
            readers.expires = last + READERS_OUTLIVE;
            Some(last)
        });
        if let Some(last) = last {
            if let Some(lock) = self.lock_mut(name) {
                lock.expires = last;
            }
        } else {
            self.unlock(name, |_| true);
            self.readers.remove(&shared.readers);
        }
    }
}

fn with_shared(names: &[KeyNames]) -> impl Iterator<Item = (&KeyNames, &SharedNames)> {
    names
        .iter()
        .filter_map(|name| name.shared.as_ref().map(|shared| (name, shared)))
}

#[cfg(test)]
mod tests;
