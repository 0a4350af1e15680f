//! Placement: which group of nodes a key belongs to.

use std::sync::Arc;

use crate::protocol::key::{LockKey, number, split_part};

/// The most slots of a key: a node names the free ones by one bit each.
pub(crate) const MAX_SLOTS: usize = 64;

/// The placement of keys on groups of nodes, by rendezvous hashing over the names of the groups.
///
/// Each group has a weight for each key, and the key belongs to the group with the highest. A group that is added takes
/// keys from all others, and one that is removed gives its keys to all others; no other key moves. The order of the groups
/// does not matter, and neither do their nodes.
///
/// # The function
///
/// It is part of the contract with clients in other languages, and never changes. All numbers have 64 bits without a sign,
/// and every operation wraps:
///
/// 1. `fnv(bytes)` is FNV-1a: begin with `0xcbf29ce484222325`; for each byte, combine by exclusive or, then multiply by
///    `0x100000001b3`.
/// 2. `x = fnv(key) ^ fnv(name)`. The key is its [encoded bytes](LockKey#encoding); the key `(key, "slot", i)` of a slot,
///    with `i` below 64, is placed as `key`, so that all slots of a key are in one group. If `key` is that of a slot too,
///    this applies to it again.
/// 3. The weight is `x` after the finalizer of SplitMix64: `x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9`, then
///    `x = (x ^ (x >> 27)) * 0x94d049bb133111eb`, then `x ^ (x >> 31)`.
/// 4. Of two equal weights, that of the name which sorts first by its bytes counts.
///
/// # Vectors
///
/// | key | its encoded bytes | weight in `0` | weight in `1` | weight in `g2` | of `0` and `1` | of all three |
/// |---|---|---|---|---|---|---|
/// | `"nightly-report"` | `nightly-report` | `46f63ad50ffd139e` | `b7882498089dd061` | `10da4c3db9f2fa46` | `1` | `1` |
/// | `("account", 7)` | `7:account,1:7,` | `411fd8db2f0bea1b` | `eb63b63aa8934c4d` | `2006260c84ddbe9f` | `1` | `1` |
/// | `("account", 8)` | `7:account,1:8,` | `b5c519d39c037b7c` | `ad55b7916bad1c36` | `4a63e5d265e8df56` | `0` | `0` |
/// | `("order", 1001)` | `5:order,4:1001,` | `de66f5490e7f621b` | `cd36f65d7654286e` | `2b8381c7819d23be` | `0` | `0` |
/// | `("a", "slot", 3)` | `1:a,4:slot,1:3,` | `86197edd8f0bd8ff` | `6162d10042da6529` | `a36717dc5cb7cf9e` | `0` | `g2` |
/// | `"a"` | `a` | `86197edd8f0bd8ff` | `6162d10042da6529` | `a36717dc5cb7cf9e` | `0` | `g2` |
/// | `("b", "slot", 64)` | `1:b,4:slot,2:64,` | `38fb35e6bb99c2de` | `8a1ce72f6a4c68bc` | `b25c183c7e247da4` | `1` | `g2` |
/// | `"b"` | `b` | `c141127169dbcbb8` | `0b164f4481233e1a` | `c2a8349bf2eed813` | `0` | `g2` |
/// | `"ключ"` | `ключ` | `af589f619b6addeb` | `7aaebae7e11ea272` | `0cc0fe635ab6b122` | `0` | `0` |
/// | `(("a", "slot", 3), "slot", 1)` | `15:1:a,4:slot,1:3,,4:slot,1:1,` | `86197edd8f0bd8ff` | `6162d10042da6529` | `a36717dc5cb7cf9e` | `0` | `g2` |
///
/// ```
/// use tower_redlock::LockKey;
/// use tower_redlock::protocol::Placement;
///
/// let two = Placement::new(["0", "1"]);
/// let three = Placement::new(["0", "1", "g2"]);
/// let key = LockKey::from(("account", 7));
/// assert_eq!((two.group_of(&key), three.group_of(&key)), (1, 1));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    names: Box<[Arc<str>]>,
    /// The hashes of the names, which are all that a lock reads.
    hashes: Box<[u64]>,
}

impl Placement {
    /// Creates the placement on groups with these names.
    pub fn new<N: Into<Arc<str>>>(names: impl IntoIterator<Item = N>) -> Self {
        let names: Box<[Arc<str>]> = names.into_iter().map(Into::into).collect();
        Self {
            hashes: names.iter().map(|name| fnv(name.as_bytes())).collect(),
            names,
        }
    }

    /// Returns the number of the group that a key belongs to, in the order of the names; zero if there is none.
    pub fn group_of(&self, key: &LockKey) -> usize {
        if self.hashes.len() < 2 {
            return 0;
        }
        let key = fnv(placed_as(key.as_bytes()));
        let (mut group, mut highest) = (0, 0);
        for (number, name) in self.hashes.iter().enumerate() {
            let weight = finalize(key ^ name);
            if weight > highest || (weight == highest && self.names[number] < self.names[group]) {
                (group, highest) = (number, weight);
            }
        }
        group
    }

    /// Returns the weight of a key in a group.
    pub fn weight(key: &LockKey, name: &str) -> u64 {
        finalize(fnv(placed_as(key.as_bytes())) ^ fnv(name.as_bytes()))
    }
}

/// Returns the bytes that decide on the group of a key: those of the slots of a key are the key's own.
fn placed_as(key: &[u8]) -> &[u8] {
    // A slot may have slots itself.
    std::iter::successors(Some(key), |key| slotted(key))
        .last()
        .unwrap_or(key)
}

/// Returns the key whose slot this is the key of, if it is one.
fn slotted(key: &[u8]) -> Option<&[u8]> {
    let (first, rest) = split_part(key)?;
    let (word, rest) = split_part(rest)?;
    let (slot, rest) = split_part(rest)?;
    let is_slot = word == b"slot" && rest.is_empty() && number(slot)? < MAX_SLOTS;
    is_slot.then_some(first)
}

fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn finalize(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests;
