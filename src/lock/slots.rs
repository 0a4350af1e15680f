//! The slots of a key that several callers may hold at a time.

use std::sync::Arc;

use crate::lock::error::LockError;
use crate::node::sha256;
use crate::protocol::{KeyNames, LockKey, LockKeys, Namespace};

/// The most slots of a key: a node names the free ones by one bit each.
pub(crate) const MAX_SLOTS: usize = 64;

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

/// Returns keys that sort before those of all slots of the same keys.
pub(crate) fn before_slots(keys: &LockKeys) -> LockKeys {
    let keys = keys.as_slice().iter();
    keys.map(|key| LockKey::from((key, "slot"))).collect()
}

/// Returns the keys of a slot.
pub(crate) fn keys_of_slot(keys: &LockKeys, slot: usize) -> LockKeys {
    let keys = keys.as_slice().iter();
    keys.map(|key| LockKey::from((key, "slot", slot))).collect()
}
