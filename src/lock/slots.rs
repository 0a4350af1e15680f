//! The slots of a key that several callers may hold at a time.

use std::sync::Arc;

use crate::lock::error::LockError;
use crate::node::sha256;
use crate::protocol::{KeyNames, LockKey, LockKeys, MAX_SLOTS, Namespace};

/// The keys of each slot, and their names.
#[derive(Debug)]
pub(crate) struct SlotTable(Vec<(LockKeys, Arc<[KeyNames]>)>);

impl SlotTable {
    /// Creates the table of so many slots of a set of keys.
    pub(crate) fn new(
        namespace: &Namespace,
        keys: &LockKeys,
        count: usize,
    ) -> Result<Self, LockError> {
        if !(1..=MAX_SLOTS).contains(&count) {
            return Err(LockError::InvalidSlots {
                asked: count,
                max: MAX_SLOTS,
            });
        }
        let names = namespace.slot_names(keys, count, sha256)?;
        let slots = names.into_iter().enumerate();
        Ok(Self(
            slots
                .map(|(slot, names)| (keys_of_slot(keys, slot), names))
                .collect(),
        ))
    }

    /// Returns the keys of a slot and their names.
    pub(crate) fn get(&self, slot: usize) -> (LockKeys, Arc<[KeyNames]>) {
        self.0[slot].clone()
    }

    /// Returns one bit for each slot.
    pub(crate) fn all(&self) -> u64 {
        u64::MAX >> (MAX_SLOTS - self.0.len())
    }
}

/// Returns the keys of the first slot, which sort before those of all others.
pub(crate) fn first_slots(keys: &LockKeys) -> LockKeys {
    keys_of_slot(keys, 0)
}

/// Returns the key of a slot.
pub(crate) fn key_of_slot(key: &LockKey, slot: usize) -> LockKey {
    LockKey::from((key, "slot", slot))
}

/// Returns the keys of a slot.
fn keys_of_slot(keys: &LockKeys, slot: usize) -> LockKeys {
    let keys = keys.as_slice().iter();
    keys.map(|key| key_of_slot(key, slot)).collect()
}
