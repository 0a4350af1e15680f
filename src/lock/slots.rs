//! The slots of a key that several callers may hold at a time.

use std::sync::Arc;

use crate::lock::error::LockError;
use crate::node::sha256;
use crate::protocol::{KeyNames, LockKey, LockKeys, MAX_SLOTS, Namespace};

/// The keys of each slot, and their names.
#[derive(Debug)]
pub(crate) struct SlotTable {
    slots: Vec<(LockKeys, Arc<[KeyNames]>)>,
    /// The slots that the caller may take, one bit for each.
    pub(crate) wanted: u64,
}

impl SlotTable {
    /// Creates the table of so many slots of a set of keys, of which the caller may take those that are `wanted`.
    pub(crate) fn new(
        namespace: &Namespace,
        keys: &LockKeys,
        count: usize,
        wanted: u64,
    ) -> Result<Self, LockError> {
        if !(1..=MAX_SLOTS).contains(&count) {
            return Err(LockError::InvalidSlots {
                asked: count,
                max: MAX_SLOTS,
            });
        }
        let names = namespace.slot_names(keys, count, sha256)?;
        let slots = names.into_iter().enumerate();
        let slots = slots.map(|(slot, names)| (keys_of_slot(keys, slot), names));
        Ok(Self {
            slots: slots.collect(),
            wanted: wanted & all_slots(count),
        })
    }

    /// Returns the keys of a slot and their names.
    pub(crate) fn get(&self, slot: usize) -> (LockKeys, Arc<[KeyNames]>) {
        self.slots[slot].clone()
    }
}

/// Returns one bit for each of so many slots.
pub(crate) fn all_slots(count: usize) -> u64 {
    // Never by all 64 bits, which would overflow; `new` refuses a count of zero, also behind this.
    u64::MAX >> MAX_SLOTS.saturating_sub(count).min(MAX_SLOTS - 1)
}

/// Returns the number of one of these slots.
pub(crate) fn slot_at_random(slots: u64, random: u64) -> Option<usize> {
    let nth = random.checked_rem(u64::from(slots.count_ones()))?;
    let mut numbers = (0..MAX_SLOTS).filter(|number| slots >> number & 1 == 1);
    numbers.nth(usize::try_from(nth).ok()?)
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
